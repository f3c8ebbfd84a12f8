"""Dual chunk attention: RoPE inside of chunks, and distances seen in training between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from posenc.contract.checks import check_count
from posenc.contract.fields import Count, Distance, Positive
from posenc.contract.protocol import Array, Namespace, PositionScheme, Role, Window
from posenc.schemes.chunk import Chunk
from posenc.schemes.moved_rope import MovedRoPE
from posenc.schemes.rope import Layout
from posenc.schemes.sum import Sum


@dataclass(frozen=True)
class DualChunk(PositionScheme, paper="An et al. 2024, arXiv 2402.17463", trained_as="rope"):
    """RoPE at positions in chunks of ``s = chunk_size - local_size``, keys always at ``j mod s``.

    The query at ``i`` has another position for keys of each part, with ``c`` for ``chunk_size``:

    - in its own chunk: ``i mod s``;
    - in the chunk before it: ``min(i mod s + s, c)``;
    - in earlier ones: ``min(2s - 1, c)``.

    So the nearest ``local_size`` keys have RoPE's distance in any case, and no distance is above
    ``c``. Keys in later chunks mirror those in earlier ones: their distance is the negative of what
    it would be with query and key swapped.

    Three calls of attention are merged by log-sum-exp; without a causal mask there are five. So
    cached keys are raw.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``, even.
    train_len
        The length ``L`` of training.
    chunk_size
        The largest distance, ``c``. Default: ``3/4 L``, as in released code.
    local_size
        Default: ``L/8``, as in the first released code; a later version has ``L/16``.
    base, layout
        As in ``RoPE``.

    Section 3.
    """

    head_dim: Count
    train_len: Distance
    chunk_size: Distance | None = None
    local_size: int | None = None
    base: Positive = 10_000.0
    layout: Layout = "half"
    _regions: tuple[tuple[PositionScheme, Window], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        chunk = max(1, self.train_len * 3 // 4) if self.chunk_size is None else self.chunk_size
        local = self.train_len // 8 if self.local_size is None else self.local_size
        if check_count("local_size", local, least=0) >= chunk:
            raise ValueError(f"local_size must be below chunk_size={chunk}, got {local}")
        s = chunk - local
        regions = (
            (self._part(s, chunk, (0, 0)), (s - 1, s - 1)),
            (self._part(s, chunk, (1, -1), "query"), (2 * s - 1, -1)),
            (self._part(s, chunk, (None, -2), "query"), (None, -s - 1)),
            (self._part(s, chunk, (-1, 1), "key"), (-1, 2 * s - 1)),
            (self._part(s, chunk, (-2, None), "key"), (-s - 1, None)),
        )
        object.__setattr__(self, "_regions", regions)

    def _part(self, size: int, limit: int, chunks: Window, later: Role | None = None) -> Sum:
        """The scheme of some chunks; with ``later``, which of query and key is in the later one."""
        settings, adjacent = (self.head_dim, self.base, self.layout), None not in chunks
        inside = _InChunk(*settings, size=size, limit=limit, later=later, adjacent=adjacent)
        return Sum(inside, Chunk(size, chunks))

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        return self._regions


@dataclass(frozen=True)
class _InChunk(MovedRoPE):
    """RoPE at ``pos mod size``; the later of query and key is ahead by up to ``limit``."""

    size: int = 1
    limit: int = 1
    later: Role | None = None
    adjacent: bool = True

    def moved(self, pos: Array, role: Role, xp: Namespace) -> Array:
        at = pos % self.size
        if role == self.later:
            ahead = at + self.size if self.adjacent else 0 * at + 2 * self.size - 1
            at = xp.clip(ahead, max=self.limit)
        return at
