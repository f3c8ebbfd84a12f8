"""Chunks: a query sees the keys of its own chunk of positions only, or of some chunks around it."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.contract.fields import Distance
from posenc.contract.params import float_dtype
from posenc.contract.protocol import Array, Arrays, Namespace, PositionScheme, Window
from posenc.positions.integers import visible


@dataclass(frozen=True)
class Chunk(PositionScheme, paper="Liu et al. 2018, arXiv 1801.10198"):
    """0 where ``q // size == k // size``, else ``-inf``: ``Sum(RoPE(128), Chunk(8192))``.

    Attention is local to each chunk. Llama 4 has chunks of 8192 on its layers with RoPE. They are
    not a sliding window: under a causal mask the first query of a chunk sees one key, and the last
    one the whole chunk.

    Segments give the same result faster, because implementations skip blocks without visible keys:
    leave the scheme out, and say ``q_seg = k_seg = pos // size``.

    Parameters
    ----------
    size
        Positions of a chunk.
    window
        Which chunks are seen: those at ``-left <= k // size - q // size <= right`` for
        ``(left, right)``, None for no bound. ``(1, 0)`` is the own chunk and the one before it,
        ``(None, -2)`` are all but these two. Default: the own one.

    Section 4.2.4.
    """

    size: Distance = 8192
    window: Window = (0, 0)

    def __post_init__(self) -> None:
        left, right = self.window
        if max(abs(left or 0), abs(right or 0)) > 2**30:  # it would not fit 32 bits
            raise ValueError(f"window must be at most 2**30 chunks or None, got {self.window}")
        if left is not None and right is not None and left + right < 0:
            raise ValueError(f"window must be (left, right) with -left <= right, got {self.window}")

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        back = q // self.size - k // self.size
        seen = visible(back, xp.zeros_like(back), window=self.window)
        zero = xp.zeros_like(back, dtype=float_dtype(params, xp))
        return zero if seen is None else xp.where(seen, zero, zero - xp.inf)
