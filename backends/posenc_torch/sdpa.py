"""Attention by ``scaled_dot_product_attention``: bias and visibility are its mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.backend import (
    Call,
    append_sink_key,
    has_bias,
    may_be_fully_masked,
)
from posenc_torch.fully_masked import zero_fully_masked

_FEW, _FEW_QUERIES = 2**19, 256


def sdpa(call: Call) -> tuple[Tensor, None]:
    """``(B, H, Q, Dv)``, with the whole bias in memory; a sink is one more key, of value 0."""
    q, k, v = promoted(call)
    if has_native_mask(call):
        # A bool also where lengths are symbols of the compiler.
        causal = True if call.causal and q.shape[2] > 1 else False  # noqa: SIM210
        out = scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=call.scale, **grouped(q, k)
        )
        return out, None
    bias, seen = call.bias_and_visible()
    if seen is not None and may_be_fully_masked(call):
        q, k, v = zero_fully_masked(q, k, v, seen)
    if call.sink is not None:
        k, v, bias, seen = append_sink_key(call, k, v, bias, seen)
    return masked(q, k, v, bias, seen, scale=call.scale), None


def refuses(call: Call) -> str | None:
    """Why SDPA cannot serve a call."""
    return "scaled_dot_product_attention caps no scores" if call.softcap is not None else None


def without_lse(call: Call) -> str:
    """Why there is no log-sum-exp."""
    return "scaled_dot_product_attention returns none"


def has_native_mask(call: Call) -> bool:
    """Nothing but, at most, the causal mask that SDPA knows by itself."""
    nothing = not has_bias(call.scheme) and call.plain and not call.regions
    return nothing and not call.needs_lse and has_native_visible(call)


def has_native_visible(call: Call) -> bool:
    """Who sees whom is what SDPA knows by itself: everyone, or ``is_causal``."""
    # SDPA scales after its own causal mask: 0 times minus infinity is NaN, and -1 times it worse.
    if call.window is not None or call.query.seg is not None or not call.scale > 0:
        return False
    # Last, because an exported program keeps what it asks of lengths.
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    return not call.causal or (call.aligned and (q_len == k_len or q_len == 1))


def is_small(call: Call) -> bool:
    """Whether a head has so few that nothing is gained by not holding them all."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    return q_len * k_len <= _FEW or q_len <= _FEW_QUERIES


def promoted(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the widest dtype among them."""
    dtype = torch.promote_types(call.q.dtype, torch.promote_types(call.k.dtype, call.v.dtype))
    return call.q.to(dtype), call.k.to(dtype), call.v.to(dtype)


def grouped(q: Tensor, k: Tensor) -> dict[str, bool]:
    """What SDPA must be told where heads share keys."""
    return {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}


def masked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, *, scale: float
) -> Tensor:
    """Attention over what is ``seen``, with a finite ``bias`` there; rows that see nothing give 0.

    Both are ``(B or 1, H or 1, Q, K)``; None for a bias of 0, or for all being seen.
    """
    shared = grouped(q, k)
    if bias is not None and q.dtype != bias.dtype:
        bias = _below_zero(bias, seen)
    if seen is None:
        mask = None if bias is None else bias.to(q.dtype)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **shared)
    # A row that may see nothing attends to everything here, and is set to 0 after.
    blind = ~seen.any(dim=-1, keepdim=True)
    seen = seen | blind
    if bias is None:
        mask = seen
    else:
        # Of a blind row too: what overflows there makes gradients of 0 times infinity.
        visible = torch.where(seen, bias, -torch.inf)
        mask = torch.where(blind, 0.0, visible).to(q.dtype)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **shared)
    return torch.where(blind, 0.0, out)


def _below_zero(bias: Tensor, seen: Tensor | None) -> Tensor:
    """A bias less the highest of its row, which softmax cannot tell and half precision can hold."""
    visible = bias if seen is None else torch.where(seen, bias, -torch.inf)
    highest = visible.detach().amax(dim=-1, keepdim=True)
    return bias - torch.where(highest == -torch.inf, 0.0, highest)
