"""Copies of learned arrays, for a kernel whose backward pass adds to them.

FlexAttention's backward pass adds the gradient of each score to what the score's ``score_mod``
loaded, by one atomic addition per score. All scores of a head load the same slope. Additions to one
address wait for each other, also those of one warp. So a kernel gets copies of each learned array,
and autograd adds the gradients of the copies. Neighbouring keys load neighbouring copies, because
the threads of a warp hold the scores of neighbouring keys when Triton adds them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posenc_torch.flex.block_mask import BLOCK

# More for a scalar, which all scores of a head load: more parts of the memory add at once.
_OF_SCALAR, _OF_TABLE = 8 * BLOCK, BLOCK


def make_copies(array: Tensor) -> Tensor:
    """``(H, 1024)`` of per-head scalars ``(H,)``, ``(H, ..., 128)`` of tables ``(H, ...)``."""
    count = _OF_SCALAR if array.ndim == 1 else _OF_TABLE
    return array[..., None].expand(*array.shape, count).contiguous()


def copy_index(copies: Tensor, key: Tensor) -> Tensor:
    """The copy that the scores of a key load, inside a kernel."""
    # Triton's compiler sees through fmod, which is its own remainder, that the copies of
    # neighbouring keys are neighbours, and adds four gradients at once; not through % or &.
    return torch.fmod(key, _OF_SCALAR if copies.ndim == 2 else _OF_TABLE)
