"""Wall against its formula, pair by pair: anchors, order, documents, gates that forget at once."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from frameworks import ROUTES
from sample import long
from subjects import normal

import posenc
from posenc.schemes import FoX, Sum, Wall
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, WIDTH, LENGTH = 2, 4, 3, 40  # three blocks of keys
SCHEME = Wall(HEADS, DIM, WIDTH, offset=0.5)
FLOAT64 = 4 * ATTENTION_TOL["float64"]  # sums of 40 gates, and exponentials
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
W, X = normal((HEADS, DIM, WIDTH), 3), normal((2, LENGTH, WIDTH), 4)
AT, ONE = np.arange(LENGTH), np.zeros(LENGTH, int)


def by_formula(pos=AT, seg=ONE, k=K, v=V, offset=0.5, w=W):
    """``sum_n q_in k_jn exp(P_in - P_jn)``, each sum between two tokens from its gates."""
    gates = -np.logaddexp(0, -(np.einsum("hdc,blc->bhld", w, X) + offset))
    out = np.zeros_like(Q)
    for b, h, i in np.ndindex(Q.shape[:3]):
        g = h // (HEADS // k.shape[1])
        keys = np.flatnonzero((pos <= pos[i]) & (seg == seg[i]))
        between = [(pos > pos[j]) & (pos <= pos[i]) & (seg == seg[i]) for j in keys]
        decay = np.exp([gates[b, h, t].sum(axis=0) for t in between])
        scores = (Q[b, h, i] * k[b, g, keys] * decay).sum(axis=1) / math.sqrt(DIM)
        weights = np.exp(scores - scores.max())
        out[b, h, i] = weights / weights.sum() @ v[b, g, keys]
    return out


def documents():
    """Three documents, interleaved in memory, whose sorted keys share blocks."""
    rng = np.random.default_rng(1)
    return rng.integers(-9, 9, LENGTH), rng.permutation(np.repeat([-3, 0, 7], [17, 16, 7]))


def attend(scheme=SCHEME, params=None, k=K, v=V, **options):
    tokens = posenc.Tokens(x=X, **{n: options.pop(n) for n in ("pos", "seg") if n in options})
    params = {"w": W} if params is None else params
    return posenc.attention(Q, k, v, scheme, params, causal=True, tokens=tokens, **options)


def test_two_tokens_by_hand():
    # sigmoid(0) = 1/2 and sigmoid(ln 3) = 3/4 are the gates of the second token's two channels, so
    # its score of the first key is 2 * 3 / 2 + 4 * 5 * 3/4 = 18, and of itself 2 + 4 = 6.
    scheme, w = Wall(1, 2, 1, offset=0.0), np.asarray([[[0.0], [math.log(3)]]])
    q, k = np.asarray([[[[9, 9], [2, 4]]]], float), np.asarray([[[[3, 5], [1, 1]]]], float)
    v, tokens = np.eye(2)[None, None], posenc.Tokens(x=np.ones((1, 2, 1)))
    found = posenc.attention(q, k, v, scheme, {"w": w}, True, tokens=tokens, scale=0.125)
    row = np.exp([18 / 8, 6 / 8])
    assert_near(found[0, 0, 1], row / row.sum(), FLOAT64)


@pytest.mark.parametrize("case", ["in order", "shuffled", "packed", "grouped"])
def test_it_is_the_formula(case):
    pos, seg, k, v = AT, ONE, K, V
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(90)[:LENGTH] - 20
    if case == "packed":
        pos, seg = documents()
    if case == "grouped":
        k, v = k[:, :1], v[:, :1]
    where = {} if case in ("in order", "grouped") else {"pos": pos, "seg": seg}
    assert_near(attend(k=k, v=v, **where), by_formula(pos, seg, k, v), FLOAT64, case)


@pytest.mark.parametrize(("offset", "packed"), [(-30.0, False), (-400.0, False), (-400.0, True)])
def test_gates_that_forget_at_once(offset, packed):
    """``exp(-P)`` alone would be infinite from the third token on, in float64 too with -400."""
    pos, seg = documents() if packed else (AT, ONE)
    scheme, where = Wall(HEADS, DIM, WIDTH, offset=offset), {"pos": pos, "seg": seg}
    found = attend(scheme, **where)
    assert_near(found, by_formula(pos, seg, offset=offset), FLOAT64)
    q, k, v, x, w = (a.astype(np.float32) for a in (Q, K, V, X, W))
    tokens = posenc.Tokens(x=x, **where)
    narrow = posenc.attention(q, k, v, scheme, {"w": w}, True, tokens=tokens)
    assert_near(narrow, found, 4 * ATTENTION_TOL["float32"])


def test_no_gates_are_nope():
    found = attend(Wall(HEADS, DIM, WIDTH, offset=800.0))
    assert_near(found, posenc.attention(Q, K, V, posenc.NoPE(), causal=True), FLOAT64)


def test_one_gate_of_all_channels_multiplies_scores():
    """By the factor whose logarithm FoX adds."""
    w = np.repeat(W[:, :1], DIM, axis=1)
    gates = {"w": W[:, 0], "b": np.full(HEADS, 0.5)}
    c = posenc.features(FoX(HEADS, WIDTH), gates, posenc.Tokens(x=X))[0].features["c"]
    fall = np.minimum(c[..., :, None] - c[..., None, :], 0)
    scores = Q @ np.swapaxes(K, 2, 3) / math.sqrt(DIM)
    change = scores * np.expm1(fall)
    expected = posenc.attention(Q, K, V, posenc.NoPE(), causal=True, bias=change)
    assert_near(attend(params={"w": w}), expected, FLOAT64)
    both = attend(Sum(SCHEME, FoX(HEADS, WIDTH)),
                  {"0_w": w, "1_w": gates["w"], "1_b": gates["b"]})  # fmt: skip
    expected = posenc.attention(Q, K, V, posenc.NoPE(), causal=True, bias=change + fall)
    assert_near(both, expected, FLOAT64)


def test_a_scale_of_the_caller():
    found = attend(scale=3 / math.sqrt(DIM))
    q = 3 * Q
    expected = posenc.attention(q, K, V, SCHEME, {"w": W}, True, tokens=posenc.Tokens(x=X))
    assert_near(found, expected, FLOAT64)


def test_padding_may_be_nan():
    valid = AT > 18
    q, k, v = (np.where(valid[:, None], a, np.nan) for a in (Q, K, V))
    tokens = posenc.Tokens(pos=AT, exists=valid, x=X)
    found = posenc.attention(q, k, v, SCHEME, {"w": W}, causal=True, tokens=tokens)
    q, k, v = (a[:, :, 19:] for a in (Q, K, V))
    tokens = posenc.Tokens(x=X[:, 19:])
    expected = posenc.attention(q, k, v, SCHEME, {"w": W}, causal=True, tokens=tokens)
    assert not np.any(found[:, :, :19])
    assert_near(found[:, :, 19:], expected, FLOAT64)


def test_gradients_of_documents_that_forget():
    """Sums of one document reach no factor of another, where they overflow."""
    torch = pytest.importorskip("torch")
    posenc_torch = pytest.importorskip("posenc_torch")
    pos, seg = (torch.tensor(a) for a in documents())
    q, k, v, w, x = (torch.tensor(a, requires_grad=True) for a in (Q, K, V, W, X))
    scheme, tokens = Wall(HEADS, DIM, WIDTH, offset=-400.0), posenc.Tokens(pos=pos, seg=seg, x=x)
    out = posenc_torch.attention(q, k, v, scheme, {"w": w}, True, tokens=tokens)
    found = torch.autograd.grad(out.square().sum(), (q, k, v, w, x))
    assert all(torch.isfinite(gradient).all() for gradient in found)


DRAWN = {
    "in order": {},
    "a window": {"window": 9},
    "later keys": {"causal": False, "softcap": 2.0},
    "shuffled": {"pos": np.random.default_rng(0).permutation(90)[:LENGTH] - 20},
    "interleaved documents": dict(zip(("pos", "seg"), documents(), strict=True)),
    "documents in order": {"pos": AT, "seg": AT // 15},
    "padding": {"exists": AT > 18},
    "a bias beside it": {"scheme": Sum(SCHEME, posenc.T5Bias(HEADS))},
}
TILED = [route for route in ROUTES if route.id in ("torch-chunked", "jax-chunked")]
# JAX compiles each call for some seconds.
OF_JAX = ("documents in order", "interleaved documents", "a bias beside it")
EACH = [
    pytest.param(case, *route.values, id=f"{case}-{route.id}", marks=[long] * jax)
    for route in TILED
    for jax in [route.id == "jax-chunked"]
    for case in DRAWN
    if not jax or case in OF_JAX
]


@pytest.mark.parametrize(("case", "route"), EACH)
def test_tiles_are_the_definition(case, route):
    """Values and gradients, where tiles are anchored, sorted, or both."""
    options = dict(DRAWN[case])
    scheme = options.pop("scheme", SCHEME)
    where = {n: options.pop(n) for n in ("pos", "seg", "exists") if n in options}
    params = {"w": W}
    if scheme is not SCHEME:
        params = {"0_w": W, "1_table": normal((HEADS, 32), 9)}
    given = {"q": Q, "k": K[:, :1], "v": V[:, :1]}
    if "exists" in where:
        given = {n: np.where(where["exists"][:, None], a, np.nan) for n, a in given.items()}
    call = {"params": params, "causal": True, **options, "tokens": posenc.Tokens(x=X, **where)}
    expected = posenc.attention(**given, scheme=scheme, **call)
    assert_near(route.attend(scheme, given, dtype="float64", **call), expected, FLOAT64)


@pytest.mark.parametrize(
    "route", [pytest.param(*r.values, id=r.id, marks=long if "jax" in r.id else ()) for r in TILED]
)
def test_gradients_of_tiles(route):
    """Of documents in order, whose tiles are anchored and sorted."""
    given, d_out = {"q": Q, "k": K, "v": V}, normal(Q.shape, 7)
    tokens = posenc.Tokens(x=X, pos=AT, seg=AT // 15)
    call = {"params": {"w": W}, "causal": True, "tokens": tokens, "dtype": "float64"}
    _, found = route.gradients(SCHEME, given, d_out=d_out, **call)
    whole = dataclasses.replace(route, implementation="reference")
    _, expected = whole.gradients(SCHEME, given, d_out=d_out, **call)
    for name, gradient in expected.items():
        assert_near(found[name], gradient, FLOAT64, name)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.id in ("torch-sdpa", "jax-xla")])
def test_others_say_that_they_have_no_decay(route):
    given = {"q": Q, "k": K, "v": V}
    with pytest.raises(NotImplementedError, match="each channel of a score of Wall decays by"):
        route.attend(SCHEME, given, {"w": W}, tokens=posenc.Tokens(x=X), causal=True)


def test_wrong_options():
    with pytest.raises(ValueError, match="q has 2 channels, the channel_decay of Wall 4"):
        posenc.attention(Q[..., :2], K[..., :2], V, SCHEME, {"w": W}, tokens=posenc.Tokens(x=X))
    with pytest.raises(TypeError, match="offset must be a number, got 'none'"):
        Wall(HEADS, DIM, WIDTH, offset="none")
