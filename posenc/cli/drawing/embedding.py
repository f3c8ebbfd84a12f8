"""Panel of an embedding: its channels, and how alike positions are."""

from __future__ import annotations

import numpy as np

from posenc.cli.drawing.values import Drawing
from posenc.study import picture
from posenc.study.picture import Figure, Panel

_MOST_ROWS = 64  # channels of an embedding; more would blur into one another


def embedding_panel(drawing: Drawing) -> list[Panel]:
    """The panel of an embedding, under its heading; none without one."""
    positions = np.arange(drawing.length)
    vectors = drawing.embedding(positions)
    if vectors is None:
        return []
    some = sorted({drawing.length // 8, drawing.length // 2, (7 * drawing.length) // 8})
    norms = np.linalg.norm(vectors, axis=-1)
    product, scale = vectors @ vectors[some].T, norms[:, None] * norms[some]
    similarity = np.divide(product, scale, out=np.zeros_like(product), where=scale > 0)

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        channels = vectors.shape[-1]
        # An even step keeps to sines, or to cosines, where these alternate.
        step = 1 if channels <= _MOST_ROWS else 2 * -(-channels // (2 * _MOST_ROWS))
        image = picture.heat_map(
            left, vectors[drawing.sampled, ::step].T, (drawing.length, channels)
        )
        title = "Value" if step == 1 else f"Value of channels 0, {step}, {2 * step}, …"
        picture.label(left, title, "position (tokens)", "channel")
        picture.colourbar(figure, image, left, "embedding")
        curves = {str(at): similarity[:, n] for n, at in enumerate(some)}
        picture.lines(right, positions, curves, "position", picture.APART)
        title = "How alike the vectors of two positions are"
        picture.label(right, title, "the other position (tokens)", "cosine similarity")

    caption = (
        "Each position has a vector of its own, which is added to the token's vector where the "
        "model begins. It tells absolute positions; attention finds distances only as far as "
        "vectors of near positions are alike."
    )
    return [picture.heading("Embedding: added to the tokens", caption), (3.0, paint)]
