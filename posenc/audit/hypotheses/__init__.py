"""Known faults, one file per subject: positions, rotations, biases, attention, embeddings."""

from __future__ import annotations

from collections.abc import Callable

from posenc.audit.hypotheses import (
    attentions,
    biases,
    embeddings,
    measures_of,
    positions,
    rotations,
    scores,
)

__all__ = ["EVERY", "measures"]

EVERY = (
    *rotations.FAULTS,
    *biases.FAULTS,
    *scores.FAULTS,
    *attentions.FAULTS,
    *embeddings.FAULTS,
    *positions.FAULTS,
)


def measures() -> tuple[Callable[..., str], ...]:
    """What is measured where no fault explains a result, in order."""
    return measures_of.MEASURES
