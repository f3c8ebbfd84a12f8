"""A caller's own mask: booleans, or a function of positions and segments."""

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
    """A caller's mask as a function: of positions, or of positions and segments."""

    function: MaskFunction
    with_segments: bool

    def __call__(
        self, q_pos: Array, k_pos: Array, q_seg: Array | None, k_seg: Array | None
    ) -> Array:
        """Whether a query may see a key; elementwise in its broadcast arguments."""
        segments = (q_seg, k_seg) if self.with_segments else ()
        found: Array = self.function(q_pos, k_pos, *segments)
        return found


@dataclass(frozen=True)
class FirstTokens:
    """A caller's window and first tokens as a mask, for regions, which have windows of their own.

    ``mask``: what the caller's own mask lets be seen besides.
    """

    window: Window
    sink_tokens: int
    mask: Mask | None

    def __call__(self, q_pos: Array, k_pos: Array, *segments: Array) -> Array:
        seen = visible(q_pos, k_pos, window=self.window, sink_tokens=self.sink_tokens)
        if self.mask is not None:
            own = self.mask(q_pos, k_pos, *(segments or (None, None)))
            seen = own if seen is None else seen & own
        assert seen is not None
        return seen


def as_mask(given: Any, q: Array, k: Array, xp: Namespace) -> Array | Mask | None:
    """The caller's mask: booleans, or a function of two or four arguments."""
    if not callable(given) or hasattr(given, "dtype"):
        return as_pairs("mask", given, q, k, xp.bool, xp)
    try:
        signature = inspect.signature(given)
    except ValueError:  # one of C's, such as torch.ge
        return Mask(given, False)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        name for name, p in signature.parameters.items()
        if p.kind in kinds and p.default is inspect.Parameter.empty
    ]  # fmt: skip
    if len(needed) not in (2, 4):
        raise ValueError(
            f"mask must be booleans (B or 1, H or 1, Q, K), or a function of (q_pos, k_pos) or of "
            f"(q_pos, k_pos, q_seg, k_seg), got one of {len(needed)} arguments: {signature}"
        )
    if needed[0] in ("b", "b_idx", "batch", "batch_idx"):
        raise ValueError(
            f"mask must be a function of (q_pos, k_pos) or of (q_pos, k_pos, q_seg, k_seg), got "
            f"one of {signature}: leave out batch and head of FlexAttention's mask_mod"
        )
    return Mask(given, len(needed) == 4)


def check_mask_result(mask: Mask, query: Side, key: Side, xp: Namespace) -> None:
    """A mask that is a function answers booleans, one for each pair: asked of the first."""
    (q_pos, q_seg, *_), (k_pos, k_seg, *_) = (s.select(slice(0, 1)) for s in (query, key))
    segments: tuple[Array | None, Array | None] = None, None
    if q_seg is not None and k_seg is not None:
        segments = as_column(q_seg), as_row(k_seg)
    elif mask.with_segments:
        raise ValueError(
            "mask is a function of (q_pos, k_pos, q_seg, k_seg), and there are no segments: give "
            "q_seg and k_seg, or a function of (q_pos, k_pos)"
        )
    found = mask(as_column(q_pos), as_row(k_pos), *segments)
    if not hasattr(found, "dtype") or not xp.isdtype(found.dtype, "bool"):
        kind = getattr(found, "dtype", type(found).__name__)
        raise TypeError(
            "mask must answer booleans, True where a query sees a key, got an answer of "
            f"{kind}; numbers to add to scores are bias="
        )
    shape = tuple(found.shape)
    wide = [p.shape[0] for p in (q_pos, k_pos, q_seg, k_seg) if p is not None and p.ndim == 2]
    most = (max([1, *wide]), 1, 1, 1)
    fits = len(shape) <= 4 and all(
        have in (1, want) for have, want in zip(reversed(shape), reversed(most), strict=False)
    )
    if not fits:
        raise ValueError(
            "mask must answer one boolean for each pair of positions, elementwise: asked of "
            f"one query and one key, it answered {shape}"
        )
