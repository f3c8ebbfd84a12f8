"""Attention by ``scaled_dot_product_attention``: bias and mask become its ``attn_mask``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.backend import (
    Call,
    Planned,
    Refusal,
    append_sink_key,
    has_bias,
    has_channel_decay,
    may_be_fully_masked,
)
from posenc_torch.attn_mask import (
    as_attn_mask,
    bias_and_mask,
    by_vectors,
    mask_dtype,
    shared_attn_mask,
    vectors_decide,
)
from posenc_torch.fully_masked import zero_fully_masked
from posenc_torch.tracing import is_forward_mode, is_traced

WITHOUT_LSE = "scaled_dot_product_attention returns none"
_SMALL_SCORES, _SMALL_QUERIES = 3 * 2**17, 256  # per head: 627 tokens, as many queries as keys


def sdpa(call: Call) -> tuple[Tensor, None]:
    """``(B, H, Q, Dv)``. The whole bias is in memory; a sink is one more key, of value 0."""
    q, k, v = promoted(call)
    if has_native_mask(call):
        # A bool also where lengths are symbols of the compiler.
        causal = True if call.causal and q.shape[2] > 1 else False  # noqa: SIM210
        out = _attend(q, k, v, is_causal=causal, scale=call.scale, enable_gqa=shares_keys(q, k))
        return out, None
    name, bias, mask = bias_and_mask(call)
    if mask is not None and may_be_fully_masked(call):
        q, k, v = zero_fully_masked(q, k, v, mask)
    if call.sink is None:
        term, fully_masked = shared_attn_mask(call, name, bias, mask)
        return _under(q, k, v, term, fully_masked, call.scale), None
    # Asked first, because Dynamo cannot trace is_traced, and fixes no length.
    dynamo = torch.compiler.is_dynamo_compiling()
    if not dynamo and is_traced() and shares_keys(q, k):
        # SDPA would repeat them after the sink, and compare strides, which fixes the length.
        k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], dim=1) for a in (k, v))
    k, v, bias, mask = append_sink_key(call, k, v, bias, mask)
    return masked_sdpa(q, k, v, bias, mask, scale=call.scale), None


def fixed(call: Call) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """``sdpa`` as a function of transformed vectors alone, for calls that differ in them.

    None for a sink, for padding, for vectors of several dtypes, and where the vectors decide which
    keys of a bias by pair are negligible.
    """
    if call.sink is not None or not call.q.dtype == call.k.dtype == call.v.dtype:
        return None
    scale = call.scale
    if has_native_mask(call):
        native = {
            "is_causal": bool(call.causal and call.q.shape[2] > 1), "scale": scale,
            "enable_gqa": shares_keys(call.q, call.k),
        }  # fmt: skip
        return lambda q, k, v: _attend(q, k, v, **native)
    if vectors_decide(call):
        if (mask_for := by_vectors(call)) is None:
            return None
        return lambda q, k, v: _under(q, k, v, mask_for(q, k), None, scale)
    name, bias, mask = bias_and_mask(call)
    if mask is not None and may_be_fully_masked(call):
        return None
    term, fully_masked = shared_attn_mask(call, name, bias, mask)
    return lambda q, k, v: _under(q, k, v, term, fully_masked, scale)


def plan(call: Call) -> Planned | Refusal:
    """How SDPA serves a call, or why it cannot."""
    if call.softcap is not None:
        return Refusal("scaled_dot_product_attention has no softcap")
    if (why := without_derivative()) is not None:
        return Refusal(why)
    pairs = 0 if has_native_mask(call) else 2
    return Planned(sdpa, without_lse=WITHOUT_LSE, takes_sink=True, pairs_in_pass=pairs, fixed=fixed)


def without_derivative() -> str | None:
    """Why SDPA does not serve the differentiation of a call."""
    forward = not torch.compiler.is_compiling() and is_forward_mode()
    return "the kernels of SDPA have no derivative in forward mode" if forward else None


def has_native_mask(call: Call) -> bool:
    """Whether a call needs no ``attn_mask``: no bias, and at most SDPA's own causal mask."""
    unbiased = not has_bias(call.scheme) and call.plain and not call.regions
    unbiased = unbiased and not has_channel_decay(call.scheme)
    return unbiased and not call.needs_lse and has_native_visible(call)


