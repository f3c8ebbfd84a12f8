"""Segments whose tokens lie side by side: `chunked` attends in each of them alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from frameworks import HAS

if not HAS["torch"]:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import array_api_compat.torch as xp
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subjects import SUBJECTS, normal, params_of

import posenc
import posenc_torch
from posenc import Tokens
from posenc.apply.feature_needs import reads_hidden
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM
from posenc.testing.tolerances import attention_bound
from posenc_torch.chunked import run, segments
from posenc_torch.chunked.parts import small_blocks

LENGTH, BATCH = 40, 2
HALVES = torch.arange(LENGTH) // 20
FIRST = torch.arange(LENGTH) < torch.tensor([[40], [25]])


def vectors(dtype=torch.float64):
    return [
        torch.tensor(normal((BATCH, HEADS, LENGTH, HEAD_DIM), seed), dtype=dtype)
        for seed in range(3)
    ]


def split(tokens, scheme=None, **options):
    """The runs of tokens in each row of a call."""
    q, k, v = vectors()
    given = Arguments(tokens=tokens, **options)
    call = prepare(q, k, v, scheme=scheme or posenc.NoPE(), causal=True, given=given, xp=xp)
    with small_blocks(8):
        return segments.side_by_side(call)


def test_tokens_of_a_segment_are_a_run_and_equal_rows_are_split_once():
    both = (segments.Run(0, 20, True, True), segments.Run(20, 40, True, True))
    assert split(Tokens(seg=HALVES)) == [segments.Rows(0, 2, both)]
    assert split(Tokens(seg=HALVES.expand(2, -1))) == [segments.Rows(0, 2, both)]
    whole, part, rest = (
        segments.Run(0, 40, True, True), segments.Run(0, 25, True, True),
        segments.Run(25, 40, False, True),
    )  # fmt: skip
    assert split(Tokens(exists=FIRST)) == [
        segments.Rows(0, 1, (whole,)), segments.Rows(1, 2, (part, rest)),
    ]  # fmt: skip


def test_positions_that_rise_by_one_in_each_segment_are_in_order():
    def in_order(pos):
        (rows,) = split(Tokens(seg=HALVES, pos=pos))
        return [run.in_order for run in rows.runs]

    assert in_order(torch.arange(LENGTH) % 20) == [True, True]
    assert in_order(torch.arange(LENGTH) * 2) == [False, False]
    jump = torch.arange(LENGTH) + (torch.arange(LENGTH) >= 30)
    assert in_order(jump) == [True, False]


WHOLE = {
    "no segments": (Tokens(pos=torch.arange(LENGTH)), {}),
    "segments that lie apart": (Tokens(seg=torch.arange(LENGTH) // 10 % 2), {}),
    "short segments": (Tokens(seg=torch.arange(LENGTH) // 3), {}),
    "nothing but padding": (Tokens(exists=torch.zeros(LENGTH, dtype=torch.bool)), {}),
    "other segments of queries": (Tokens(seg=HALVES), {"queries": Tokens(seg=0 * HALVES)}),
    "a mask": (Tokens(seg=HALVES), {"mask": lambda q, k: q - k < 9}),
    "a bias": (Tokens(seg=HALVES), {"bias": torch.zeros(1, 1, LENGTH, LENGTH)}),
    "first tokens": (Tokens(seg=HALVES), {"mask": posenc.window(4, first=2)}),
    "a log-sum-exp": (Tokens(seg=HALVES), {"return_lse": True}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_split(name):
    tokens, options = WHOLE[name]
    assert split(tokens, **options) is None


@st.composite
def rows_of_tokens(draw):
    """Segments, padding and positions of a batch: runs of any length, positions with jumps."""
    seg, exists, pos = (np.zeros((BATCH, LENGTH), int) for _ in range(3))
    for row in range(BATCH):
        cuts = draw(st.lists(st.integers(1, LENGTH - 1), max_size=3, unique=True))
        edges = [0, *sorted(cuts), LENGTH]
        for n, (start, stop) in enumerate(pairwise(edges)):
            seg[row, start:stop] = draw(st.sampled_from([n, n, n, 0]))
            exists[row, start:stop] = draw(st.sampled_from([1, 1, 0]))
            step = draw(st.sampled_from([1, 1, 2]))
            pos[row, start:stop] = draw(st.integers(0, 50)) + step * np.arange(stop - start)
    return Tokens(*(torch.tensor(a) for a in (pos, seg)), exists=torch.tensor(exists == 1))


@pytest.mark.parametrize("name", ["alibi-learned", "fox", "nope", "cope"])
@given(tokens=rows_of_tokens(), causal=st.booleans(), window=st.sampled_from([None, 5]))
@settings(max_examples=25, deadline=None)
def test_any_segments_give_what_the_reference_gives(name, tokens, causal, window):
    """Results and gradients, also of what is learned and of padding."""
    scheme = SUBJECTS[name]
    if reads_hidden(scheme):
        tokens = replace(tokens, x=torch.tensor(normal((BATCH, LENGTH, HIDDEN_DIM), 4)))
    found = []
    for implementation in ("reference", "chunked"):
        arrays = [a.requires_grad_() for a in vectors()]
        params = {n: torch.tensor(a).double() for n, a in params_of(scheme).items()}
        leaves = [*arrays, *(a.requires_grad_() for a in params.values())]
        with small_blocks(8):
            out = posenc_torch.attention(
                *arrays, scheme, params=params, tokens=tokens, causal=causal, window=window,
                implementation=implementation,
            )  # fmt: skip
        weights = torch.tensor(normal(tuple(out.shape), 9))
        grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
        zero = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, grads, strict=True)]
        found.append([out.detach(), *zero])
    # Gradients of params add up those of all pairs.
    bound = 4 * LENGTH * attention_bound("float64", keys=LENGTH)
    for one, other in zip(*found, strict=True):
        assert_near(one, other, bound * max(1.0, float(one.abs().max())))


def test_gradients_of_nothing_but_padding_are_0():
    arrays = [a.requires_grad_() for a in vectors()]
    out = posenc_torch.attention(
        *arrays, posenc.NoPE(), tokens=WHOLE["nothing but padding"][0], implementation="chunked"
    )
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), arrays))


def test_auto_splits_padding_from_384_tokens_and_keeps_sdpa_where_nothing_can_be_split():
    def chosen(length, tokens):
        q = torch.zeros(2, 4, length, 8)
        return posenc_torch.explain(q, q, q, posenc.ALiBi(4), causal=True, tokens=tokens)[
            "implementation"
        ]

    def padded(length):
        return Tokens(exists=torch.arange(length) < torch.tensor([[length], [length // 2]]))

    assert chosen(384, padded(384)) == "chunked"
    assert chosen(383, padded(383)) == "sdpa"
    assert chosen(384, Tokens(seg=torch.arange(384) % 2)) == "sdpa"


def test_a_segment_has_the_mask_of_sdpa_if_that_is_all_it_needs(monkeypatch):
    masks = []

    def seen(call):
        masks.append(call.query.seg)
        return torch.zeros_like(call.v), None

    monkeypatch.setattr(run, "sdpa", seen)
    q, k, v = (torch.zeros(1, 2, 600, 8) for _ in range(3))
    tokens = Tokens(seg=torch.arange(600) // 300)
    posenc_torch.attention(
        q, k, v, posenc.NoPE(), causal=True, tokens=tokens, implementation="chunked"
    )
    assert masks == [None, None]
