"""A scheme as one picture: its bias, its embedding, its transform, whichever it has."""

from __future__ import annotations

import inspect
import io
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import array_api_compat.numpy as xp
import numpy as np

from posenc import evaluate
from posenc.checks import check_count
from posenc.params import head_count, init_params, merged
from posenc.protocol import Array, PositionScheme, Role

Axes: TypeAlias = Any  # matplotlib is imported only when a picture is asked for
Painter: TypeAlias = Callable[[Any], None]

_WIDTH, _DPI = 10.0, 160  # inches, and dots an inch: 1600 pixels across
_MOST_HEADS, _MOST_CELLS = 8, 512
_GATE = -0.1
_HIDDEN, _MASKED, _LINE = "0.86", "0.35", "#0072b2"
_NOTHING = "This scheme tells attention no positions: scores see the tokens' content"


def draw(
    scheme: PositionScheme,
    path: str | Path,
    *,
    length: int = 128,
    title: str | None = None,
    params: Mapping[str, Array] | None = None,
    causal: bool = True,
) -> Path:
    """Draw what a scheme does to attention, into one PNG file 1600 pixels wide.

    Parameters
    ----------
    scheme
        A scheme; what it has is asked of it, so a third party's is drawn like ours.
    path
        Of the file; it ends in ``.png`` or in nothing.
    length
        Positions ``0 .. length - 1``, or as many of them as the scheme allows.
    title
        Default: the scheme's name.
    params
        Learned arrays by name. Default: ``posenc.init_params(scheme)``.
    causal
        Whether keys after the query are greyed out and left out of the lines.

    Returns
    -------
    The path written.

    Raises
    ------
    ImportError, OSError
        Without matplotlib; where the file cannot be written.
    """
    evaluate.check_scheme(scheme)
    length, target = check_count("length", length), Path(path)
    if target.suffix.lower() not in ("", ".png"):
        raise ValueError(f"path must end in .png, got {str(path)!r}")
    drawn = _drawn(scheme, params, length, causal)
    found = (_bias(drawn), _embedding(drawn), _transform(drawn))
    panels = [panel for panel in found if panel is not None] or [_nothing(drawn)]
    subtitle = [_summary(scheme), *drawn.notes(asked=length, initial=params is None)]
    png = _png(panels, title or type(scheme).__name__, [line for line in subtitle if line])
    try:
        target.write_bytes(png)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(target)) from error
    return target


@dataclass(frozen=True)
class _Panel:
    """One part of the picture: its heading, its height in inches, and what paints it."""

    heading: str
    height: float
    paint: Painter


@dataclass(frozen=True)
class _Drawn:
    """A scheme with its arrays, over as many positions as it allows."""

    scheme: PositionScheme
    params: Mapping[str, Array]
    length: int
    causal: bool

    def notes(self, *, asked: int, initial: bool) -> list[str]:
        """What a reader must know before believing the picture."""
        notes = []
        if self.params and initial:
            notes.append("learned: drawn at initialisation")
        if self.length < asked:
            notes.append(f"{self.length} of {asked} positions: the scheme allows no more")
        return ["; ".join(notes)]

    def positions(self) -> np.ndarray[Any, Any]:
        """All positions, or evenly chosen ones where there are more than a picture can show."""
        cells = min(self.length, _MOST_CELLS)
        return np.unique(np.linspace(0, self.length - 1, cells).round().astype(np.int64))

    def bias(self, q: Array, k: Array) -> Array | None:
        """``(H, Q, K)`` or None; of a constant gate where the bias stands on gates."""
        scheme = self.scheme
        if not evaluate.is_gated(scheme):
            return evaluate.bias(scheme, q, k, self.params, dtype=xp.float64)
        arrays = merged(scheme, self.params, dtype=xp.float64, device="cpu", xp=xp)
        at = (evaluate.column(_GATE * q), evaluate.row(_GATE * k))
        value = evaluate.bias_tile(scheme, *at, arrays, dtype=xp.float64, xp=xp)
        shape = (1, head_count(scheme) or 1, len(q), len(k))
        return None if value is None else np.broadcast_to(value, shape)[0]

    def embedding(self, pos: Array) -> Array | None:
        """``(L, dim)`` or None."""
        return evaluate.embedding(self.scheme, pos, self.params, dtype=xp.float64)

    def transform(self, vector: Array, pos: Array, role: Role) -> Array | None:
        """One vector as every head sees it from each position, ``(H, L, D)``; None if untouched."""
        x = np.tile(vector, (head_count(self.scheme) or 1, len(pos), 1))
        turned = evaluate.transform(self.scheme, x, pos, role=role, params=self.params)
        return None if turned is x and vector.any() and role == "query" else turned

    def channels(self) -> int:
        """Channels of a head."""
        return int(getattr(self.scheme, "head_dim", 64))
