"""``posenc show``: a scheme as one picture of its bias, embedding and transform; a task."""

from __future__ import annotations

import re
import shutil
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import posenc
from posenc.apply.bias import bias_tile
from posenc.apply.feature_needs import has_features, reads_features, reads_hidden
from posenc.apply.shapes import as_column, as_row
from posenc.apply.transform import has_transform
from posenc.attn.arguments import Arguments
from posenc.attn.call import Call
from posenc.attn.features import features, hidden_width
from posenc.attn.prepare import prepare
from posenc.cli import tasks
from posenc.cli.pages import picture_file, title_of
from posenc.cli.parser import Parser
from posenc.contract.checks import check_count, check_scheme
from posenc.contract.params import head_count, init_params, key_head_count
from posenc.contract.protocol import Array, Hook, PositionScheme
from posenc.contract.tokens import Tokens
from posenc.makers import maker_of
from posenc.positions.integers import visible
from posenc.presets import PLANS
from posenc.schemes import Scaling
from posenc.schemes.sum import Combination
from posenc.study import picture, weights
from posenc.study.picture import Axes, Figure, Panel
from posenc.study.specs import parse

_DEFAULTS = {"length": 128, "heads": 8, "head_dim": 64}
_MOST_HEADS = 8
_STEEP = 10.0  # a larger bias gets a logarithmic scale
_FEW_HEADS = 4  # of arrays at random, of which more heads say no more
_AFTER_QUERY = "0.88"  # grey of keys that the causal mask hides
_CELLS = {"aspect": "equal", "interpolation": "nearest"}
_MOST_ROWS = 64  # channels of an embedding; more would blur into one another


def add_options(parser: Parser) -> None:
    """Add the options of ``posenc show``."""
    parser.usage = "posenc show NAME [options]"
    parser.examples = (
        ("posenc show alibi", "draws alibi.png"),
        ("posenc show rope:base=500000+alibi@64 --out both.svg", "a sum, with a window"),
        ("posenc show copy", "prints examples of a task"),
    )
    parser.add_argument(
        "scheme",
        metavar="NAME",
        help="a name of `posenc list`, with options as rope:base=500000, a sum as rope+alibi, a "
        "window as rope@64; of a task, show prints examples",
    )
    add = parser.add_argument
    add(
        "--out",
        type=picture_file,
        metavar="FILE",
        help="ends in .png, .svg or .pdf (default: NAME.png)",
    )
    add(
        "--length", type=int, metavar="N",
        help="positions (default: 128); for a task, the size of its examples",
    )  # fmt: skip
    add("--heads", type=int, metavar="N", help="heads (default: 8)")
    add("--head-dim", type=int, metavar="N", help="channels per head (default: 64)")
    add(
        "--train-len", type=int, metavar="N",
        help="training length, for schemes that use it; a quarter of the length for those that "
        "need it or that extend trained models",
    )  # fmt: skip
    add(
        "--params", metavar="FILE",
        help="draw trained params: the folder of `posenc compare --keep-weights`, or one file",
    )  # fmt: skip
    add("--seed", type=int, metavar="N", help="of the run in --params, if there are several")
    add("--layer", type=int, metavar="N", help="of the model in --params (default: 0)")


