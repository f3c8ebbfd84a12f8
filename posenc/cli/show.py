"""A scheme as one picture: its bias, its embedding, its transform, whichever it has."""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from posenc import evaluate
from posenc.attn.call import Call, prepare
from posenc.attn.features import hidden_width
from posenc.checks import check_count, check_scheme
from posenc.cli import picture
from posenc.cli.picture import Figure, Panel
from posenc.params import head_count, init_params
from posenc.protocol import Array, PositionScheme

_MOST_HEADS = 8
_STEEP = 10.0
_HIDDEN = "0.88"
_CELLS = {"aspect": "equal", "interpolation": "nearest"}
_ADDED = "added to the scaled scores"


def draw(
    scheme: PositionScheme,
    path: str | Path,
    *,
    length: int = 128,
    title: str | None = None,
    params: Mapping[str, Array] | None = None,
    causal: bool = True,
) -> Path:
    """Draw what a scheme does to attention: a PNG of 1600 pixels across, or an SVG or PDF.

    Parameters
    ----------
    scheme
        Any scheme: what it has is asked of itself.
    path
        Of the file; it ends in ``.png``, ``.svg`` or ``.pdf``, or in nothing for a PNG.
    length
        Positions ``0 .. length - 1``, or as many of them as the scheme allows.
    title
        Default: the name of the scheme's class.
    params
        Learned arrays by name. Default: ``posenc.init_params(scheme)``.
    causal
        Whether keys after the query are greyed out, and left out of the lines.

    Returns
    -------
    The path written.

    Raises
    ------
    ImportError, OSError
        Without matplotlib; where the file cannot be written.
    """
    check_scheme(scheme)
    length, target = check_count("length", length), Path(path)
    form = target.suffix.lower().removeprefix(".") or "png"
    if form not in picture.FORMATS:
        accepted = ", ".join(f".{name}" for name in picture.FORMATS)
        raise ValueError(f"path must end in one of {accepted}, got {str(path)!r}")
    drawn = _Drawn(scheme, init_params(scheme) if params is None else params, length, causal)
    drawn = drawn.as_far_as_allowed()
    panels = [*_bias_panel(drawn), *_embedding_panel(drawn), *_transform_panel(drawn)]
    notes = []
    if drawn.params:
        notes.append("learned: drawn at initialisation" if params is None else "learned: as given")
    if drawn.length < length:
        notes.append(f"{drawn.length} positions, all that the scheme allows of {length}")
    lines = [textwrap.shorten(repr(scheme), 120, placeholder=" …"), *notes]
    name = title or type(scheme).__name__
    page = picture.page(panels or [_nothing_panel(drawn)], name, lines, form)
    try:
        target.write_bytes(page)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(target)) from error
    return target


