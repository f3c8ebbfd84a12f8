"""``draw``: all panels of a scheme on one page, with what the picture does not show in words."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.cli.drawing.bias import bias_panel
from posenc.cli.drawing.embedding import embedding_panel
from posenc.cli.drawing.transform import factor_panel, factors_of, scale_notes, transform_panel
from posenc.cli.drawing.values import Drawing
from posenc.cli.pages import title_of
from posenc.contract.checks import check_count, check_scheme
from posenc.contract.params import init_params
from posenc.contract.protocol import Array, Hook, PositionScheme
from posenc.schemes import Scaling
from posenc.schemes.sum import Combination
from posenc.study import picture
from posenc.study.picture import Figure, Panel


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
    drawing = Drawing(scheme, own, length, causal, window, random).limited()
    factors = factors_of(drawing)
    panels = [
        *bias_panel(drawing),
        *embedding_panel(drawing),
        *transform_panel(drawing, factors),
        *factor_panel(drawing, factors),
    ]
    notes = []
    if drawing.params:
        notes.append("learned: drawn at initialisation" if params is None else "learned: as given")
    if random:
        notes[-1] += ", which is random: only equal values have a meaning"
    notes += scale_notes(factors)
    if len(drawing.sampled) < drawing.length:
        step = drawing.length / len(drawing.sampled)
        notes.append(f"maps show one of {step:.3g} positions: periods below {2 * step:.3g} alias")
    if Hook.SINK in scheme.hooks():
        notes.append("with a sink, one more logit in every softmax, which is not drawn")
    if Hook.CHANNEL_DECAY in scheme.hooks():
        notes.append("channels of scores decay by their content, which is not drawn")
    if Hook.ADJUST_SCORES in scheme.hooks():
        notes.append("changes whole rows of scores by their content, which is not drawn")
    if drawing.length < length:
        notes.append(f"{drawing.length} positions, all that the scheme allows of {length}")
    lines = [*about(scheme), textwrap.shorten(repr(scheme), 140, placeholder=" …"), *notes]
    name = title or type(scheme).__name__
    page = picture.page(panels or [_nothing_panel(drawing)], name, lines, form)
    return picture.write(page, path)


def _starts_at_random(scheme: PositionScheme) -> bool:
    one, other = (init_params(scheme, seed) for seed in range(2))
    return any((one[name] != other[name]).any() for name in one)


def about(scheme: PositionScheme) -> list[str]:
    """What a scheme, or each part of a sum, is in one line, and who published it."""
    if isinstance(scheme, Combination):
        return [line for part in scheme.schemes for line in about(part)]
    parts: list[Any] = [
        scheme,
        *(value for value in vars(scheme).values() if isinstance(value, Scaling)),
    ]
    titles = [(title_of(type(part)).replace("`", ""), part.paper) for part in parts]
    lines = [f"{title} {paper}".strip() for title, paper in titles if title]
    return [part for line in lines for part in textwrap.wrap(line, 140, break_on_hyphens=False)]


def _nothing_panel(drawing: Drawing) -> Panel:
    mask = " and the causal mask" if drawing.causal else ""
    sink = "a sink, " if Hook.SINK in drawing.scheme.hooks() else ""
    sentence = f"No positions enter: attention sees only {sink}the content of tokens{mask}."
    if Hook.CHANNEL_DECAY in drawing.scheme.hooks():
        sentence = "Only channels of scores decay, and by content: nothing to draw."
    if Hook.ADJUST_SCORES in drawing.scheme.hooks():
        sentence = "Only whole rows of scores change, and by content: nothing to draw."

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0.5, 0.5, sentence, ha="center", va="center", fontsize=14)

    return 1.1, paint