def run(options: dict[str, Any]) -> int:
    """Draw a scheme and print the picture's path, or print a task's examples; return 0."""
    given = {name: value for name, value in options.items() if value is not None}
    label = given.pop("scheme")
    if tasks.is_task(label):
        if of_pictures := sorted(given.keys() - {"length"}):
            name = f"--{of_pictures[0].replace('_', '-')}"
            raise ValueError(f"{name} is for pictures of schemes; {label!r} is a task")
        width = min(100, shutil.get_terminal_size().columns)
        print(tasks.examples(label, given.get("length"), width))
        return 0
    if "params" in given:
        print(_draw_trained(label, given))
        return 0
    if of_weights := sorted(given.keys() & {"seed", "layer"}):
        raise ValueError(f"--{of_weights[0]} chooses among trained weights, and needs --params")
    given = {**_DEFAULTS, **given}
    length = check_count("length", given["length"])
    heads, head_dim = given["heads"], given["head_dim"]
    layer, *others = parse(label)
    if others:
        raise ValueError(f"show draws one layer, as rope+alibi@64; {label!r} has layers in turn")
    if label.partition(":")[0] in PLANS:
        raise ValueError(f"show draws one scheme; {label!r} is a plan of layers: use posenc list")
    sizes = {"num_heads": heads, "head_dim": head_dim, "dim": heads * head_dim, "max_len": length}
    train_len, quarter = given.get("train_len"), max(2, length // 4)
    if train_len is None and any(
        getattr(maker_of(p.name), "trained_as", None) for p in layer.parts
    ):
        train_len = quarter  # without one, Self-Extend's window could exceed the picture
    if train_len is not None:
        sizes["train_len"] = train_len
    try:
        scheme = layer.make(**sizes)
    except TypeError:  # it may need a training length, as LogScale does
        if "train_len" in sizes:
            raise
        scheme = layer.make(**sizes, train_len=quarter)
    path = given.get("out") or f"{_file_name(label)}.png"
    print(draw(scheme, path, length=length, title=label, window=layer.window))
    return 0


def _draw_trained(label: str, given: Mapping[str, Any]) -> Path:
    """Draw a layer of a trained model; its sizes are those of the run."""
    if of_sizes := sorted(given.keys() & {"heads", "head_dim", "train_len"}):
        name = of_sizes[0].replace("_", "-")
        raise ValueError(f"--{name} comes from the run that --params names")
    kept = weights.find(given["params"], label, given.get("seed"))
    decoder, layer = kept.decoder(), given.get("layer", 0)
    if not 0 <= layer < len(decoder.schemes):
        raise ValueError(f"--layer must be 0 .. {len(decoder.schemes) - 1}, got {layer}")
    scheme = decoder.schemes[layer]
    if not (names := scheme.param_specs()):
        raise ValueError(f"layer {layer} of {label!r} learns nothing, so training changed nothing")
    params = {name: decoder.position[decoder.owners[layer]][name] for name in names}
    title = f"{label}, seed {kept.seed}, layer {layer} of {len(decoder.schemes)}, trained"
    path = given.get("out") or f"{_file_name(label)}-{kept.seed}-{layer}.png"
    return draw(scheme, path, length=given.get("length", 128), title=title, params=params)


def draw(
    scheme: PositionScheme,
    path: str | Path,
    *,
    length: int = 128,
    title: str | None = None,
    params: Mapping[str, Array] | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Path:
    """Draw what a scheme does to attention: a PNG of 1600 pixels across, or an SVG or PDF.

    Parameters
    ----------
    scheme
        Any scheme; the picture shows the parts that it has.
    path
        The file: it ends in ``.png``, ``.svg`` or ``.pdf``; a name without a suffix is a PNG.
    length
        Positions ``0 .. length - 1``, or as many of them as the scheme allows.
    title
        Default: the name of the scheme's class.
    params
        Learned arrays by name. Default: ``posenc.init_params(scheme)``.
    causal
        Whether keys after the query are grey in the maps and absent from the lines.
    window
        A query sees keys at distances below it; default: all.

    Returns
    -------
    The path written.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    OSError
        The file cannot be written.
    """
    check_scheme(scheme)
    length, form = check_count("length", length), picture.form_of(path)
    if window is not None:
        check_count("window", window)
    own, random = params, params is None and _starts_at_random(scheme)
    own = init_params(scheme) if own is None else own
    drawing = _Drawing(scheme, own, length, causal, window, random).limited()
    factors = _factors(drawing)
    panels = [
        *_bias_panel(drawing),
        *_embedding_panel(drawing),
        *_transform_panel(drawing, factors),
        *_factor_panel(drawing, factors),
    ]
    notes = []
    if drawing.params:
        notes.append("learned: drawn at initialisation" if params is None else "learned: as given")
    if random:
        notes[-1] += ", which is random: only equal values have a meaning"
    notes += _scale_notes(factors)
    if len(drawing.sampled) < drawing.length:
        step = drawing.length / len(drawing.sampled)
        notes.append(f"maps show one of {step:.3g} positions: periods below {2 * step:.3g} alias")
    if Hook.SINK in scheme.hooks():
        notes.append("with a sink, one more logit in every softmax, which is not drawn")
    if Hook.ADJUST_SCORES in scheme.hooks():
        notes.append("changes whole rows of scores by their content, which is not drawn")
    if drawing.length < length:
        notes.append(f"{drawing.length} positions, all that the scheme allows of {length}")
    lines = [*_about(scheme), textwrap.shorten(repr(scheme), 140, placeholder=" …"), *notes]
    name = title or type(scheme).__name__
    page = picture.page(panels or [_nothing_panel(drawing)], name, lines, form)
    return picture.write(page, path)


@dataclass(frozen=True)
class _Drawing:
    """A scheme with its params, on the positions ``0 .. length - 1``."""

    scheme: PositionScheme
    params: Mapping[str, Array]
    length: int
    causal: bool
    window: int | None = None
    random: bool = False  # whether equal values alone have a meaning

    def limited(self) -> _Drawing:
        """The same up to the first position that raises an ``IndexError``."""
        allowed = bisect_left(range(self.length), True, key=self._fails)
        if not allowed:
            self._evaluate(0)
        return replace(self, scheme=self.scheme.at_length(allowed), length=allowed)

    def _fails(self, position: int) -> bool:
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
    def sampled(self) -> np.ndarray[Any, Any]:
        """All positions, or evenly spaced ones if the picture cannot show all."""
        count = min(self.length, picture.MOST_CELLS)
        return np.unique(np.linspace(0, self.length - 1, count).round().astype(np.int64))

    @property
    def _reach(self) -> tuple[int, int] | None:
        return None if self.window is None else (self.window - 1, self.window - 1)

    def bias(self, q: Array, k: Array) -> Array | None:
        """``(H, Q, K)`` or None, minus infinity outside the window."""
        value = self._bias_of_scheme(q, k)
        inside = visible(q[:, None], k[None, :], window=self._reach)
        if inside is None:
            return value
        return np.where(inside, 0.0 if value is None else value, -np.inf).reshape(
            -1, len(q), len(k)
        )

    def _bias_of_scheme(self, q: Array, k: Array) -> Array | None:
        """The bias alone; for random tokens if it reads features."""
        if not reads_features(self.scheme):
            return posenc.bias(self.scheme, q, k, self.params, dtype=np.float64)
        call = self._call_of_random_tokens(1 + int(max(q.max(), k.max())))
        query, key = call.query.select(q), call.key.select(k)
        value = bias_tile(
            self.scheme, as_column(query.encoded_pos), as_row(key.encoded_pos),
            call.arrays, query=query.features, key=key.features, dtype=call.dtype, xp=call.xp,
        )  # fmt: skip
        shape = 1, call.q.shape[1], len(q), len(k)
        return None if value is None else np.broadcast_to(value, shape)[0]

    @property
    def _heads(self) -> int:
        return head_count(self.scheme) or key_head_count(self.scheme) or 1

    def _call_of_random_tokens(self, length: int) -> Call:
        """A call of attention with normal vectors and hidden states, the same each time."""
        q, k, x = self._random_tokens(length)
        return prepare(q, k, k, self.scheme, self.params, given=Arguments(tokens=Tokens(x=x)))

    def _random_tokens(self, length: int) -> tuple[Array, Array, Array | None]:
        """Queries, keys and hidden states, or None for a scheme that reads none."""
        heads, width = self._heads, _head_dim(self.scheme)
        rng = np.random.default_rng(0)
        # Drawn token by token, so that a longer picture starts with the same tokens.
        q, k = rng.standard_normal((length, 2, heads, width)).transpose(1, 2, 0, 3)[:, None]
        hidden = hidden_width(self.scheme, self.params)
        x = np.random.default_rng(1).standard_normal((1, length, hidden)) if hidden else None
        return q, k, x

    def _features(self, pos: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Features of random tokens: of queries at ``pos``, and of a key at 0."""
        if not has_features(self.scheme):
            return {}, {}
        q, k, x = self._random_tokens(1 + int(pos.max()))
        query, key = features(self.scheme, self.params, Tokens(x=x), q=q, k=k)
        of_queries = {n: a[:, :, pos] for n, a in query.features.items()}
        return of_queries, {n: a[:, :, :1] for n, a in key.features.items()}

    def embedding(self, pos: Array) -> Array | None:
        """``(L, dim)`` or None."""
        return posenc.embedding(self.scheme, pos, self.params, dtype=np.float64)

    def scores(self, channel: int | slice, pos: Array) -> Array | None:
        """Scores ``(H, L)`` of queries at ``pos`` and a key at 0, both 1 in these channels, else 0.

        None if the scheme transforms neither. If it has regions, each score is that of its region.
        """
        x = np.zeros((1, self._heads, len(pos), _head_dim(self.scheme)))
        x[..., channel] = 1.0
        return self._through_regions(x, pos, lambda query, key: (query * key).sum(axis=-1))

    def scale(self, channel: int | slice, pos: Array) -> Array | None:
        """Products of lengths ``(H, L)`` where ``scores`` has dot products."""
        x = np.zeros((1, self._heads, len(pos), _head_dim(self.scheme)))
        x[..., channel] = 1.0
        norm = partial(np.linalg.norm, axis=-1)
        return self._through_regions(x, pos, lambda query, key: norm(query) * norm(key))

    def _through_regions(
        self, x: Array, pos: Array, product: Callable[[Array, Array], Array]
    ) -> Array | None:
        of_queries, of_key = self._features(pos)
        regions = self.scheme.regions() or ((self.scheme, (None, None)),)
        total, transformed = np.zeros(x.shape[1:3]), False
        for scheme, window in regions:
            params = {name: a for name, a in self.params.items() if name in scheme.param_specs()}
            transform = partial(posenc.transform, scheme, params=params)
            query = transform(x, pos, role="query", features=of_queries)
            key = transform(x[:, :, :1], np.asarray([0]), role="key", features=of_key)
            inside = visible(pos, np.zeros_like(pos), window=window)
            inside = np.ones(len(pos), bool) if inside is None else inside
            if len(regions) > 1 and not reads_features(scheme):
                bias = posenc.bias(scheme, pos, np.asarray([0]), params)
                inside = inside if bias is None else inside & ~np.isneginf(bias[0, :, 0])
            total = np.where(inside, product(query, key)[0], total)
            transformed |= has_transform(scheme)
        return total if transformed else None


def _head_dim(scheme: PositionScheme) -> int:
    """Channels per head: those of the scheme, or of a part of a sum; 64 where any will do."""
    parts = scheme.schemes if isinstance(scheme, Combination) else ()
    found = [*(getattr(one, "head_dim", None) for one in (scheme, *parts)), 64]
    return next(int(one) for one in found if one)


def _starts_at_random(scheme: PositionScheme) -> bool:
    one, other = (init_params(scheme, seed) for seed in range(2))
    return any((one[name] != other[name]).any() for name in one)


def _about(scheme: PositionScheme) -> list[str]:
    """What a scheme, or each part of a sum, is in one line, and who published it."""
    if isinstance(scheme, Combination):
        return [line for part in scheme.schemes for line in _about(part)]
    parts: list[Any] = [
        scheme,
        *(value for value in vars(scheme).values() if isinstance(value, Scaling)),
    ]
    titles = [(title_of(type(part)).replace("`", ""), part.paper) for part in parts]
    lines = [f"{title} {paper}".strip() for title, paper in titles if title]
    return [part for line in lines for part in textwrap.wrap(line, 140, break_on_hyphens=False)]


def _factors(drawing: _Drawing) -> Array | None:
    """What the transform does to all scores of a query alike, ``(L,)``; None: nothing of the kind.

    No distance explains it.
    """
    width, nothing = _head_dim(drawing.scheme), drawing.scale(slice(0), np.arange(1))
    if nothing is None or nothing.any():  # zeros do not stay zeros: no factor alone
        return None
    each = [drawing.scale(channel, drawing.sampled) for channel in range(width)]
    factors = np.asarray([one for one in each if one is not None])
    if not factors.size or not np.allclose(factors, factors[:1, :1], rtol=1e-6, atol=0):
        return None
    return factors[0, 0]


def _scale_notes(factors: Array | None) -> list[str]:
    if factors is None:
        return []
    low, high = float(factors.min()), float(factors.max())
    if high > low * (1 + 1e-6):
        return [
            f"besides distance, the query's position multiplies its scores: {low:.3g} to {high:.3g}"
        ]
    return [f"all scores are multiplied by {high:.3g}"] if abs(high - 1) > 1e-6 else []


def _factor_panel(drawing: _Drawing, factors: Array | None) -> list[Panel]:
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


def _file_name(label: str) -> str:
    return re.sub(r"[\W_]+", "-", label.lower())


def _bias_heading(drawing: _Drawing, values: Array) -> Panel:
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


def _bias_panel(drawing: _Drawing) -> list[Panel]:
    values = drawing.bias(drawing.sampled, drawing.sampled)
    if values is None:
        return []
    heads = _choose_heads(len(values), _FEW_HEADS if drawing.random else _MOST_HEADS)
    biased = Hook.BIAS in drawing.scheme.hooks()
    at = drawing.length - 1 if drawing.causal else drawing.length // 2
    keys = np.arange(drawing.length)
    line = drawing.bias(np.asarray([at]), keys)
    assert line is not None
    weights = np.where(np.isneginf(line[:, 0]), np.nan, _softmax(line[:, 0]))
    if (inside := visible(at, keys, window=drawing._reach)) is not None:
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
            _shade_outside(axes, drawing.window, distance)

    height = 4.1 if len(heads) > 4 else 3.4 if biased else 2.8
    return [_bias_heading(drawing, values), (height, paint)]


def _shade_outside(axes: Axes, window: int | None, distance: Array) -> None:
    """Grey where no key is seen, on either side."""
    if window is None:
        return
    for sign in (-1, 1):
        furthest = int((sign * distance).max())
        if furthest >= window:
            ends = sign * (window - 0.5), sign * furthest
            axes.axvspan(*sorted(ends), color=_AFTER_QUERY, zorder=0.5)
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
            axes.text(sum(ends) / 2, 0.95, "outside the window", fontsize=8, **place)


def _softmax(scores: Array) -> Array:
    """Weights along the last axis; keys at minus infinity have none."""
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def _bias_maps(figure: Figure, drawing: _Drawing, maps: Mapping[str, Array]) -> None:
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
        for mask, grey in ((minus, picture.MASKED), (after_query, _AFTER_QUERY)):
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
        "after the query (causal mask)": (_AFTER_QUERY, after_query),
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


def _embedding_panel(drawing: _Drawing) -> list[Panel]:
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


def _transform_panel(drawing: _Drawing, factors: Array | None) -> list[Panel]:
    positions = np.arange(drawing.length)
    total = drawing.scores(slice(None), positions)
    if total is None:
        return []
    width = _head_dim(drawing.scheme)
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
        shown = [0] if heads_equal else _choose_heads(len(total))
        picture.lines(right, positions, {str(h + 1): total[h] / width for h in shown})
        _shade_outside(right, drawing.window, positions)
        title = "All channels together, if query and key are equal"
        picture.label(right, title, "distance q − k (tokens)", "dot product, mean of channels")

    heading = f"Transform: effect of positions{tokens} on queries and keys{axes}"
    caption = (
        "Queries and keys are changed by their positions before their dot product. The map has "
        "what each channel then adds to a score: a wave, if channels are turned; fast ones tell "
        "near positions apart, slow ones far positions. The line is their sum."
    )
    return [picture.heading(heading, caption), (3.1, paint)]


def _nothing_panel(drawing: _Drawing) -> Panel:
    mask = " and the causal mask" if drawing.causal else ""
    sink = "a sink, " if Hook.SINK in drawing.scheme.hooks() else ""
    sentence = f"No positions enter: attention sees only {sink}the content of tokens{mask}."
    if Hook.ADJUST_SCORES in drawing.scheme.hooks():
        sentence = "Only whole rows of scores change, and by content: nothing to draw."

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0.5, 0.5, sentence, ha="center", va="center", fontsize=14)

    return 1.1, paint


def _choose_heads(heads: int, most: int = _MOST_HEADS) -> list[int]:
    """Up to so many heads, evenly spaced."""
    return [int(h) for h in np.linspace(0, heads - 1, min(heads, most)).round()]
