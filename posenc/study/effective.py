"""Effective length: to which length a score holds, by two published definitions.

=========  =====================================================================================
``RULER``  the longest length whose score, like that of all shorter ones, is at least .856: that
           of Llama 2 7B at 4096 tokens, the baseline of Hsieh et al. 2024, arXiv 2404.06654.
``NoLiMa`` the same for 85 % of the scheme's own score at the training length; Modarressi et al.
           2025, arXiv 2502.05167.
=========  =====================================================================================

A loss of text, which falls as a model gets better, holds where it is at most the loss of the
baseline at the training length, and at most the scheme's own loss there divided by .85.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RULER, NOLIMA = 0.856, 0.85
_DRAWS = 400  # of the bootstrap
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Effective:
    """An effective length; 0 if the score does not hold at the shortest length either."""

    length: int
    low: int
    high: int
    lengths: tuple[int, ...]

    def text(self) -> str:
        """``32 [16, 64]``; ``≥ 64`` where it holds at every length that was tried."""
        shown = [_shown(n, self.lengths) for n in (self.length, self.low, self.high)]
        return shown[0] if self.low == self.high else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def effective_length(
    scores: Mapping[int, Sequence[Array]],
    *,
    least: float | Sequence[Array] | None = None,
    lower: bool = False,
    same_texts: bool = False,
) -> Effective | None:
    """The effective length of scores by length, with a bootstrap interval of 95 %.

    Parameters
    ----------
    scores
        By length from that of training on: one array per seed, with one score per sequence.
    least
        The absolute threshold; None for NoLiMa's, relative to the shortest length. Or scores of the
        same texts, one array per seed, whose mean is the threshold.
    lower
        Whether lower is better, as for losses.
    same_texts
        Whether the sequences of all lengths and seeds are the same texts. They are then drawn
        together, so that hard ones count at all lengths or at none.

    Returns
    -------
    None without scores. The interval is over seeds and sequences: both are drawn with replacement.
    """
    lengths = tuple(sorted(scores))
    if not lengths or not all(scores.values()):
        return None
    rng, found = np.random.default_rng(0), []
    rows = [scores[n] for n in lengths]
    baseline = None if least is None or isinstance(least, float) else least
    fixed = least if least is None or isinstance(least, float) else _mean(least)
    for _ in range(_DRAWS):
        seeds = rng.integers(0, len(rows[0]), len(rows[0]))
        texts = rng.integers(0, rows[0][0].size, rows[0][0].size) if same_texts else None
        at = fixed
        if baseline is not None:  # with the same seeds, if it has as many
            alike = len(baseline) == len(seeds)
            of = seeds if alike else rng.integers(0, len(baseline), len(baseline))
            at = _drawn_mean(baseline, of, texts, rng)
        means = [_drawn_mean(row, seeds, texts, rng) for row in rows]
        found.append(_holds(means, lengths, at, lower))
    low, high = (int(np.quantile(found, q, method="nearest")) for q in (0.025, 0.975))
    means = [_mean(row) for row in rows]
    return Effective(_holds(means, lengths, fixed, lower), low, high, lengths)


def _mean(seeds: Sequence[Array]) -> float:
    return float(np.mean([one.mean() for one in seeds]))


def _drawn_mean(
    seeds: Sequence[Array], chosen: Array, texts: Array | None, rng: np.random.Generator
) -> float:
    """The mean over drawn seeds, and over drawn sequences: ``texts``, or others of each seed."""
    return _mean(
        [
            seeds[n][rng.integers(0, seeds[n].size, seeds[n].size) if texts is None else texts]
            for n in chosen
        ]
    )


def _holds(means: Sequence[float], lengths: Sequence[int], least: float | None, lower: bool) -> int:
    if least is None:
        least = means[0] / NOLIMA if lower else means[0] * NOLIMA
    longest = 0
    for length, mean in zip(lengths, means, strict=True):
        if not (mean <= least if lower else mean >= least):
            break
        longest = length
    return longest


def _shown(length: int, lengths: Sequence[int]) -> str:
    if not length:
        return f"< {lengths[0]}"
    return f"≥ {length}" if length == lengths[-1] else str(length)
