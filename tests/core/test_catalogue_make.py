"""Schemes by name."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

import posenc
import posenc.presets
from posenc.cli.list import page as list_page
from posenc.makers import fitted_options

SIZES = {"num_heads": 2, "head_dim": 8, "max_len": 32}
EVERY_SIZE = {**SIZES, "train_len": 16, "dim": 16, "hidden_dim": 16}


@pytest.mark.parametrize("name", posenc.catalogue())
def test_every_name_makes_a_scheme(name):
    scheme = posenc.make(name, **SIZES, train_len=16)
    assert isinstance(scheme, posenc.PositionScheme)
    assert scheme == posenc.make(name.upper(), **EVERY_SIZE)
    assert posenc.catalogue()[name](**SIZES, train_len=16, dim=16) == scheme
    assert type(scheme).__doc__
    assert re.search("arXiv|no paper", scheme.paper)


def test_sizes_reach_the_schemes():
    assert posenc.make("alibi", **SIZES) == posenc.ALiBi(2)
    assert posenc.make("rope", **SIZES, base=7.0) == posenc.RoPE(8, base=7.0)
    assert posenc.make("sinusoidal", **SIZES) == posenc.Sinusoidal(16)
    assert posenc.make("sinusoidal", **SIZES, dim=12) == posenc.Sinusoidal(12)
    assert posenc.make("learned", **SIZES, dim=12) == posenc.Learned(max_len=32, dim=12)
    assert posenc.make("t5", **SIZES, causal=True) == posenc.T5Bias(2, causal=True)


def needed_sizes(name):
    """The sizes without which a scheme cannot be made, found by leaving out one after another."""
    sizes = dict(EVERY_SIZE)
    for size in EVERY_SIZE:
        rest = {other: value for other, value in sizes.items() if other != size}
        try:
            posenc.make(name, **rest)
        except TypeError:
            continue
        sizes = rest
    return sizes


@pytest.mark.parametrize("name", posenc.catalogue())
def test_only_the_sizes_that_a_scheme_uses_are_asked_for(name):
    sizes = needed_sizes(name)
    kind = type(posenc.make(name, **sizes))
    assert kind is type(posenc.make(name, **EVERY_SIZE))
    for absent in sizes:
        rest = {other: value for other, value in sizes.items() if other != absent}
        maker = inspect.unwrap(posenc.catalogue()[name]).__name__
        needs = rf"^{maker} needs .*\b{absent}\b.*were given: ."
        with pytest.raises(TypeError, match=needs) as caught:
            posenc.make(name, **rest)
        assert all(given in str(caught.value).split("given:")[1] for given in rest)


@pytest.mark.parametrize(
    ("maker", "wrong", "size"),
    [
        (partial(posenc.make, "alibi"), "num_head", "num_heads"),
        (posenc.presets.llama3, "head_dm", "head_dim"),  # a function
    ],
)
def test_a_misspelt_size_is_suggested(maker, wrong, size):
    message = rf"no option '{wrong}' \(did you mean '{size}'\?\); accepted: "
    with pytest.raises(ValueError, match=message):
        maker(**{wrong: 8})


def test_a_class_needs_its_fields_without_a_default():
    assert needed_sizes("nope") == {}
    assert needed_sizes("learned") == {"max_len": 32, "dim": 16}
    assert needed_sizes(f"{__name__}.Gated") == {"num_heads": 2, "hidden_dim": 16}


def test_a_width_follows_from_heads_and_their_channels():
    assert posenc.make("sinusoidal", num_heads=2, head_dim=8) == posenc.Sinusoidal(16)
    with pytest.raises(TypeError, match=r"needs dim \(or num_heads and head_dim\); .*: num_heads$"):
        posenc.make("sinusoidal", num_heads=2)


@dataclass(frozen=True)
class Gated(posenc.PositionScheme):
    """Reads hidden states."""

    num_heads: int
    hidden_dim: int
    kind: str = "log"


def test_hidden_states_are_as_wide_as_the_model_unless_given():
    name = f"{__name__}.Gated"
    assert posenc.make(name, num_heads=2, head_dim=8) == Gated(2, 16)
    assert posenc.make(name, num_heads=2, head_dim=8, dim=12) == Gated(2, 12)
    assert posenc.make(name, num_heads=2, head_dim=8, hidden_dim=5) == Gated(2, 5)
    with pytest.raises(
        TypeError, match=r"Gated needs hidden_dim \(or dim, or num_heads and head_d"
    ):
        posenc.make(name, num_heads=2)


def test_an_error_names_the_sizes_that_were_given_and_none_that_follow():
    for given in ({"dim": 32}, {"num_heads": 2, "head_dim": 4}, {"dim": 32, "hidden_dim": 8}):
        with pytest.raises(TypeError, match=f"given: {', '.join(given)}$"):
            posenc.make("learned", **given)


def test_a_name_may_set_options_of_its_class(monkeypatch):
    entry = (Gated, {"kind": "power"})
    monkeypatch.setitem(sys.modules["posenc.makers"]._BUILT_IN, "gated_power", entry)
    assert posenc.make("gated_power", **SIZES) == Gated(2, 16, "power")
    with pytest.raises(ValueError, match="Gated has no option 'kind'; accepted: none"):
        posenc.make("gated_power", **SIZES, kind="log")
    page = list_page("gated_power")
    assert page.splitlines()[0].endswith("Gated(kind='power')")
    assert "options: none" in page


def test_a_maker_that_is_a_function_gets_the_sizes_that_were_given(monkeypatch):
    asked = []
    makers = {"mine": lambda **given: asked.append(given) or posenc.NoPE()}
    monkeypatch.setattr(sys.modules["posenc.makers"], "catalogue", lambda: makers)
    posenc.make("mine", max_len=5, slope=2)
    posenc.make("mine", num_heads=2, head_dim=8)
    widths = {"dim": 16, "hidden_dim": 16}
    assert asked == [{"max_len": 5, "slope": 2}, {"num_heads": 2, "head_dim": 8, **widths}]


@dataclass(frozen=True)
class Trained(posenc.PositionScheme):
    """Takes the training length as it is."""

    train_len: int
    slope: float = 1.0


@dataclass(frozen=True)
class Fitted(posenc.PositionScheme):
    """Has an answer of a test to what its options are."""

    needed: int
    reach: int = 1
    answer: ClassVar[object] = None

    @classmethod
    def fitted(cls, sizes):
        return {"needed": 2, "reach": sizes.get("train_len", 7)} if not cls.answer else cls.answer


def test_the_training_length_is_a_size():
    for name in ("alibi", "learned", "rope"):  # they do not use it
        assert posenc.make(name, **SIZES, train_len=9) == posenc.make(name, **SIZES)
    assert posenc.make(f"{__name__}.Trained", train_len=9, slope=2.0) == Trained(9, 2.0)
    with pytest.raises(TypeError, match=r"^Trained needs train_len; .*were given: max_len$"):
        posenc.make(f"{__name__}.Trained", max_len=9)
    with pytest.raises(ValueError, match="train_len must be at least 1, got 0"):
        posenc.make("rope", **SIZES, train_len=0)
    with pytest.raises(TypeError, match=r"train_len must be an integer, got 1\.5"):
        posenc.make("rope", **SIZES, train_len=1.5)


@pytest.mark.parametrize("train_len", [1, 2, 31, 64])
def test_t5_fits_its_buckets_to_the_training_length(train_len):
    reach = max(2, train_len)
    expected = posenc.T5Bias(2, causal=True, num_buckets=min(32, reach), max_distance=reach)
    assert posenc.make("t5", **SIZES, train_len=train_len) == expected
    assert posenc.make("t5", **SIZES, train_len=train_len, scaled=False) == replace(
        expected, scaled=False
    )
    own = {"causal": False, "num_buckets": 4, "max_distance": 9}
    assert posenc.make("t5", **SIZES, train_len=train_len, **own) == posenc.T5Bias(2, **own)
    assert posenc.make("t5", **SIZES) == posenc.T5Bias(2)


def test_a_class_fits_its_options_to_the_sizes():
    name = f"{__name__}.Fitted"
    assert posenc.make(name) == Fitted(2, 7)
    assert posenc.make(name, train_len=5) == Fitted(2, 5)
    assert posenc.make(name, train_len=5, reach=3, needed=1) == Fitted(1, 3)
    assert fitted_options(name, {"train_len": 5}) == {"needed": 2, "reach": 5}
    assert fitted_options("t5", {}) == fitted_options("rope", {"train_len": 5}) == {}


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ({"reech": 1}, ValueError, r"Fitted.fitted has no option 'reech' \(did you mean 'reach'"),
        ({"train_len": 1}, ValueError, "Fitted.fitted has no option 'train_len'; accepted: needed"),
        (3, TypeError, "Fitted.fitted must return options by name, got 3"),
    ],
)
def test_a_wrong_answer_is_named(monkeypatch, answer, error, message):
    posenc.make(f"{__name__}.Fitted")
    monkeypatch.setattr(sys.modules[__name__].Fitted, "answer", answer)
    with pytest.raises(error, match=message):
        posenc.make(f"{__name__}.Fitted")


def narrow(num_heads, head_dim, max_len, dim, slope=1.0):
    """A maker from before there was a training length."""
    return posenc.ALiBi(num_heads)


def wide(num_heads, **sizes):
    return posenc.RoPE(sizes["train_len"])


def test_a_maker_gets_the_sizes_that_it_names():
    assert posenc.make(f"{__name__}.narrow", **SIZES, train_len=8, slope=2.0) == posenc.ALiBi(2)
    assert posenc.make(f"{__name__}.wide", **SIZES, train_len=8) == posenc.RoPE(8)
    with pytest.raises(ValueError, match=r"narrow has no option 'slop' \(did you mean 'slope'"):
        posenc.make(f"{__name__}.narrow", **SIZES, slop=2.0)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("alibbi", {}, ValueError, "'alibi'"),
        (3, {}, ValueError, "3"),
        ("rope", {"bas": 7.0}, ValueError, "'base'"),
        ("nope", {"base": 7.0}, ValueError, "base"),
        ("rope", {"num_heads": 0}, ValueError, "num_heads"),
        ("nope", {"max_len": 1.5}, TypeError, "max_len"),
        ("nope", {"head_dim": -8}, ValueError, "head_dim"),
        ("nope", {"dim": 0}, ValueError, "dim"),
        ("rope", {"layout": "halff"}, ValueError, "'half'"),
    ],
)
def test_wrong_names_and_sizes(name, options, error, message):
    with pytest.raises(error, match=message):
        posenc.make(name, **SIZES | options)


@pytest.fixture
def entries(monkeypatch):
    def add(name, value):
        found = [EntryPoint(name, value, "posenc.schemes")]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)

    return add


def test_another_package_may_add_a_scheme(entries):
    entries("tide", "posenc.testing.examples:Fading")
    scheme = posenc.make("tide", **SIZES)
    assert scheme.num_heads == 2
    assert type(scheme).__name__ == "Fading"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("alibi", "posenc.testing.examples:Fading", "takes the name"),
        ("mine", "posenc.testing.examples:Missing", "cannot load"),
        ("mine", "no_such_module:Tide", "cannot load"),
        ("mine", "pathlib:Path", "class Path is not a PositionScheme"),
        ("mine", "os:sep", "neither a PositionScheme nor a maker"),
    ],
)
def test_a_bad_addition_is_a_warning(entries, name, value, message):
    entries(name, value)
    with pytest.warns(UserWarning, match=message):
        found = posenc.catalogue()
    assert "mine" not in found
    assert found["alibi"](**SIZES) == posenc.ALiBi(2)


def test_a_dotted_name_is_imported():
    scheme = posenc.make("posenc.testing.examples.Fading", **SIZES)
    assert type(scheme).__name__ == "Fading"
    assert scheme.num_heads == 2
    assert posenc.make("posenc.testing.examples.Fence", **SIZES, reach=3).reach == 3


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no_such_module.Tide", ValueError, "unknown scheme .*No module named 'no_such_module'"),
        ("posenc.testing.examples.Missing", ValueError, "has no attribute 'Missing'"),
        ("os.path", TypeError, "neither a PositionScheme nor a maker"),
        (".Tide", ValueError, "unknown scheme"),
        ("..examples.Tide", ValueError, "unknown scheme"),
        (
            "posenc.testing.examples.fading",
            ValueError,
            r"did you mean 'Fading'\?\); accepted: .*Fence",
        ),
        ("kerpel", ValueError, "a dotted name, module.Class"),
        ("rope:base=3", ValueError, "'rope:base=3' is a label.* the name is 'rope'"),
    ],
)
def test_dotted_names_of_nothing(name, error, message):
    with pytest.raises(error, match=message):
        posenc.make(name, **SIZES)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes ``mine.py`` where it is found, and forgets it again."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text, name="mine"):
        (tmp_path / f"{name}.py").write_text(f"{HEADER}{text}")
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield write
    for name in ("mine", "helper"):
        sys.modules.pop(name, None)


HEADER = """\
from dataclasses import dataclass
from posenc import PositionScheme
"""
FIELD_FIRST = """\
@dataclass(frozen=True)
class Mine(PositionScheme):
    relative: bool = True
    num_heads: int
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("class Mine(:\n", r"SyntaxError: .*mine\.py, line 3"),
        ("top = 1\nrate = top / 0\n", r"ZeroDivisionError: division by zero, at .*mine\.py:4$"),
        ("import helper\n", r"ModuleNotFoundError: No module named 'helper', at .*mine\.py:3$"),
        ("import os\nos.nothing\n", "AttributeError: .*nothing.*py:4$"),
        (FIELD_FIRST, r"TypeError: class Mine: relative is written as a field.*mine\.py:4$"),
    ],
)
def test_a_module_that_fails_is_an_import_error(written, text, cause):
    written(text)
    message = f"^scheme 'mine.Mine': cannot import 'mine': {cause}"
    with pytest.raises(ImportError, match=message) as caught:
        posenc.make("mine.Mine", **SIZES)
    assert cause.startswith(type(caught.value.__cause__).__name__)


