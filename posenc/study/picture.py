"""The look of pictures of schemes: heat maps, lines, headings, and the file format."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from posenc.contract.protocol import Array

Axes: TypeAlias = Any  # matplotlib is imported only to draw
Figure: TypeAlias = Any
Panel: TypeAlias = tuple[float, Callable[[Figure], None]]  # height in inches, and its painter

WIDTH, _DPI = 10.0, 160  # inches, and dots per inch: 1600 pixels across
MOST_CELLS = 512
_CAPTION = 150  # characters of a line
MASKED, _LINE = "0.4", "#0072b2"
APART = ("#0072b2", "#d55e00", "#009e73")  # Okabe and Ito 2008, for lines without an order
FORMATS = ("png", "svg", "pdf")


def colours(values: Array) -> dict[str, Any]:
    """A diverging map around zero if both signs occur, else a sequential map."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if low < 0 < high:
        return {"cmap": "RdBu_r", "vmin": -max(-low, high), "vmax": max(-low, high)}
    if low == high:
        low, high = low - 1, high + 1
    return {"cmap": "viridis", "vmin": low, "vmax": high}


def heat_map(axes: Axes, values: Array, size: tuple[int, int], **style: Any) -> Any:
    """Draw values over ``size`` (across, down), whatever their own resolution."""
    across, down = size
    extent = (-0.5, across - 0.5, down - 0.5, -0.5)
    style = {"aspect": "auto", "interpolation": "auto", **(style or colours(values))}
    axes.locator_params(integer=True, min_n_ticks=1)
    return axes.imshow(np.ma.masked_invalid(values), extent=extent, **style)


def lines(
    axes: Axes,
    x: Array,
    curves: Mapping[str, Array],
    what: str = "head",
    shades: Sequence[str] = (),
    *,
    legend: bool = True,
) -> None:
    """Draw one line per head, with crosses at the foot where a value is minus infinity.

    ``shades`` are their colours; by default they go from dark to light.
    """
    from matplotlib import colormaps

    ordered: Any = colormaps["viridis"](np.linspace(0, 0.88, len(curves)))
    palette: Any = shades or ordered
    thin = {"linewidth": 1.4 if len(x) <= MOST_CELLS else 0.8}
    for i, (head, values) in enumerate(curves.items()):
        shade = palette[i] if len(curves) > 1 else _LINE
        point = "." if len(x) == 1 else None
        axes.plot(
            x,
            np.ma.masked_invalid(values),
            marker=point,
            color=shade,
            label=head if legend else None,
            **thin,
        )
        masked = x[np.isneginf(values)]
        foot = np.full(len(masked), 0.02 + 0.025 * i), axes.get_xaxis_transform()
        axes.plot(masked, foot[0], "x", transform=foot[1], color=shade, markersize=3)
    if any(np.isneginf(values).any() for values in curves.values()):
        axes.plot([], [], "x", color=MASKED, markersize=4, label="−∞: masked")
        low, high = axes.get_ylim()
        axes.set_ylim(low - (0.05 + 0.03 * len(curves)) * (high - low), high)
    axes.locator_params("x", integer=True, min_n_ticks=1)
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and len(axes.get_legend_handles_labels()[1]) > 1:
        outside = {"loc": "upper left", "bbox_to_anchor": (1, 1), "handlelength": 1.2}
        axes.legend(title=what, title_fontsize=8, fontsize=8, frameon=False, **outside)


def label(axes: Axes, title: str, across: str, up: str) -> None:
    """Set the title and axis labels of a panel."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.tick_params(labelsize=8)


def heading(text: str, caption: str = "") -> Panel:
    """The heading of the next panel, with sentences that say how to read it."""
    lines = textwrap.wrap(caption, _CAPTION, break_on_hyphens=False)
    height = 0.34 + 0.165 * len(lines)

    def paint(figure: Figure) -> None:
        plain = {"parse_math": False, "ha": "left", "va": "top"}
        figure.text(0.01, 1 - 0.1 / height, text, fontsize=10.5, fontweight="bold", **plain)
        below = 1 - 0.31 / height
        figure.text(0.01, below, "\n".join(lines), fontsize=9, color="0.3", **plain)

    return height, paint


def colourbar(figure: Figure, image: Any, axes: Axes, label: str) -> None:
    """Draw the scale of a heat map."""
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def form_of(path: str | Path) -> str:
    """The format that a file's name asks for; a name without a suffix is a PNG."""
    form = Path(path).suffix.lower().removeprefix(".") or "png"
    if form not in FORMATS:
        accepted = ", ".join(f".{name}" for name in FORMATS)
        raise ValueError(f"path must end in one of {accepted}, got {str(path)!r}")
    return form


def write(page: bytes, path: str | Path) -> Path:
    """Write a picture, and return its path."""
    target = Path(path)
    try:
        target.write_bytes(page)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(target)) from error
    return target


def page(panels: Sequence[Panel], title: str, lines: Sequence[str], form: str = "png") -> bytes:
    """The panels below each other, under a title and lines of small print, in one of FORMATS."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'posenc[plot]'") from error
    head = 0.5 + 0.16 * len(lines)
    heights = [head, *(height for height, _ in panels)]
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=_DPI, layout="constrained")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    top, *rows = parts
    plain = {"parse_math": False, "ha": "left", "va": "top"}
    top.text(0.01, 1 - 0.08 / head, title, fontsize=14, fontweight="bold", **plain)
    top.text(0.01, 1 - 0.38 / head, "\n".join(lines), fontsize=9, color="0.3", **plain)
    for row, (_, paint) in zip(rows, panels, strict=True):
        paint(row)
    return encode(figure, form)


def encode(figure: Figure, form: str) -> bytes:
    """A figure in one of FORMATS: the same bytes each time, and fonts that journals accept."""
    import matplotlib as mpl

    file = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    # Fonts of type 42 (TrueType): many journals refuse type 3, the default of a PDF.
    with mpl.rc_context({"svg.hashsalt": "posenc", "pdf.fonttype": 42}):
        figure.savefig(file, format=form, dpi="figure", metadata=undated)
    return file.getvalue()
