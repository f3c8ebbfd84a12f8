"""``posenc list``: one row per scheme of the catalogue, measured on a small instance; tasks."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

import posenc
from posenc.apply.feature_needs import has_features, reads_hidden, summed_features
from posenc.cli import tasks
from posenc.cli.pages import docstring_texts, example_of, list_parameters, signature_of, title_of
from posenc.cli.parser import Parser
from posenc.contract.checks import check_scheme
from posenc.contract.params import init_params
from posenc.contract.protocol import Array, Hook, PositionScheme
from posenc.layers import LayerPlan
from posenc.makers import catalogue, maker_of
from posenc.presets import PLANS
from posenc.schemes.sizes import SIZES

_SIZES = {"num_heads": 4, "head_dim": 16, "max_len": 64, "train_len": 64}
_SIZES |= {"dim": 64, "hidden_dim": 64}
_PLACES = (
    "embedding", "transform", "bias", "features", "sink", "channel decay", "whole rows", "regions",
)  # fmt: skip
_HEAD, _PAPER = ("scheme", "enters as", "learned", "relative", "fused as"), "paper (arXiv)"
_END = (
    "`posenc list NAME` shows the options of one scheme, plan or task; `posenc show NAME` draws a "
    "scheme, or prints examples of a task."
)
_WIDTH, _LONGEST_NAME, _LONGEST_ENTERS = 100, 20, 33


def add_options(parser: Parser) -> None:
    """Add the options of ``posenc list``."""
    parser.usage = "posenc list [NAME ...]"
    parser.examples = (
        ("posenc list", "every scheme and task"),
        ("posenc list rope t5", "their options and defaults"),
        ("posenc list mymodule.MyScheme", "a class of your own"),
    )
    parser.add_argument(
        "name", nargs="*", metavar="NAME",
        help="of a scheme, a plan of layers or a task, or module.Class",
    )  # fmt: skip


def run(options: dict[str, Any]) -> int:
    """Print schemes and tasks, or one page per name, and return the exit status 0."""
    width = min(100, shutil.get_terminal_size().columns)  # 80 without a terminal
    if options["name"]:
        print("\n\n".join(page(name, width) for name in options["name"]))
    else:
        print(f"{table(rows(), width)}\n")
        print("\n".join(line for note in _notes() for line in textwrap.wrap(note, width)))
        print(f"\n{tasks.table(width)}\n")
        print("\n".join(textwrap.wrap(_END, width)))
    return 0


def _notes() -> Iterator[str]:
    """What the table does not say."""
    tested: dict[str, list[str]] = {}
    for name, maker in sorted(catalogue().items()):
        if trained_as := getattr(maker, "trained_as", None):
            tested.setdefault(trained_as, []).append(name)
    for trained_as, names in tested.items():
        yield (
            f"For models that are trained as {trained_as}: {', '.join(names)}. "
            f"In posenc compare: {trained_as}~{names[0]}."
        )
    yield f"Plans of layers, as labels of posenc compare: {', '.join(sorted(PLANS))}."


@dataclass(frozen=True)
class Row:
    """One scheme of the catalogue.

    Attributes
    ----------
    name
        Its name in the catalogue.
    title
        First line of the docstring of the scheme's class.
    enters
        The places where position enters, of ``"embedding"``, ``"transform"``, ``"bias"``,
        ``"features"``, ``"sink"``, ``"channel decay"``, ``"whole rows"`` and ``"regions"``.
    learned
        Whether it has learned arrays.
    relative
        Whether position enters only by differences of positions. A bias declares it; a transform is
        measured; embeddings, whole rows, sums over tokens, and angles from hidden states are not.
    fusable
        How a fused kernel can apply it: ``"score_mod"`` and ``"key bias"``, ``"before attention"``,
        ``"merged parts"``, ``"log-sum-exp"`` for a sink alone, ``"chunked only"``,
        ``"reference only"``, or ``"as is"`` if there is nothing to apply.
    paper
        Authors, year and arXiv number.
    error
        The error from making or measuring the scheme, or None.
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
    """One row per scheme of ``posenc.catalogue()``; if a scheme fails, its row has the error."""
    return [_row(name, maker) for name, maker in sorted(catalogue().items())]


def one_of_each_kind() -> list[str]:
    """Names of the catalogue, one for each way to act: where a scheme enters, learned, fused as.

    The shortest name of a kind stands for it, because variants have longer names; of two as short,
    that of a relative scheme.
    """
    kinds: dict[object, str] = {}
    for row in sorted(rows(), key=lambda row: (len(row.name), not row.relative, row.name)):
        if row.error is None:
            kinds.setdefault((row.enters, row.learned, row.fusable), row.name)
    return sorted(kinds.values())


