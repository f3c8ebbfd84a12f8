"""Faults of positions: ignored, shifted, clipped, rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from posenc.audit.faults import Guess, Hypothesis
from posenc.audit.gold import Question
from posenc.testing.framework import Host

ALL = ("rotation", "bias", "attention", "embedding")
TOKENS = ("rotation", "attention", "embedding")
HALVES = {"bfloat16": 3e38, "float16": 65504.0}  # and the largest number of each
_TABLES = (64, 100, 128, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def moved(question: Question, move: Callable[[Host], Host]) -> Question:
    """The question at other positions."""
    keys = None if question.k_pos is None else move(question.k_pos)
    return question.change(q_pos=move(question.q_pos), k_pos=keys)


def round_to(values: Host, dtype: str) -> Host:
    """Numbers rounded to ``bfloat16`` or ``float16``."""
    if dtype == "float16":
        return np.asarray(values, np.float64).astype(np.float16).astype(np.float64)
    bits: Host = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64).reshape(np.shape(values))


def _rows(question: Question) -> Iterator[Guess]:
    if question.q_pos.shape[0] < 2:
        return
    sentence = (
        "Rows after the first take the positions of row 0: each row of a batch has positions of "
        "its own."
    )
    yield sentence, moved(question, lambda pos: np.broadcast_to(pos[:1], pos.shape).copy())


def _counted(pos: Host) -> Host:
    counted = np.arange(pos.shape[1])
    counted = counted if pos.ndim == 2 else counted[:, None]
    return np.broadcast_to(counted, pos.shape).copy()


def _ignored(question: Question) -> Iterator[Guess]:
    sentence = (
        "It ignores the positions that it is given and counts 0, 1, 2, ... in every row: an offset "
        "of a cache is lost, padding counts as tokens, and packed documents never restart."
    )
    if question.kind == "bias":
        return
    if question.k_pos is None:
        yield sentence, moved(question, _counted)
        first = question.q_pos[:1, :1]
        same = (
            "It takes the first position as an offset of the whole batch and counts on from it, "
            "whatever positions follow."
        )
        if question.q_pos.ndim == 2:
            yield same, moved(question, lambda pos: _counted(pos) + first)
            own = "It counts on from each row's first position, whatever positions follow."
            yield own, moved(question, lambda pos: _counted(pos) + pos[:, :1])
        return
    keys = _counted(question.k_pos)
    yield sentence, question.change(k_pos=keys, q_pos=keys[:, -question.q_pos.shape[1] :])
    cached = (
        "Queries of a cached step count from 0 again: the number of cached keys is not added to "
        "their positions."
    )
    yield cached, question.change(q_pos=_counted(question.q_pos))


def _bias_ignored(question: Question) -> Iterator[Guess]:
    keys = question.q_pos if question.k_pos is None else question.k_pos
    index_q, index_k = np.arange(len(question.q_pos)), np.arange(len(keys))
    by_index = question.change(q_pos=index_q, k_pos=index_k)
    yield (
        (
            "It takes indices for positions: query i and key j count from 0, so a query of a "
            "cached step has position 0."
        ),
        by_index,
    )
    last = question.change(q_pos=index_q + len(keys) - len(index_q), k_pos=index_k)
    yield (
        (
            "It takes indices for positions, with the queries at the end of the keys, whatever "
            "positions it is given."
        ),
        last,
    )


def _shifted(question: Question) -> Iterator[Guess]:
    for step, way in ((1, "from 1 instead of 0"), (-1, "one too low")):
        yield f"Positions are one off: it counts {way}.", moved(question, partial(np.add, step))
    if question.k_pos is not None and question.kind != "bias":
        for step in (1, -1):
            way = "after" if step > 0 else "before"
            sentence = f"Positions of queries are one off: each is one {way} its own."
            yield sentence, question.change(q_pos=question.q_pos + step)


def _modulo(size: int, pos: Host) -> Host:
    return pos % size


def _rounded_to(dtype: str, pos: Host) -> Host:
    return round_to(pos, dtype).astype(np.int64)


def _clipped(question: Question) -> Iterator[Guess]:
    most = int(np.max(question.q_pos))
    for size in (n for n in _TABLES if n <= most):
        clipped = f"Positions from {size} on are taken as {size - 1}: its table has {size} entries."
        yield clipped, moved(question, partial(np.minimum, size - 1))
        around = f"Positions from {size} on begin again at 0: its table has {size} entries."
        yield around, moved(question, partial(_modulo, size))


def _rounded(question: Question) -> Iterator[Guess]:
    for dtype, exact in (("bfloat16", 256), ("float16", 2048)):
        sentence = (
            f"Positions are rounded to {dtype}, which has every integer only up to {exact}: keep "
            "positions as integers or float32."
        )
        if dtype == "float16" and np.max(np.abs(question.q_pos)) > 65504:
            continue
        yield sentence, moved(question, partial(_rounded_to, dtype))


def _reversed(question: Question) -> Iterator[Guess]:
    sentence = "It takes the tokens in their order in memory, reversed: the last has position 0."
    if question.kind != "bias":
        yield sentence, moved(question, lambda pos: _counted(pos)[:, ::-1])


FAULTS = (
    Hypothesis("row 0 for all rows", TOKENS, _rows),
    Hypothesis("positions ignored", TOKENS, _ignored),
    Hypothesis("indices for positions", ("bias",), _bias_ignored),
    Hypothesis("positions one off", ALL, _shifted),
    Hypothesis("positions in half precision", ALL, _rounded),
    Hypothesis("positions beyond a table", ALL, _clipped),
    Hypothesis("reversed", TOKENS, _reversed),
)
