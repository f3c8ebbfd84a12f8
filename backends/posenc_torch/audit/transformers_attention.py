"""transformers: sinks of GPT-OSS and sliding windows, by its own attention and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc_torch.audit.runs import candidate, groups

NAME = "transformers"
WINDOW = 33
# Half of its functions have no types.
masks: Any = masking_utils
gpt_oss: Any = modeling_gpt_oss
llama: Any = modeling_llama


def candidates() -> Iterator[Candidate]:
    """Every attention."""
    dtypes = ("float32", "bfloat16")
    yield candidate(
        NAME, "gpt_oss: eager_attention_forward, sinks", "sink", "attention", _sinks, dtypes=dtypes,
    )  # fmt: skip
    yield candidate(
        NAME, "masking_utils: sliding_window_causal_mask_function", f"nope@{WINDOW}", "attention",
        _window, dtypes=dtypes,
    )  # fmt: skip


def _sinks(sizes: Sizes) -> Callable[..., Any]:
    def f(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor,
        causal: bool, q_pos: Tensor, k_pos: Tensor, seg: Tensor | None,
    ) -> Tensor:  # fmt: skip
        layer = SimpleNamespace(
            num_key_value_groups=groups(q, k), sinks=sink.to(q.dtype), training=False
        )
        mask = _mask(q, causal, None, q_pos, k_pos, seg)
        scale = q.shape[-1] ** -0.5
        found: Tensor = gpt_oss.eager_attention_forward(layer, q, k, v, mask, scale)[0]
        return found.transpose(1, 2)

    return f


def _window(sizes: Sizes) -> Callable[..., Any]:
    def f(
        q: Tensor, k: Tensor, v: Tensor,
        causal: bool, q_pos: Tensor, k_pos: Tensor, seg: Tensor | None, window: int,
    ) -> Tensor:  # fmt: skip
        layer = SimpleNamespace(num_key_value_groups=groups(q, k), training=False)
        mask = _mask(q, causal, window, q_pos, k_pos, seg)
        scale = q.shape[-1] ** -0.5
        found: Tensor = llama.eager_attention_forward(layer, q, k, v, mask, scale)[0]
        return found.transpose(1, 2)

    return f


def _mask(
    q: Tensor, causal: bool, window: int | None, q_pos: Tensor, k_pos: Tensor, seg: Tensor | None
) -> Tensor:
    """The mask as eager attention adds it."""
    offset = k_pos.shape[1] - q_pos.shape[1]
    _check_order(q_pos, k_pos, seg, offset)
    if window is None:
        see = masks.causal_mask_function if causal else masks.bidirectional_mask_function
    elif causal:
        see = masks.sliding_window_causal_mask_function(window)
    else:  # its option is the number of keys on each side
        see = masks.sliding_window_bidirectional_mask_function(window - 1)
    if seg is not None:
        see = masks.and_masks(see, masks.packed_sequence_mask_function(seg))
        see = masks.or_masks(see, _padding(seg, k_pos))
    found: Tensor = masks.eager_mask(
        q.shape[0], q_pos.shape[1], k_pos.shape[1], q_offset=offset, mask_function=see,
        dtype=q.dtype,
    )  # fmt: skip
    return found


def _padding(seg: Tensor, k_pos: Tensor) -> Callable[..., Tensor]:
    """Padding sees padding. Nobody reads its results, but the audit compares them too."""
    absent = (seg == 0) & (k_pos == 0)

    def see(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return absent[b, q] & absent[b, k]

    return see


def _check_order(q_pos: Tensor, k_pos: Tensor, seg: Tensor | None, offset: int) -> None:
    """Masks see the order of tokens in memory, not their positions."""
    steps = k_pos.diff(dim=1) == 1
    if seg is not None:
        steps = steps | (seg.diff(dim=1) != 0) | (seg[:, 1:] == 0)
    if not bool(steps.all()) or not torch.equal(q_pos, k_pos[:, offset:]):
        raise CannotExpressError("its masks count tokens, and take no positions")
