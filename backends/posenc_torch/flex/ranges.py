"""The block mask of a plain causal call as ranges of blocks: work and memory ``O(L / 128)``.

Row ``i`` of blocks needs the blocks ``first[i] .. i``. The last is on the diagonal, partly visible;
all pairs of the others are visible. ``first`` never falls, so the rows that need a block are a
range too. Instead of the index of every block, each list of indices holds the first one. With the
option ``BLOCKS_ARE_CONTIGUOUS`` a GPU's kernel reads no other and counts on from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.backend import Call, negligible_blocks
from posenc_torch.flex import target
from posenc_torch.flex.block_mask import BLOCK, Diagonals

OPTIONS = {"BLOCKS_ARE_CONTIGUOUS": True}
"""Kernel options without which a kernel would read beyond the lists."""


def takes_ranges(call: Call) -> bool:
    """Whether the mask of a call is that of ranges: causal, with nothing else hidden.

    The kernel for a CPU, and that for few queries, read whole lists.
    """
    plain = call.causal and call.window is None and call.mask.plain and call.query.seg is None
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    return plain and call.aligned and BLOCK <= q_len == k_len and not target.is_cpu(call.q)


def needed_lists(call: Call) -> dict[str, Tensor] | None:
    """``block_lists`` of a call from its values, without negligible blocks; None for all blocks.

    Blocks between those that are needed are needed too. A query's own block is never negligible.
    """
    negligible = negligible_blocks(call, BLOCK)
    if negligible is None:
        return None
    index = torch.arange(negligible.shape[-1], dtype=torch.int32, device=negligible.device)
    # A tensor: for a number of blocks Inductor (PyTorch 2.11) mixes int32 and int64, and fails.
    return block_lists(torch.where(negligible, index[-1:], index).amin(dim=-1))


def block_lists(first: Tensor) -> dict[str, Tensor]:
    """The lists of a ``BlockMask`` by name, from the first block of each row.

    Parameters
    ----------
    first
        ``(B or 1, H or 1, n)``, int32. A row also takes the blocks that a later row needs.

    Returns
    -------
    Numbers of blocks ``(B or 1, H or 1, n)`` and their first indices ``(B or 1, H or 1, n, 1)``:
    of keys for each row and of queries for each column, partly and fully (``full_``) visible.
    """
    first = first.flip(-1).cummin(-1).values.flip(-1).contiguous()
    row = torch.arange(first.shape[-1], dtype=torch.int32, device=first.device)
    row = row.expand_as(first).contiguous()
    last = torch.searchsorted(first, row, right=True, out_int32=True) - 1
    one, after = torch.ones_like(row), torch.minimum(row + 1, row[..., -1:])
    starts = {"kv": row, "full_kv": first, "q": row, "full_q": after}
    numbers = {"kv": one, "full_kv": row - first, "q": one, "full_q": last - row}
    return {f"{name}_num_blocks": number for name, number in numbers.items()} | {
        f"{name}_indices": start[..., None] for name, start in starts.items()
    }


def lists_of_diagonals(index: Tensor, diagonals: Diagonals) -> dict[str, Tensor]:
    """The lists of all blocks on diagonals that reach the main one, or that end before it.

    ``index`` is ``0 .. n - 1``, int32.
    """
    row = index[None, None]
    first, end = diagonals
    if end is None:
        return block_lists(torch.zeros_like(row) if first is None else (row + first).clamp(min=0))
    # Block a of queries sees all of the blocks 0 .. a + end - 1.
    blocks, zero = index.shape[0], torch.zeros_like(row)
    below = row + (1 - end)
    starts = {"kv": zero, "full_kv": zero, "q": zero, "full_q": below.clamp(max=blocks - 1)}
    numbers = {"kv": zero, "full_kv": row + end, "q": zero, "full_q": blocks - below}
    return {f"{name}_num_blocks": number.clamp(min=0) for name, number in numbers.items()} | {
        f"{name}_indices": start[..., None] for name, start in starts.items()
    }
