"""Which bytes are trained on and scored: the same for every scheme of a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from posenc.positions.integers import randomised

Tokens = np.ndarray[Any, Any]
Data = bytes | Tokens  # of a text, or of a mapped file


def training_starts(data: Data, *, seed: int, steps: int, batch_size: int, length: int) -> Tokens:
    """Starts of the training windows, ``(steps, batch_size)``; they depend on the seed only."""
    rng = np.random.default_rng([seed, 2])
    return rng.integers(0, len(data) - length, size=(steps, batch_size))


def training_positions(reach: int, *, seed: int, steps: int, length: int) -> Tokens | None:
    """Positions ``(steps, length)``, drawn from ``0 .. reach - 1``; None for ``reach`` 0.

    All sequences of a step share them. Ruoss et al. 2023, arXiv 2305.16843.
    """
    if not reach:
        return None
    return randomised(np.random.default_rng([seed, 3]), length, reach, batch=steps)


def cut(data: Data, starts: Tokens, length: int) -> Tokens:
    """Windows ``starts.shape + (length + 1,)``: ``length`` inputs, each with its next byte."""
    text = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    return np.asarray(text[starts[..., None] + np.arange(length + 1)])


def held_out_stretches(data: Data, *, count: int, longest: int) -> Tokens:
    """``count`` evenly spaced stretches of the held-out text, ``(count, longest + 1)``."""
    return cut(data, _starts(data, count, longest), longest)


def _starts(data: Data, count: int, longest: int) -> Tokens:
    return np.linspace(0, len(data) - longest - 1, count).astype(np.int64)


def between_stretches(data: Data, *, count: int, longest: int, length: int) -> Tokens:
    """Stretches ``(N, L + 1)`` of the held-out text apart from ``held_out_stretches``.

    They share no byte. One lies in the middle of each gap. ``L`` is the largest multiple of
    ``length`` that fits in every gap and is not longer than the scored stretches.

    Raises
    ------
    ValueError
        A gap is too small for ``length``.
    """
    begins = _starts(data, count, longest) + longest + 1
    ends = np.append(begins[1:] - longest - 1, len(data))
    if count > 1:  # the last stretch ends with the text
        begins, ends = begins[:-1], ends[:-1]
    room = int((ends - begins).min())
    size = min(max(longest, length), room - 1) // length * length
    if size < length:
        raise ValueError(
            f"the held-out text is too small for a sweep: {room} bytes lie between two of the "
            f"{count} stretches of {longest} that are scored, and choosing a value needs "
            f"{length + 1}; give more text, fewer windows (--eval-windows), or shorter lengths"
        )
    return cut(data, begins + (ends - begins - size - 1) // 2, size)


def non_overlapping(stretches: Tokens, length: int) -> Tokens:
    """The same stretches cut into windows of ``length``; a remainder is left out.

    So every length that divides the longest scores the same bytes. The protocol of Press et al.
    2022: a shorter window has more targets with little left context (the early-token curse).
    """
    starts = np.arange(0, stretches.shape[1] - length, length)
    pieces = stretches[:, starts[:, None] + np.arange(length + 1)]
    return pieces.reshape(-1, length + 1)


def sliding(stretches: Tokens, length: int, stride: int) -> Tokens:
    """The same stretches cut into windows of ``length`` that start ``stride`` after one another.

    In order, ``(stretches, windows, length + 1)``; a remainder is left out. The first window of a
    stretch scores all its targets, each other one its last ``stride``: then a target has a context
    of at least ``length - stride``, after the first window. With ``stride = length`` these are the
    windows of ``non_overlapping``. Press et al. 2022, arXiv 2108.12409, appendix; "Perplexity of
    fixed-length models" in the documentation of transformers, which keeps the remainder.
    """
    starts = np.arange(0, stretches.shape[1] - length, stride)
    return stretches[:, starts[:, None] + np.arange(length + 1)]


def sliding_mean(losses: Tokens, stride: int) -> float:
    """The mean over the targets that ``sliding`` scores, of ``losses (N, windows, length)``."""
    first, others = losses[:, 0], losses[:, 1:, -stride:]
    return float(np.concatenate([first.ravel(), others.ravel()]).mean())


def same_targets(stretches: Tokens, length: int) -> Tokens:
    """The last ``length`` inputs of each stretch: the same last targets, a growing context."""
    return stretches[:, -(length + 1) :]
