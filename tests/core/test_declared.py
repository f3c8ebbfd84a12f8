"""What a scheme declares: facts, fields that check themselves, features, and wrappers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import pytest

import posenc
from posenc import FeatureSpec, PositionScheme
from posenc.apply.feature_needs import lookback, reads_features, reads_hidden, summed_features
from posenc.cli.pages import docstring_texts
from posenc.contract.fields import Count, Distance, Finite, Positive
from posenc.contract.protocol import Hook
from posenc.layers import LayerPlan
from posenc.schemes import DAPE, FoX, Inkling, LogScale, ReRoPE, Scaling, Sum, Wrapper


def test_facts_are_attributes_that_subclasses_inherit():
    class Near(PositionScheme, relative=True, paper="Doe 2026"):
        """Near."""

    class Nearer(Near, shared=True):
        pass

    assert (Nearer.relative, Nearer.shared, Nearer.paper) == (True, True, "Doe 2026")
    assert (Near.shared, PositionScheme.relative) == (False, False)
    assert inspect.getdoc(Near) == "Near.\n\nDoe 2026."


@pytest.mark.parametrize("indent", ["", "    "], ids=["3.13", "3.11"])
def test_the_paper_is_a_paragraph_after_the_parameters(indent):
    """Compilers since Python 3.13 remove a docstring's indentation."""
    lines = "Far.", "", "Parameters", "----------", "reach", "    How far."
    text = "\n".join(lines[:1] + tuple((indent + line).rstrip() for line in lines[1:]))

    class Far(PositionScheme, relative=True, paper="Doe 2026"):
        __doc__ = text

    assert docstring_texts(Far)["reach"] == "How far."
    assert inspect.getdoc(Far).endswith("\n\nDoe 2026.")


def test_a_fact_may_follow_from_fields():
    """Of a ``Sum``, which is relative if its biases are."""
    assert Sum(posenc.RoPE(8), posenc.ALiBi(2)).relative
    assert not Sum(posenc.ALiBi(2), LogScale("inkling", 8)).relative
    assert posenc.schemes.AxialRoPE(8).axes == 2


@pytest.mark.parametrize(
    ("base", "facts", "message"),
    [
        (
            PositionScheme,
            {"relatve": True},
            "class X: unknown relatve=True .did you mean 'relative'",
        ),
        (PositionScheme, {"relative": 1}, "class X: relative must be bool, got 1"),
        (PositionScheme, {"axes": "2"}, "class X: axes must be int, got '2'"),
        (Scaling, {"relative": True}, "class X: unknown relative=True; accepted: paper, trained"),
    ],
)
def test_a_wrong_fact_is_a_type_error(base, facts, message):
    with pytest.raises(TypeError, match=message):
        type("X", (base,), {}, **facts)


def test_a_fact_is_no_field():
    body = {"__annotations__": {"relative": "bool"}, "relative": True}
    with pytest.raises(TypeError, match=r"X: relative is written as a field.*class X\(..., relat"):
        type("X", (PositionScheme,), body)

    class Plain(PositionScheme):
        relative: ClassVar[bool] = True

    assert Plain.relative


@pytest.mark.parametrize("name", ["hidden_features", "query_features", "key_features", "lookback"])
def test_a_member_that_is_gone_says_what_to_write(name):
    with pytest.raises(TypeError, match=rf"^X\.{name}: it is of a feature now; .*FeatureSpec\("):
        type("X", (PositionScheme,), {name: lambda self: None})
    with pytest.raises(
        TypeError, match=r"^X\.cumulative: it is of a feature now; declare features"
    ):
        type("X", (PositionScheme,), {"cumulative": ("c",)})


@dataclass(frozen=True)
class Fields(PositionScheme):
    heads: Count = 1
    reach: Distance | None = None
    base: Positive = 1.0
    start: Finite = 0.0
    kind: Literal["a", "b"] = "a"
    learned: bool = False
    scheme: PositionScheme | None = None
    sizes: tuple[int, ...] = ()
    free: int | str = 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"heads": 1.0}, TypeError, "heads must be an integer, got 1.0"),
        ({"heads": None}, TypeError, "heads must be an integer, got None"),
        ({"reach": 2**30 + 1}, ValueError, r"reach must be at most 2\*\*30"),
        ({"base": 0}, ValueError, "base must be finite and greater than 0, got 0"),
        ({"start": np.inf}, ValueError, "start must be finite, got inf"),
        ({"kind": "c"}, ValueError, "unknown kind 'c'; accepted: a, b"),
        ({"learned": 1}, TypeError, "learned must be True or False, got 1"),
        ({"scheme": "rope"}, TypeError, "scheme must be an instance of a PositionScheme"),
    ],
)
def test_a_field_is_checked_as_it_is_annotated(given, error, message):
    with pytest.raises(error, match=message):
        Fields(**given)


def test_a_field_that_fits_is_kept():
    made = Fields(heads=np.int64(3), base=2, sizes=(np.int32(4),), free=None)
    assert (made.heads, made.reach, made.base, made.sizes, made.free) == (3, None, 2, (4,), None)
    assert [type(n) for n in (made.heads, made.base, made.sizes[0])] == [int, int, int]


