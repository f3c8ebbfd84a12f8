"""Attention by ``scaled_dot_product_attention``: bias and mask become its ``attn_mask``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from posenc_torch.booleans import all_of, any_of, hiding
from posenc_torch.diagonals import mask_of, mask_table
from posenc_torch.fully_masked import zero_fully_masked
from posenc_torch.tables import gather_pairs
from posenc_torch.tracing import constant_in_programs, is_forward_mode, is_traced, may_read
from posenc_torch.underflow import (
    lowest_by_distance,
    may_underflow,
    negligible_depth,
    without_negligible,
)

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
    name, bias, mask = _bias_and_mask(call)
    if mask is not None and may_be_fully_masked(call):
        q, k, v = zero_fully_masked(q, k, v, mask)
    if call.sink is None:
        term, fully_masked = _attn_mask(call, name, bias, mask)
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
    keys are negligible.
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
    if _vectors_decide(call):
        return None
    name, bias, mask = _bias_and_mask(call)
    if mask is not None and may_be_fully_masked(call):
        return None
    term, fully_masked = _attn_mask(call, name, bias, mask)
    return lambda q, k, v: _under(q, k, v, term, fully_masked, scale)


def _attn_mask(
    call: Call, name: str | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """``as_attn_mask`` of this call, once for all layers that have the name."""

    def make() -> tuple[Tensor | None, Tensor | None]:
        return as_attn_mask(bias, mask, mask_dtype(call.q))

    return make() if name is None else call.once(f"attn_mask, {name}", make)


def _bias_and_mask(call: Call) -> tuple[str | None, Tensor | None, Tensor | None]:
    """The bias and the visible pairs, or both in the first; before them, what layers share it by.

    On a CPU without keys that are negligible, so that no weight is a subnormal number.
    """
    table = _table(call)
    if table is not None:
        depth = _negligible_from(call, table)
        name = f"by distance to {depth}"
        return name, call.once(name, lambda: _mask_to(call, table, depth)), None
    pairs = _pairs(call)
    bias, mask = pairs.bias, pairs.mask
    if bias is None or not _pairs_may_go(call, pairs):
        return "by pair", bias, mask
    may_change = pairs.is_new and call.shared is None
    bias = without_negligible(call, bias, mask, call.q, call.k, may_change=may_change)
    return None, bias, mask


def _vectors_decide(call: Call) -> bool:
    """Whether keys may be negligible, so that masks of layers differ."""
    table = _table(call)
    return _pairs_may_go(call, _pairs(call)) if table is None else _lowest(call, table) is not None


def _pairs_may_go(call: Call, pairs: _Pairs) -> bool:
    # The score of a sink is no part of the bias, of which a number is taken off.
    return pairs.is_low and _is_worth_a_look(call) and call.sink is None


def _is_worth_a_look(call: Call) -> bool:
    """Whether a backward pass multiplies weights: a forward pass gains no more than a look takes.

    Not of few queries, whose scores are fewer than the channels of keys.
    """
    if call.q.shape[2] < call.q.shape[3] or not torch.is_grad_enabled():
        return False
    arrays = (call.q, call.k, call.v, *call.arrays.values())
    return any(isinstance(a, Tensor) and a.requires_grad for a in arrays)


def _table(call: Call) -> Tensor | None:
    """The bias and the mask by distance, if they are."""
    return call.once("mask by distance", lambda: mask_table(call))


def _lowest(call: Call, table: Tensor) -> float | None:
    """How far a table is below the bias of the own key; None where it does not matter."""
    own = call.k.shape[2] - 1
    if not _is_worth_a_look(call):
        return None
    return call.once("depth of the mask", lambda: lowest_by_distance(table, own))


def _negligible_from(call: Call, table: Tensor) -> float | None:
    """How far below that of the own key a bias by distance is negligible for every query.

    None where no key is. A multiple of 8, so that most layers of a pass share a mask.
    """
    if (lowest := _lowest(call, table)) is None:
        return None
    own = table.detach()[:, call.k.shape[2] - 1].abs().amax()
    depth: float = negligible_depth(call, own, call.q, call.k).item()
    return 8.0 * math.ceil(depth / 8) if depth < lowest else None  # NaN is not


def _mask_to(call: Call, table: Tensor, depth: float | None) -> Tensor:
    """All pairs of a table, with ``-inf`` from a depth on."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    if depth is not None:
        table = torch.where(table <= table[:, k_len - 1, None] - depth, -torch.inf, table)
    return mask_of(table, q_len, k_len)


