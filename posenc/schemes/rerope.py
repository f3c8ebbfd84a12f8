"""ReRoPE: RoPE whose distances stop growing, or grow more slowly, from a window on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from posenc.contract.fields import Distance, Positive
from posenc.contract.protocol import Array, Namespace, PositionScheme, Role, Window
from posenc.schemes.log_scale import LogScale
from posenc.schemes.moved_rope import MovedRoPE
from posenc.schemes.rope import Layout, RoPE
from posenc.schemes.scalings import PI, Scaling
from posenc.schemes.sum import Sum


@dataclass(frozen=True)
class ReRoPE(
    PositionScheme,
    paper="Su 2023, github.com/bojone/rerope (no paper)",
    trained_as="rope",
):
    """RoPE in which keys at distance ``n >= window`` are as if at ``window + (n - window) / leak``.

    With ``n = i - j`` of query ``i`` and key ``j``, ``w`` for ``window`` and ``c`` for ``leak``::

        key     before ...        -w         query          +w        ... after
                ---- far before ---|---------- near ---------|---- far after ----
        turned   w + (n - w) / c               n                -w + (n + w) / c
        as by
        by      RoPE scaled by c,      RoPE as it is      RoPE scaled by c, queries
                queries w - w/c ahead                     w - w/c behind

    Without ``leak``, far keys are all as if at ``w`` or ``-w``. Keys after the query mirror those
    before it. Near and far keys are two calls of attention, merged by log-sum-exp; without a causal
    mask there are three. So cached keys are raw. Angles are as exact as RoPE's.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``, even.
    window
        The first distance that changes, ``w``. Left out in ``posenc.make``, it is a quarter of
        ``train_len``, as in the authors' table of results.
    leak
        What distance beyond the window is divided by. Default: nothing is left of it.
    train_len
        The length ``L`` of training. If given, as ``posenc.make`` does, the query at position ``p``
        is multiplied by ``max(1, ln(p + 1) / ln L)``, as in released code.
    base, layout
        As in ``RoPE``.
    """

    head_dim: int
    window: Distance
    leak: Positive | None = None
    train_len: int | None = None
    base: float = 10_000.0
    layout: Layout = "half"
    _regions: tuple[tuple[PositionScheme, Window], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        near, w = RoPE(self.head_dim, self.base, self.layout), self.window
        parts: list[PositionScheme] = [near, self._far(1), self._far(-1)]
        if self.train_len is not None:
            factor = LogScale("rerope", self.train_len)
            parts = [Sum(factor, part) for part in parts]
        windows = (w - 1, w - 1), (None, -w), (-w, None)
        object.__setattr__(self, "_regions", tuple(zip(parts, windows, strict=True)))

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        """A window of a quarter of the training length."""
        return {"window": max(1, sizes["train_len"] // 4)} if "train_len" in sizes else {}

    def _far(self, sign: int) -> PositionScheme:
        """The scheme of far keys: those before the query, or (-1) those after it."""
        settings = self.head_dim, self.base, self.layout
        kept = _Ahead(*settings, scaling=_Kept(self.window, self.leak), steps=sign)
        return kept if self.leak is None else Sum(kept, RoPE(*settings, scaling=PI(self.leak)))

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        return self._regions


@dataclass(frozen=True)
class _Kept(Scaling):
    """Frequencies times ``w - w / leak``, so that one position is as many."""

    window: int = 1
    leak: float | None = None

    def scaled(
        self, frequencies: Sequence[Decimal], *, base: Decimal, dim: int
    ) -> Iterable[Decimal]:
        lost = 0 if self.leak is None else self.window / Decimal(self.leak)
        return (f * (self.window - lost) for f in frequencies)


@dataclass(frozen=True)
class _Ahead(MovedRoPE):
    """Queries turned by a fixed number of positions, keys as they are."""

    steps: int = 1

    def moved(self, pos: Array, role: Role, xp: Namespace) -> Array | None:
        return 0 * pos + self.steps if role == "query" else None
