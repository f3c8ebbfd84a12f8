"""A window with ``sink_tokens``: the window, and the first tokens outside of it, as two calls.

A part has one range of keys. One that holds the first tokens and a window holds all keys between
them too, so parts would be as long as the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from posenc.backend import Call, Mask, PartialAttention, Window, merge_parts, visible
from posenc_torch.chunked.parts import queries_per_part


def has_far_first_tokens(call: Call) -> bool:
    """Whether most queries see first tokens far outside of their window."""
    left, right = call.window or (None, None)
    if left is None or not call.sink_tokens or not call.aligned:
        return False
    keys = int(call.k.shape[2])
    ahead = 0 if call.causal else keys if right is None else max(0, right)
    near = max(0, left) + ahead + queries_per_part(call) + call.sink_tokens
    return keys > 2 * near


def beside_first_tokens(
    call: Call, attend: Callable[[Call], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """``attend`` to the window and to the first tokens outside of it, merged."""
    inside = replace(call, sink_tokens=0, wants_lse=True)
    calls = (inside, _first_outside(inside, call.sink_tokens))
    out, lse = merge_parts([PartialAttention(*attend(part)) for part in calls], call)
    return out, lse


def _first_outside(call: Call, count: int) -> Call:
    """The call with the first ``count`` keys alone, where its window hides them."""
    assert call.window is not None
    mask, bias, first = call.mask, call.extra_bias, slice(count)
    function = mask if isinstance(mask, Mask) else None
    with_segments = function is not None and function.with_segments
    outside = Mask(_Outside(call.window, function), with_segments)
    part = replace(
        call, k=call.k[:, :, first], v=call.v[:, :, first], key=call.key.select(first),
        window=None, mask=outside, aligned=False,
        extra_bias=None if bias is None else bias[..., first],
    )  # fmt: skip
    if mask is None or isinstance(mask, Mask):
        return part
    at = part.query.pos[..., :, None], part.key.pos[..., None, :]
    return replace(part, mask=mask[..., first] & outside(*at, None, None))


@dataclass(frozen=True)
class _Outside:
    """The pairs that a window hides, and the caller's function does not."""

    window: Window
    mask: Mask | None

    def __call__(self, q_pos: Tensor, k_pos: Tensor, *segments: Tensor | None) -> Tensor:
        inside: Tensor | None = visible(q_pos, k_pos, window=self.window)
        assert inside is not None  # the window has a bound
        pairs = ~inside
        if self.mask is not None:
            pairs = pairs & self.mask(q_pos, k_pos, *(segments or (None, None)))
        return pairs
