"""Schemes by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import posenc

SIZES = {"num_heads": 2, "head_dim": 8, "max_len": 32}


@pytest.mark.parametrize("name", posenc.schemes())
def test_every_name_makes_a_scheme(name):
    scheme = posenc.make(name, **SIZES)
    assert isinstance(scheme, posenc.PositionScheme)
    assert scheme == posenc.make(name.upper(), dim=16, **SIZES)
    assert posenc.schemes()[name](**SIZES, dim=16) == scheme
    assert type(scheme).__doc__
    assert "arXiv" in scheme.paper


def test_sizes_reach_the_schemes():
    assert posenc.make("alibi", **SIZES) == posenc.ALiBi(2)
    assert posenc.make("rope", **SIZES, base=7.0) == posenc.RoPE(8, base=7.0)
    assert posenc.make("sinusoidal", **SIZES) == posenc.Sinusoidal(16)
    assert posenc.make("sinusoidal", **SIZES, dim=12) == posenc.Sinusoidal(12)
    assert posenc.make("learned", **SIZES, dim=12) == posenc.Learned(max_len=32, dim=12)
    assert posenc.make("t5", **SIZES, causal=True) == posenc.T5Bias(2, causal=True)


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
    entries("kerple", "subjects:Kerple")
    scheme = posenc.make("kerple", **SIZES)
    assert scheme.num_heads == 2
    assert type(scheme).__name__ == "Kerple"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("alibi", "subjects:Kerple", "takes the name"),
        ("mine", "subjects:Missing", "cannot load"),
        ("mine", "no_such_module:Kerple", "cannot load"),
    ],
)
def test_a_bad_addition_is_a_warning(entries, name, value, message):
    entries(name, value)
    with pytest.warns(UserWarning, match=message):
        found = posenc.schemes()
    assert "mine" not in found
    assert found["alibi"](**SIZES) == posenc.ALiBi(2)


def test_a_dotted_name_is_imported():
    scheme = posenc.make("subjects.Kerple", **SIZES)
    assert type(scheme).__name__ == "Kerple"
    assert scheme.num_heads == 2
    assert posenc.make("subjects.Fence", **SIZES, reach=3).reach == 3


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no_such_module.Kerple", ValueError, "unknown scheme .*No module named 'no_such_module'"),
        ("subjects.Missing", ValueError, "has no attribute 'Missing'"),
        ("os.path", TypeError, "neither a PositionScheme nor a maker"),
        ("pathlib.Path", TypeError, "neither a PositionScheme nor a maker"),
        (".Kerple", ValueError, "unknown scheme"),
        ("kerpel", ValueError, "or a dotted name module.Class"),
    ],
)
def test_dotted_names_of_nothing(name, error, message):
    with pytest.raises(error, match=message):
        posenc.make(name, **SIZES)