def has_native_visible(call: Call) -> bool:
    """Whether the mask is one that SDPA has by itself: none, or ``is_causal``."""
    # SDPA scales after its own causal mask. A scale of 0 gives NaN there, a negative one infinity.
    if call.window is not None or call.query.seg is not None or not call.scale > 0:
        return False
    # Last, because an exported program keeps every condition on lengths that it evaluates.
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    native: bool = not call.causal or (call.aligned and (q_len == k_len or q_len == 1))
    return native or (call.in_the_past and q_len == 1)


def is_small(call: Call) -> bool:
    """Whether a head has so few scores that holding all of them costs nothing."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    small: bool = q_len * k_len <= _SMALL_SCORES or q_len <= _SMALL_QUERIES
    return small


def promoted(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the widest dtype among them."""
    q, k, v = call.q, call.k, call.v
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def shares_keys(q: Tensor, k: Tensor) -> bool:
    """Whether query heads share keys and values (grouped-query attention)."""
    # A bool also where head counts are symbols of the compiler.
    return True if q.shape[1] != k.shape[1] else False  # noqa: SIM210


def masked_sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    joined: bool = False, *, scale: float,
) -> Tensor:  # fmt: skip
    """Attention under ``mask``, with a ``bias`` that is finite there; fully masked rows are 0.

    Both are ``(B or 1, H or 1, Q, K)``. None is a bias of 0, and a mask that hides nothing.
    """
    return _under(q, k, v, *as_attn_mask(bias, mask, mask_dtype(q), joined), scale)


def _under(
    q: Tensor, k: Tensor, v: Tensor, term: Tensor | None, fully_masked: Tensor | None, scale: float
) -> Tensor:
    """Attention under an ``attn_mask``, with 0 in fully masked rows."""
    out = _attend(q, k, v, attn_mask=term, scale=scale, enable_gqa=shares_keys(q, k))
    if fully_masked is not None:
        return torch.where(fully_masked, 0.0, out)
    # SDPA keeps its result for its backward pass, and a caller may change this one in place.
    return out.clone() if out.requires_grad else out


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """SDPA; on a CPU with vectors of one width, by zeros.

    Its fused kernel for a CPU takes no other, and without that it holds ``Q x K`` scores.
    """
    width = v.shape[3]
    if q.device.type != "cpu" or q.shape[3] == width:
        return refuse_second_derivatives(scaled_dot_product_attention(q, k, v, **options))
    q, k, v = of_one_width(q, k, v)
    return refuse_second_derivatives(scaled_dot_product_attention(q, k, v, **options))[..., :width]


def refuse_second_derivatives(out: Tensor) -> Tensor:
    """A result of SDPA whose second derivatives say what has them, if its kernel has none.

    Only SDPA's own definition has them, which it takes where no kernel serves.
    """
    if not out.requires_grad or torch.compiler.is_compiling() or is_traced():
        return out
    kernel = out.grad_fn
    if kernel is not None and kernel.name().startswith("ScaledDotProduct"):
        kernel.register_hook(_refuse_more)
    return out


def _refuse_more(gradients: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...] | None:
    """First derivatives that cannot be differentiated; None where nobody asks for that."""
    if not torch.is_grad_enabled():
        return None
    return tuple(None if g is None else _FirstDerivative.apply(g) for g in gradients)  # type: ignore[no-untyped-call]  # as torch has it


class _FirstDerivative(torch.autograd.Function):
    """The same numbers, with an error of ours for a derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise NotImplementedError(
            "the kernels of scaled_dot_product_attention have first derivatives only: use "
            "implementation='reference', which has second derivatives too"
        )


def of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with zeros up to the widest of them."""
    widest = max(q.shape[3], v.shape[3])
    q, k, v = (torch.nn.functional.pad(a, (0, widest - a.shape[3])) for a in (q, k, v))
    return q, k, v
