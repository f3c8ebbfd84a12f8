"""The rows of the catalogue say what the schemes are."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import posenc
from posenc.cli.list import Row, one_of_each_kind, page, rows, table
from posenc.contract.protocol import FeatureSpec, PositionScheme
from posenc.makers import fitted_options

SIZES = {"num_heads": 2, "head_dim": 8, "max_len": 32, "train_len": 16}


@dataclass(frozen=True)
class Gated(PositionScheme, relative=True):  # which says nothing of features
    def feature_specs(self):
        return {"c": FeatureSpec(self.gates, of="key", cumulative=True)}

    def gates(self, x, *, params, xp):
        return -xp.matrix_transpose(x[..., :4])

    def bias(self, q, k, *, params, xp):
        return params.query["c"] - params.key["c"]


@dataclass(frozen=True)
class Turned(PositionScheme):
    """Scores of ``q + k`` grow with absolute position.

    More words.
    """

    def transform(self, x, pos, *, role, params, xp):
        return x * xp.astype(1 + pos, x.dtype)[..., None]


class BiasAndTurn(Turned, relative=True):
    """Both, of which one is relative."""

    bias = posenc.ALiBi.bias

    def constants(self):
        return {"slopes": (1.0, 2.0, 3.0, 4.0)}


class BiasAndRope(posenc.RoPE, relative=True):
    """Both relative."""

    bias, constants = posenc.ALiBi.bias, BiasAndTurn.constants


def refuses(**sizes):
    raise RuntimeError("no licence\nfor this head_dim")


@pytest.fixture
def catalogue(monkeypatch):
    """Rows by name where the catalogue holds the given makers too."""

    def measured(**makers):
        monkeypatch.setattr("posenc.cli.list.catalogue", lambda: posenc.catalogue() | makers)
        return {row.name: row for row in rows()}

    return measured


@pytest.mark.parametrize(
    ("name", "enters", "learned", "relative", "fusable"),
    [
        ("alibi", ("bias",), False, True, "score_mod, key bias"),
        ("fox", ("bias", "features"), True, False, "score_mod, key bias"),
        ("learned", ("embedding",), True, False, "before attention"),
        ("nope", (), False, False, "as is"),
        ("rope", ("transform",), False, True, "before attention"),
        ("selective_rope", ("transform", "features"), True, False, "before attention"),
        ("sinusoidal", ("embedding",), False, False, "before attention"),
        ("t5", ("bias",), True, True, "score_mod"),
    ],
)
def test_a_row_is_what_the_scheme_is(name, enters, learned, relative, fusable):
    (row,) = (row for row in rows() if row.name == name)
    assert (row.enters, row.learned, row.relative) == (enters, learned, relative)
    assert (row.fusable, row.error) == (fusable, None)
    assert "arXiv" in row.paper
    assert row.title


def test_a_bias_of_distance_that_the_token_chooses_is_relative():
    assert {row.name: row.relative for row in rows()}["inkling"]


def test_a_factor_beyond_the_training_length_is_not_relative():
    assert not {row.name: row.relative for row in rows()}["rerope"]


def test_the_catalogue_has_a_row_each():
    found = rows()
    assert [row.name for row in found] == sorted(posenc.catalogue())
    assert next(r.title for r in found if r.name == "nope").startswith("No positional encoding")
    with pytest.raises(FrozenInstanceError):
        found[0].name = "other"


def test_relative_is_measured_where_a_scheme_transforms(catalogue):
    found = catalogue(
        turned=lambda **_: Turned(),
        both=lambda **_: BiasAndTurn(),
        rope2=lambda **_: BiasAndRope(16),
    )
    assert not found["turned"].relative
    assert not found["both"].relative
    assert found["rope2"].relative
    assert found["both"].enters == ("transform", "bias")
    assert found["both"].fusable == "score_mod"
    assert found["turned"].title == "Scores of ``q + k`` grow with absolute position."


def test_a_gated_scheme_is_never_relative(catalogue):
    row = catalogue(gated=lambda **_: Gated())["gated"]
    assert row.enters == ("bias", "features")
    assert (row.relative, row.fusable, row.title) == (False, "score_mod", "")


def test_a_broken_maker_is_a_row_with_its_error(catalogue):
    found = catalogue(broken=refuses, rubbish=lambda **_: 3, rope18=lambda **_: posenc.RoPE(18))
    assert found["broken"].error == "RuntimeError: no licence\nfor this head_dim"
    assert found["rubbish"].error.startswith("TypeError: scheme must be an instance")
    assert "head_dim=18" in found["rope18"].error
    assert found["alibi"].error is None
    lines = table(list(found.values())).splitlines()
    assert any("RuntimeError: no licence for this head_dim" in line for line in lines)


def test_makers_are_asked_for_a_small_model(catalogue):
    asked = []
    catalogue(mine=lambda **sizes: asked.append(sizes) or posenc.NoPE())
    widths = {"dim": 64, "hidden_dim": 64}
    assert asked == [{"num_heads": 4, "head_dim": 16, "max_len": 64, "train_len": 64, **widths}]


def test_the_table_is_aligned_and_fits():
    text = table(rows())
    head, rule, *lines = text.splitlines()
    assert rule == "-" * 100
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii()
    for row in rows():
        (line,) = (line for line in lines if line.split(" ")[0] == row.name)
        assert line[head.index("enters") :].startswith(", ".join(row.enters) or "nothing")
        assert line[head.index("learned") :].startswith("yes" if row.learned else "no")
        assert line[head.index("relative") :].startswith("yes" if row.relative else "no")
        assert line[head.index("fused") :].startswith(row.fusable)
        below = " ".join(lines[lines.index(line) + 1 :][:3]).split()
        paper = row.paper.replace("arXiv ", "")
        assert line.endswith(f"  {paper}") or " ".join(below).count(paper)
        assert " ".join(below).startswith(row.title.replace("`", ""))


def test_a_long_row_still_fits():
    everywhere = (
        "embedding", "transform", "bias", "features", "sink", "channel decay", "whole rows",
        "regions",
    )  # fmt: skip
    paper = "Somebody, Other, Another and Still Another 2026, arXiv 2601.00001"
    long = Row("n" * 60, "word " * 60, everywhere, True, True, "score_mod, key bias", paper)
    text = table([*rows(), long, Row("broken", error="ValueError: " + "x" * 250)])
    assert max(map(len, text.splitlines())) <= 100
    assert paper.replace("arXiv ", "") in text
    assert text.count("x" * 50) >= 3


@pytest.mark.parametrize("width", [60, 80])
def test_a_table_fits_the_width_that_it_is_given(width):
    lines = table(rows(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert set(posenc.catalogue()) <= {first for line in lines for first in line.split()[:1]}
    said = sum(line.count("score_mod, key bias") for line in lines)
    assert said == [row.fusable for row in rows()].count("score_mod, key bias")


@pytest.mark.long
def test_one_scheme_stands_for_each_kind():
    def kind(row):
        return row.enters, row.learned, row.fusable

    found = rows()
    chosen = [kind(row) for row in found if row.name in one_of_each_kind()]
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) == set(map(kind, found))
    assert "rope" in one_of_each_kind(), "plain forms stand for their variants"


def test_an_empty_table_is_its_head():
    assert len(table([]).splitlines()) == 2


# A maker that is a function has a page of its own parameters.
OF_CLASSES = [
    n for n, maker in posenc.catalogue().items() if isinstance(inspect.unwrap(maker), type)
]


@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_page_has_every_field_with_its_default_and_words(name):
    text = page(name, 72)
    kind = inspect.unwrap(posenc.catalogue()[name])
    preset = getattr(posenc.catalogue()[name], "preset", {})
    sizes, options = re.split(r"^options:", text.split("sizes of the model:")[1], flags=re.M)
    entries = {
        name: (rest, words)
        for name, rest, words in re.findall(r"^  (\w+)  (.*)\n((?:      .*\n?)*)", text, re.M)
    }
    kinds = (kind, *(value for value in preset.values() if isinstance(value, type)))
    given = [f for each in kinds for f in fields(each) if f.init and f.name not in preset]
    types = {name: hint for each in kinds for name, hint in get_type_hints(each).items()}
    assert list(entries) == sorted((f.name for f in given), key=lambda n: f"  {n}  " in options)
    for field in given:
        needed = field.default is MISSING
        hint = types[field.name]
        parts = (hint,) if get_origin(hint) is Literal else get_args(hint)
        choices = [repr(v) for part in parts if get_origin(part) is Literal for v in get_args(part)]
        choices += ["None"] * bool(choices and type(None) in parts)
        kind_of = " or ".join(choices) or re.sub("Count|Distance", "int", field.type)
        kind_of = re.sub("Positive|Finite", "float", kind_of)
        facts = f"{kind_of}, needed" if needed else f"{kind_of}, default {field.default!r}"
        words = " ".join(" ".join(entries[field.name]).split())
        assert words.startswith(f"{facts} "), "and its docstring says something of every field"
        made = f"  {field.name}  " in sizes or field.name in fitted_options(name, SIZES)
        assert made or not needed, "and every name can be made from sizes"
    assert kinds[-1].paper.split()[0] in text
    assert max(map(len, text.splitlines())) <= 72


def plain(num_heads, slope=2.0, **sizes):
    """A maker that is no class.

    Parameters
    ----------
    slope : float
        How steep
        it is.

    Returns
    -------
    nothing
        That is an option.
    """
    return posenc.ALiBi(num_heads)


def test_a_page_of_a_function_and_of_a_broken_scheme(monkeypatch):
    makers = posenc.catalogue() | {"plain": plain, "broken": refuses}
    monkeypatch.setattr(sys.modules["posenc.makers"], "catalogue", lambda: makers)
    text = page("plain", 60)
    assert "  num_heads  needed\n" in text
    assert "  slope  default 2.0\n      How steep it is.\n" in text
    assert "nothing  " not in text
    assert text.endswith("plain:slope=2.0")
    assert "error: RuntimeError: no licence for this head_dim" in page("broken", 60)
    with pytest.raises(ValueError, match="did you mean 'rope'"):
        page("ropee")
