"""Panels of a transform: what each channel does to a score, and a factor by absolute position."""

from __future__ import annotations

import numpy as np

from posenc.apply.feature_needs import reads_hidden
from posenc.cli.drawing.shown import choose_heads, shade_outside
from posenc.cli.drawing.values import Drawing, head_dim
from posenc.contract.protocol import Array
from posenc.study import picture
from posenc.study.picture import Figure, Panel


def transform_panel(drawing: Drawing, factors: Array | None) -> list[Panel]:
    """The panel of a transform, under its heading; none if it has no more than a factor."""
    positions = np.arange(drawing.length)
    total = drawing.scores(slice(None), positions)
    if total is None:
        return []
    width = head_dim(drawing.scheme)
    nothing = drawing.scores(slice(0), drawing.sampled)
    assert nothing is not None
    rows = [drawing.scores(channel, drawing.sampled) for channel in range(width)]
    # Where zeros do not stay zeros, every score holds those of all channels.
    channels = np.asarray([scores[0] - nothing[0] for scores in rows if scores is not None])
    _, kept = np.unique(channels.round(6), axis=0, return_index=True)
    if len(kept) == 1 and factors is not None and np.ptp(factors) > 1e-6:
        return []  # that factor is all there is, and has a panel of its own
    heads_equal = bool((total == total[:1]).all())
    tokens = " of random tokens" if reads_hidden(drawing.scheme) else ""
    axes = "; here for text, with the position on every axis" if drawing.scheme.axes > 1 else ""

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        image = picture.heat_map(left, channels[np.sort(kept)], (drawing.length, len(kept)))
        up = "pair of channels" if 2 * len(kept) == width else "channels without duplicates"
        title = "Each row: one channel of query and key, ⟨T(p) e, T(0) e⟩"
        if nothing.any():
            title = "Each row: one channel, ⟨T(p) e, T(0) e⟩ − ⟨T(p) 0, T(0) 0⟩"
        picture.label(left, title, "query position p (tokens), key at 0", up)
        picture.colourbar(
            figure, image, left, "dot product" if heads_equal else "dot product, head 1"
        )
        shown = [0] if heads_equal else choose_heads(len(total))
        picture.lines(right, positions, {str(h + 1): total[h] / width for h in shown})
        shade_outside(right, drawing.window, positions)
        title = "All channels together, if query and key are equal"
        picture.label(right, title, "distance q − k (tokens)", "dot product, mean of channels")

    heading = f"Transform: effect of positions{tokens} on queries and keys{axes}"
    caption = (
        "Queries and keys are changed by their positions before their dot product. The map has "
        "what each channel then adds to a score: a wave, if channels are turned; fast ones tell "
        "near positions apart, slow ones far positions. The line is their sum."
    )
    return [picture.heading(heading, caption), (3.1, paint)]


def factors_of(drawing: Drawing) -> Array | None:
    """What the transform does to all scores of a query alike, ``(L,)``; None: nothing of the kind.

    No distance explains it.
    """
    width, nothing = head_dim(drawing.scheme), drawing.scale(slice(0), np.arange(1))
    if nothing is None or nothing.any():  # zeros do not stay zeros: no factor alone
        return None
    each = [drawing.scale(channel, drawing.sampled) for channel in range(width)]
    factors = np.asarray([one for one in each if one is not None])
    if not factors.size or not np.allclose(factors, factors[:1, :1], rtol=1e-6, atol=0):
        return None
    return factors[0, 0]


def scale_notes(factors: Array | None) -> list[str]:
    """What the factor on scores is, in words, if it is not 1."""
    if factors is None:
        return []
    low, high = float(factors.min()), float(factors.max())
    if high > low * (1 + 1e-6):
        return [
            f"besides distance, the query's position multiplies its scores: {low:.3g} to {high:.3g}"
        ]
    return [f"all scores are multiplied by {high:.3g}"] if abs(high - 1) > 1e-6 else []


def factor_panel(drawing: Drawing, factors: Array | None) -> list[Panel]:
    """The factor on a query's scores, where its absolute position decides it."""
    if factors is None or factors.max() <= factors.min() * (1 + 1e-6):
        return []

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        picture.lines(axes, drawing.sampled, {"": factors})
        picture.label(axes, "", "query position q (tokens)", "factor on its scores")

    caption = (
        "All scores of a query are multiplied by a number that follows from its own position: "
        "above 1, its attention is sharper."
    )
    return [picture.heading("By absolute position: sharpness of attention", caption), (2.0, paint)]
