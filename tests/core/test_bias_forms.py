"""The cheaper forms of a bias, and the blocks of keys that they prove to leave no trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import array_api_compat.numpy as xp
import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc import Tokens
from posenc.apply.bias import has_bias
from posenc.apply.feature_needs import reads_features
from posenc.attn.arguments import Arguments
from posenc.attn.bias_forms import bias_by_distance, bias_by_key, near_diagonals
from posenc.attn.blocks import visible_blocks
from posenc.attn.negligible import negligible_blocks
from posenc.attn.prepare import prepare
from posenc.schemes import FoX, LogScale, PoPE, Sink, Sum
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM
from posenc.testing.tolerances import rounding_bound

FADING = {
    **SUBJECTS,
    "alibi-steep": posenc.ALiBi(HEADS, slopes=[8.0, 4.0, -3.0, 1.0]),
    "alibi-learned-steep": posenc.ALiBi(HEADS, learned=True, slopes=[4.0, 2.0, 1.0, 0.5]),
}
_NO_TOKENS = Tokens()
BIASED = [name for name, s in FADING.items() if has_bias(s) and name != "silent"]


def call_of(
    scheme, q_len, k_len, *, seed=0, size=1.0, dtype="float64", grouped=False, causal=False,
    tokens=_NO_TOKENS, queries=None, **options,
):  # fmt: skip
    """A call on NumPy, of two sequences."""
    count, d = heads(scheme), "float64"
    shared = 1 if grouped and count > 1 else count
    q = size * normal((2, count, q_len, HEAD_DIM), seed, d)
    k, v = (size * normal((2, shared, k_len, HEAD_DIM), seed + n, d) for n in (1, 2))
    x, q_x = (normal((2, n, HIDDEN_DIM), seed + 3, d) for n in (k_len, q_len))
    own = params_of(scheme, dtype=dtype)
    q, k, v, x, q_x = (a.astype(dtype) for a in (q, k, v, x, q_x))
    tokens = replace(tokens, x=x)
    queries = None if queries is None else replace(queries, x=q_x)
    given = Arguments(tokens=tokens, queries=queries, **options)
    return prepare(q, k, v, scheme, own, causal, given, xp=xp)


def weights(call):
    """The weight of every key in every row, by the definition, in float64."""
    group = call.q.shape[1] // call.k.shape[1]
    q, k = (np.asarray(a, np.float64) for a in (call.q, np.repeat(call.k, group, axis=1)))
    scores = call.scale * np.einsum("bhid,bhjd->bhij", q, k)
    bias, seen = call.bias_and_visible()
    scores = scores if bias is None else scores + bias
    scores = scores if seen is None else np.where(seen, scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    found = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = found.sum(axis=-1, keepdims=True)
    return found / np.where(total == 0, 1, total)


def unmasked(call):
    """The call without its causal mask."""
    return replace(call, mask=replace(call.mask, causal=False))


def spread_out(blocks, block, like):
    """Of every pair of a query and a key, what is said of its blocks."""
    wide = np.repeat(np.repeat(blocks, block, axis=-2), block, axis=-1)
    return np.broadcast_to(wide[..., : like.shape[-2], : like.shape[-1]], like.shape)


@pytest.mark.parametrize("lengths", [(20, 20), (1, 20), (7, 20)], ids=str)
@pytest.mark.parametrize("name", BIASED)
def test_a_bias_by_distance_is_the_bias(name, lengths):
    scheme = FADING[name]
    call = call_of(scheme, *lengths)
    table = bias_by_distance(call)
    assert (table is not None) == (scheme.relative and not reads_features(scheme))
    if table is None:
        return
    q_len, k_len = lengths
    at = np.arange(k_len)[None, :] - np.arange(k_len - q_len, k_len)[:, None] + k_len - 1
    # The same operations on the same differences: the same bits.
    np.testing.assert_array_equal(np.broadcast_to(table[None, :, at], call.bias().shape),
                                  call.bias())  # fmt: skip
    elsewhere = {"tokens": Tokens(pos=np.arange(k_len)), "queries": Tokens(pos=np.arange(q_len))}
    assert bias_by_distance(call_of(scheme, *lengths, **elsewhere)) is None


T5_FEW = posenc.T5Bias(HEADS, num_buckets=8, max_distance=20)
CONSTANT_BEYOND = {
    "both-sides": T5_FEW,
    "left": posenc.T5Bias(HEADS, 8, 20, causal=True),
    "sum": Sum(posenc.T5Bias(HEADS, 4, 3), T5_FEW),
    "sink": Sink(T5_FEW),
    "nowhere": Sum(T5_FEW, posenc.ALiBi(HEADS)),
}


@pytest.mark.parametrize("name", CONSTANT_BEYOND)
@given(k_len=st.integers(1, 70), ahead=st.integers(0, 9), block=st.integers(1, 9),
       causal=st.booleans())  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_tiles_beyond_near_diagonals_have_one_bias(name, k_len, ahead, block, causal):
    scheme, q_len = CONSTANT_BEYOND[name], max(1, k_len - ahead)
    call = call_of(scheme, q_len, k_len, causal=causal)
    bias, visible = call.bias_and_visible()
    visible = np.broadcast_to(True if visible is None else visible, bias.shape)
    diagonal = np.arange(k_len)[None, :] // block - np.arange(q_len)[:, None] // block
    first, end = near_diagonals(call, block)
    left, right = scheme.constant_beyond()
    for far, sign, distance in ((diagonal < first, -1, left), (diagonal >= end, 1, right)):
        far = far & visible
        if far.any():
            value = bias_by_distance(call, between=(sign * distance, sign * distance))
            everywhere = np.broadcast_to(value[None, :, :, None], bias.shape)
            np.testing.assert_array_equal(bias[far], everywhere[far])
    # No tile too many: the next ones have a distance that is nearer.
    ahead = k_len - q_len
    if first > diagonal.min():
        assert first * block + block - 1 - ahead > -left
    if end <= diagonal.max() and not causal:
        assert (end - 1) * block - (block - 1) - ahead < right
    assert left is not None or not (diagonal < first).any()


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_by_key_gives_the_same_weights(name):
    call = call_of(FADING[name], 20, 20, causal=True)
    keys = bias_by_key(call)
    if keys is None:
        return
    bias, seen = call.bias_and_visible()
    apart = np.where(seen, bias - keys[..., None, :], np.nan)
    # Differences of numbers of up to a hundred, of a few roundings each.
    bound = rounding_bound(8, 100, "float64")
    assert np.nanmax(np.abs(apart - np.nanmax(apart, axis=-1, keepdims=True))) < bound
    assert bias_by_key(unmasked(call)) is None


def test_a_term_of_a_bias_may_have_arrays_of_keys():
    """They belong to the transform, and are no longer there."""
    scheme = Sink(Sum(PoPE(HEADS, HEAD_DIM), LogScale("inkling", 4), posenc.ALiBi(HEADS)), HEADS)
    call = call_of(scheme, 20, 20, causal=True)
    (term,) = call.bias_terms()
    np.testing.assert_array_equal(term.bias(), call.bias())


def test_some_have_one():
    found = [bias_by_key(call_of(FADING[name], 4, 4, causal=True)) is not None for name in BIASED]
    assert 4 < sum(found) < len(found)


@st.composite
def fading_calls(draw):
    """Calls of all kinds, near and far, with small and large scores."""
    name = draw(st.sampled_from(BIASED))
    q_len, k_len = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 3, 30])),
        "seed": draw(st.integers(0, 99)),
        "size": draw(st.sampled_from([0.0, 0.5, 1.0, 4.0])),
        "dtype": draw(st.sampled_from(["float32", "float64"])),
        "grouped": draw(st.booleans()),
    }
    keys, queries = {}, {}
    if q_len > k_len or draw(st.booleans()):
        step, rng = draw(st.sampled_from([1, 30])), np.random.default_rng(options["seed"])
        for side, length in ((queries, q_len), (keys, k_len)):
            side["pos"] = step * rng.permutation(40)[:length]
            if draw(st.booleans()):
                side["pos"] = np.sort(side["pos"])
    if draw(st.booleans()):
        keys["seg"], queries["seg"] = np.arange(k_len) % 2, np.arange(q_len) % 3
    options |= {"tokens": Tokens(**keys), "queries": Tokens(**queries) if queries else None}
    return call_of(FADING[name], q_len, k_len, **options), draw(st.integers(1, 9))


@settings(deadline=None, max_examples=400)
@given(fading_calls())
def test_what_is_negligible_has_no_weight(drawn):
    call, block = drawn
    some, every = visible_blocks(call, block)
    exact = weights(call)
    assert not exact[~spread_out(some[:, None], block, exact)].any()
    seen = call.visible()
    if seen is not None:
        assert np.broadcast_to(seen, exact.shape)[spread_out(every[:, None], block, exact)].all()
    for whole in (None, every):
        nothing = negligible_blocks(call, block, all_visible=whole)
        if nothing is not None:
            left = np.where(spread_out(nothing, block, exact), exact, 0).sum(axis=-1)
            assert left.max() <= np.finfo(call.q.dtype).eps / 4


def test_many_keys_that_each_round_to_nothing_have_no_weight_together():
    """All scores 0, and the bias as far below as one key alone could be left out at."""
    k_len, eps = 4000, np.finfo("float32").eps
    for depth in (1.01 * np.log(4 / eps), 1.01 * np.log(4 * k_len / eps)):
        pit = Pit(depth=float(depth))
        call = call_of(pit, 1, k_len, size=0.0, dtype="float32", causal=True)
        nothing, exact = negligible_blocks(call, 8), weights(call)
        left = np.where(spread_out(nothing, 8, exact), exact, 0).sum(axis=-1).max()
        assert left <= eps / 4
        assert nothing.any() == (depth > np.log(4 * k_len / eps))


def test_scores_of_millions_do_not_round_to_negligible():
    """Every score is the largest possible one, so only the bias counts: a little too little."""
    k_len, eps = 40, np.finfo("float32").eps
    pit = Pit(depth=float(0.99 * np.log(4 * k_len / eps)))
    call = call_of(pit, k_len, k_len, dtype="float32", causal=True)
    some, _ = visible_blocks(call, 4)
    for seed in range(20):
        same = np.broadcast_to(normal((1, HEADS, 1, HEAD_DIM), seed, "float32"), call.q.shape)
        nothing = negligible_blocks(replace(call, q=1e3 * same, k=1e3 * same), 4)
        assert not (nothing & some[:, None]).any()


@dataclass(frozen=True)
class Pit(posenc.PositionScheme, relative=True):
    """0 at a token itself, ``-depth`` everywhere else."""

    depth: float = 1.0

    def bias(self, q, k, *, params, xp):
        none = xp.astype(q - k, xp.float32) * 0
        return xp.where(q == k, none, none - self.depth)


def skipped(scheme, length=600, block=20, **options):
    """The share of what is visible that need not be seen."""
    call = call_of(scheme, length, length, dtype="float32", **options)
    some, every = visible_blocks(call, block)
    nothing = negligible_blocks(call, block, all_visible=every)
    return np.mean(nothing[np.broadcast_to(some[:, None], nothing.shape)])


STEEP = posenc.ALiBi(HEADS, slopes=[1.0] * HEADS)  # fades within 40 keys


def test_what_fades_is_found():
    # Of 30 * 31 / 2 pairs of blocks all but the nearest three a row.
    assert skipped(STEEP, causal=True) > 0.8
    assert skipped(STEEP) > 0.8  # behind and ahead, by distance
    # Positions of one's own, apart by 3: by key, from the own key of every query.
    at = {"tokens": Tokens(pos=3 * np.arange(600))}
    assert skipped(STEEP, causal=True, **at) > 0.8
    # Queries that do not see their own key: what is wholly visible bounds them.
    pos = at["tokens"].pos
    turned = {"tokens": Tokens(pos=np.roll(pos, 300)), "queries": Tokens(pos=pos + 1)}
    assert skipped(STEEP, causal=True, **turned) > 0.7
    packed = {"tokens": Tokens(seg=np.repeat([0, 1], 300))}
    assert skipped(STEEP, causal=True, **packed) > 0.6
    assert skipped(posenc.ALiBi(HEADS, learned=True, slopes=[1.0] * HEADS), causal=True) > 0.8
    assert skipped(FoX(HEADS, HIDDEN_DIM), causal=True) > 0.3  # gates of about 1/2 a token


def test_gates_and_distances_are_bounded_together():
    """A sum of gates has a form by key, T5's table one by distance, and their sum has neither."""
    fox, t5 = FoX(HEADS, HIDDEN_DIM), posenc.T5Bias(HEADS)
    for scheme in (Sum(fox, t5), Sink(Sum(t5, fox)), Sum(posenc.NoPE(), Sum(t5, fox), STEEP)):
        call = call_of(scheme, 20, 20, causal=True)
        assert bias_by_key(call) is bias_by_distance(call) is None
        assert skipped(scheme, causal=True) > 0.7
    # A factor of the whole bias: no sum of parts.
    grown = Sum(fox, t5, LogScale("inkling", train_len=1))
    assert grown.bias_terms() == (("", grown),)
    assert negligible_blocks(call_of(grown, 20, 20, causal=True), 4) is None
    # Gates forget 0.7 a token, and slopes below 0 give back 0.6.
    rising = Sum(fox, posenc.ALiBi(HEADS, slopes=[-0.6] * HEADS), t5)
    call = call_of(rising, 600, 600, size=0.5, dtype="float32", causal=True)
    nothing, exact = negligible_blocks(call, 20), weights(call)
    left = np.where(spread_out(nothing, 20, exact), exact, 0).sum(axis=-1)
    assert left.max() <= np.finfo("float32").eps / 4
    assert nothing[..., -1, 0].all()
    assert negligible_blocks(unmasked(call), 20) is None


