"""PoPE against its formula, and what is new in it: wider vectors, and params of keys."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from frameworks import FRAMEWORKS, FUSED, ROUTES, route
from sample import few_of_jax, long
from subjects import normal

import posenc
from posenc.schemes import LogScale, PoPE, Sink, Sum
from posenc.testing.tolerances import ATTENTION_TOL, DERIVATIVE_TOL, assert_near, rounding_bound

HEADS, KEY_HEADS, DIM, LENGTH = 4, 2, 8, 12
DELTA = np.random.default_rng(5).uniform(-7, 0.5, (KEY_HEADS, DIM))  # some beyond both bounds
GROUPED = PoPE(KEY_HEADS, DIM)
BASE = 10_000.0
WIDE = [p for p in ROUTES if p.id != "jax-xla"]
LEARNING = [p for p in FUSED if p in WIDE and p.id != "torch-flex"]  # its gradients need a GPU


def later(routes, name):
    """Parameters by implementation; one that compiles for a second is not in the quick part."""
    few = few_of_jax(routes)
    return [pytest.param(*p.values, id=p.id, marks=long) if p.id == name else p for p in few]


def softplus(x):
    return np.logaddexp(0.0, x)


def vectors(length=LENGTH):
    shapes = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS}
    return {n: normal((2, h, length, DIM), seed) for seed, (n, h) in enumerate(shapes.items())}


def scores_by_definition(q, k, pos, delta):
    """``sum_c sp(q_c) sp(k_c) cos((j - i) theta_c + delta_c)``, for each pair, unscaled."""
    theta = BASE ** (-np.arange(DIM) / DIM)
    delta = np.clip(delta, -2 * math.pi, 0)[:, None, None, :]
    phase = (pos - pos[:, None])[:, :, None] * theta + delta
    return np.einsum("bhic,bhjc,hijc->bhij", softplus(q), softplus(k), np.cos(phase))


def attention_by_definition(q, k, v, delta, pos=None, scale=DIM**-0.5):
    k, v, delta = (np.repeat(a, HEADS // KEY_HEADS, axis=-3) for a in (k, v, delta[..., None]))
    pos = np.arange(q.shape[2]) if pos is None else pos
    scores = scale * scores_by_definition(q, k, pos, delta[..., 0])
    scores = np.where(pos <= pos[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize(("i", "j"), [(0, 0), (3, 1), (1000, 7), (2**24 - 1, 2**24 - 4099)])
def test_the_score_is_that_of_the_formula(i, j):
    delta = np.asarray([[-0.5, -6.0, 0.0, -1.0]])
    q, k = np.asarray([0.5, -2.0, 1.0, 3.0]), np.asarray([-1.0, 0.25, 2.0, -0.5])
    scheme = PoPE(1, 4, base=100.0)
    parts = [
        posenc.transform(
            scheme, x[None, None], np.asarray([pos]), role=role, params={"delta": delta}
        )
        for x, pos, role in ((q, i, "query"), (k, j, "key"))
    ]
    assert [part.shape for part in parts] == [(1, 1, 8)] * 2
    with mpmath.workdps(40):
        expected = sum(
            mpmath.log1p(mpmath.exp(q[c]))
            * mpmath.log1p(mpmath.exp(k[c]))
            * mpmath.cos((j - i) * mpmath.mpf(100) ** (-mpmath.mpf(c) / 4) + delta[0, c])
            for c in range(4)
        )
    # Sums of 4 products below 3.1 * 2.2, with sines and cosines of a few roundings.
    assert abs(float(np.vdot(*parts)) - float(expected)) < rounding_bound(16, 7.0, "float64")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_channels_take_turns_in_the_other_layout(dtype):
    other = PoPE(KEY_HEADS, DIM, layout="interleaved")
    x, pos = normal((1, KEY_HEADS, 3, DIM), 7).astype(dtype), np.arange(3)
    half, turns = (
        posenc.transform(scheme, x, pos, role="key", params={"delta": DELTA})
        for scheme in (PoPE(KEY_HEADS, DIM), other)
    )
    assert turns.dtype == dtype
    np.testing.assert_array_equal(turns[..., 0::2], half[..., :DIM])  # cosines
    np.testing.assert_array_equal(turns[..., 1::2], half[..., DIM:])


def test_phases_count_as_the_nearer_bound():
    x, pos = normal((1, KEY_HEADS, 3, DIM), 7), np.arange(3)

    def turned(value):
        params = {"delta": np.full((KEY_HEADS, DIM), value)}
        return posenc.transform(GROUPED, x, pos, role="key", params=params)

    np.testing.assert_array_equal(turned(0.7), turned(0.0))
    np.testing.assert_array_equal(turned(-9.0), turned(-2 * math.pi))
    assert not np.array_equal(turned(-0.7), turned(0.0))


def test_first_phases():
    assert not np.any(posenc.init_params(GROUPED)["delta"])
    drawn = posenc.init_params(PoPE(64, DIM, init="uniform"))["delta"]
    assert drawn.min() < -6
    assert -0.3 < drawn.max() <= 0


@pytest.mark.parametrize("route", later(WIDE, "torch-flex"))
def test_wider_vectors_on_every_implementation(route):
    tensors, params = vectors(), {"delta": DELTA}
    out = route.attend(GROUPED, tensors, params, causal=True)
    expected = attention_by_definition(**tensors, delta=DELTA)
    assert_near(out, expected, ATTENTION_TOL["float32"], str(route))


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="torch is not installed")
@pytest.mark.parametrize("window", [None, 5])
def test_sdpa_on_a_cpu_gets_vectors_of_one_width(window, monkeypatch):
    """Its fused kernel takes no other; for others it holds all scores."""
    import torch

    import posenc_torch
    from posenc_torch import sdpa

    widths = []

    def recorded(*vectors, **options):
        widths.append([a.shape[-1] for a in vectors])
        return torch.nn.functional.scaled_dot_product_attention(*vectors, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", recorded)
    tensors = {name: torch.tensor(a) for name, a in vectors().items()}
    for v in (tensors["v"], torch.cat([tensors["v"]] * 3, dim=-1)):  # narrower, and wider
        out = posenc_torch.attention(
            tensors["q"], tensors["k"], v, GROUPED, {"delta": torch.tensor(DELTA)}, True,
            implementation="sdpa", window=window,
        )  # fmt: skip
        assert out.shape[-1] == v.shape[-1]
    assert widths == [[2 * DIM] * 3, [3 * DIM] * 3]


@pytest.mark.skipif("jax" not in FRAMEWORKS, reason="JAX is not installed")
def test_an_implementation_that_takes_one_width_says_so():
    with pytest.raises(NotImplementedError, match="q has head_dim 16, v has 8"):
        route("jax", "xla").attend(GROUPED, vectors(), {"delta": DELTA}, causal=True)


@pytest.mark.parametrize("route", later(LEARNING, "jax-chunked"))
def test_phases_of_shared_keys_learn(route):
    tensors, d_out = vectors(), normal((2, HEADS, LENGTH, DIM), 9)
    inside = DELTA.clip(-6, -0.1)
    direction = np.random.default_rng(1).standard_normal(inside.shape)
    _, gradients = route.gradients(GROUPED, tensors, {"delta": inside}, d_out, causal=True)
    ends = [
        np.vdot(d_out, attention_by_definition(**tensors, delta=inside + step * direction))
        for step in (1e-5, -1e-5)
    ]
    found, expected = np.vdot(gradients["delta"], direction), (ends[0] - ends[1]) / 2e-5
    size = np.linalg.norm(gradients["delta"]) * np.linalg.norm(direction)
    assert abs(found - expected) < DERIVATIVE_TOL * size


@pytest.mark.parametrize("raw", [False, True])
def test_a_cache_of_wide_or_of_raw_keys(raw):
    tensors, params = vectors(), {"delta": DELTA}
    expected = attention_by_definition(**tensors, delta=DELTA)[:, :, -1:]
    pos = np.arange(LENGTH)
    wide = posenc.transform(GROUPED, tensors["k"], pos, role="key", params=params)
    assert posenc.cache_needs(GROUPED).transformed
    step = {"q": tensors["q"][:, :, -1:], "k": tensors["k"] if raw else wide, "v": tensors["v"]}
    out = posenc.attention(
        **step, scheme=GROUPED, params=params, causal=True, k_transformed=not raw,
        tokens=posenc.Tokens(pos=pos), queries=posenc.Tokens(pos=pos[-1:]),
    )  # fmt: skip
    assert_near(out, expected, ATTENTION_TOL["float64"])


def test_parts_of_a_sum_may_have_more_heads_than_keys():
    both = Sum(GROUPED, posenc.ALiBi(HEADS, slopes=[0.0] * HEADS))
    tensors = vectors()
    out = posenc.attention(**tensors, scheme=both, params={"0_delta": DELTA}, causal=True)
    expected = attention_by_definition(**tensors, delta=DELTA)
    assert_near(out, expected, ATTENTION_TOL["float64"])
    assert Sink(GROUPED, HEADS).param_specs().keys() == {"delta", "sink"}


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="torch is not installed")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_once_in_a_sum(dtype):
    import torch

    half = torch.tensor(vectors()["q"]).to(getattr(torch, dtype))
    scheme, pos = Sum(PoPE(HEADS, DIM), LogScale("ssmax", num_heads=HEADS)), torch.arange(LENGTH)
    params = posenc.init_params(scheme)
    whole = posenc.transform(scheme, half.float(), pos, role="query", params=params)
    found = posenc.transform(scheme, half, pos, role="query", params=params)
    assert torch.equal(found, whole.to(half.dtype))


def test_errors():
    tensors, params = vectors(), {"delta": np.zeros((HEADS, DIM))}
    with pytest.raises(ValueError, match=r"keys have 2 heads, and 'delta'.* 4: its heads are"):
        posenc.attention(**tensors, scheme=PoPE(HEADS, DIM), params=params)
    with pytest.raises(ValueError, match="x has 8 channels, the scheme head_dim=6"):
        posenc.attention(**tensors, scheme=PoPE(KEY_HEADS, 6), params={"delta": np.zeros((2, 6))})
    with pytest.raises(ValueError, match="queries have 16 channels, transformed keys 8"):
        posenc.attention(
            **tensors, scheme=GROUPED, params={"delta": DELTA}, k_transformed=True,
            tokens=posenc.Tokens(pos=np.arange(LENGTH)),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"unknown init 'zeros'.*zero, uniform"):
        PoPE(2, 4, init="zeros")
    with pytest.raises(ValueError, match=r"unknown layout 'pairs'.*half, interleaved"):
        PoPE(2, 4, layout="pairs")
    with pytest.raises(ValueError, match="differ in head_dim"):
        posenc.attention(tensors["q"], tensors["k"][..., :6], tensors["v"], posenc.NoPE())
