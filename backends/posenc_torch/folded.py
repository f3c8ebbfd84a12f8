"""A key bias folded into the head dimension, so that SDPA serves it without a mask.

Flash kernels and cuDNN then serve ALiBi without a mask, with exact gradients. The algorithm is in
``posenc.attn.folded``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.backend import (
    Call,
    Planned,
    Refusal,
    bias_by_key,
    fold_key_bias,
    plan_unless,
    why_not_foldable,
)
from posenc_torch.sdpa import (
    WITHOUT_LSE,
    has_native_visible,
    promoted,
    refuse_second_derivatives,
    without_derivative,
)


def folded(call: Call) -> tuple[Tensor, None]:
    """``(B, H, Q, Dv)`` by ``scaled_dot_product_attention`` without a mask."""
    q, k, v = promoted(call)
    batch, heads, q_len, dim = q.shape
    if k.shape[1] != heads:  # the keys of each head carry its own bias
        k, v = (a.repeat_interleave(heads // a.shape[1], dim=1) for a in (k, v))
    # Exact in float64: float32 is off by 1e-4 where slope times position is a thousand.
    wide = {name: array.double() for name, array in call.arrays.items()}
    key = call.key.map_features(lambda array: array.double())
    bias = bias_by_key(replace(call, arrays=wide, dtype=torch.float64, key=key))
    assert bias is not None
    bias = (bias / call.scale).expand(batch, heads, -1)
    rounded = _rounded if torch.compiler.is_compiling() else None
    q, k = fold_key_bias(q, k, bias, detach=torch.Tensor.detach, rounded=rounded, xp=call.xp)
    width = v.shape[3]
    if width == dim:  # some kernels require values as wide as keys
        v = torch.nn.functional.pad(v, (0, q.shape[3] - width))
    out = scaled_dot_product_attention(q, k, v, is_causal=q_len > 1, scale=call.scale)
    return refuse_second_derivatives(out)[..., :width], None


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 ``values`` rounded to the nearest number with the digits of ``dtype``, ties to even.

    It changes bits, because Inductor leaves out a conversion to ``dtype`` and back.
    """
    if dtype == values.dtype:
        return values
    dropped = 52 + round(math.log2(torch.finfo(dtype).eps))  # of the 52 digits of float64
    bits = values.view(torch.int64)
    even = (bits >> dropped) & 1
    bits = (bits + (2 ** (dropped - 1) - 1) + even) & -(2**dropped)
    result: Tensor = bits.view(values.dtype)
    return result


def plan(call: Call) -> Planned | Refusal:
    """How SDPA serves a call without a mask, or why it cannot."""
    return plan_unless(_why_not(call), Planned(folded, without_lse=WITHOUT_LSE))


def _why_not(call: Call) -> str | None:
    """Why a call has no bias to fold in, or why SDPA cannot serve it without a mask."""
    if (why := why_not_foldable(call) or without_derivative()) is not None:
        return why
    if not (has_native_visible(call) and call.plain):
        return (
            "SDPA without a mask needs aligned positions, as many queries as keys or one, "
            "no window, no segments, no mask, bias or softcap of the caller and a scale above 0"
        )
    dtype, bias = promoted(call)[0].dtype, bias_by_key(call)
    if bias is not None and bias.requires_grad and torch.finfo(dtype).bits < 32:
        return (
            f"the bias is learned, and its gradient would be rounded to {dtype} before it is "
            "summed: sums that cancel lose all their digits"
        )
    return None


def not_preferred(call: Call) -> str:
    """Why ``"auto"`` skips it."""
    if call.q.device.type == "cpu":
        return "on a CPU 'chunked' is faster"
    return "on an H200 it takes six times as long as 'flex', at 1024 tokens"
