"""What a scheme may have in its regions: served by every implementation, or refused in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from frameworks import ROUTES
from frameworks import route as named
from sample import few_of_jax, long
from subjects import normal

import posenc
from posenc.contract.protocol import ParamSpec, PositionScheme, Window
from posenc.schemes import DAPE, ReRoPE, Sink, Sum
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS
from posenc.testing.tolerances import ATTENTION_TOL

LENGTH = 24
TENSORS = {
    name: normal((2, HEADS, LENGTH, HEAD_DIM), n).astype("float32") for n, name in enumerate("qkv")
}


@dataclass(frozen=True)
class Split(PositionScheme):
    """``near`` up to a distance of ``at``, ``far`` from there on; all keys after the query."""

    near: PositionScheme = field(default_factory=posenc.NoPE)
    far: PositionScheme = field(default_factory=posenc.NoPE)
    at: int = 8

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {**self.near.param_specs(), **self.far.param_specs()}

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        return (self.near, (self.at, None)), (self.far, (None, -self.at - 1))


@dataclass(frozen=True)
class Constant(PositionScheme):
    """A bias of ``value`` at every pair."""

    value: float = 1.0

    def bias(self, q: Any, k: Any, *, params: Mapping[str, Any], xp: Any) -> Any:
        return 0.0 * (q - k) + self.value


@dataclass(frozen=True)
class Unscaled(PositionScheme):
    """Scores are not divided, as T5's."""

    def scale(self, head_dim: int) -> float:
        return 1.0


NESTED = Split(Split(Constant(0.5), Constant(-1.0), at=3), Split(Constant(2.0), Constant(0.0), 14))


def attended(bias: np.ndarray, scale: float | np.ndarray = HEAD_DIM**-0.5) -> np.ndarray:
    """Causal attention in float64."""
    q, k, v = (a.astype("float64") for a in TENSORS.values())
    row, col = np.ogrid[:LENGTH, :LENGTH]
    scores = np.where(col <= row, scale * (q @ k.swapaxes(2, 3)) + bias, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def distance() -> np.ndarray:
    row, col = np.ogrid[:LENGTH, :LENGTH]
    return row - col


def found(route: Any, scheme: PositionScheme, params: Any = None, **options: Any) -> Any:
    """The result, or why the implementation has no log-sum-exp to merge regions with."""
    try:
        return route.attend(scheme, TENSORS, params or {}, causal=True, **options)
    except NotImplementedError as reason:
        if "log-sum-exp" not in str(reason):
            raise
        return str(reason)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=long), {"mask": posenc.window(12, first=2)}],
    ids=["plain", "window"],
)
@pytest.mark.parametrize("route", few_of_jax(ROUTES, "torch-flex", "jax-chunked"))
def test_a_region_may_have_regions(route, options):
    away = distance()
    bias = np.select([away <= 3, away <= 8, away <= 14], [0.5, -1.0, 2.0], 0.0)
    if options:
        bias = np.where((away < 12) | (np.arange(LENGTH) < 2), bias, -np.inf)
    out = found(route, NESTED, **options)
    if not isinstance(out, str):
        assert_near(out, attended(bias), ATTENTION_TOL["float32"])


@pytest.mark.parametrize("route", few_of_jax(ROUTES))
def test_a_region_may_have_its_own_scale(route):
    out = found(route, Split(Unscaled(), posenc.NoPE()))
    if not isinstance(out, str):
        scale = np.where(distance() <= 8, 1.0, HEAD_DIM**-0.5)
        # Unscaled scores are of size 8 here, and rounded accordingly.
        assert_near(out, attended(np.zeros(()), scale), 8 * ATTENTION_TOL["float32"])


def test_the_callers_scale_is_that_of_all_regions():
    scheme = Split(Unscaled(), posenc.NoPE())
    out = posenc.attention(*TENSORS.values(), scheme, causal=True, scale=0.3)
    assert_near(out, attended(np.zeros(()), 0.3), ATTENTION_TOL["float32"])


@pytest.mark.parametrize("route", few_of_jax(ROUTES))
def test_whole_rows_of_a_region_are_the_references(route):
    scheme = Split(posenc.NoPE(), DAPE(posenc.ALiBi(HEADS)))
    params = posenc.init_params(scheme.far, seed=0)
    if route.implementation in ("auto", "chunked", "reference"):
        expected = found(named("numpy", "reference"), scheme, params)
        assert_near(found(route, scheme, params), expected, ATTENTION_TOL["float32"])
        return
    with pytest.raises(NotImplementedError, match="DAPE adjusts whole rows"):
        found(route, scheme, params)


@pytest.mark.parametrize("inside", [lambda part: part, lambda part: Split(far=part)])
def test_a_region_has_no_sink_of_its_own(inside):
    scheme = Split(far=inside(Split(Sink(posenc.NoPE(), learned=False, value=1.0))))
    with pytest.raises(ValueError, match=r"the scheme of a region must have no sink, got Sink"):
        posenc.attention(*TENSORS.values(), scheme, causal=True)


def test_nor_beside_a_sink_of_the_whole():
    with pytest.raises(ValueError, match=r"scheme has a sink already, in the region"):
        Sink(Split(Sink(posenc.NoPE(), 4)), 4)


def test_a_sink_beside_regions_is_that_of_the_whole_row():
    rerope = ReRoPE(HEAD_DIM, window=5)
    beside = Sum(rerope, Sink(posenc.NoPE(), learned=False, value=0.7))
    around = Sink(rerope, learned=False, value=0.7)
    results = [posenc.attention(*TENSORS.values(), s, causal=True) for s in (beside, around)]
    assert_near(*results, ATTENTION_TOL["float32"])
