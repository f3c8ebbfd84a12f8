"""What SDPA adds to scores: a call's bias and mask as one ``attn_mask``.

On a CPU without keys that are negligible, so that no weight is a subnormal number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.backend import Call, may_be_fully_masked
from posenc_torch.booleans import all_of, any_of, hiding
from posenc_torch.diagonals import mask_of, mask_table
from posenc_torch.sharing import Latest
from posenc_torch.tables import gather_pairs
from posenc_torch.tracing import constant_in_programs, may_read
from posenc_torch.underflow import (
    highest_of_rows,
    is_large,
    lowest_by_distance,
    may_underflow,
    rounded_depth,
    without_negligible,
)


def bias_and_mask(call: Call) -> tuple[str | None, Tensor | None, Tensor | None]:
    """What layers share it by, the bias and the visible pairs; the bias may hold both."""
    table = _table(call)
    if table is not None:
        depth = _negligible_from(call, _span(call, table), call.q, call.k)
        name = f"by distance to {depth}"
        return name, call.once(name, lambda: _mask_to(call, table, depth)), None
    pairs = _pairs(call)
    bias, mask = pairs.bias, pairs.mask
    if bias is None or not _pairs_may_go(call, pairs):
        return "by pair", bias, mask
    may_change = pairs.is_new and call.shared is None
    bias = without_negligible(call, bias, mask, call.q, call.k, may_change=may_change)
    return None, bias, mask


def vectors_decide(call: Call) -> bool:
    """Whether keys may be negligible, so that masks of layers differ."""
    table = _table(call)
    return _pairs_may_go(call, _pairs(call)) if table is None else _span(call, table) is not None


def by_vectors(call: Call) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The ``attn_mask`` as a function of the queries and keys that decide which keys it leaves out.

    None for a learned bias, and unless bias and mask are by distance.
    """
    if (table := _table(call)) is None or table.requires_grad:
        return None
    q, k = (torch.empty_like(a, device="meta") for a in (call.q, call.k))
    bare = replace(call, q=q, k=k, v=None, shared=None)  # nobody keeps the vectors
    span, dtype = _span(call, table), mask_dtype(call.q)
    latest = Latest()

    def mask_for(q: Tensor, k: Tensor) -> Tensor:
        depth = _negligible_from(bare, span, q, k)
        return latest.once(depth, lambda: to(depth))

    def to(depth: float | None) -> Tensor:
        bias = _mask_to(bare, table, depth)
        return bias if bias.dtype == dtype else _minus_row_max(bias, None).to(dtype)

    return mask_for


def shared_attn_mask(
    call: Call, name: str | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """``as_attn_mask`` of this call, once for all layers that have the name."""

    def make() -> tuple[Tensor | None, Tensor | None]:
        return as_attn_mask(bias, mask, mask_dtype(call.q))

    return make() if name is None else call.once(f"attn_mask, {name}", make)


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


def _minus_row_max(bias: Tensor, mask: Tensor | None) -> Tensor:
    """The bias minus its highest visible value per row: half precision then holds near keys.

    Softmax does not change when a number is added to a whole row.
    """
    return bias - highest_of_rows(bias, mask)


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


class _Span(NamedTuple):
    """How far a table is at most below the biases of own keys, and the largest of these."""

    lowest: float
    own: float


def _span(call: Call, table: Tensor) -> _Span | None:
    """The span of a table; None where it does not matter."""

    def look() -> _Span | None:
        own = call.k.shape[2] - 1
        lowest = lowest_by_distance(table, own)
        return None if lowest is None else _Span(lowest, table.detach()[:, own].abs().amax().item())

    return call.once("span of the mask", look) if _is_worth_a_look(call) else None


def _negligible_from(call: Call, span: _Span | None, q: Tensor, k: Tensor) -> float | None:
    """How far below that of the own key a bias by distance is negligible for every query.

    None where no key is.
    """
    if span is None:
        return None
    depth = rounded_depth(call, span.own, q, k)
    return depth if depth < span.lowest else None


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
    if not (lowest.item() > -torch.inf and highest.item() < torch.inf):  # NaN is neither
        bias, mask = call.split_bias(bias, mask)
        lowest, highest = bias.detach().aminmax()
        pairs = _Pairs(bias, mask, is_new=True)
    elif mask is None or not sees_itself(call):
        pairs = _Pairs(bias, mask)
    else:  # adding takes an eighth of the time of where(mask, bias, -inf)
        pairs = _Pairs(bias + hiding(mask, bias.dtype), None, is_new=True)
    if call.sink is None and is_large(lowest, highest):
        pairs = _without_large(pairs)
    return pairs._replace(is_low=may_underflow(lowest, highest))


def _without_large(pairs: _Pairs) -> _Pairs:
    """The same with less bias, where all visible keys of a row have a large one."""
    assert pairs.bias is not None
    highest = highest_of_rows(pairs.bias, pairs.mask)
    if not is_large(*highest.aminmax()):
        return pairs
    return pairs._replace(bias=pairs.bias - highest, is_new=True)


def sees_itself(call: Call) -> bool:
    """Whether every query sees its own key, if no bias hides it."""
    in_window = all(side is None or side >= 0 for side in call.window or ())
    return in_window and not may_be_fully_masked(call)


def mask_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which SDPA takes a bias as its mask: q's, but float32 at least on a CPU.

    On a CPU its kernels add a float32 mask to float32 scores, whatever the dtype of q.
    """
    # Allowed to add in half precision, SDPA fails to compile with a wider mask (pytorch 161936).
    if q.dtype.itemsize > 2 or q.device.type != "cpu" or _may_add_in_half_precision():
        return q.dtype
    return torch.promote_types(q.dtype, torch.float32)


@constant_in_programs
def _may_add_in_half_precision() -> bool:
    """Whether the user lets SDPA add in half precision where it has no fused kernel."""
    cuda = torch.backends.cuda  # the switch is for CPUs too
    allowed: bool = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    return allowed
