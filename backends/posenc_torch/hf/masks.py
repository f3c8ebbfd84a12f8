"""The mask that transformers passes to our attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_EXISTENCE = torch.uint8  # a mask of the caller has another dtype


class GivenMask(NamedTuple):
    """The mask that a layer is given: which keys exist, the whole mask, or neither.

    Through the code of transformers it travels as one tensor, which only this file reads.
    """

    exists: Tensor | None = None
    """Booleans ``(B, K)``, beside the layer's own mask."""
    whole: Tensor | None = None
    """``(B, 1 or H, Q or 1, K)``, booleans or a term of the scores, instead of the layer's own."""


def as_existence(mask: Tensor) -> Tensor:
    """``mask``, which is other than 0 where a key exists, as ``given_mask`` reads it."""
    return mask.to(torch.bool).to(_EXISTENCE)


def given_mask(mask: Tensor | None) -> GivenMask:
    """What the tensor says that transformers passed on, ``(B, 1 or H, Q or 1, K)``."""
    if mask is None:
        return GivenMask()
    if mask.dtype == _EXISTENCE:
        return GivenMask(exists=mask[:, 0, 0, :].to(torch.bool))
    return GivenMask(whole=mask)


def mask_function(
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    mask_function: Any = None,
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """None, or which keys exist, ``(B, 1, 1, K)``; the whole mask if it is not a plain one.

    transformers calls it as its own ``sdpa_mask``. A plain mask is the causal one or none at all,
    with the layer's window or chunk. Any other, as that of packed sequences, of images or of
    ``is_causal=False``, comes whole, as booleans ``(B, 1, Q, K)``.
    """
    both_ways = allow_is_bidirectional_skip and not getattr(config, "is_causal", True)
    indexed = getattr(config, "index_topk", None) is not None  # the indexer reads the whole mask
    skips = allow_is_causal_skip or allow_is_bidirectional_skip
    skips = skips or (not indexed and _is_plain(mask_function))
    if both_ways or not skips:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(
            kv_length=kv_length, kv_offset=kv_offset, attention_mask=attention_mask,
            mask_function=mask_function, config=config, allow_is_causal_skip=False, **others,
        )  # fmt: skip
    if attention_mask is None:
        return None
    missing = max(0, kv_offset + kv_length - attention_mask.shape[1])
    exist = functional.pad(as_existence(attention_mask), (0, missing))
    return exist[:, None, None, kv_offset : kv_offset + kv_length]


def _is_plain(function: Callable[..., Any] | None) -> bool:
    """Whether a mask is causal, with a window or a chunk at most.

    transformers asks for such a mask whole too: for one query and a static cache.
    """
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return True
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    makers = (masking_utils.sliding_window_overlay, masking_utils.chunked_overlay)
    near = {f"{maker.__name__}.<locals>.inner_mask" for maker in makers}
    return (
        len(parts) == 1
        and isinstance(parts[0], tuple)
        and all(
            part is masking_utils.causal_mask_function or getattr(part, "__qualname__", "") in near
            for part in parts[0]
        )
    )
