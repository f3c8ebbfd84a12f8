"""SDPA's fused kernel for CPUs, with the log-sum-exp of its forward pass.

``scaled_dot_product_attention`` (SDPA) keeps the log-sum-exp to itself. With it, a backward pass
computes the scores once, and needs no second forward pass. These operators are private to PyTorch.
SDPA calls them itself, and ``fused`` says whether it would. They have had these arguments since
PyTorch 2.5; a version without them takes the other way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from posenc_torch.booleans import hiding
from posenc_torch.sdpa import of_one_width, shares_keys

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


class Result(NamedTuple):
    """What a backward pass needs of a forward pass.

    Attributes
    ----------
    out
        ``(B, H, Q, max(D, Dv))``: SDPA takes vectors of one width.
    lse
        ``(B, H, Q)``: the log-sum-exp of the scores.
    """

    out: Tensor
    lse: Tensor


def fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether SDPA computes attention of these arrays by the kernel, laid out as it reads them."""
    if q.device.type != "cpu" or not all(hasattr(torch.ops.aten, n) for n in (_FORWARD, _BACKWARD)):
        return False
    # Shapes and dtypes decide: the narrower one gets zeros, and other layouts are copied.
    q, k = (a.detach().new_empty(a.shape[3]).expand(a.shape) for a in (q, k))
    choice = torch._fused_sdp_choice(q, k, k, enable_gqa=shares_keys(q, k))
    return choice == SDPBackend.FLASH_ATTENTION.value


def kept(q: Tensor, v: Tensor) -> Result:
    """Room for the results of all parts of a call."""
    (batch, heads, q_len, dim), width = q.shape, v.shape[3]
    out = q.new_empty((batch, q_len, heads, max(dim, width))).transpose(1, 2)
    return Result(out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)))


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Result:
    """Attention and its log-sum-exp; ``mask`` is what SDPA calls ``attn_mask``."""
    q, k, v = _operands(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=_floats(mask, q), scale=scale
    )
    return Result(out, lse)


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Result,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    dim, width = q.shape[3], v.shape[3]
    q, k, v = _operands(q, k, v)
    if v.shape[3] != width:
        d_out = torch.nn.functional.pad(d_out, (0, v.shape[3] - width))
    d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, *result, 0.0, False, attn_mask=_floats(mask, q), scale=scale
    )
    return d_q[..., :dim], d_k[..., :dim], d_v[..., :width]


def _operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one width, with neighbouring channels side by side in memory.

    The kernel reads them so and looks at no last stride. Padding and reversing keep strides.
    """
    if q.shape[3] != v.shape[3]:
        q, k, v = of_one_width(q, k, v)
    q, k, v = (a if a.stride(3) == 1 else a.contiguous() for a in (q, k, v))
    return q, k, v


def _floats(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask of booleans as numbers to add, as SDPA makes them."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return hiding(mask, q.dtype)