@dataclass(frozen=True)
class _Drawn:
    """A scheme with its arrays, over the positions ``0 .. length - 1``."""

    scheme: PositionScheme
    params: Mapping[str, Array]
    length: int
    causal: bool

    def as_far_as_allowed(self) -> _Drawn:
        """Shortened to the positions before the first that is an ``IndexError``."""
        allowed = bisect_left(range(self.length), True, key=self._refuses)
        if not allowed:
            self._evaluate(0)
        return replace(self, scheme=self.scheme.at_length(allowed), length=allowed)

    def _refuses(self, position: int) -> bool:
        try:
            self._evaluate(position)
        except IndexError:
            return True
        return False

    def _evaluate(self, position: int) -> None:
        at = np.asarray([position])
        self.embedding(at)
        self.bias(at, np.asarray([0]))
        self.scores(0, at)

    @property
    def cells(self) -> np.ndarray[Any, Any]:
        """All positions, or evenly chosen ones where a picture cannot show all."""
        count = min(self.length, picture.MOST_CELLS)
        return np.unique(np.linspace(0, self.length - 1, count).round().astype(np.int64))

    def bias(self, q: Array, k: Array) -> Array | None:
        """``(H, Q, K)`` or None; of random tokens where the bias reads features."""
        if not evaluate.reads_features(self.scheme):
            return evaluate.bias(self.scheme, q, k, self.params, dtype=np.float64)
        call = self._of_random_tokens(1 + int(max(q.max(), k.max())))
        query, key = call.query.select(q), call.key.select(k)
        value = evaluate.bias_tile(
            self.scheme, evaluate.as_column(query.encoded_pos), evaluate.as_row(key.encoded_pos),
            call.arrays, query=query.features, key=key.features, dtype=call.dtype, xp=call.xp,
        )  # fmt: skip
        shape = 1, call.q.shape[1], len(q), len(k)
        return None if value is None else np.broadcast_to(value, shape)[0]

    def _of_random_tokens(self, length: int) -> Call:
        """A call of attention whose vectors and hidden states are normal, the same each time."""
        heads, width = head_count(self.scheme) or 1, getattr(self.scheme, "head_dim", 64)
        rng = np.random.default_rng(0)
        # Token by token, so that a longer picture begins with the same.
        q, k = rng.standard_normal((length, 2, heads, width)).transpose(1, 2, 0, 3)[:, None]
        hidden = hidden_width(self.scheme, self.params)
        x = np.random.default_rng(1).standard_normal((1, length, hidden)) if hidden else None
        return prepare(q, k, k, self.scheme, self.params, x=x)

    def embedding(self, pos: Array) -> Array | None:
        """``(L, dim)`` or None."""
        return evaluate.embedding(self.scheme, pos, self.params, dtype=np.float64)

    def scores(self, channel: int | slice, pos: Array) -> Array | None:
        """A query at ``pos`` times a key at 0, both one in these channels, else zero: ``(H, L)``.

        None where the scheme transforms neither.
        """
        width = getattr(self.scheme, "head_dim", 64)
        x = np.zeros((head_count(self.scheme) or 1, len(pos), width))
        x[..., channel] = 1.0
        first = x[:, :1]
        see = partial(evaluate.transform, self.scheme, params=self.params)
        query, key = see(x, pos, role="query"), see(first, np.asarray([0]), role="key")
        return None if query is x and key is first else (query * key).sum(axis=-1)


def _bias_panel(drawn: _Drawn) -> list[Panel]:
    values = drawn.bias(drawn.cells, drawn.cells)
    if values is None:
        return []
    heads = _shown(len(values))
    at = drawn.length - 1 if drawn.causal else drawn.length // 2
    keys = np.arange(drawn.length)
    line = drawn.bias(np.asarray([at]), keys)
    assert line is not None

    def paint(figure: Figure) -> None:
        content = "depends on content; here of random tokens"
        picture.heading(
            figure, f"Bias: {content if evaluate.reads_features(drawn.scheme) else _ADDED}"
        )
        wide = min(6.2, 0.9 + 2.7 * len(heads))
        left, right = figure.subfigures(1, 2, width_ratios=(wide, picture.WIDTH - wide))
        present = _bias_maps(left, drawn, {str(h + 1): values[h] for h in heads})
        _shades(figure, present)
        axes = right.subplots()
        curves = {str(h + 1): line[h, 0] for h in heads}
        distance, name = (at - keys, "distance q − k") if drawn.causal else (keys - at, "k − q")
        picture.lines(axes, distance, curves)
        picture.label(
            axes, f"Bias against distance, query at {at}", f"{name} (tokens)", "bias (added score)"
        )

    return [(3.7 if len(heads) > 4 else 3.0 if len(heads) < 3 else 2.6, paint)]


def _bias_maps(figure: Figure, drawn: _Drawn, maps: Mapping[str, Array]) -> dict[str, str]:
    """One map a head, on one colour scale; returns the greys that occur, by meaning."""
    from matplotlib.colors import SymLogNorm

    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    hidden = (drawn.cells[None, :] > drawn.cells[:, None]) & drawn.causal
    stack = np.stack(list(maps.values()))
    masked = np.isneginf(stack) & ~hidden
    colours = picture.colours(np.where(hidden, np.nan, stack))
    steep = max(-colours["vmin"], colours["vmax"]) > _STEEP
    if steep:
        limits = {limit: colours.pop(limit) for limit in ("vmin", "vmax")}
        colours["norm"] = SymLogNorm(1.0, **limits)
    size = drawn.length, drawn.length
    for axes in grid.flat[len(maps) :]:
        axes.set_axis_off()
    for axes, (head, values), minus in zip(grid.flat, maps.items(), masked, strict=False):
        image = picture.heat(axes, values, size, **colours, **_CELLS)
        for mask, grey in ((minus, picture.MASKED), (hidden, _HIDDEN)):
            layer = np.where(mask, float(grey), np.nan)
            picture.heat(axes, layer, size, cmap="gray", vmin=0, vmax=1, **_CELLS)
        picture.label(axes, f"head {head}" if len(maps) > 1 else "", "", "")
    figure.supxlabel("key position k (tokens)", fontsize=9)
    figure.supylabel("query position q (tokens)", fontsize=9)
    picture.colourbar(figure, image, grid, "bias, logarithmic beyond ±1" if steep else "bias")
    found = {
        "masked by the bias (−∞)": (picture.MASKED, masked),
        "after the query (causal mask)": (_HIDDEN, hidden),
    }
    return {meaning: grey for meaning, (grey, where) in found.items() if where.any()}