def test_a_subclass_may_take_more():
    @dataclass(frozen=True)
    class More(Fields):
        heads: int | None = None

    assert More().heads is None
    with pytest.raises(TypeError, match="learned must be True or False"):
        More(learned=2)


@pytest.mark.parametrize("way", ["by its base", "but one field", "inside"])
def test_schemes_of_ones_own_that_differ_are_not_equal(way):
    """Layers that are equal share work, and compiled programs are found by the scheme."""

    @dataclass(frozen=True, eq=way == "but one field")
    class Steep(posenc.ALiBi):
        steps: int = field(default=1, compare=way != "but one field")

    scheme = Sum(posenc.RoPE(8), Steep(2)) if way == "inside" else Steep(2)
    with pytest.raises(TypeError, match="scheme: two Steep that differ in 'steps' alone are equal"):
        LayerPlan.of(scheme, 2)


def test_schemes_of_ones_own_that_equality_tells_apart():
    class Short(posenc.ALiBi):
        def __init__(self):
            super().__init__(2)

    @dataclass(frozen=True, eq=False)
    class Own(posenc.ALiBi):
        steps: int = 1

        def __eq__(self, other):
            return isinstance(other, Own) and other.steps == self.steps

        def __hash__(self):
            return hash(self.steps)

    @dataclass(frozen=True, eq=False)
    class Itself(PositionScheme):  # equal to no other
        steps: int = 1

    assert len(LayerPlan.of([Short(), Own(2), Itself(2)], 3)) == 3


def test_annotations_of_a_function_are_seen_where_its_module_has_them():
    class Local:
        pass

    @dataclass(frozen=True)
    class Inner(PositionScheme):
        heads: Count = 2
        local: Local | None = None

    assert Inner(local=3).local == 3
    with pytest.raises(ValueError, match="heads must be at least 1"):
        Inner(0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"of": "keys"}, "unknown of 'keys'.*accepted: query, key"),
        ({"of": "key", "reads": "x"}, "unknown reads 'x'.*accepted: hidden, vectors"),
        ({"of": "key", "lookback": -1}, "lookback must be at least 0, got -1"),
        ({"of": "query", "cumulative": True}, "cumulative=True needs of='key', got 'query'"),
        ({"of": "query", "lookback": 2}, "lookback=2 needs of='key', got 'query'"),
        (
            {"of": "key", "reads": "vectors", "lookback": 2},
            "lookback=2 needs reads='hidden', got 'vectors'",
        ),
    ],
)
def test_a_wrong_feature_spec(given, message):
    with pytest.raises(ValueError, match=message):
        FeatureSpec(np.asarray, **given)


def test_what_features_need_is_known_before_a_call():
    fox, path = FoX(2, 8), posenc.make("path", num_heads=2, head_dim=4, conv=3)
    assert (summed_features(fox), lookback(fox), reads_hidden(fox)) == (("c",), 0, True)
    assert (summed_features(path), lookback(path), reads_features(path)) == ((), 2, False)
    assert summed_features(Sum(posenc.RoPE(4), fox)) == ("1_c",)
    assert reads_features(Sum(posenc.RoPE(4), fox))
    # The bias of ALiBi is by distance, whatever the other part reads.
    assert not reads_features(Sum(posenc.ALiBi(2), posenc.schemes.SelectiveRoPE(2, 4)))


METHODS = [
    name
    for name, method in vars(PositionScheme).items()
    if inspect.isfunction(method)
    and not name.startswith("_")
    and name not in ("hooks", "at_length")
]


@pytest.mark.parametrize("name", METHODS)
def test_a_wrapper_forwards_every_method(name):
    """Also one that a later version adds: the list is that of the class."""
    said = []

    class Inside(PositionScheme):
        pass

    setattr(Inside, name, lambda self, *given, **named: said.append((given, named)) or name)

    @dataclass(frozen=True)
    class Around(Wrapper):
        scheme: PositionScheme

    assert getattr(Around(Inside()), name)(1, two=2) == name
    assert said == [((1,), {"two": 2})]


@pytest.mark.parametrize(
    "scheme",
    [
        posenc.T5Bias(2),
        ReRoPE(8, 4),
        posenc.ALiBi(2, interpolate_from=16),
        DAPE(posenc.ALiBi(2), 3),
        Inkling(2, 8),
        posenc.schemes.AxialRoPE(8),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_a_wrapper_that_changes_nothing_is_the_scheme(scheme):
    @dataclass(frozen=True)
    class Around(Wrapper):
        scheme: PositionScheme

    around = Around(scheme)
    for fact in ("relative", "axes", "shared", "whole_rows", "mixes_heads", "paper"):
        assert getattr(around, fact) == getattr(scheme, fact)
    assert around.hooks() == scheme.hooks()
    assert around.feature_specs() == scheme.feature_specs()
    longer = around.at_length(64)
    assert longer == (around if scheme.at_length(64) is scheme else Around(scheme.at_length(64)))


def test_hooks_are_members():
    assert posenc.ALiBi(2).hooks() == {Hook.BIAS, Hook.KEY_BIAS}
    assert {hook.value for hook in Hook} <= set(dir(PositionScheme))
    with pytest.raises(AttributeError):
        _ = Hook.BAIS
