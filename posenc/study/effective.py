"""Effective length: to which length a score holds, by two published definitions.

=========  =====================================================================================
``RULER``  the longest length whose score, like that of all shorter ones, is at least .856: that
           of Llama 2 7B at 4096 tokens, the baseline of Hsieh et al. 2024, arXiv 2404.06654
``NoLiMa`` the same for 85 % of the scheme's own score at the training length; Modarressi et al.
           2025, arXiv 2502.05167
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
    scores: Mapping[int, Sequence[Array]], *, least: float | None = None, lower: bool = False
) -> Effective | None:
    """The effective length of scores by length, with a bootstrap interval of 95 %.

    Parameters
    ----------
    scores
        By length from that of training on: one array per seed, with one score per sequence.
    least
        The absolute threshold; None for NoLiMa's, relative to the shortest length.
    lower
        Whether lower is better, as for losses.

    Returns
    -------
    None without scores. The interval is over seeds and sequences: both are drawn with replacement.
    """
    lengths = tuple(sorted(scores))
    if not lengths or not all(scores.values()):
        return None
    rng, draws = np.random.default_rng(0), []
    seeds = len(scores[lengths[0]])
    for _ in range(_DRAWS):
        chosen = rng.integers(0, seeds, seeds)
        draws.append([_drawn_mean(scores[n], chosen, rng) for n in lengths])
    means = np.array([float(np.mean([s.mean() for s in scores[n]])) for n in lengths])
    found = [_holds(row, lengths, least, lower) for row in draws]
    low, high = (int(np.quantile(found, q, method="nearest")) for q in (0.025, 0.975))
    return Effective(_holds(means, lengths, least, lower), low, high, lengths)


def _drawn_mean(seeds: Sequence[Array], chosen: Array, rng: np.random.Generator) -> float:
    """The mean over drawn seeds, and over drawn sequences of each."""
    drawn = (seeds[n][rng.integers(0, seeds[n].size, seeds[n].size)] for n in chosen)
    return float(np.mean([one.mean() for one in drawn]))


def _holds(
    means: Sequence[float] | Array, lengths: Sequence[int], least: float | None, lower: bool
) -> int:
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
