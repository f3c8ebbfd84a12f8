"""What the catalogue holds: a row a scheme, measured on a small one, and a table to print."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from posenc import evaluate
from posenc.checks import check_scheme
from posenc.params import init_params
from posenc.protocol import Array, PositionScheme
from posenc.schemes import schemes

_SIZES = {"num_heads": 4, "head_dim": 16, "max_len": 64, "dim": 64}
_PLACES = ("embedding", "transform", "bias", "gate")
_HEAD, _PAPER = ("scheme", "enters as", "learned", "relative", "fused as"), "paper (arXiv)"
_WIDTH, _LONGEST_NAME = 100, 20


@dataclass(frozen=True)
class Row:
    """One scheme of the catalogue.

    Attributes
    ----------
    name
        In the catalogue.
    title
        First line of the docstring of the scheme's class.
    enters
        Where position enters: of ``"embedding"``, ``"transform"``, ``"bias"``, ``"gate"`` those
        that the class writes.
    learned
        Whether it has learned arrays.
    relative
        Whether attention sees differences of positions alone. A bias declares it; a transform is
        measured; embeddings and gates are not relative.
    fusable
        How a fused kernel takes it: ``"score_mod"`` and ``"key bias"``, ``"before attention"``,
        ``"row-local gate"``, or ``"as is"`` where there is nothing to take.
    paper
        Authors, year and arXiv number.
    error
        Why the scheme could not be made or measured, else None.
    """

    name: str
    title: str = ""
    enters: tuple[str, ...] = ()
    learned: bool = False
    relative: bool = False
    fusable: str = ""
    paper: str = ""
    error: str | None = None


def rows() -> list[Row]:
    """A row for each scheme of ``posenc.schemes()``; one that fails is a row with its error."""
    return [_row(name, maker) for name, maker in sorted(schemes().items())]


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, at most 100 characters wide: two lines a scheme or more."""
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    indent = " " * (widths[0] + 2)

    def paragraph(text: str) -> list[str]:
        lines = textwrap.wrap(text, _WIDTH - len(indent))
        return [indent + line for line in lines]

    head, *starts = (
        "  ".join(f"{cell:<{n}}" for cell, n in zip(line, widths, strict=True)) for line in cells
    )
    beside = len(head) + 2 + len(_PAPER) <= _WIDTH
    lines = [f"{head}  {_PAPER}" if beside else head.rstrip(), "-" * _WIDTH]
    for row, start in zip(rows, starts, strict=True):
        paper = row.paper.replace("arXiv ", "")
        fits = len(start) + 2 + len(paper) <= _WIDTH
        lines.append((f"{start}  {paper}" if fits else start).rstrip())
        lines += paragraph(row.title.replace("`", ""))
        lines += paragraph("" if fits else paper) + paragraph(row.error or "")
    return "\n".join(lines)


def _row(name: str, maker: Callable[..., PositionScheme]) -> Row:
    try:
        scheme = maker(**_SIZES)
        check_scheme(scheme)
        enters = tuple(place for place in _PLACES if _writes(scheme, place))
        return Row(
            name=name,
            title=_title(type(scheme)),
            enters=enters,
            learned=bool(scheme.param_specs()),
            relative=_is_relative(scheme, enters),
            fusable=_fusable(scheme, enters),
            paper=scheme.paper,
        )
    except Exception as error:
        return Row(name, error=f"{type(error).__name__}: {error}")


def _writes(scheme: PositionScheme, method: str) -> bool:
    return getattr(type(scheme), method) is not getattr(PositionScheme, method)


def _title(kind: type) -> str:
    """First line of the docstring; nothing for the signature that ``dataclass`` writes."""
    first, *_ = inspect.cleandoc(kind.__doc__ or "").splitlines() or [""]
    return "" if first.startswith(f"{kind.__name__}(") else first


def _is_relative(scheme: PositionScheme, enters: tuple[str, ...]) -> bool:
    if not enters or "embedding" in enters or "gate" in enters:
        return False
    if "bias" in enters and not scheme.relative:
        return False
    return "transform" not in enters or _turns_relative(scheme)


def _turns_relative(scheme: PositionScheme) -> bool:
    """Whether scores of unit vectors stay within 1e-5 where all positions shift, in float32."""
    rng, params, pos = np.random.default_rng(0), init_params(scheme), np.arange(16)
    shape = (_SIZES["num_heads"], len(pos), _SIZES["head_dim"])
    q, k = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))

    def scores(shift: int) -> Array:
        at = pos + shift
        queries = evaluate.transform(scheme, q, at, role="query", params=params)
        keys = evaluate.transform(scheme, k, at, role="key", params=params)
        return np.einsum("hqd,hkd->hqk", queries, keys)

    shifts = (1, 17, _SIZES["max_len"] - len(pos))
    return all(np.allclose(scores(s), scores(0), rtol=0, atol=1e-5) for s in shifts)


def _fusable(scheme: PositionScheme, enters: tuple[str, ...]) -> str:
    if "gate" in enters:
        return "row-local gate"
    if "bias" in enters:
        return "score_mod, key bias" if _writes(scheme, "key_bias") else "score_mod"
    return "before attention" if enters else "as is"


def _cells(row: Row) -> tuple[str, ...]:
    name = row.name if len(row.name) <= _LONGEST_NAME else row.name[: _LONGEST_NAME - 1] + "…"
    if row.error is not None:
        return name, "error", "", "", ""
    learned, relative = ("yes" if yes else "no" for yes in (row.learned, row.relative))
    return name, ", ".join(row.enters) or "nothing", learned, relative, row.fusable