def test_what_does_not_fade_is_kept():
    assert skipped(posenc.ALiBi(HEADS, slopes=[1e-4] * HEADS), causal=True) == 0
    assert skipped(posenc.ALiBi(HEADS, slopes=[-1.0] * HEADS)) == 0
    # Scores of thousands could outweigh any bias of hundreds.
    assert skipped(STEEP, size=60.0, causal=True) == 0
    for name in ("t5", "checkered", "tide"):
        assert negligible_blocks(call_of(SUBJECTS[name], 20, 20), 4) is None


def test_one_long_key_far_away_is_kept():
    """It outweighs all that is near: the longest key decides, whichever it is."""
    call = call_of(STEEP, 200, 200, dtype="float32", causal=True, grouped=True)
    k = np.array(call.k)
    k[:, :, 7] = 1000 * np.asarray(call.q[:, :1, 150])
    nothing = negligible_blocks(replace(call, k=k), 10)
    exact = weights(replace(call, k=k))
    assert exact[:, 0, 150, 7].min() > 0.99
    assert not nothing[:, 0, 15, 0].any()


def test_a_query_that_does_not_see_itself_keeps_what_is_far():
    call = call_of(STEEP, 200, 200, dtype="float32", causal=True)
    tokens = np.arange(200)  # the second half sees the first twenty keys alone
    query = replace(call.query, seg=1 * (tokens >= 100))
    apart = replace(call, query=query, key=replace(call.key, seg=1 * (tokens < 20)))
    _, every = visible_blocks(apart, 10)
    for whole in (None, every):
        nothing, exact = negligible_blocks(apart, 10, all_visible=whole), weights(apart)
        left = np.where(spread_out(nothing, 10, exact), exact, 0).sum(axis=-1)
        assert left.max() <= np.finfo("float32").eps / 4
    at = {"tokens": Tokens(pos=tokens[::-1].copy()), "queries": Tokens(pos=tokens)}
    turned = call_of(STEEP, 200, 200, dtype="float32", causal=True, **at)
    left = np.where(spread_out(negligible_blocks(turned, 10), 10, exact), weights(turned), 0)
    assert left.sum(axis=-1).max() <= np.finfo("float32").eps / 4


