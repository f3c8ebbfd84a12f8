"""The table of a bias by distance, which may hold the mask too, and nothing of negligible keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from posenc.backend import (
    Bounds,
    Call,
    bias_by_distance,
    has_bias,
    has_channel_decay,
    may_have_negligible_blocks,
    visible_by_distance,
)
from posenc_torch.attn_mask import sees_itself
from posenc_torch.chunked.parts import sees_many_keys
from posenc_torch.chunked.whole_scores import needs_whole_scores
from posenc_torch.fully_masked import is_true
from posenc_torch.sharing import Latest
from posenc_torch.underflow import lowest_by_distance, rounded_depth

T = TypeVar("T")


def table_of(call: Call) -> Tensor | None:
    """The bias by distance, ``(H or 1, Q + K - 1)``; 0 for a mask by distance without a bias."""
    return _once(call, "bias by distance", lambda: _table_of(call))


def _table_of(call: Call) -> Tensor | None:
    if has_channel_decay(call.scheme):
        return None  # which would turn the order of queries
    if has_bias(call.scheme) or call.extra_bias is not None or not call.in_order:
        return bias_by_distance(call)
    hides = call.causal or call.window is not None
    if not (hides and _mask_is_by_distance(call) and sees_itself(call)):
        return None
    distances = call.q.shape[2] + call.k.shape[2] - 1
    return torch.zeros((1, distances), dtype=call.dtype, device=call.q.device)


def with_mask(
    call: Call, table: Tensor, dtype: torch.dtype, bounds: Callable[[], Bounds | None]
) -> tuple[Tensor, bool]:
    """A table for a mask in ``dtype``, and whether it holds the mask, as ``-inf``.

    Negligible entries are ``-inf`` too: a weight of 0, where it may else be a subnormal number.
    """
    name = f"bias by distance, {dtype}"
    made = _once(call, name, lambda: _Masked.of(call, table, dtype))
    if made.own is None or not may_have_negligible_blocks(call):
        return made.table, made.has_mask
    if sees_many_keys(call) or not sees_itself(call):
        known = bounds()
        full = made.table if known is None else made.without(known.distances(table.detach()))
        return full, made.has_mask
    # Of few keys by a wider bound, which takes a third of the time.
    depth = rounded_depth(call, made.own, call.q, call.k)
    lowest = table.detach()[:, call.k.shape[2] - 1, None] - depth
    latest = _once(call, f"{name} to a depth", Latest)
    return latest.once(depth, lambda: made.without(table <= lowest)), made.has_mask


def _once(call: Call, name: str, make: Callable[[], T]) -> T:
    """``call.once``, but each layer has the graph of its learned arrays to itself."""
    learns = any(isinstance(a, Tensor) and a.requires_grad for a in call.arrays.values())
    return make() if learns else call.once(name, make)


class _Masked(NamedTuple):
    """A table for a mask in some dtype.

    Attributes
    ----------
    table, has_mask
        As ``with_mask`` has them, with entries that may be negligible.
    own
        The largest absolute bias of a query's own key; None if no entry is so low that a look pays.
    """

    table: Tensor
    has_mask: bool
    own: float | None

    @classmethod
    def of(cls, call: Call, table: Tensor, dtype: torch.dtype) -> _Masked:
        holds = _mask_is_by_distance(call) and _peaks_at_own_key(call, table, dtype)
        full = _masked(call, table, dtype) if holds else table
        own = None
        if _may_underflow(call, table):
            own = table.detach()[:, call.k.shape[2] - 1].abs().amax().item()
        return cls(full, holds, own)

    def without(self, negligible: Tensor) -> Tensor:
        """The table without these entries."""
        return torch.where(negligible, -torch.inf, self.table)


def toeplitz(table: Tensor, count: int, key_counts: Sequence[int]) -> Tensor:
    """``(1, H or 1, n, K)``: row ``i`` is ``table[:, i : i + K]``; a view.

    Of two ranges of keys each has its own columns, and the result is a copy.
    """
    step, one = table.stride()
    if len(key_counts) == 1:
        return table.as_strided((1, table.shape[0], count, *key_counts), (0, step, one, one))
    columns = torch.split(table, [count + keys - 1 for keys in key_counts], dim=1)
    views = [
        own.as_strided((1, table.shape[0], count, keys), (0, step, one, one))
        for own, keys in zip(columns, key_counts, strict=True)
    ]
    return torch.cat(views, dim=3)


def far(call: Call) -> int | None:
    """The nearest distance of far keys, if they are visible; see ``Job``."""
    left, k_len = call.scheme.constant_beyond()[0], call.k.shape[2]
    if left is None or left >= k_len:
        return None
    return left if is_true(visible_by_distance(call)[k_len - 1 - left]) else None


def _mask_is_by_distance(call: Call) -> bool:
    """Whether distances decide which keys are visible, and SDPA can add the mask."""
    plain = call.query.seg is None and call.mask.plain and call.mask.first_tokens == 0
    return plain and not needs_whole_scores(call)


def _peaks_at_own_key(call: Call, table: Tensor, dtype: torch.dtype) -> bool:
    """Whether the bias of a query's own key is finite and, for a mask in half precision, highest.

    For such a mask the bias of the own key is subtracted. The rest is then at most 0, and half
    precision holds it best for the keys with the largest bias.
    """
    own = table[:, call.k.shape[2] - 1 : call.k.shape[2]]
    if dtype == table.dtype:
        return bool(torch.isfinite(own).all())
    return bool((torch.isfinite(own) & ((table <= own) | ~visible_by_distance(call))).all())


def _masked(call: Call, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias by distance with ``-inf`` at hidden distances, for a mask in ``dtype``."""
    visible = torch.where(visible_by_distance(call), table, -torch.inf)
    if dtype == table.dtype:
        return visible
    # Softmax does not change, and half precision then holds the bias of near keys.
    return visible - table.detach()[:, call.k.shape[2] - 1, None]


@torch.no_grad()
def _may_underflow(call: Call, table: Tensor) -> bool:
    """Whether visible entries are so low that a look pays."""
    visible = torch.where(visible_by_distance(call), table, -torch.inf)
    return lowest_by_distance(visible, call.k.shape[2] - 1) is not None
