"""The caller's mask: booleans, or a function of positions and segments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from posenc.attn.arguments import as_pairs
from posenc.attn.options import MaskFunction
from posenc.attn.side import Side
from posenc.evaluate import as_column, as_row
from posenc.positions import visible
from posenc.protocol import Array, Namespace, Window


@dataclass(frozen=True)
class Mask:
    """A mask as a function of positions, or of positions and segments."""

    function: MaskFunction
    with_segments: bool

    def __call__(
        self, q_pos: Array, k_pos: Array, q_seg: Array | None, k_seg: Array | None
    ) -> Array:
        """Whether a key is visible to a query, elementwise over broadcast arguments."""
        segments = (q_seg, k_seg) if self.with_segments else ()
        mask: Array = self.function(q_pos, k_pos, *segments)
        return mask


@dataclass(frozen=True)
class FirstTokens:
    """The caller's window, ``sink_tokens`` and mask as one function.

    For calls of regions, whose ``window`` is that of the region.
    """

    window: Window
    sink_tokens: int
    mask: Mask | None

    def __call__(self, q_pos: Array, k_pos: Array, *segments: Array) -> Array:
        pairs = visible(q_pos, k_pos, window=self.window, sink_tokens=self.sink_tokens)
        if self.mask is not None:
            allowed = self.mask(q_pos, k_pos, *(segments or (None, None)))
            pairs = allowed if pairs is None else pairs & allowed
        assert pairs is not None
        return pairs


def as_mask(given: Any, q: Array, k: Array, xp: Namespace) -> Array | Mask | None:
    """The caller's mask: booleans, or a ``Mask`` for a function of two or four arguments."""
    if not callable(given) or hasattr(given, "dtype"):
        return as_pairs("mask", given, q, k, xp.bool, xp)
    try:
        signature = inspect.signature(given)
    except ValueError:  # a function written in C, such as torch.ge
        return Mask(given, False)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        name for name, p in signature.parameters.items()
        if p.kind in kinds and p.default is inspect.Parameter.empty
    ]  # fmt: skip
    if len(needed) not in (2, 4):
        raise ValueError(
            f"mask must be booleans (B or 1, H or 1, Q, K), or a function of (q_pos, k_pos) or of "
            f"(q_pos, k_pos, q_seg, k_seg), got a function of {len(needed)} arguments: {signature}"
        )
    if needed[0] in ("b", "b_idx", "batch", "batch_idx"):
        raise ValueError(
            f"mask must be a function of (q_pos, k_pos) or of (q_pos, k_pos, q_seg, k_seg), got "
            f"{signature}: leave out batch and head of FlexAttention's mask_mod"
        )
    return Mask(given, len(needed) == 4)


def check_mask_result(mask: Mask, query: Side, key: Side, xp: Namespace) -> None:
    """Check the mask on the first query and key: it returns one boolean for each pair."""
    (q_pos, q_seg, *_), (k_pos, k_seg, *_) = (s.select(slice(0, 1)) for s in (query, key))
    segments: tuple[Array | None, Array | None] = None, None
    if q_seg is not None and k_seg is not None:
        segments = as_column(q_seg), as_row(k_seg)
    elif mask.with_segments:
        raise ValueError(
            "mask is a function of (q_pos, k_pos, q_seg, k_seg), but there are no segments: give "
            "q_seg and k_seg, or a function of (q_pos, k_pos)"
        )
    result = mask(as_column(q_pos), as_row(k_pos), *segments)
    if not hasattr(result, "dtype") or not xp.isdtype(result.dtype, "bool"):
        kind = getattr(result, "dtype", type(result).__name__)
        raise TypeError(
            f"mask must return booleans, True where a query sees a key, got {kind}; "
            "numbers to add to scores are bias="
        )
    shape = tuple(result.shape)
    batches = [p.shape[0] for p in (q_pos, k_pos, q_seg, k_seg) if p is not None and p.ndim == 2]
    largest = (max([1, *batches]), 1, 1, 1)
    fits = len(shape) <= 4 and all(
        have in (1, want) for have, want in zip(reversed(shape), reversed(largest), strict=False)
    )
    if not fits:
        raise ValueError(
            "mask must return one boolean for each pair of positions, elementwise; for one query "
            f"and one key it returned shape {shape}"
        )
