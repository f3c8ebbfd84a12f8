"""The gradient of a bias ``u(q) + w(k)``, from sums that SDPA's backward pass gives."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks_installed import require
from sample import long
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc.positions import packed
from posenc.schemes import FoX, Sum
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

import posenc_torch
from posenc_torch.chunked import parts, passes

LENGTH = 40
MIXED = Sum(FoX(HEADS, HIDDEN_DIM), posenc.ALiBi(HEADS, learned=True))
RISING = posenc.ALiBi(HEADS, learned=True, slopes=[-1.0, -0.5, 0.5, 1.0])
SEPARABLE = {
    "relative": SUBJECTS["alibi-learned"],
    "gates": SUBJECTS["fox"],
    "both": MIXED,
    "rising": RISING,
}
CALLS = {
    "causal": {"causal": True},
    "all-blocks": {"causal": True, "skip_blocks": False},
    "packed": {"causal": True, "tokens": packed([17, 1, 22])},
    "window": {"mask": posenc.causal & posenc.window(11)},
    "two-ranges": {"mask": posenc.causal & posenc.window(11, first=3)},
    "own-key": {"mask": posenc.causal & posenc.window(1)},
    "far": {"causal": True, "tokens": posenc.Tokens(pos=2 * np.arange(LENGTH) + 2**24)},
}


def gradients(scheme, implementation, *, dtype, shared, queries, tokens=None, **options):
    """Those of q, k, v, hidden states and params, by name, as float64."""
    count = heads(scheme)
    shapes = {
        "q": (2, count, queries, HEAD_DIM),
        "k": (2, count // shared, LENGTH, HEAD_DIM),
        "v": (2, count // shared, LENGTH, HEAD_DIM + 3),
        "x": (2, LENGTH, HIDDEN_DIM),
    }
    arrays = {name: normal(shape, n) for n, (name, shape) in enumerate(shapes.items())}
    leaves = {
        name: torch.tensor(array, dtype=dtype, requires_grad=True)
        for name, array in {**arrays, **params_of(scheme)}.items()
    }
    q, k, v, x = (leaves[name] for name in shapes)
    given = {f: getattr(tokens, f) for f in ("pos", "seg") if tokens is not None}
    given = {name: torch.tensor(a) for name, a in given.items() if a is not None}
    out = posenc_torch.attention(
        q, k, v, scheme, {name: leaves[name] for name in params_of(scheme)},
        implementation=implementation, tokens=posenc.Tokens(x=x, **given), **options,
    )  # fmt: skip
    d_out = torch.tensor(normal(out.shape, 9), dtype=dtype)
    found = torch.autograd.grad(out, list(leaves.values()), d_out, allow_unused=True)
    return {n: g.double().numpy() for n, g in zip(leaves, found, strict=True) if g is not None}


@pytest.fixture
def no_scores(monkeypatch):
    """Fails where the gradient of a score is computed again."""

    def refuse(*_, **__):
        raise AssertionError("a score is computed for its gradient")

    monkeypatch.setattr(passes.Scores, "of", refuse)


def some_long(name, call, shared):
    """Each bias in a plain call, and each call with gates or both, are in the quick part."""
    plain = call in ("causal", "window", "far") and shared == 1
    return () if plain or (name == "both" and shared == 2) else long


@pytest.mark.parametrize(
    ("name", "call", "shared"),
    [
        pytest.param(name, call, shared, marks=some_long(name, call, shared))
        for name in SEPARABLE
        for call in CALLS
        for shared in (1, 2)
    ],
)
def test_no_score_is_computed_again(name, call, shared, no_scores):
    scheme, options = SEPARABLE[name], {**CALLS[call], "shared": shared, "queries": LENGTH}
    wide = gradients(scheme, "reference", dtype=torch.float64, **options)
    with parts.small_blocks(8):
        found = gradients(scheme, "chunked", dtype=torch.float32, **options)
    assert found.keys() == wide.keys()
    for leaf, expected in wide.items():  # sums over queries, keys and channels
        assert_near(found[leaf], expected, ATTENTION_TOL["float32"] * REDUCTION_FACTOR)


def test_few_queries_of_many_keys(no_scores):
    options = {"causal": True, "shared": 2, "queries": 13}
    wide = gradients(MIXED, "reference", dtype=torch.float64, **options)
    with parts.small_blocks(8):
        found = gradients(MIXED, "chunked", dtype=torch.float32, **options)
    for leaf, expected in wide.items():
        assert_near(found[leaf], expected, ATTENTION_TOL["float32"] * REDUCTION_FACTOR)
