"""Examples of the contract and what callers bring, each against its formula in float64.

Formulas are written out here, for default positions; they use nothing of the library but RoPE,
sinusoids and ALiBi's bias, which have golden numbers of their own.
"""

from __future__ import annotations

import math
import pickle
import re
import tracemalloc
from dataclasses import replace

import array_api_compat.numpy as xp
import numpy as np
import pytest
from frameworks import FUSED, HAS, ROUTES, Route
from hypothesis import given
from hypothesis import strategies as st
from sample import few_of_jax, long
from subjects import PROOFS, SUBJECTS, normal, params_of

import posenc
from posenc import Tokens
from posenc.apply.feature_needs import summed_features
from posenc.attn.caches import CacheNeeds
from posenc.attn.segment_sums import segment_sums
from posenc.contract.protocol import Hook
from posenc.schemes import FoX, ReRoPE, Sink, Sum
from posenc.testing import AttentionCase, assert_near
from posenc.testing.examples import (
    HEAD_DIM,
    HEADS,
    HIDDEN_DIM,
)
from posenc.testing.tolerances import ATTENTION_TOL, rounding_bound

BATCH, LENGTH = 2, 12
FLOAT64 = 2 * ATTENTION_TOL["float64"]  # either is rounded
AT = np.arange(LENGTH)
AHEAD = AT[None, :] - AT[:, None]  # k - q
CAUSAL = AHEAD <= 0
RECTIFIED = ReRoPE(HEAD_DIM, window=4)
TENSORS = {
    "q": normal((BATCH, HEADS, LENGTH, HEAD_DIM), 0),
    "k": normal((BATCH, HEADS, LENGTH, HEAD_DIM), 1),
    "v": normal((BATCH, HEADS, LENGTH, HEAD_DIM), 2),
}
Q, K, V = TENSORS.values()
X = normal((BATCH, LENGTH, HIDDEN_DIM), 3)
PLACES = np.random.default_rng(4).integers(-5, 9, (LENGTH, 2))
ROOT = math.sqrt(HEAD_DIM)


def products(q=Q, k=K):
    return np.einsum("bhid,bhjd->bhij", q, k) / ROOT


def attended(scores, seen=CAUSAL, sink=None):
    """Softmax attention and its log-sum-exp; ``sink`` broadcasts to ``(B, H, Q)``."""
    scores = np.where(seen, scores, -np.inf)
    if sink is not None:
        own = np.broadcast_to(sink, scores.shape[:3])[..., None]
        scores = np.concatenate([scores, own], axis=-1)
    highest = np.max(scores, axis=-1, keepdims=True, initial=-700)
    weights = np.exp(scores - highest)
    total = np.sum(weights, axis=-1, keepdims=True)
    weights = np.divide(weights, total, where=total > 0, out=np.zeros_like(weights))
    with np.errstate(divide="ignore"):
        return weights[..., :LENGTH] @ V, (highest + np.log(total))[..., 0]


def turned(x, pos):
    return posenc.transform(posenc.RoPE(x.shape[-1]), x, np.asarray(pos), role="query")


def rotated():
    return products(turned(Q, AT), turned(K, AT))


def alibi():
    slopes = np.asarray([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)])
    return -slopes[:, None, None] * np.abs(AHEAD)


def gate_sums(p):
    gates = -np.log1p(np.exp(-(X @ p["w"].T + p["b"])))
    return np.cumsum(gates, axis=1).transpose(0, 2, 1)


def fox(p):
    c = gate_sums(p)
    return products() + c[..., :, None] - c[..., None, :]


def fading(p):
    c = gate_sums(p)
    return products() - 2 * np.log1p(np.abs(c[..., :, None] - c[..., None, :]))


def shaw(p):
    rows = p["table"][np.clip(AHEAD, -3, 3) + 3]
    return products() + np.einsum("bhid,ijd->bhij", Q, rows) / ROOT


def transformer_xl(p):
    half = HIDDEN_DIM // 2
    angles = np.clip(-AHEAD, 0, 9)[..., None] * 10_000.0 ** (-np.arange(half) / half)
    r = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    other = np.einsum("bhid,hde,ije->bhij", Q + p["v"][:, None], p["w"], r)
    return products(Q + p["u"][:, None]) + other / ROOT


def deberta(p):
    away, rows = np.clip(-AHEAD, -6, 6), np.asarray([0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7])
    p_k, p_q = (p[name][:, rows[away + 6]] for name in ("p_k", "p_q"))
    terms = np.einsum("bhid,hijd->bhij", Q, p_k) + np.einsum("bhjd,hijd->bhij", K, p_q)
    return (products() + terms / ROOT) / math.sqrt(3)


