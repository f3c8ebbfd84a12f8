"""The asv suite: its params are the catalogue, its benchmarks run, and what it tracks is true."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from frameworks_installed import require
from sample import long

import posenc
import posenc.makers

SUITE = Path(__file__).parents[2] / "benchmarks" / "suite"


@dataclass(frozen=True)
class Newcomer(posenc.PositionScheme):
    """Acts at all three places."""

    num_heads: int
    dim: int

    def embedding(self, pos, *, params, xp):
        return xp.zeros((pos.shape[0], self.dim), dtype=params.dtype)

    def transform(self, x, pos, *, role, params, xp):
        return x

    def bias(self, q_pos, k_pos, *, params, xp):
        return xp.astype(k_pos - q_pos, params.dtype)


@pytest.fixture
def load(monkeypatch):
    """The suite's modules, imported anew with these variables; unloaded at the end."""

    def load(**variables):
        monkeypatch.syspath_prepend(str(SUITE.parent))
        for name in ("POSENC_SCHEMES", "POSENC_FRAMEWORKS", "POSENC_GRID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for name in [name for name in sys.modules if name.split(".")[0] == "suite"]:
            monkeypatch.delitem(sys.modules, name)
        names = [module.name for module in pkgutil.iter_modules([str(SUITE)])]
        return {name: importlib.import_module(f"suite.{name}") for name in names}

    yield load
    for name in [name for name in sys.modules if name.split(".")[0] == "suite"]:
        del sys.modules[name]


def classes(modules):
    """Benchmark classes by name, as asv finds them."""
    return {
        f"{name}.{kind.__name__}": kind
        for name, module in modules.items()
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if not kind.__name__.startswith("_") and benchmarks(kind)
    }


def benchmarks(kind):
    return [name for name in dir(kind) if name.startswith(("time_", "track_"))]


def test_a_new_scheme_is_in_every_benchmark_of_schemes(load, monkeypatch):
    monkeypatch.setitem(posenc.makers._BUILT_IN, "newcomer", Newcomer)
    found = classes(load(POSENC_FRAMEWORKS="numpy", POSENC_GRID="full"))
    of_schemes = {n: k for n, k in found.items() if "scheme" in getattr(k, "param_names", ())}
    assert len(of_schemes) > 10
    without = [n for n, kind in of_schemes.items() if "newcomer" not in kind.params[0]]
    assert without == []


def test_errors_of_a_new_scheme_are_in_the_short_grid(load, monkeypatch):
    """Of any scheme: attention is timed with one of each kind, of which "newcomer" is the first."""
    for name in ("newcomer", "newcomer_again"):
        monkeypatch.setitem(posenc.makers._BUILT_IN, name, Newcomer)
    found = classes(load(POSENC_FRAMEWORKS="numpy"))
    errors = [kind for name, kind in found.items() if name.startswith("error.")]
    assert len(errors) == 4
    assert all("newcomer_again" in kind.params[0] for kind in errors)


def first_figures(kind):
    """Values at the first params that are not refused; times are None."""
    params = kind.params if isinstance(kind.params[0], list | tuple) else [kind.params]
    for choice in itertools.product(*params):
        subject = kind()
        try:
            subject.setup(*choice)
        except NotImplementedError:
            continue
        return [getattr(subject, name)(*choice) for name in benchmarks(kind)]
    return []


FRAMEWORKS = [
    pytest.param(name, marks=() if name == "numpy" else long) for name in ("numpy", "torch", "jax")
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_call_of_each_benchmark(load, framework):
    if not require(framework):
        pytest.skip(f"{framework} is not installed")
    found = classes(load(POSENC_SCHEMES="rope alibi sinusoidal", POSENC_FRAMEWORKS=framework))
    # The exhaustive part runs all. NumPy has no training step.
    left_out = ["growth.", "long.", "start."]
    left_out += ["TrainingStep", "WithoutPositions", "study."] * (framework == "numpy")
    for name, kind in found.items():
        if any(part in name for part in left_out):
            continue
        figures = first_figures(kind)
        assert figures, f"{name} refuses all params"
        assert all(value is None or value >= 0 for value in figures), name


def test_a_wrong_result_shows_in_the_error(load, monkeypatch):
    error = load(POSENC_SCHEMES="alibi", POSENC_FRAMEWORKS="numpy")["error"]
    choice = "alibi", "numpy"

    def tracked():
        subject = error.Attention()
        subject.setup(*choice)
        return subject.track_max_error(*choice)

    right, attention = tracked(), posenc.attention
    assert 0 <= right < 32  # of some 100 roundings most cancel

    def wrong(q, *arguments, **options):
        out = attention(q, *arguments, **options)
        return out + np.float32(1e-3) if q.dtype == np.float32 else out

    monkeypatch.setattr(posenc, "attention", wrong)
    assert tracked() > 1000


def test_an_infinity_of_one_side_is_an_infinite_error(load):
    error = load(POSENC_FRAMEWORKS="numpy", POSENC_SCHEMES="alibi")["error"]
    masked, seen = np.array([-np.inf, 1.0]), np.array([0.0, 1.0])
    assert error.max_error(masked, masked) == 0
    assert error.max_error(seen, masked) == np.inf
    assert error.max_error(masked, seen) == np.inf
    assert error.max_error(seen + np.spacing(np.float32(1)), seen) == 1


def test_exponents_of_known_costs(load):
    growth = load(POSENC_FRAMEWORKS="numpy", POSENC_SCHEMES="alibi")["growth"]
    subject = growth.Attention()
    subject.lengths = [1024, 4096]
    assert subject._exponent([1.0, 4.0]) == 1
    assert subject._exponent([1.0, 16.0]) == 2


def test_peak_memory_counts_what_is_freed_before_the_end(load):
    own = load(POSENC_FRAMEWORKS="numpy", POSENC_SCHEMES="alibi")["frameworks"].FRAMEWORKS["numpy"]

    def function(arrays):
        return np.zeros(2**20, np.uint8).sum()

    peak = own.ready(function, {}, "forward").peak_memory()
    assert 2**20 <= peak < 2**20 + 2**18  # Python's own objects
