"""Scores as large as they come, and what nobody sees: on every way to compute attention."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import PARTIAL
from sample import few_of_jax

import posenc
from posenc.contract.protocol import Hook
from posenc.schemes import ReRoPE, Sink
from posenc.testing.attention_case import AttentionCase
from posenc.testing.framework import frameworks
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

ROUTES = [
    pytest.param(f, implementation, id=f"{f}-{implementation}")
    for f in frameworks().values()
    for implementation in f.implementations
    if implementation not in PARTIAL
]
# torch's kernels save the log-sum-exp alone, which has no digits left to tell one key from two.
FORWARD_ONLY = [("torch", "sdpa"), ("torch", "chunked")]
# As users compile. With the fewer optimisations of other tests XLA fuses less.
COMPILER = {"jax": "jit"}
DIM = 12  # a scale that is no power of two: then every product is rounded
PARTIAL_BLOCK, WHOLE_BLOCKS = 20, 32  # XLA fuses less into tiles that are masked


def decided(highest, dtype, length, dim=DIM):
    """Queries whose highest scores are two equal ones, far above the others, and the result."""
    rng = np.random.default_rng(0)
    ranks = rng.permutation(length) // 2 + 1.0  # 1, 1, 2, 2 ...
    sizes = highest * dim**0.5 * rng.uniform(0.5, 1, length) * rng.choice([-1, 1], length)
    sizes = sizes / ranks.max()
    # One channel alone, for sums in whatever order would part what is equal.
    q, k = np.eye(1, dim) * sizes[:, None], np.eye(1, dim) * ranks[:, None]
    v = rng.standard_normal((length, dim))
    best = np.where(sizes[:, None] > 0, ranks == ranks.max(), ranks == ranks.min())
    # Two heads: XLA takes one product alone for a part of what follows, and rounds it.
    tensors = {n: np.array([[a, a]], dtype) for n, a in {"q": q, "k": k, "v": v}.items()}
    return tensors, best / 2


@pytest.mark.parametrize(
    ("highest", "length"), [(1e10, WHOLE_BLOCKS), (1e15, PARTIAL_BLOCK), (1e30, WHOLE_BLOCKS)]
)
@pytest.mark.parametrize(("framework", "implementation"), few_of_jax(ROUTES))
def test_the_highest_score_less_itself_is_nothing(framework, implementation, highest, length):
    tensors, weights = decided(highest, "float32", length)
    problem, compiler = AttentionCase(posenc.NoPE(), tensors), COMPILER.get(framework.name)
    # Two equal weights are exactly 1/2.
    expected = weights @ tensors["v"]
    found = problem.attend(framework, implementation, compiler=compiler)
    assert_near(found, expected, ATTENTION_TOL["float32"])
    if not framework.differentiable or (framework.name, implementation) in FORWARD_ONLY:
        return
    d_out = np.random.default_rng(1).standard_normal(expected.shape)
    try:
        _, found = problem.gradients(framework, implementation, d_out, compiler=compiler)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    d_weights = d_out @ np.swapaxes(tensors["v"], -1, -2)
    mean = np.sum(d_weights * weights, axis=-1, keepdims=True)
    d_scores = weights * (d_weights - mean) * DIM**-0.5
    wanted = {
        "q": d_scores @ tensors["k"],
        "k": np.swapaxes(d_scores, -1, -2) @ tensors["q"],
        "v": np.swapaxes(np.broadcast_to(weights, d_scores.shape), -1, -2) @ d_out,
    }
    for name, gradient in wanted.items():
        size = max(10.0, float(np.abs(gradient).max()))  # of the terms that cancel for q
        assert_near(found[name] / size, gradient / size, ATTENTION_TOL["float32"], name)


@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", DIM), ("float32", 1)])
@pytest.mark.parametrize(("framework", "implementation"), few_of_jax(ROUTES))
def test_nor_in_half_precision_or_of_one_channel(framework, implementation, dtype, dim):
    """A scale after the products, or a product that is no sum, is one operation with the rest."""
    if dtype not in framework.dtypes:
        pytest.skip(f"it has no {dtype}")
    # The highest rank is 12, no power of two: of one channel too the product is rounded.
    tensors, weights = decided(1e10, "float32", 24, dim)
    case, compiler = AttentionCase(posenc.NoPE(), tensors), COMPILER.get(framework.name)
    found = case.attend(framework, implementation, dtype=dtype, compiler=compiler)
    assert_near(found, weights @ tensors["v"], ATTENTION_TOL[dtype])


BESIDE = {
    "softcap": lambda highest: (posenc.NoPE(), {"softcap": 4 * highest}),
    "sink": lambda _: (Sink(posenc.NoPE(), learned=False, value=-3e38), {}),
}


@pytest.mark.parametrize(
    ("highest", "length"), [(1e6, PARTIAL_BLOCK), (1e30, PARTIAL_BLOCK), (1e30, WHOLE_BLOCKS)]
)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize(("framework", "implementation"), few_of_jax(ROUTES))
def test_nor_beside_a_cap_or_a_sink(framework, implementation, beside, highest, length):
    """Neither changes which two keys score highest, and a sink far below takes nothing."""
    tensors, weights = decided(highest, "float32", length)
    scheme, options = BESIDE[beside](highest)
    case, compiler = AttentionCase(scheme, tensors, options=options), COMPILER.get(framework.name)
    try:
        found = case.attend(framework, implementation, compiler=compiler)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    assert_near(found, weights @ tensors["v"], ATTENTION_TOL["float32"])


PARTS = {  # rotated by angles that round to 0, so that scores stay equal
    "regions": lambda score: ReRoPE(head_dim=DIM, window=4, base=1e30),
    "sink": lambda score: Sink(posenc.NoPE(), learned=False, value=score),
    "regions and sink": lambda score: Sink(
        ReRoPE(head_dim=DIM, window=4, base=1e30), learned=False, value=score
    ),
}


@pytest.mark.parametrize("score", [2.0**14, 2.0**100])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("framework", "implementation"), few_of_jax(ROUTES))
def test_parts_count_their_keys(framework, implementation, parts, score):
    """All scores are equal: a log-sum-exp in one number has lost how many keys a part has."""
    length, channel = 16, np.eye(1, DIM, DIM - 1)
    scheme = PARTS[parts](score)
    rng = np.random.default_rng(0)
    v, d_out = (rng.standard_normal((1, 1, length, DIM)) for _ in range(2))
    ones = np.ones((1, 1, length, 1))
    tensors = {"q": ones * channel * score, "k": ones * channel, "v": v}
    case = AttentionCase(scheme, tensors, options={"scale": 1.0})
    share = 1 / (length + (Hook.SINK in scheme.hooks()))  # of each key
    out = np.broadcast_to(share * np.sum(v, axis=2, keepdims=True), v.shape)
    try:
        # Parts that need a log-sum-exp are matrix products in torch's "chunked".
        if not framework.differentiable or (framework.name, implementation) == ("torch", "sdpa"):
            found, gradients = case.attend(framework, implementation), {}
        else:
            found, gradients = case.gradients(
                framework, implementation, d_out, compiler=COMPILER.get(framework.name)
            )
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    assert_near(found, out, ATTENTION_TOL["float32"])
    products = d_out @ np.swapaxes(v, -1, -2)
    d_scores = share * (products - np.sum(d_out * out, axis=-1, keepdims=True))
    wanted = {
        "q": np.sum(d_scores, axis=-1)[..., None] * channel,
        "k": np.sum(d_scores, axis=-2)[..., None] * channel * score,
        "v": share * np.sum(d_out, axis=2, keepdims=True) * np.ones_like(v),
    }
    for name, gradient in gradients.items():
        size = 10 * (score if name == "k" else 1)  # of the terms that cancel
        assert_near(gradient / size, wanted[name] / size, ATTENTION_TOL["float32"], name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("framework", "implementation"), few_of_jax(ROUTES))
def test_what_is_hidden_is_below_the_lowest_that_is_seen(framework, implementation, dtype):
    """Also below minus half of the largest float; jax.nn hides with 0.7 of it."""
    if dtype not in framework.dtypes:
        pytest.skip(f"it has no {dtype}")
    lowest = 0.65 * float(np.finfo(dtype).min)
    q = np.full((1, 1, 4, 4), lowest / 4)
    k = np.asarray([1.0, 0.9, 1.0, 1.0])[:, None] + np.zeros((1, 1, 4, 4))
    v = np.arange(4.0)[:, None] + np.zeros((1, 1, 4, 4))
    problem = AttentionCase(
        posenc.NoPE(), {"q": q, "k": k, "v": v}, options={"causal": True, "scale": 1.0}
    )
    try:
        found = problem.attend(framework, implementation, dtype=dtype)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    # The second key scores highest by 1e37, and the first query sees the first alone.
    np.testing.assert_array_equal(found[0, 0, :, 0], [0, 1, 1, 1])


@pytest.mark.parametrize("parts", ["one", "regions"])
@pytest.mark.parametrize(("framework", "implementation"), few_of_jax(ROUTES))
def test_the_lowest_bias_hides_nothing(framework, implementation, parts):
    """A bias of the lowest number is how some libraries mask; it is no mask where all keys have it.

    The first two keys have it, so the first two rows see no other, and later rows see others alone.
    """
    length, lowest = 6, float(np.finfo("float32").min)
    scheme = ReRoPE(head_dim=DIM, window=3) if parts == "regions" else posenc.NoPE()
    rng = np.random.default_rng(0)
    k, v, d_out = (rng.standard_normal((1, 1, length, DIM)) for _ in range(3))
    bias = np.where(np.arange(length) < 2, lowest, 0.0) + np.zeros((1, 1, length, length))
    tensors = {"q": np.zeros_like(v), "k": k, "v": v, "bias": bias}
    case = AttentionCase(scheme, tensors, options={"causal": True})
    weights = np.tril(np.ones((length, length)))
    weights[2:, :2] = 0
    sizes = np.sum(weights, axis=-1, keepdims=True)
    weights = weights / sizes
    compiler = COMPILER.get(framework.name)
    try:
        if not framework.differentiable or (framework.name, implementation) in FORWARD_ONLY:
            found, gradients = case.attend(framework, implementation, compiler=compiler), {}
        else:
            found, gradients = case.gradients(framework, implementation, d_out, compiler=compiler)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    assert_near(found, weights @ v, ATTENTION_TOL["float32"])
    if gradients:
        assert_near(gradients["v"], weights.T @ d_out, ATTENTION_TOL["float32"])
    try:
        lse = case.log_sum_exp(framework, implementation)[0, 0]
    except NotImplementedError:
        return
    assert_near(lse[:2] / lowest, [1, 1], ATTENTION_TOL["float32"])
    assert_near(lse[2:], np.log(sizes[2:, 0]), ATTENTION_TOL["float32"])


@pytest.mark.parametrize("scheme", [posenc.NoPE(), posenc.ALiBi(2)], ids=["nope", "alibi"])
@pytest.mark.parametrize("hidden", ["pads", "tail"])
@pytest.mark.parametrize(("framework", "implementation"), few_of_jax(ROUTES))
def test_nan_in_what_nobody_sees_reaches_nothing(framework, implementation, hidden, scheme):
    """Padding on the left, and keys of a cache that come after every query."""
    if implementation == "flex":
        pytest.skip("its kernel multiplies weights of 0 with values, and so passes NaN on")
    rng, size = np.random.default_rng(0), 7
    tensors = {n: rng.standard_normal((1, 2, size, 4)) for n in "qkv"}
    if hidden == "pads":
        options = {"tokens": posenc.positions.left_padded([size - 3], size)}
        unseen = dict.fromkeys("qkv", slice(0, 3))
    else:
        tensors["q"] = tensors["q"][:, :, :2]
        options = {
            "tokens": posenc.Tokens(pos=np.arange(size)),
            "queries": posenc.Tokens(pos=np.asarray([2, 3])),
            "causal": True,
        }
        unseen = dict.fromkeys("kv", slice(4, None))
    spoilt = {n: np.array(a) for n, a in tensors.items()}
    for name, rows in unseen.items():
        spoilt[name][:, :, rows] = [np.nan, np.inf, -np.inf, np.nan]
    d_out = rng.standard_normal(tensors["q"].shape)
    answers = []
    for own in (tensors, spoilt):
        problem = AttentionCase(scheme, own, options=options)
        if framework.differentiable:
            answers.append(problem.gradients(framework, implementation, d_out))
        else:
            answers.append((problem.attend(framework, implementation), {}))
    (out, gradients), (found, others) = answers
    np.testing.assert_array_equal(found, out)
    for name, gradient in others.items():
        np.testing.assert_array_equal(gradient, gradients[name], name)