def page(name: str, width: int = _WIDTH) -> str:
    """One scheme as text: its facts, the sizes it needs and its options, from its docstring.

    ``name`` is as in ``posenc.make``: of the catalogue, or dotted. A plan of ``posenc.presets``
    and a task have a page too.
    """
    if name in PLANS:
        return _plan_page(name, width)
    if tasks.is_task(name):
        return tasks.page(name, width)
    maker = maker_of(name)
    source, row = inspect.unwrap(maker), _row(name, maker)
    preset, sources = getattr(maker, "preset", {}), (source, *_parts(maker))
    named = [
        p
        for each in sources
        for p in signature_of(each).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in preset
    ]
    texts = {n: text for each in sources for n, text in docstring_texts(each).items()}
    parts = [
        " = ".join(
            dict.fromkeys((name, f"{source.__module__}.{source.__qualname__}{_call(preset)}"))
        ),
        *textwrap.wrap(row.title.replace("`", ""), width),
        "",
        *_facts(row, width),
        *_trained_as(name, maker),
        *list_parameters("sizes of the model", [p for p in named if p.name in SIZES], texts, width),
        *list_parameters("options", [p for p in named if p.name not in SIZES], texts, width),
        *example_of(name, [p for p in named if p.name not in SIZES], width),
    ]
    return "\n".join(parts)


def _plan_page(name: str, width: int) -> str:
    """One plan as text: its docstring, its options, and its layers as released."""
    maker = PLANS[name]
    parameters = signature_of(inspect.unwrap(maker)).parameters.values()
    of_model = {*SIZES, "layers"}
    paragraphs = inspect.cleandoc(maker.__doc__ or "").replace("`", "").split("\n\n")
    options = [p for p in parameters if p.name not in of_model]
    return "\n".join(
        [
            f"{name} = posenc.presets.{name}",
            *(line for text in paragraphs for line in (*textwrap.wrap(text, width), "")),
            "layers, as released:",
            *_layers(maker(), width),
            *list_parameters("sizes", [p for p in parameters if p.name in of_model], {}, width),
            *list_parameters("options", options, {}, width),
            *example_of(name, options, width),
        ]
    )


def _layers(plan: LayerPlan, width: int) -> list[str]:
    """Which layers have which scheme and window, one line for each pair."""
    places: dict[tuple[PositionScheme, int | None], list[str]] = {}
    for layer, own in enumerate(zip(plan.schemes, plan.windows, strict=True)):
        places.setdefault(own, []).append(str(layer))
    lines = []
    for (scheme, window), layers in places.items():
        seen = "" if window is None else f", window {window}"
        text = f"  {scheme!r}{seen}: {' '.join(layers)}"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 6)
    return lines


def table(rows: Sequence[Row], width: int = _WIDTH) -> str:
    """The rows as aligned text of at most ``width`` characters: two or more lines per scheme."""
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    # Columns that do not fit become lines of the schemes.
    ends = accumulate(widths, lambda end, column: end + 1 + column)
    shown = max(1, sum(end <= width for end in ends))
    below = [
        "; ".join(f"{name}: {cell}" for name, cell in zip(_HEAD[shown:], line[shown:], strict=True))
        for line in cells[1:]
    ]
    widths = widths[:shown]
    gap = "  " if sum(widths) + 2 * len(widths[1:]) <= width else " "
    # In a narrow table names are on lines of their own.
    above = sum(widths) + len(gap) * len(widths[1:]) > width
    if above:
        cells, widths[0] = [("", *line[1:]) for line in cells], 1
    indent = " " * (widths[0] + len(gap))

    def paragraph(text: str) -> list[str]:
        lines = textwrap.wrap(text, width - len(indent))
        return [indent + line for line in lines]

    head, *starts = (
        gap.join(f"{cell:<{n}}" for cell, n in zip(line, widths, strict=False)) for line in cells
    )
    fits_head = shown == len(_HEAD) and len(head) + 2 + len(_PAPER) <= width
    lines = [f"{head}  {_PAPER}" if fits_head else head.rstrip(), "-" * width]
    for row, start, rest in zip(rows, starts, below, strict=True):
        paper = row.paper.replace("arXiv ", "")
        fits = len(start) + 2 + len(paper) <= width
        lines += [_short_name(row)] if above else []
        lines.append((f"{start}  {paper}" if fits else start).rstrip())
        lines += paragraph(row.title.replace("`", ""))
        lines += paragraph(rest)
        lines += paragraph("" if fits else paper) + paragraph(row.error or "")
    return "\n".join(lines)


def _parts(maker: Callable[..., PositionScheme]) -> tuple[type, ...]:
    """The classes that a name sets, as a scaling of RoPE: the maker takes their options too."""
    return tuple(v for v in getattr(maker, "preset", {}).values() if isinstance(v, type))