def of_keys(p):
    rows = p["p_q"][:, np.clip(4 - AHEAD, 0, 7)]
    return np.einsum("bhjd,hijd->bhij", K, rows) / ROOT


def inkling(p):
    r = np.einsum("blc,hrc->bhlr", X, p["w"])
    bias = np.einsum("bhir,rij->bhij", r, p["p"][:, np.clip(-AHEAD, 0, 4)])
    return products() / ROOT + np.where((AHEAD <= 0) & (AHEAD > -5), bias, 0)


def selective(p):
    unit = X.reshape(BATCH, LENGTH, HEADS, -1)
    unit = unit / np.sqrt(np.sum(unit**2, axis=-1, keepdims=True) + 1e-6)
    phi = np.einsum("hdr,hrc,blhc->bhld", p["w2"], p["w1"], unit)
    taps = p["conv"].shape[-1]
    late = np.pad(phi, ((0, 0), (0, 0), (taps - 1, 0), (0, 0)))
    phi = sum(late[:, :, n : n + LENGTH] * p["conv"][:, None, :, n] for n in range(taps))
    angle = np.cumsum(phi * 5e5 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)), axis=2)
    turns = np.exp(1j * angle)
    q, k = ((a[..., : HEAD_DIM // 2] + 1j * a[..., HEAD_DIM // 2 :]) * turns for a in (Q, K))
    return np.einsum("bhid,bhjd->bhij", q, np.conj(k)).real / ROOT


def axial(p):
    angle = np.concatenate([PLACES[:, axis, None] * np.asarray([1, 0.1]) for axis in (0, 1)], -1)
    turns = np.exp(1j * angle)
    q, k = ((a[..., : HEAD_DIM // 2] + 1j * a[..., HEAD_DIM // 2 :]) * turns for a in (Q, K))
    return np.einsum("bhid,bhjd->bhij", q, np.conj(k)).real / ROOT


def streets(p):
    away = np.sum(np.abs(PLACES[:, None] - PLACES[None]), axis=-1)
    return products() - np.asarray([0.5, 0.25, 0.125, 1.0])[:, None, None] * away


def cope(p):
    scores = products()
    gates = np.where(CAUSAL, 1 / (1 + np.exp(-scores)), 0)
    at = np.minimum(np.cumsum(gates[..., ::-1], axis=-1)[..., ::-1], 5)
    low, table = np.floor(at).astype(int), Q @ p["e"].T
    first, second = (np.take_along_axis(table, np.minimum(low + n, 5), axis=-1) for n in (0, 1))
    return scores + first * (1 - (at - low)) + second * (at - low)


def rerope(p):
    far = products(turned(Q, np.full(LENGTH, 4)), K)
    return np.where(-AHEAD < 4, rotated(), far)


def part(p, n):
    return {name[2:]: array for name, array in p.items() if name.startswith(f"{n}_")}


FORMULAS = {
    "fox": fox,
    "fading": fading,
    "shaw": shaw,
    "transformer_xl": transformer_xl,
    "deberta": deberta,
    "inkling": inkling,
    "selective": selective,
    "axial": axial,
    "streets": streets,
    "cope": cope,
    "rerope": rerope,
    "fox+alibi": lambda p: fox(part(p, 0)) + alibi(),
    "rope+alibi": lambda p: rotated() + alibi(),
    # A feature comes from the key as it is, whatever turns it.
    "rope+key-side": lambda p: (rotated() + of_keys(part(p, 1))) / math.sqrt(2),
    "sink": lambda p: products() + alibi(),
    "sink-of-queries": lambda p: products(),
    "sink-off-by-one": lambda p: rotated(),
}
SINKS = {
    "sink": lambda p: p["sink"][:, None],
    "sink-of-queries": lambda p: np.einsum("blc,hc->bhl", X, p["sink_w"]),
    "sink-off-by-one": lambda p: np.zeros(()),
}
OF_TOKENS = {name: Tokens(places=PLACES, x=X) for name in ("axial", "streets")}
# What an implementation may say instead of serving a scheme.
REASONS = (
    r"^(implementation '\w+' cannot serve this call: )?"
    r"(CoPE adjusts whole rows of scores, which '\w+' does not hold: .+"
    r"|(merging the regions of ReRoPE|the sink of Sink) needs a log-sum-exp, and .+"
    r")$"
)


def problem_of(name, **options):
    scheme = PROOFS[name]
    params = params_of(scheme)
    if name == "sink":
        params = {"sink": np.asarray([0.3, -1, 2, 0], np.float32)}
    own = {"causal": True, "tokens": OF_TOKENS.get(name, Tokens(x=X))}
    return AttentionCase(scheme, TENSORS, params, {**own, **options})


def expected(name, problem):
    wide = {n: a.astype(np.float64) for n, a in problem.params.items()}
    return attended(FORMULAS[name](wide), sink=SINKS.get(name, lambda p: None)(wide))


def drawn(route: Route):
    """The schemes to try: all, or every fourth where each call is compiled."""
    if route.framework.default_compiler is None or route.implementation == "chunked":
        return list(FORMULAS)
    return list(FORMULAS)[::4]


def slow(route: Route | None):
    """Whether a call takes half a second or more."""
    return route is not None and (route.framework.name == "jax" or route.implementation == "flex")


CALLS = [
    pytest.param(
        one.values[0],
        name,
        id=f"{one.id}-{name}",
        marks=[*one.marks, *[long] * slow(one.values[0])],
    )
    for one in ROUTES
    for name in (["shaw"] if one.values[0] is None else drawn(one.values[0]))
]


def skip_refused(reason):
    """An implementation may refuse for known reasons only; JAX adds notes of its own."""
    assert re.search(REASONS, str(reason)), reason
    pytest.skip(f"refused: {reason}")


@pytest.mark.parametrize(("route", "name"), CALLS)
def test_a_scheme_is_its_formula(route, name):
    problem = problem_of(name)
    dtypes = (
        ("float32",)
        if route.framework.default_compiler or route.implementation == "flex"
        else ("float32", "float64")
    )
    for dtype in dtypes:
        try:
            found = problem.attend(route.framework, route.implementation, dtype=dtype)
        except NotImplementedError as reason:
            assert route.implementation != "reference"
            skip_refused(reason)
        assert_near(found, expected(name, problem)[0], max(FLOAT64, ATTENTION_TOL[dtype]), dtype)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_log_sum_exp_is_its_formula(name):
    problem = problem_of(name)
    params = {n: a.astype(np.float64) for n, a in problem.params.items()}
    out, lse = posenc.attention(
        **TENSORS, scheme=problem.scheme, params=params, **problem.options, return_lse=True
    )
    for found, want in zip((out, lse), expected(name, problem), strict=True):
        assert_near(found, want, FLOAT64)


def test_every_proof_has_a_formula():
    assert FORMULAS.keys() == PROOFS.keys()
    assert all(SUBJECTS[name] is scheme for name, scheme in PROOFS.items())


# Sinks


@pytest.mark.parametrize("route", few_of_jax(FUSED))
def test_a_sink_has_its_gradient(route):
    """``out = share * o``, so ``d out / d sink = -share * (1 - share) * o``, summed over rows."""
    problem, d_out = problem_of("sink"), normal(Q.shape, 9)
    sink = problem.params["sink"].astype(np.float64)
    alone, lse = attended(products() + alibi())
    share = 1 / (1 + np.exp(sink[:, None] - lse))
    want = -np.sum((share * (1 - share))[..., None] * alone * d_out, axis=(0, 2, 3))
    try:
        _, found = problem.gradients(route.framework, route.implementation, d_out)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    # In all of a head's scores, as a learned number of a bias.
    assert_near(found["sink"], want, 6 * ATTENTION_TOL["float32"], "gradient of the sink")
    assert_near(
        np.sum(found["v"]), np.sum(_toward_values(share, d_out)), 6 * ATTENTION_TOL["float32"]
    )


def _toward_values(share, d_out):
    scores = np.where(CAUSAL, products() + alibi(), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhij,bhid->bhjd", weights * share[..., None], d_out)


def test_a_sink_of_nothing_seen_takes_all():
    seen = np.ones((1, 1, LENGTH, LENGTH), bool)
    seen[..., 3, :] = False
    scheme, params = Sink(posenc.ALiBi(HEADS)), {"sink": np.arange(4.0)}
    out, lse = posenc.attention(Q, K, V, scheme, params, mask=seen, return_lse=True)
    assert not np.any(out[:, :, 3])
    np.testing.assert_array_equal(lse[0, :, 3], params["sink"])


# What callers bring

ADDED = normal((1, HEADS, LENGTH, LENGTH), 5)
VALID = np.ones((BATCH, LENGTH), bool)
VALID[0, :3] = VALID[1, 5] = False
BOTH_EXIST = VALID[:, None, None, :] & VALID[:, None, :, None]
TREE = AT[:, None] >= AT // 2 * 2
ROW, COL = AT[:, None], AT[None, :]
BROUGHT = {
    "window and first tokens": (
        {"causal": True, "mask": posenc.window(3, first=2)},
        products(), (COL <= ROW) & ((ROW - COL < 3) | (COL < 2)),
    ),
    "first tokens are not seen before they come": (
        {"causal": True, "mask": posenc.window((0, 0), first=4)}, products(),
        (COL <= ROW) & ((ROW == COL) | (COL < 4)),
    ),
    "first tokens of one window are not of another": (
        {"window": (5, 5), "mask": posenc.window((1, 1), first=2)}, products(),
        (abs(ROW - COL) <= 5) & ((abs(ROW - COL) <= 1) | (COL < 2)),
    ),
    "two windows with first tokens": (
        {"mask": posenc.window((1, 1), first=4) & posenc.window((4, None), first=1)}, products(),
        ((abs(ROW - COL) <= 1) | (COL < 4)) & ((ROW - COL <= 4) | (COL < 1)),
    ),
    "sides of a window": ({"window": (3, 1)}, products(), (ROW - COL <= 3) & (COL - ROW <= 1)),
    "one side of a window": ({"window": (None, 2)}, products(), COL - ROW <= 2),
    "bias": ({"bias": ADDED}, products() + ADDED, COL >= 0),
    "bias that hides": (
        {"bias": np.where(TREE, ADDED[:, :1], -np.inf)}, products() + ADDED[:, :1], TREE,
    ),
    "cap before bias": (
        {"softcap": 2.0, "bias": ADDED}, 2 * np.tanh(products() / 2) + ADDED, COL >= 0,
    ),
    "mask of a prefix": (
        {"mask": lambda q, k: (k <= q) | (k < 4)}, products(), (COL <= ROW) | (COL < 4),
    ),
    "mask of blocks": ({"mask": lambda q, k: k // 4 <= q // 4}, products(), COL // 4 <= ROW // 4),
    "mask of a segment": (
        {
            "mask": lambda q, k, q_seg, k_seg: (k <= q) | (k_seg == 1),
            "tokens": Tokens(seg=AT // 6),
        },
        products(), (ROW // 6 == COL // 6) & ((COL <= ROW) | (COL // 6 == 1)),
    ),
    "mask as booleans": (
        {"mask": TREE[None, None], "causal": True}, products(), TREE & (COL <= ROW),
    ),
    "tokens that exist": ({"tokens": Tokens(exists=VALID)}, products(), BOTH_EXIST),
    "tokens that exist, in segments": (
        {"tokens": Tokens(seg=AT // 6, exists=VALID)}, products(),
        BOTH_EXIST & (ROW // 6 == COL // 6),
    ),
    "keys that exist": (
        {"tokens": Tokens(exists=VALID), "queries": Tokens()}, products(), VALID[:, None, None, :],
    ),
    "keys that exist, in segments": (
        {"tokens": Tokens(seg=AT // 6, exists=VALID), "queries": Tokens(seg=AT // 6)}, products(),
        VALID[:, None, None, :] & (ROW // 6 == COL // 6),
    ),
    "queries that exist": (
        {"tokens": Tokens(), "queries": Tokens(exists=VALID)}, products(), VALID[:, None, :, None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROUGHT)
def test_what_callers_bring_is_its_formula(case):
    """On the definition; a law compares every implementation with it."""
    options, scores, seen = BROUGHT[case]
    out, lse = posenc.attention(Q, K, V, posenc.NoPE(), **options, return_lse=True)
    want, total = attended(scores, seen)
    assert_near(out, want, FLOAT64)
    assert_near(lse, total, FLOAT64)


@pytest.mark.parametrize("case", ["window and first tokens", "cap before bias", "mask of blocks"])
def test_a_sink_goes_with_all_of_it(case):
    options, scores, seen = BROUGHT[case]
    scheme = Sink(posenc.NoPE(), learned=False, value=0.5)
    assert_near(
        posenc.attention(Q, K, V, scheme, **options), attended(scores, seen, 0.5)[0], FLOAT64
    )


def test_places_stand_for_positions_in_a_bias_and_not_in_order():
    """Repeated places, as of image tokens: who sees whom is what positions say."""
    places = AT // 3
    given = {"tokens": Tokens(places=places), "causal": True}
    slopes = np.asarray([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)])
    away = np.abs(places[:, None] - places[None, :])
    want, _ = attended(products() - slopes[:, None, None] * away)
    assert_near(posenc.attention(Q, K, V, posenc.ALiBi(HEADS), **given), want, FLOAT64)


@pytest.mark.parametrize("route", few_of_jax(FUSED))
def test_a_callers_bias_has_its_gradient(route):
    """``d out_i / d bias_ij = w_ij (v_j - out_i)``."""
    problem = AttentionCase(posenc.NoPE(), {**TENSORS, "bias": ADDED}, {}, {"causal": True})
    d_out = normal(Q.shape, 9)
    scores = np.where(CAUSAL, products() + ADDED, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    toward = np.einsum("bhid,bhjd->bhij", d_out, V)
    slope = weights * (toward - np.sum(weights * toward, axis=-1, keepdims=True))
    try:
        _, found = problem.gradients(route.framework, route.implementation, d_out)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    assert_near(found["bias"], np.sum(slope, axis=0, keepdims=True), ATTENTION_TOL["float32"])


# Sums


@st.composite
def tokens(draw):
    length, readers = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    places = st.integers(-3, 6)
    rows = [draw(st.lists(places, min_size=n, max_size=n)) for n in (length, readers) * 2]
    segments = [
        draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)) for n in (length, readers)
    ]
    return np.asarray(rows[0]), np.asarray(rows[1]), *map(np.asarray, segments), draw(st.booleans())


@given(tokens(), st.integers(0, 99))
def test_sums_are_those_of_a_loop(at, seed):
    """Over positions in any order, that tokens share, and segments: float64, term by term."""
    pos, q_pos, seg, q_seg, segmented = at
    values = normal((BATCH, 2, len(pos), 3), seed)
    own, other = (Tokens(p, s if segmented else None) for p, s in ((pos, seg), (q_pos, q_seg)))
    found = segment_sums(values, own, other, xp=xp)
    for sums, (where, whose) in zip(found, ((pos, seg), (q_pos, q_seg)), strict=True):
        for n, (p, s) in enumerate(zip(where, whose, strict=True)):
            before = [
                values[:, :, j] for j in range(len(pos))
                if pos[j] <= p and (not segmented or seg[j] == s)
            ]  # fmt: skip
            want = np.sum(before, axis=0) if before else np.zeros((BATCH, 2, 3))
            assert_near(sums[:, :, n], want, rounding_bound(len(pos), len(pos), "float64"))


def test_sums_of_packed_tokens_take_memory_by_their_number():
    def peak(length):
        values, at = np.ones((1, 2, length), np.float32), np.arange(length)
        tracemalloc.start()
        packed = Tokens(at % 100, at // 100)
        segment_sums(values, packed, packed, xp=xp)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(4096) < 2.2 * peak(2048)  # a pair of tokens would make it 4


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_sums_of_float32_keep_their_digits_in_long_rows():
    """No sum is a difference of two larger ones: the last document is as right as the first."""
    import torch

    length, size = 2**14, 64
    values = normal((1, 1, length), 0, "float32") - 1
    at = Tokens(torch.arange(length) % size, torch.arange(length) // size)
    import array_api_compat.torch as txp

    found = segment_sums(torch.tensor(values), at, at, xp=txp)[0].numpy().reshape(-1, size)
    want = np.cumsum(values.astype(np.float64).reshape(-1, size), axis=-1)
    assert_near(found[-1], want[-1], rounding_bound(size, 1))


# Combinations


def test_a_sum_and_a_sink_are_values():
    for scheme in (PROOFS["fox+alibi"], PROOFS["sink"], Sink(PROOFS["rope+alibi"], HEADS)):
        twin = pickle.loads(pickle.dumps(scheme))
        assert twin == scheme
        assert hash(twin) == hash(scheme)
        assert eval(repr(scheme), _names()) == scheme
    assert Sum(posenc.RoPE(8), posenc.ALiBi(4)) != Sum(posenc.ALiBi(4), posenc.RoPE(8))
    assert repr(Sum(posenc.NoPE(), posenc.NoPE())) == "Sum(NoPE(), NoPE())"


def _names():
    ours = (Sum, Sink, posenc.ALiBi, posenc.RoPE, FoX)
    return {kind.__name__: kind for kind in ours}


def test_a_sum_answers_for_its_parts():
    both, gated = PROOFS["rope+alibi"], PROOFS["fox+alibi"]
    assert both.relative
    assert both.hooks() >= {"transform", "bias", "key_bias"}
    assert summed_features(gated) == ("0_c",)
    assert set(gated.param_specs()) == {"0_w", "0_b"}
    assert list(gated.constants()) == ["1_slopes"]
    one_without = Sum(posenc.ALiBi(HEADS), posenc.T5Bias(HEADS))
    assert Hook.KEY_BIAS not in one_without.hooks()
    assert Sum(posenc.ALiBi(HEADS), PROOFS["selective"]).relative
    assert not Sum(posenc.ALiBi(HEADS), SUBJECTS["tide"]).relative
    assert Sum(posenc.NoPE(), posenc.T5Bias(HEADS, scaled=False)).scale(HEAD_DIM) == 1


def test_a_sum_of_two_of_a_kind_keeps_their_arrays_apart():
    twice = Sum(FoX(HEADS, HIDDEN_DIM), FoX(HEADS, HIDDEN_DIM))
    params = params_of(twice, dtype="float64")
    found = posenc.attention(Q, K, V, twice, params, causal=True, tokens=Tokens(x=X))
    scores = fox(part(params, 0)) + fox(part(params, 1)) - products()
    assert_near(found, attended(scores)[0], FLOAT64)
    assert not np.array_equal(params["0_w"], params["1_w"])


def test_regions_of_a_sum_are_summed():
    scheme = Sum(RECTIFIED, posenc.ALiBi(HEADS))
    want, total = attended(rerope({}) + alibi())
    out, lse = posenc.attention(Q, K, V, scheme, causal=True, return_lse=True)
    assert_near(out, want, FLOAT64)
    assert_near(lse, total, FLOAT64)


@pytest.mark.parametrize("mask", ["none", "function", "booleans"])
@pytest.mark.parametrize("window", [None, 6, (5, 2)])
def test_first_tokens_are_in_one_region_alone(window, mask):
    """The first tokens are inside of the caller's window; which region has them, distance says."""
    seen, given = COL <= ROW, posenc.window(window, first=2)
    if window is not None:
        seen = seen & ((ROW - COL <= 5) | (COL < 2))
    if mask != "none":
        seen = seen & _not_thirds(ROW, COL)
        given &= _not_thirds if mask == "function" else _not_thirds(ROW, COL)[None, None]
    want, total = attended(rerope({}), seen)
    out, lse = posenc.attention(Q, K, V, RECTIFIED, causal=True, mask=given, return_lse=True)
    assert_near(out, want, FLOAT64)
    assert_near(lse, total, FLOAT64)


def _not_thirds(q, k):
    return (q + k) % 3 != 0


def test_features_of_a_sink_around_regions_are_given_as_any():
    scheme = Sink(RECTIFIED, HEADS, per_query=True, hidden_dim=HIDDEN_DIM)
    params, x = params_of(scheme), normal((Q.shape[0], Q.shape[2], HIDDEN_DIM), 7)
    query, key = posenc.features(scheme, params, Tokens(x=x))
    bare = {"tokens": replace(key, x=None), "queries": replace(query, x=None)}
    given = posenc.attention(Q, K, V, scheme, params, **bare)
    whole = posenc.attention(Q, K, V, scheme, params, tokens=Tokens(x=x))
    assert_near(given, whole, FLOAT64)


def test_what_a_cache_needs():
    def needs(scheme, *more, transformed=False, features=False, carry=(), x_before=0):
        assert posenc.cache_needs(scheme) == CacheNeeds(
            ("k", "v", *more), transformed, features, carry, x_before
        )

    needs(posenc.NoPE())
    needs(posenc.T5Bias(HEADS))
    needs(posenc.RoPE(HEAD_DIM), transformed=True)
    needs(PROOFS["shaw"])  # features of a query need no cache
    needs(PROOFS["cope"])
    needs(PROOFS["deberta"])  # features of keys come back from keys that are as they were
    needs(PROOFS["rope+key-side"], "features", transformed=True, features=True)
    needs(FoX(HEADS, HIDDEN_DIM), "features", features=True, carry=("c",))
    needs(PROOFS["fox+alibi"], "features", features=True, carry=("0_c",))
    turned = {"transformed": True, "features": True}
    needs(PROOFS["selective"], **turned, carry=("angle",), x_before=2)
    needs(RECTIFIED)
    needs(Sink(posenc.RoPE(HEAD_DIM), learned=False), transformed=True)
