"""Sums of parts that enter in different places, on every implementation."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import FUSED, ROUTES
from sample import few_of_jax, long
from subjects import HIDDEN_DIM, normal

import posenc
from posenc.schemes import ALiBi, DynamicNTK, FoX, LogScale, NoPE, RoPE, Sink, Sum, T5Bias
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR, assert_near

HEADS, DIM, LENGTH = 4, 8, 20
# A table and sums of gates in one bias; two transforms, one of them learned; a sink.
EVERYTHING = Sum(
    FoX(HEADS, HIDDEN_DIM),
    T5Bias(HEADS, num_buckets=8, max_distance=12, causal=True),
    RoPE(DIM),
    LogScale("ssmax", num_heads=HEADS),
    Sink(NoPE(), HEADS),
)


def inputs():
    vectors = {n: normal((2, HEADS, LENGTH, DIM), seed) for seed, n in enumerate("qkv")}
    return vectors, normal((2, LENGTH, HIDDEN_DIM), 3)


def by_hand(params):
    """Every part by its own function, put together as the definition says."""
    vectors, x = inputs()
    (q, k, v), pos = vectors.values(), np.arange(LENGTH)
    of = [
        {name[2:]: a for name, a in params.items() if name[0] == str(n)}
        for n in range(len(EVERYTHING.schemes))
    ]
    fox, t5, rope, scale, _ = EVERYTHING.schemes
    q = posenc.transform(rope, q, pos, role="query")
    q = posenc.transform(scale, q, pos, role="query", params=of[3])
    k = posenc.transform(rope, k, pos, role="key")
    gates = posenc.features(fox, of[0], posenc.Tokens(x=x))[1].features["c"]
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(DIM) + posenc.bias(t5, pos, pos, of[1])
    scores = scores + gates[..., :, None] - gates[..., None, :]
    weights = np.where(pos <= pos[:, None], np.exp(scores), 0.0)
    sink = np.exp(of[4]["sink"])[:, None, None]
    return weights / (sink + weights.sum(axis=-1, keepdims=True)) @ v


def drawn():
    params = posenc.init_params(EVERYTHING)
    rng = np.random.default_rng(3)
    return {name: a + rng.normal(0, 0.5, a.shape) for name, a in params.items()}


@pytest.mark.parametrize(
    "route",
    [
        pytest.param(*p.values, id=p.id, marks=long) if p.id in ("torch-flex", "jax-chunked") else p
        for p in few_of_jax(ROUTES)
    ],
)
def test_everything_at_once(route):
    params, (vectors, x) = drawn(), inputs()
    out = route.attend(EVERYTHING, vectors, params, causal=True, tokens=posenc.Tokens(x=x))
    assert_near(out, by_hand(params), ATTENTION_TOL["float32"], str(route))


@long
@pytest.mark.parametrize("route", [p for p in FUSED if p.id != "torch-flex"])
def test_every_part_learns(route):
    params, d_out, (vectors, x) = drawn(), normal((2, HEADS, LENGTH, DIM), 9), inputs()
    _, gradients = route.gradients(
        EVERYTHING, vectors, params, d_out, causal=True, tokens=posenc.Tokens(x=x)
    )
    rng, step = np.random.default_rng(1), 1e-5
    for name, array in params.items():
        direction = rng.standard_normal(array.shape)
        ends = [
            np.vdot(d_out, by_hand({**params, name: array + s * direction})) for s in (step, -step)
        ]
        found, expected = np.vdot(gradients[name], direction), (ends[0] - ends[1]) / (2 * step)
        size = np.linalg.norm(gradients[name]) * np.linalg.norm(direction)
        tolerance = 2 * REDUCTION_FACTOR * ATTENTION_TOL["float32"]
        assert abs(found - expected) <= tolerance * max(1.0, size), name


def test_labels_of_sums_are_made_from_sizes():
    sizes = {"num_heads": HEADS, "head_dim": DIM, "train_len": 16}
    for label in ("rope+alibi", "rope+log_scale", "fox+t5", "rope+sink", "xpos+sink", "pope+fox"):
        scheme = Sum(*(posenc.make(name, **sizes) for name in label.split("+")))
        hidden = posenc.Tokens(x=normal((1, LENGTH, HEADS * DIM), 3))
        q = normal((1, HEADS, LENGTH, DIM), 0)
        params = posenc.init_params(scheme)
        out = posenc.attention(q, q, q, scheme, params, causal=True, tokens=hidden)
        assert np.all(np.isfinite(out)), label


def test_a_scale_of_one_part_is_that_of_the_sum():
    assert Sum(T5Bias(HEADS, scaled=False), ALiBi(HEADS)).scale(DIM) == 1.0


def test_every_part_is_that_of_the_length():
    rope, alibi = RoPE(DIM, scaling=DynamicNTK(2, 16)), ALiBi(HEADS, interpolate_from=16)
    whole = Sum(rope, NoPE(), alibi)
    longer = whole.at_length(64)
    assert longer == Sum(rope.at_length(64), NoPE(), alibi.at_length(64)) != whole
    plain = Sum(RoPE(DIM), ALiBi(HEADS))
    assert plain.at_length(64) is plain