def _call(preset: Mapping[str, Any]) -> str:
    """The options that a name sets, as in a call: ``(kind='log')``."""
    shown = (f"{n}={v.__name__ if isinstance(v, type) else repr(v)}" for n, v in preset.items())
    return f"({', '.join(shown)})" if preset else ""


def _facts(row: Row, width: int) -> list[str]:
    if row.error is not None:
        return textwrap.wrap(f"error: {row.error}", width, subsequent_indent="  ")
    _, enters, learned, relative, fusable = _cells(row)
    values = (enters, learned, relative, fusable, row.paper)
    lines = []
    for name, value in zip((*_HEAD[1:], "paper"), values, strict=True):
        start = f"{name:<9}  "
        lines += textwrap.wrap(start + value, width, subsequent_indent=" " * len(start))
    return lines


def _trained_as(name: str, maker: Callable[..., PositionScheme]) -> list[str]:
    other = getattr(maker, "trained_as", None)
    return [f"trained as {other}; in posenc compare {other}~{name}"] if other else []


def _row(name: str, maker: Callable[..., PositionScheme]) -> Row:
    try:
        scheme = maker(**_SIZES)
        check_scheme(scheme)
        enters = _enters(scheme)
        parts = _parts(maker)
        described: Any = parts[-1] if parts else scheme
        return Row(
            name=name,
            title=title_of(parts[-1] if parts else type(scheme)),
            enters=enters,
            learned=bool(scheme.param_specs()),
            relative=_is_relative(scheme, enters),
            fusable=_fusable(scheme, enters),
            paper=described.paper,
        )
    except Exception as error:
        return Row(name, error=f"{type(error).__name__}: {error}")


def _enters(scheme: PositionScheme) -> tuple[str, ...]:
    hooks = scheme.hooks()
    places = {place for place in _PLACES if place in hooks}
    places |= {"features"} if has_features(scheme) else set()
    places |= {"whole rows"} if Hook.ADJUST_SCORES in hooks else set()
    places |= {"channel decay"} if Hook.CHANNEL_DECAY in hooks else set()
    return tuple(place for place in _PLACES if place in places)


def _is_relative(scheme: PositionScheme, enters: tuple[str, ...]) -> bool:
    if not {"transform", "bias", "regions"} & set(enters):
        return False
    angles = "transform" in enters and reads_hidden(scheme)
    if {"embedding", "whole rows"} & set(enters) or summed_features(scheme) or angles:
        return False
    if "regions" in enters:
        parts = (part for part, _ in scheme.regions())
        return all(_is_relative(part, _enters(part)) for part in parts)
    if "bias" in enters and not scheme.relative:
        return False
    return "transform" not in enters or _is_relative_transform(scheme)


def _is_relative_transform(scheme: PositionScheme) -> bool:
    """Whether a shift of all positions changes scores of unit vectors by at most 1e-5 (float32)."""
    rng, params, pos = np.random.default_rng(0), init_params(scheme), np.arange(16)
    shape = (_SIZES["num_heads"], len(pos), _SIZES["head_dim"])
    q, k = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))

    def scores(shift: int) -> Array:
        at = pos + shift
        queries = posenc.transform(scheme, q, at, role="query", params=params)
        keys = posenc.transform(scheme, k, at, role="key", params=params)
        return np.einsum("hqd,hkd->hqk", queries, keys)

    # Some act only beyond the training length, as the log-position factor of ReRoPE.
    shifts = (1, 17, _SIZES["max_len"] - len(pos), 4 * _SIZES["train_len"])
    return all(np.allclose(scores(s), scores(0), rtol=0, atol=1e-5) for s in shifts)


def _fusable(scheme: PositionScheme, enters: tuple[str, ...]) -> str:
    if {"whole rows", "channel decay"} & set(enters):
        return "chunked only"
    if "regions" in enters:
        return "merged parts"
    if "bias" in enters:
        return "score_mod, key bias" if Hook.KEY_BIAS in scheme.hooks() else "score_mod"
    if "transform" in enters or "embedding" in enters:
        return "before attention"
    return "log-sum-exp" if "sink" in enters else "as is"


def _cells(row: Row) -> tuple[str, ...]:
    name = _short_name(row)
    if row.error is not None:
        return name, "error", "", "", ""
    learned, relative = ("yes" if yes else "no" for yes in (row.learned, row.relative))
    enters = ", ".join(row.enters) or "nothing"
    enters = textwrap.shorten(enters, _LONGEST_ENTERS, placeholder=" …")
    return name, enters, learned, relative, row.fusable


def _short_name(row: Row) -> str:
    return row.name if len(row.name) <= _LONGEST_NAME else row.name[: _LONGEST_NAME - 1] + "…"
