"""attn-gym: its modifications of scores, and its windows, by the functions that FlexAttention gets.

They are called on arrays of indices, which is what FlexAttention's own compiled code does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attn_gym import mods
from attn_gym.masks import generate_packed_causal_doc_mask_mod, generate_sliding_window
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc.audit.adapters import causal_alibi
from posenc_torch.audit import runs

_candidate = partial(runs.candidate, "attn-gym")
WINDOW = 33
_OTHERS = {
    "generate_mla_rope_score_mod(...)": "it adds products of vectors that are rotated already",
    "generate_natten(...)": "posenc has no mask of two axes",
    "generate_graphormer_spatial_bias(...)": "posenc has no distances on a graph",
}


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate."""
    yield _candidate(
        "generate_alibi_bias(H)", "alibi", "bias",
        lambda sizes: _bias(mods.generate_alibi_bias(sizes.num_heads)), causal_alibi,
        differentiable=False,
    )  # fmt: skip
    yield _candidate(
        "generate_alibi_bias(H)", "alibi:slopes=geometric", "bias",
        lambda sizes: _bias(mods.generate_alibi_bias(sizes.num_heads)),
        partial(causal_alibi, slopes="geometric"), differentiable=False,
    )  # fmt: skip
    yield _candidate(
        "generate_sandwich_bias(H, L)", "sandwich", "bias", _sandwich, differentiable=False,
    )  # fmt: skip
    yield _candidate(
        f"flex_attention, generate_sliding_window({WINDOW - 1})", f"nope@{WINDOW}", "attention",
        lambda sizes: _windowed, differentiable=False,
    )  # fmt: skip
    yield _candidate(
        "flex_attention, generate_packed_causal_doc_mask_mod(offsets), generate_tanh_softcap(cap)",
        "nope", "attention",
        lambda sizes: _documents, differentiable=False,
    )  # fmt: skip
    for subject, why in _OTHERS.items():
        yield runs.lacking("attn-gym", subject, why)


def _bias(score_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        heads = torch.arange(num_heads)[:, None, None]
        scores = torch.zeros(num_heads, len(q_pos), len(k_pos))
        return score_mod(scores, torch.tensor(0), heads, q_pos[:, None], k_pos)

    return f


def _sandwich(sizes: Sizes) -> Callable[..., Tensor]:
    return _bias(mods.generate_sandwich_bias(sizes.num_heads, sizes.max_len))


def _windowed(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, window: int) -> Tensor:
    """The library says how far back a query sees; that is one less than the number of keys."""
    queries, keys = q_pos.shape[1], k_pos.shape[1]
    offset = keys - queries
    if bool((k_pos.diff(dim=1) != 1).any()) or not torch.equal(q_pos, k_pos[:, offset:]):
        raise CannotExpressError("its masks count tokens, and take no positions")
    near = generate_sliding_window(window - 1)

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        return near(b, h, i + offset, j)

    blocks = create_block_mask(mask, None, None, queries, keys, device="cpu")
    found: Tensor = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    return found


def _documents(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, q_pos: Tensor, k_pos: Tensor,
    seg: Tensor | None, scale: float, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Documents by where they begin, which all rows share; without any, one that is all."""
    queries, keys = q_pos.shape[1], k_pos.shape[1]
    ids = torch.zeros_like(k_pos) if seg is None else seg
    if bool((ids != ids[0]).any()):
        raise CannotExpressError("its documents are those of every row")
    begins = torch.cat([torch.ones(1, dtype=torch.bool), ids[0].diff() != 0])
    inside = k_pos.diff(dim=1)[:, ~begins[1:]]
    if bool((inside != 1).any()) or not torch.equal(q_pos, k_pos[:, keys - queries :]):
        raise CannotExpressError("its masks count tokens, and take no positions")
    if not causal:
        raise CannotExpressError("it is causal")
    offsets = torch.cat([begins.nonzero()[:, 0], torch.tensor([keys])]).to(torch.int32)
    same = generate_packed_causal_doc_mask_mod(offsets)

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        return same(b, h, i + keys - queries, j)

    blocks = create_block_mask(mask, None, None, queries, keys, device="cpu")
    capped = None if softcap is None else mods.generate_tanh_softcap(softcap)
    found: Tensor = flex_attention(q, k, v, capped, blocks, scale, enable_gqa=True)
    return found