class _Pairs(NamedTuple):
    """The bias and the visible pairs.

    Attributes
    ----------
    bias, mask
        Either may be None.
    is_low
        Whether the bias spans so much that some keys may be negligible.
    is_new
        Whether nobody else holds the memory of the bias.
    """

    bias: Tensor | None
    mask: Tensor | None
    is_low: bool = False
    is_new: bool = False


def _pairs(call: Call) -> _Pairs:
    return call.once("pairs", lambda: _by_pair(call))


def _by_pair(call: Call) -> _Pairs:
    """The bias and the visible pairs; where values can be read, with what they make unnecessary.

    The pairs are None if all are visible, as in a decoding step, or if ``-inf`` in the bias hides
    the others.
    """
    if not may_read(call.q):
        return _Pairs(*call.bias_and_visible(gather_pairs))
    bias, mask = call.bias(gather_pairs), call.visible()
    if mask is not None and all_of(mask).item():
        mask = None
    if bias is None:
        return _Pairs(None, mask)
    lowest, highest = bias.detach().aminmax()
    is_low = may_underflow(lowest, highest)
    if not (lowest.item() > -torch.inf and highest.item() < torch.inf):  # NaN is neither
        return _Pairs(*call.split_bias(bias, mask), is_low, is_new=True)
    if mask is None or not sees_itself(call):
        return _Pairs(bias, mask, is_low)
    # Adding takes an eighth of the time of where(mask, bias, -inf).
    bias = bias + hiding(mask, bias.dtype)
    return _Pairs(bias, None, is_low, is_new=True)


def sees_itself(call: Call) -> bool:
    """Whether every query sees its own key, if no bias hides it."""
    in_window = all(side is None or side >= 0 for side in call.window or ())
    return in_window and not may_be_fully_masked(call)


def plan(call: Call) -> Planned | Refusal:
    """How SDPA serves a call, or why it cannot."""
    if call.softcap is not None:
        return Refusal("scaled_dot_product_attention has no softcap")
    if (why := without_derivative()) is not None:
        return Refusal(why)
    return Planned(sdpa, without_lse=WITHOUT_LSE, takes_sink=True, fixed=fixed)


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


def mask_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which SDPA takes a bias as its mask: q's, but float32 at least on a CPU.

    On a CPU its kernels add a float32 mask to float32 scores, whatever the dtype of q.
    """
    # Allowed to add in half precision, SDPA fails to compile with a wider mask (pytorch 161936).
    if q.device.type != "cpu" or _may_add_in_half_precision():
        return q.dtype
    return torch.promote_types(q.dtype, torch.float32)


@constant_in_programs
def _may_add_in_half_precision() -> bool:
    """Whether the user lets SDPA add in half precision where it has no fused kernel."""
    cuda = torch.backends.cuda  # the switch is for CPUs too
    allowed: bool = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    return allowed


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


def as_attn_mask(
    bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype, joined: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Bias and mask as one ``attn_mask``, and which rows ``(..., Q, 1)`` are fully masked.

    A fully masked row attends to everything under the first, so its result has to be set to 0. The
    second is None without a mask. ``joined`` says that the bias is ``-inf`` where the mask hides.
    """
    if bias is not None and bias.dtype != dtype:
        bias = _minus_row_max(bias, mask)
    if mask is None:
        return bias if bias is None or bias.dtype == dtype else bias.to(dtype), None
    sees = any_of(mask, -1, keepdim=True)
    if may_read(mask) and sees.all().item():
        return mask if bias is None else _hidden(bias, mask, joined).to(dtype), None
    fully_masked = ~sees
    mask = mask | fully_masked
    if bias is None:
        return mask, fully_masked
    # 0 in fully masked rows too: an overflow there makes gradients of 0 times infinity.
    visible = _hidden(bias, mask, joined)
    return torch.where(fully_masked, 0.0, visible).to(dtype), fully_masked


def _hidden(bias: Tensor, mask: Tensor, joined: bool) -> Tensor:
    """The bias, ``-inf`` where the mask hides."""
    return bias if joined else torch.where(mask, bias, -torch.inf)


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


def _minus_row_max(bias: Tensor, mask: Tensor | None) -> Tensor:
    """The bias minus its highest visible value per row: half precision then holds near keys.

    Softmax does not change when a number is added to a whole row.
    """
    visible = bias if mask is None else torch.where(mask, bias, -torch.inf)
    row_max = visible.detach().amax(dim=-1, keepdim=True)
    return bias - torch.where(row_max == -torch.inf, 0.0, row_max)
