"""Panels of a bias: a map for each head, its line by distance, and the weights that it makes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from posenc.apply.feature_needs import has_features, reads_features
from posenc.cli.drawing.shown import MOST_HEADS, UNSEEN, choose_heads, shade_outside
from posenc.cli.drawing.values import Drawing
from posenc.contract.protocol import Array, Hook
from posenc.positions.integers import visible
from posenc.study import picture
from posenc.study.picture import Figure, Panel

_STEEP = 10.0  # a larger bias gets a logarithmic scale
_FEW_HEADS = 4  # of arrays at random, of which more heads say no more
_CELLS = {"aspect": "equal", "interpolation": "nearest"}


def bias_panel(drawing: Drawing) -> list[Panel]:
    """The panel of a bias or a window, under its heading; none without either."""
    values = drawing.bias(drawing.sampled, drawing.sampled)
    if values is None:
        return []
    heads = choose_heads(len(values), _FEW_HEADS if drawing.random else MOST_HEADS)
    biased = Hook.BIAS in drawing.scheme.hooks()
    at = drawing.length - 1 if drawing.causal else drawing.length // 2
    keys = np.arange(drawing.length)
    line = drawing.bias(np.asarray([at]), keys)
    assert line is not None
    weights = np.where(np.isneginf(line[:, 0]), np.nan, _softmax(line[:, 0]))
    if (inside := visible(at, keys, window=drawing.reach)) is not None:
        line = np.where(inside, line, np.nan)  # what is outside has a shade instead of crosses

    def paint(figure: Figure) -> None:
        maps_width = min(6.2 if len(heads) > 4 else 4.4, 0.9 + 2.7 * len(heads))
        left, right = figure.subfigures(1, 2, width_ratios=(maps_width, picture.WIDTH - maps_width))
        _bias_maps(left, drawing, {str(h + 1): values[h] for h in heads})
        *rest, below = right.subplots(1 + biased, 1, sharex=True, squeeze=False)[:, 0]
        distance, name = (at - keys, "distance q − k") if drawing.causal else (keys - at, "k − q")
        for above in rest:
            picture.lines(above, distance, {str(h + 1): line[h, 0] for h in heads})
            picture.label(above, f"Query at {at}: bias by distance", "", "bias")
        picture.lines(below, distance, {str(h + 1): 100 * weights[h] for h in heads}, legend=False)
        below.set_yscale("log")
        below.set_ylim(0.01, 150)
        below.set_yticks((0.01, 0.1, 1, 10, 100), ("0.01", "0.1", "1", "10", "100"))
        below.minorticks_off()
        title = f"Attention of query {at}, if all keys had equal content"
        picture.label(below, title, f"{name} (tokens)", "weight (%)")
        for axes in (*rest, below):
            shade_outside(axes, drawing.window, distance)

    height = 4.1 if len(heads) > 4 else 3.4 if biased else 2.8
    return [_bias_heading(drawing, values), (height, paint)]


def _bias_heading(drawing: Drawing, values: Array) -> Panel:
    """What a bias does, and what it depends on: distance, absolute position, or content."""
    scheme, window = drawing.scheme, drawing.window
    if Hook.BIAS not in scheme.hooks():
        return picture.heading(
            f"Window: a query sees keys at distances below {window}",
            "Keys outside have no weight at all. Inside, the mask changes nothing.",
        )
    text = "Each head adds a number to the score of query q and key k, before the softmax: at 0 it "
    text += "changes nothing, at −1 the key's weight is divided by e = 2.72."
    if not reads_features(scheme):
        what = "added to the scores"
        if len(drawing.sampled) == drawing.length:
            same = np.allclose(values[:, 1:, 1:], values[:, :-1, :-1], rtol=1e-6, atol=1e-9)
            where = "It" if scheme.relative else "Up to this length it"
            text += (
                f" {where} is equal along diagonals: distance alone counts."
                if same
                else " It changes along diagonals: absolute position counts too."
            )
    elif has_features(scheme):
        what = "depends on content; here for random tokens"
    else:
        what = "depends on places; here for text, with the position on every axis"
    if window is not None:
        text += f" Keys at distances of {window} and more have no weight."
    return picture.heading(f"Bias: {what}", text)


def _bias_maps(figure: Figure, drawing: Drawing, maps: Mapping[str, Array]) -> None:
    """Draw one map per head on one colour scale, with a legend of the greys."""
    from matplotlib.colors import SymLogNorm

    columns = len(maps) if len(maps) < 3 else 2 if len(maps) < 5 else 4
    rows = -(-len(maps) // columns)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    after_query = (drawing.sampled[None, :] > drawing.sampled[:, None]) & drawing.causal
    stack = np.stack(list(maps.values()))
    masked = np.isneginf(stack) & ~after_query
    colours = picture.colours(np.where(after_query, np.nan, stack))
    steep = max(-colours["vmin"], colours["vmax"]) > _STEEP
    if steep:
        limits = {limit: colours.pop(limit) for limit in ("vmin", "vmax")}
        colours["norm"] = SymLogNorm(1.0, **limits)
    size = drawing.length, drawing.length
    for axes in grid.flat[len(maps) :]:
        axes.set_axis_off()
    for axes, (head, values), minus in zip(grid.flat, maps.items(), masked, strict=False):
        image = picture.heat_map(axes, values, size, **colours, **_CELLS)
        for mask, grey in ((minus, picture.MASKED), (after_query, UNSEEN)):
            layer = np.where(mask, float(grey), np.nan)
            picture.heat_map(axes, layer, size, cmap="gray", vmin=0, vmax=1, **_CELLS)
        picture.label(axes, f"head {head}" if len(maps) > 1 else "", "", "")
    figure.supxlabel("key position k (tokens)", fontsize=9)
    figure.supylabel("query position q (tokens)", fontsize=9)
    if Hook.BIAS in drawing.scheme.hooks():
        picture.colourbar(figure, image, grid, "bias, logarithmic beyond ±1" if steep else "bias")
    masking = "masked by the bias (−∞)" if drawing.window is None else "outside the window (−∞)"
    meanings = {
        masking: (picture.MASKED, masked),
        "after the query (causal mask)": (UNSEEN, after_query),
    }
    _grey_legend(figure, {text: grey for text, (grey, where) in meanings.items() if where.any()})


def _grey_legend(figure: Figure, greys: Mapping[str, str]) -> None:
    """A legend of the greys, above the maps."""
    from matplotlib.patches import Patch

    patches = [Patch(color=grey, label=meaning) for meaning, grey in greys.items()]
    if patches:
        figure.legend(
            handles=patches, fontsize=8, frameon=False, loc="outside upper left", ncols=len(patches)
        )


def _softmax(scores: Array) -> Array:
    """Weights along the last axis; keys at minus infinity have none."""
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
