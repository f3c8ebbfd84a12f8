"""The block mask of a call, without negligible blocks, and the positions that a kernel reads."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes

from posenc.backend import Call, Mask, may_have_negligible_blocks, negligible_blocks
from posenc_torch.flex import programs, target
from posenc_torch.flex.api import block_mask_inputs
from posenc_torch.flex.block_mask import BLOCK, BlockMaskInputs, Diagonals, TokenIntegers
from posenc_torch.flex.ranges import lists_of_diagonals, needed_lists, takes_ranges

_MIN_BLOCKS = 8  # of keys: with fewer, skipping blocks saves little


def block_mask_of(call: Call, diagonals: Diagonals | None = None) -> BlockMask | None:
    """The mask of a call, without its negligible blocks; None for no mask, on a GPU."""
    hides = call.causal or call.window or not call.mask.plain or diagonals is not None
    unmasked = not hides and call.query.seg is None
    as_ranges = takes_ranges(call)
    if (
        call.skip_blocks
        and call.k.shape[2] > _MIN_BLOCKS * BLOCK
        and may_have_negligible_blocks(call)
    ):
        inputs = mask_inputs(call)
        if as_ranges:
            with torch.no_grad():
                lists = programs.in_one_program(needed_lists, call)
            if lists is not None:
                return inputs.block_mask_of_lists(lists)
        else:
            any_visible, all_visible = inputs.visible_blocks()
            kept = _not_negligible(call, all_visible)
            if kept is not None:
                return inputs.block_mask(any_visible[:, None] & kept, all_visible[:, None] & kept)
    # On a CPU FlexAttention without a block mask takes threads * L * L memory.
    if unmasked and not target.is_cpu(call.q):
        return None
    # A cached mask must hold values, which traced tensors do not have.
    traced = torch.compiler.is_compiling() or bool(_modes())
    if call.aligned and call.query.seg is None and call.mask.plain and not traced:
        lengths = call.q.shape[2], call.k.shape[2]
        return plain_mask(*lengths, call.mask, call.query.pos.device, as_ranges, diagonals)
    inputs = mask_inputs(call)._replace(diagonals=diagonals)
    return _whole_mask(inputs, as_ranges=as_ranges)


def _not_negligible(call: Call, all_visible: Tensor) -> Tensor | None:
    """Which blocks are not negligible, in the shape of ``all_visible``; None for all blocks."""
    q_padded, k_padded = all_visible.shape[-2:]
    q_blocks, k_blocks = (-(-a.shape[2] // BLOCK) for a in (call.q, call.k))
    whole = all_visible[..., :q_blocks, :k_blocks]
    with torch.no_grad():
        skipped = programs.in_one_program(negligible_blocks, call, BLOCK, all_visible=whole)
    if skipped is None or not target.is_cpu(call.q):
        return None if skipped is None else ~skipped
    return torch.nn.functional.pad(~skipped, (0, k_padded - k_blocks, 0, q_padded - q_blocks))


def mask_inputs(call: Call) -> BlockMaskInputs:
    """The tokens and the mask options of a call, from which its block mask is computed."""
    q_pos, k_pos = _mask_positions(call)
    q_seg = k_seg = None
    if call.query.seg is not None and call.key.seg is not None:
        segments, batch = (call.query.seg, call.key.seg), call.q.shape[0]
        if not target.is_cpu(call.q):
            q_seg, k_seg = (TokenIntegers.of(seg) for seg in segments)
        else:
            q_seg, k_seg = (TokenIntegers.of(seg.long(), batch=batch) for seg in segments)
    return BlockMaskInputs(q_pos, k_pos, q_seg, k_seg, call.mask)


def _mask_positions(call: Call) -> tuple[TokenIntegers, TokenIntegers]:
    """Positions of queries and keys, which the mask depends on."""
    is_index = call.aligned and call.q.shape[2] == call.k.shape[2]
    if not target.is_cpu(call.q):
        q, k = call.query.pos, call.key.pos
        return TokenIntegers.of(q, is_index=is_index), TokenIntegers.of(k, is_index=call.aligned)
    return _cpu_integers(call, call.query.pos, call.key.pos, is_index=is_index)


def bias_positions(call: Call) -> tuple[TokenIntegers, TokenIntegers]:
    """Places of queries and keys if they are given, else positions: the bias reads them."""
    query, key = call.query.places, call.key.places
    if query is None or key is None:
        return _mask_positions(call)
    if not target.is_cpu(call.q):
        return TokenIntegers.of(query), TokenIntegers.of(key)
    return _cpu_integers(call, query, key)


def _cpu_integers(
    call: Call, query: Tensor, key: Tensor, *, is_index: bool = False
) -> tuple[TokenIntegers, TokenIntegers]:
    """Positions or places for a kernel on a CPU: int32, with a row for each batch element."""
    batch = call.q.shape[0]
    q, k = (
        TokenIntegers.of(values.to(torch.int32), batch=batch, is_index=is_index)
        for values in (query, key)
    )
    return q, k


@lru_cache(8)
def plain_mask(
    q_len: int,
    k_len: int,
    mask: Mask,
    device: torch.device,
    as_ranges: bool,
    diagonals: Diagonals | None = None,
) -> BlockMask:
    """The mask of default positions, cached because layers and steps ask for the same one."""
    with torch.inference_mode(False):  # a training step cannot use inference tensors
        inputs = block_mask_inputs(q_len, k_len, mask, device=device)._replace(diagonals=diagonals)
        return _whole_mask(inputs, as_ranges=as_ranges)


def _whole_mask(inputs: BlockMaskInputs, *, as_ranges: bool) -> BlockMask:
    """The mask of all visible blocks."""
    if not as_ranges:
        return inputs.block_mask(*(blocks[:, None] for blocks in inputs.visible_blocks()))
    index = torch.arange(inputs.q_pos.blocks, dtype=torch.int32, device=inputs.q_pos.values.device)
    return inputs.block_mask_of_lists(lists_of_diagonals(index, inputs.diagonals or (None, None)))
