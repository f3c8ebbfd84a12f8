"""Whole rows of scores, of some queries at a time, are those of all queries."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial

import array_api_compat.numpy as xp
import numpy as np
import pytest
from cases import Case, options_of, tensors_of
from frameworks import FUSED, HAS
from frameworks import route as named
from sample import long
from subjects import HIDDEN_DIM, SUBJECTS, heads, normal, params_of

import posenc
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc.attn.rows import of_queries, queries_of
from posenc.contract.protocol import Hook
from posenc.schemes import CoPE
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR, assert_near

ADJUSTING = {n: s for n, s in SUBJECTS.items() if Hook.ADJUST_SCORES in s.hooks()}
CHUNKED = [p for p in FUSED if p.values[0] is None or p.values[0].implementation == "chunked"]
SEES = np.random.default_rng(5).random((2, 1, 27, 30)) < 0.8
# Blocks of 8 queries: the last one has fewer. In order, later keys of a block are left out.
CALLS = {
    "in order": Case({"causal": True}, q_len=27, k_len=30, grouped=True),
    "as many": Case({"causal": True, "window": 9}, q_len=20, k_len=20),
    "a mask and a bias by pair": Case(
        # A power of two, so that TRA's threshold sees exact scores in any float.
        {"mask": SEES, "bias": normal(SEES.shape, 4), "softcap": 3.0, "scale": 0.5},
        q_len=27,
        k_len=30,
    ),
}
# JAX compiles each for some seconds.
SETTINGS = [
    pytest.param(
        route, subject, call, id=f"{found.id}-{subject}-{call}",
        marks=[*found.marks, *[long] * (found.id == "jax-chunked" and (n, m) != (1, 1))],
    )
    for found in CHUNKED
    for route in found.values
    for n, subject in enumerate(ADJUSTING)
    for m, call in enumerate(CALLS)
]  # fmt: skip


def call_of(scheme, q_len, k_len, *, causal=False, **options):
    q, k = normal((2, 4, q_len, 8), 0), normal((2, 4, k_len, 8), 1)
    return prepare(q, k, k, scheme, posenc.init_params(scheme), causal, Arguments(**options), xp=xp)


@pytest.mark.parametrize(("route", "subject", "call"), SETTINGS)
def test_some_queries_at_a_time_are_all_queries(route, subject, call):
    if not HAS["torch"]:
        pytest.skip("gradients are compared with torch's autograd, torch is not installed")
    scheme, case = ADJUSTING[subject], CALLS[call]
    tensors, params = tensors_of(scheme, case), params_of(scheme)
    options = options_of(scheme, case)
    bias = options.pop("bias", None)
    tensors |= {} if bias is None else {"bias": bias}
    d_out = normal((2, heads(scheme), case.q_len, tensors["v"].shape[-1]), 9)

    def found(route, dtype):
        return route.gradients(scheme, tensors, params, d_out, dtype=dtype, **options)

    values, gradients = found(named("torch", "reference"), "float64")
    out, own = found(route, "float32")
    assert_near(out, values, ATTENTION_TOL["float32"])
    for name, gradient in gradients.items():
        factor = REDUCTION_FACTOR if name in params or name == "tokens.x" else 1
        assert_near(own[name], gradient, factor * ATTENTION_TOL["float32"], name)


BOUNDS = {
    "causal": {"causal": True},
    "window": {"window": (4, 2)},
    "causal window": {"causal": True, "window": (4, 2)},
    "no key but the own": {"causal": True, "window": 1},
    "causal, and another's window": {"causal": True, "mask": posenc.window((7, None))},
    "a window of later keys": {"window": (None, 3)},
}


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("k_len", [40, 53])
def test_some_queries_read_no_key_that_all_of_them_hide(bounds, k_len):
    call = call_of(CoPE(8), 40, k_len, **BOUNDS[bounds])
    for start in range(0, 40, 9):
        queries = slice(start, min(start + 9, 40))
        (seen,) = np.nonzero(np.any(call.visible()[0, 0, queries], axis=0))
        part = of_queries(call, queries)
        np.testing.assert_array_equal(part.key.pos, np.arange(seen[0], seen[-1] + 1))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "tokens": posenc.Tokens(pos=np.arange(40)[::-1])},
        {"mask": posenc.window((4, 0), first=1)},
        {"causal": True, "mask": lambda i, j: i - j < 3},
    ],
    ids=["another order", "first tokens", "a function"],
)
def test_keys_that_may_be_seen_are_read(options):
    call = call_of(CoPE(8), 40, 40, **options)
    part = of_queries(call, slice(20, 30))
    assert np.sum(part.visible()) == np.sum(call.visible()[:, :, 20:30])


def test_near_keys_leave_room_for_more_queries():
    def queries(window, own_keys=True):
        call = call_of(CoPE(8), 4000, 4000, causal=True, window=window)
        assert call.q.shape[:2] == (2, 4)
        return queries_of(call, 2**19, most=4096, own_keys=own_keys)

    assert queries(None) == queries((64, 0), own_keys=False) == queries((3999, 0)) == 16
    assert queries((64, 0)) * (queries((64, 0)) + 64) == pytest.approx(2**19 / 8, rel=0.01)


def test_long_paths_are_worth_many_queries():
    """As many as an implementation has in a block: each block goes along the same keys."""
    along = [s for s in ADJUSTING.values() if s.key_paths]
    calls = {
        s: call_of(s, 400, 4000, tokens=posenc.Tokens(x=normal((2, 4000, HIDDEN_DIM), 2)))
        for s in along
    }
    assert along
    assert {queries_of(call, 2**19, most=256) for call in calls.values()} == {256}


@long
@pytest.mark.skipif(not HAS["jax"], reason="JAX is not installed")
def test_hidden_keys_are_left_out_by_jax_too(monkeypatch):
    """Two ranges of 18 and 17 queries, the last ones of 38 tokens, in blocks of 4."""
    jax, posenc_jax, blocks, rows = (
        importlib.import_module(name)
        for name in ("jax", "posenc_jax", "posenc_jax.chunked.blocks", "posenc_jax.chunked.rows")
    )
    scheme = posenc.make("cope", head_dim=8, init_std=0.5)
    q, k = normal((2, 35, 4, 8), 0, "float32"), normal((2, 38, 2, 8), 1, "float32")
    params, seen = posenc.init_params(scheme), []
    whole = rows._by_blocks
    monkeypatch.setattr(
        rows, "_by_blocks", lambda call, n: seen.append(call.k.shape[2]) or whole(call, n)
    )

    def loss(vectors, implementation):
        q, k, params = vectors
        out = posenc_jax.attention(
            q, k, k, scheme, params, causal=True, window=(12, None), implementation=implementation
        )
        return (out**2).sum(), out

    with blocks.block_size(4):
        some, every = (
            jax.jit(partial(jax.value_and_grad(loss, has_aux=True), implementation=name))(
                (q, k, params)
            )
            for name in ("chunked", "reference")
        )
    assert set(seen) == {21, 38 - 9}
    for one, other in zip(*map(jax.tree.leaves, (some, every)), strict=True):
        factor = 2 * REDUCTION_FACTOR  # both are rounded; sums over all pairs
        assert_near(one, np.asarray(other, np.float64), factor * ATTENTION_TOL["float32"])


@long
def test_half_precision_is_rounded_once():
    """Scores, and the gradients of keys that blocks add up, are in the working dtype."""
    scheme, case = ADJUSTING["cope"], Case({"causal": True}, q_len=40, k_len=40)
    tensors, params = tensors_of(scheme, case), params_of(scheme)
    d_out = normal((2, heads(scheme), 40, tensors["v"].shape[-1]), 9)
    for framework in (p.values[0].framework for p in CHUNKED if p.values[0] is not None):
        found = [
            named(framework.name, implementation).gradients(
                scheme, tensors, params, d_out, dtype="bfloat16", causal=True
            )
            for implementation in ("chunked", "reference")
        ]
        (out, some), (whole, every) = found
        # Results round once, to 8 bits; before that they differ by roundings of float32.
        np.testing.assert_allclose(out, whole, rtol=2**-7, atol=1e-5)
        for name in ("k", "v"):
            np.testing.assert_allclose(some[name], every[name], rtol=2**-7, atol=1e-3)


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_a_mask_that_changes_is_noticed():
    torch, posenc_torch = (importlib.import_module(name) for name in ("torch", "posenc_torch"))
    q = torch.ones((1, 2, 300, 8), requires_grad=True)
    sees = torch.ones((1, 1, 300, 300), dtype=torch.bool)
    scheme = posenc.make("tra", num_heads=2, hidden_dim=8)
    params = {name: torch.tensor(a) for name, a in posenc.init_params(scheme).items()}
    tokens = posenc.Tokens(x=torch.ones((1, 300, 8)))
    out = posenc_torch.attention(
        q, q, q, scheme, params, mask=sees, tokens=tokens, implementation="chunked"
    )
    sees.fill_(False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@long
@pytest.mark.skipif(not HAS["jax"], reason="JAX is not installed")
def test_a_mask_of_ones_own_may_hold_an_array():
    jax, posenc_jax = (importlib.import_module(name) for name in ("jax", "posenc_jax"))
    blocks = importlib.import_module("posenc_jax.chunked.blocks")
    q = normal((2, 20, 4, 8), 0, "float32")
    scheme = posenc.make("cope", head_dim=8, init_std=0.5)
    params, sees = posenc.init_params(scheme), SEES[0, 0, :20, :20]
    results = []
    for mask in (Kept(keep=jax.numpy.asarray(sees)), sees[None, None]):
        with blocks.block_size(8):
            results.append(posenc_jax.attention(q, q, q, scheme, params, mask=mask))
    np.testing.assert_array_equal(*results)


@dataclass(frozen=True)
class Kept(posenc.Mask):
    keep: object = None

    def pairs(self, q, k, xp):
        return self.keep[q.pos, k.pos]
