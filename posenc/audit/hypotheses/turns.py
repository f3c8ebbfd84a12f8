"""A plain rotation whose every part can be wrong, in float64 NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posenc.audit.gold import Question, at_length
from posenc.audit.hypotheses.positions import round_to
from posenc.schemes import RoPE
from posenc.testing.framework import Host


@dataclass(frozen=True)
class Turn:
    """``x * cos + partner(x) * sin`` with ``cos`` and ``sin`` of ``pos * frequencies``.

    Attributes
    ----------
    pairs
        Which channels ``partner`` swaps: ``half`` or ``interleaved``.
    table
        How cosines and sines are laid out along the channels. It should equal ``pairs``.
    stored
        How the result is laid out. It should equal ``pairs``.
    sign
        -1 rotates the other way.
    first
        The first channel that rotates.
    """

    frequencies: Host
    pairs: str
    table: str
    stored: str
    factor: float
    sign: float = 1.0
    first: int = 0
    rounded: tuple[str, ...] = ()
    half: str = "bfloat16"

    @classmethod
    def of(cls, rope: RoPE, pos: Host) -> Turn:
        """The right one."""
        longer: Any = at_length(rope, pos)
        layout = longer.layout
        frequencies = np.array(longer.frequencies())
        return cls(frequencies, layout, layout, layout, longer.attention_factor)

    def change(self, **other: Any) -> Turn:
        """The same but for some parts."""
        return replace(self, **other)

    def values(self, question: Question) -> Host:
        """What it makes of the vectors of a question."""
        x, width = question.vectors["x"], 2 * len(self.frequencies)
        if self.first + width > x.shape[-1]:
            raise ValueError("more channels rotate than there are")
        angle = self.angles(question.q_pos)[:, None]
        cos, sin = np.cos(angle), np.sin(angle)
        if "tables" in self.rounded:
            cos, sin = round_to(cos, self.half), round_to(sin, self.half)
        part = x[..., self.first : self.first + width]
        cos, sin = (_spread(a, self.table) for a in (cos, sin))
        turned = self.factor * (part * cos + self.sign * _partner(part, self.pairs) * sin)
        if self.stored != self.pairs:
            turned = _stored(turned, self.pairs)
        out = np.array(x, np.float64)
        out[..., self.first : self.first + width] = turned
        return out

    def angles(self, pos: Host) -> Host:
        """``(B, L, n)``."""
        at, frequencies = pos.astype(np.float64)[..., None], self.frequencies
        if "positions" in self.rounded:
            at = round_to(at, self.half)
        if "frequencies" in self.rounded:
            frequencies = round_to(frequencies, self.half)
        angle: Host = at * frequencies
        return round_to(angle, self.half) if "angles" in self.rounded else angle


def pairs_of(x: Host, layout: str) -> tuple[Host, Host]:
    """First and second channels of the pairs, ``(..., n)`` each."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def joined(first: Host, second: Host, layout: str) -> Host:
    """Channels from the pairs."""
    if layout == "interleaved":
        stacked = np.stack([first, second], -1)
        return stacked.reshape(*first.shape[:-1], -1)
    return np.concatenate([first, second], -1)


def _partner(x: Host, layout: str) -> Host:
    first, second = pairs_of(x, layout)
    return joined(-second, first, layout)


def _spread(values: Host, layout: str) -> Host:
    return joined(values, values, layout)


def _stored(turned: Host, pairs: str) -> Host:
    other = "half" if pairs == "interleaved" else "interleaved"
    return joined(*pairs_of(turned, pairs), other)