def test_lengths_whose_squares_are_lost_prove_nothing():
    call = call_of(STEEP, 200, 200, dtype="float32", causal=True)
    q, k = np.full_like(call.q, 1e-23), np.full_like(call.k, 1e3)
    k[:, :, 0] *= 1e15
    call = replace(call, q=q, k=k, scale=1e7)
    assert weights(call)[0, 0, 199, 0] > 0.99
    assert not negligible_blocks(call, 10)[:, :, -1, 0].any()


def test_what_is_not_a_number_spares_nothing():
    call = call_of(STEEP, 200, 200, dtype="float32", causal=True)
    for side in ("q", "k"):
        broken = np.array(getattr(call, side))
        broken[0, 0, 5, 0] = np.nan
        assert not negligible_blocks(replace(call, **{side: broken}), 10).any()


def test_it_needs_nothing_but_the_standard():
    own = array_api_strict
    q = own.asarray(normal((1, HEADS, 60, HEAD_DIM), 0, "float32"))
    pos = own.arange(60)
    for tokens in (None, Tokens(pos=pos)):
        call = prepare(q, q, q, STEEP, None, True, Arguments(tokens=tokens), xp=own)
        some, every = visible_blocks(call, 8)
        assert own.any(negligible_blocks(call, 8, all_visible=every) & some[:, None, ...])
