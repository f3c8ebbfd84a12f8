"""The mask that transformers passes to our attention function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

EXISTENCE = torch.uint8
"""The dtype of a mask that says which keys exist; a mask of the caller has another."""


def mask_function(
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> Tensor | None:
    """None, or which keys exist, ``(B, 1, 1, K)``; the whole mask if it is not a plain one.

    transformers calls it as its own ``sdpa_mask``. A plain mask is the causal one or none at all,
    with the layer's window or chunk. Any other, as that of packed sequences or of images, comes
    whole, as booleans ``(B, 1, Q, K)``.
    """
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(
            kv_length=kv_length, kv_offset=kv_offset, attention_mask=attention_mask,
            allow_is_causal_skip=False, **others,
        )  # fmt: skip
    if attention_mask is None:
        return None
    missing = max(0, kv_offset + kv_length - attention_mask.shape[1])
    exist = functional.pad(attention_mask.to(torch.bool).to(EXISTENCE), (0, missing))
    return exist[:, None, None, kv_offset : kv_offset + kv_length]