def test_the_line_is_of_the_module_that_failed(written):
    written("import helper\n")
    written("\n1 / 0\n", name="helper")
    with pytest.raises(ImportError, match=r"division by zero, at .*helper\.py:4$"):
        posenc.make("mine.Mine", **SIZES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Mine(PositionScheme): pass",
            "class Mine is not a frozen dataclass; write @dataclass",
        ),
        (
            "@dataclass\nclass Mine(PositionScheme): pass",
            r".* write @dataclass\(frozen=True\) above",
        ),
        (
            "@dataclass(frozen=True)\nclass Mine:\n    def param_specs(self): return {}",
            r"class Mine is not a PositionScheme; inherit from posenc\.PositionScheme: class Mine",
        ),
    ],
)
def test_a_class_that_is_no_scheme_is_told_what_to_write(written, text, message):
    written(text)
    with pytest.raises(TypeError, match=f"scheme 'mine.Mine': {message}"):
        posenc.make("mine.Mine", **SIZES)


def test_a_subclass_without_fields_needs_no_decorator(written):
    written("from posenc import ALiBi\nclass Mine(ALiBi): pass")
    assert posenc.make("mine.Mine", **SIZES).num_heads == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "mine.Mine"], "cannot import 'mine': ZeroDivisionError"),
        (["compare", "--schemes", "mine.Mine"], "cannot import 'mine': ZeroDivisionError"),
        (["show", "kerple.Mine"], "No module named 'kerple'; the folder {} was searched"),
    ],
)
def test_a_command_says_it_in_one_line(tmp_path, arguments, message):
    (tmp_path / "mine.py").write_text("1 / 0")
    command = [
        sys.executable,
        "-c",
        "import posenc.cli.main, sys; sys.exit(posenc.cli.main.main())",
    ]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"posenc \w+: error: .*\n", done.stderr)
    assert message.format(tmp_path.resolve()) in done.stderr
