"""Faults of embeddings: layouts, exponents, bases, half precision, rows of a learned table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from posenc.audit.faults import Guess, Hypothesis
from posenc.audit.gold import Question
from posenc.audit.hypotheses.positions import HALVES, round_to
from posenc.audit.hypotheses.turns import joined
from posenc.schemes import Learned, Sinusoidal
from posenc.testing.framework import Host

EMBEDDING = ("embedding",)
_BASES = (10_000.0, 100.0, 1_000.0, 100_000.0, 500_000.0, 1_000_000.0)
_LAYOUTS = {
    "interleaved": "sines and cosines alternate, [sin, cos, sin, cos, ...]",
    "concatenated": "all sines come before all cosines, [sin | cos]",
    "tensor2tensor": "[sin | cos] with frequencies base**(-k/(D/2 - 1))",
}


def _waves(question: Question) -> tuple[Sinusoidal, Host] | None:
    """The scheme, and its frequencies ``(D/2,)``."""
    scheme = question.scheme
    if not isinstance(scheme, Sinusoidal):
        return None
    last = scheme.layout == "tensor2tensor"
    pairs = np.arange(scheme.dim // 2)
    return scheme, scheme.base ** (-pairs / (scheme.dim // 2 - last))


def _values(scheme: Sinusoidal, angle: Host, layout: str = "", flip: bool = False) -> Host:
    sin, cos = np.sin(angle), np.cos(angle)
    if flip:
        sin, cos = cos, sin
    own = layout or scheme.layout
    return joined(sin, cos, "interleaved" if own == "interleaved" else "half")


def _layout(question: Question) -> Iterator[Guess]:
    found = _waves(question)
    if found is None:
        return
    scheme, frequencies = found
    at = question.q_pos[..., None] * frequencies
    right = f"where layout={scheme.layout!r} is {_LAYOUTS[scheme.layout]}"
    yield (
        f"Cosines come where sines should be, and sines where cosines should be, {right}.",
        _values(scheme, at, flip=True),
    )
    for layout, words in _LAYOUTS.items():
        if layout == scheme.layout:
            continue
        made: dict[str, Any] = {"layout": layout}
        other = question.change(scheme=replace(scheme, **made))
        sentence = f"Its layout is {layout!r}: {words}, {right}."
        yield sentence, other
    for layout, words in (("interleaved", "alternate"), ("concatenated", "are concatenated")):
        yield (
            f"Its sines and cosines {words}, cosines first, {right}.",
            _values(scheme, at, layout, flip=True),
        )
    n, dim = scheme.dim // 2, scheme.dim
    other_layout = "concatenated" if scheme.layout == "interleaved" else "interleaved"
    for layout, more in ((scheme.layout, ""), (other_layout, f", and its layout {other_layout!r}")):
        for exponents, words in (
            (np.arange(n) / (n - 1), f"k/({n} - 1), as in tensor2tensor"),
            (np.arange(n) / n, f"k/{n}"),
            (2 * np.arange(n) / n, f"4k/{dim}, twice the right one"),
            (np.arange(1, n + 1) / n, f"2(k + 1)/{dim}, one pair too late"),
        ):
            yield (
                f"Its frequencies are base**-e with the exponent e = {words}{more}, {right}.",
                _values(scheme, question.q_pos[..., None] * scheme.base**-exponents, layout),
            )
    each = scheme.base ** (-np.arange(dim) / dim)
    yield (
        "Every channel i has a frequency of its own, base**(-i/D): a sine and its cosine must "
        "share one.",
        _each_channel(scheme, question.q_pos[..., None] * each),
    )


def _each_channel(scheme: Sinusoidal, angle: Host) -> Host:
    sine = np.arange(scheme.dim) % 2 == 0
    if scheme.layout != "interleaved":
        sine = np.arange(scheme.dim) < scheme.dim // 2
    return np.where(sine, np.sin(angle), np.cos(angle))


def _base(question: Question) -> Iterator[Guess]:
    scheme = question.scheme
    if isinstance(scheme, Sinusoidal):
        for base in _BASES:
            if base != scheme.base:
                made = replace(scheme, base=base)
                yield f"Its base is {base:g}, not {scheme.base:g}.", question.change(scheme=made)


def _half(question: Question) -> Iterator[Guess]:
    found = _waves(question)
    if found is None:
        return
    scheme, frequencies = found
    pos = question.q_pos[..., None].astype(np.float64)

    def rounded(half: str, *what: str) -> Callable[[str, Host], Host]:
        return lambda name, values: round_to(values, half) if name in what else values

    for half, largest in HALVES.items():
        for what, words in (
            (("frequencies",), "Its frequencies are"),
            (("angles",), "Its angles are"),
            (("positions", "frequencies", "angles"), "Positions, frequencies and angles are"),
            (("values",), "Its sines and cosines are"),
        ):
            if np.max(np.abs(pos)) > largest:
                continue
            turn = rounded(half, *what)
            angle = turn("angles", turn("positions", pos) * turn("frequencies", frequencies))
            sentence = f"{words} rounded to {half}: compute them in float32."
            yield sentence, turn("values", _values(scheme, angle))


def _rows(question: Question) -> Iterator[Guess]:
    """Rows of a learned table, which some models have before that of position 0."""
    scheme = question.scheme
    if not isinstance(scheme, Learned):
        return
    table = np.asarray(question.params["table"], np.float64)
    for offset in range(4):
        rows = question.q_pos + offset
        if offset != scheme.offset and np.max(rows) < len(table):
            yield (
                f"It reads row pos + {offset} of the table, where offset={scheme.offset} is row "
                f"pos + {scheme.offset}.",
                table[rows],
            )
    scale = np.sqrt(scheme.dim)
    right = table[question.q_pos + scheme.offset]
    yield f"It is multiplied by sqrt(D) = {scale:.6g}.", scale * right


FAULTS = (
    Hypothesis("layout of an embedding", EMBEDDING, _layout),
    Hypothesis("rows of a table", EMBEDDING, _rows),
    Hypothesis("base of an embedding", EMBEDDING, _base),
    Hypothesis("half precision of an embedding", EMBEDDING, _half, rounds=True),
)