def _shades(figure: Figure, greys: Mapping[str, str]) -> None:
    """What the greys mean, beside the heading."""
    from matplotlib.patches import Patch

    patches = [Patch(color=grey, label=meaning) for meaning, grey in greys.items()]
    if patches:
        where = {"loc": "upper right", "bbox_to_anchor": (1, 1.02), "ncols": len(patches)}
        figure.legend(handles=patches, fontsize=8, frameon=False, **where)


def _embedding_panel(drawn: _Drawn) -> list[Panel]:
    everywhere = np.arange(drawn.length)
    vectors = drawn.embedding(everywhere)
    if vectors is None:
        return []
    middle = drawn.length // 2
    norms = np.linalg.norm(vectors, axis=-1)
    product = vectors @ vectors[middle]
    scale = norms * norms[middle]
    similarity = np.divide(product, scale, out=np.zeros_like(product), where=scale > 0)

    def paint(figure: Figure) -> None:
        picture.heading(figure, "Embedding: added to the tokens")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        image = picture.heat(left, vectors[drawn.cells].T, (drawn.length, vectors.shape[-1]))
        picture.label(left, "Value", "position (tokens)", "channel")
        picture.colourbar(figure, image, left, "embedding")
        picture.lines(right, everywhere - middle, {"": similarity})
        title = f"Similarity of position {middle} to the others"
        picture.label(
            right, title, f"distance from position {middle} (tokens)", "cosine similarity"
        )

    return [(3.3, paint)]


def _transform_panel(drawn: _Drawn) -> list[Panel]:
    everywhere = np.arange(drawn.length)
    total = drawn.scores(slice(None), everywhere)
    if total is None:
        return []
    width = getattr(drawn.scheme, "head_dim", 64)
    each = [drawn.scores(channel, drawn.cells) for channel in range(width)]
    channels = np.asarray([scores[0] for scores in each if scores is not None])
    _, kept = np.unique(channels.round(6), axis=0, return_index=True)
    alike = bool((total == total[:1]).all())

    def paint(figure: Figure) -> None:
        picture.heading(figure, "Transform: queries and keys as seen from their positions")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        image = picture.heat(left, channels[np.sort(kept)], (drawn.length, len(kept)))
        rows = "pair of channels" if 2 * len(kept) == width else "channels, those alike once"
        title = "Unit vectors e of channels: ⟨T(p) e, T(0) e⟩, the cosine if T rotates"
        picture.label(left, title, "query position p (tokens), key at 0", rows)
        picture.colourbar(figure, image, left, "dot product" if alike else "dot product, head 1")
        shown = [0] if alike else _shown(len(total))
        picture.lines(right, everywhere, {str(h + 1): total[h] / width for h in shown})
        title = "Equal query and key, all ones"
        picture.label(right, title, "distance q − k (tokens)", "dot product, mean of channels")

    return [(3.3, paint)]


def _nothing_panel(drawn: _Drawn) -> Panel:
    mask = " and the causal mask" if drawn.causal else ""
    sentence = f"No positions enter: attention sees only the content of tokens{mask}."

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0.5, 0.5, sentence, ha="center", va="center", fontsize=14)

    return 1.1, paint


def _shown(heads: int) -> list[int]:
    """Up to eight heads, spread over all."""
    return [int(h) for h in np.linspace(0, heads - 1, min(heads, _MOST_HEADS)).round()]
