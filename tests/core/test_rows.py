"""Whole rows of scores, of some queries at a time, are those of all queries."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from cases import Case, options_of, tensors_of
from frameworks import FUSED, HAS
from frameworks import route as named
from sample import long
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc.contract.protocol import Hook
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
        marks=[*found.marks, *[long] * (found.id == "jax-chunked" and n != m)],
    )
    for found in CHUNKED
    for route in found.values
    for n, subject in enumerate(ADJUSTING)
    for m, call in enumerate(CALLS)
]  # fmt: skip


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

    if scheme.key_pairs:
        with pytest.raises(NotImplementedError, match="arrays over all pairs of keys"):
            found(route, "float32")
        return
    values, gradients = found(named("torch", "reference"), "float64")
    out, own = found(route, "float32")
    assert_near(out, values, ATTENTION_TOL["float32"])
    for name, gradient in gradients.items():
        factor = REDUCTION_FACTOR if name in params or name == "tokens.x" else 1
        assert_near(own[name], gradient, factor * ATTENTION_TOL["float32"], name)


@pytest.mark.skipif(not HAS["jax"], reason="JAX is not installed")
def test_later_keys_are_left_out_by_jax_too(monkeypatch):
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
            q, k, k, scheme, params, causal=True, implementation=implementation
        )
        return (out**2).sum(), out

    with blocks.block_size(4):
        some, every = (
            jax.jit(partial(jax.value_and_grad(loss, has_aux=True), implementation=name))(
                (q, k, params)
            )
            for name in ("chunked", "reference")
        )
    assert set(seen) == {21, 38}
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
