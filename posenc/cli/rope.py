"""``posenc rope``: what the RoPE of a checkpoint's ``config.json`` really is."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from posenc import hf
from posenc.cli.pages import picture_file
from posenc.cli.parser import Parser
from posenc.contract.protocol import Array
from posenc.hf import keys
from posenc.hf.context import length_by_base, length_by_cosines
from posenc.hf.mrope import AXIS_SECTIONS
from posenc.schemes.mrope import MRoPE
from posenc.schemes.nope import NoPE
from posenc.schemes.rope import RoPE
from posenc.study import picture
from posenc.study.picture import Figure

_WIDTH = 100
_MOST_NUMBERS = 6  # of a list that is printed
_FAR = 2**20  # distances up to which the criterion is tried


def add_options(parser: Parser) -> None:
    """Add the options of ``posenc rope``."""
    parser.usage = "posenc rope CONFIG [options]"
    parser.examples = (
        ("posenc rope checkpoints/llama", "a folder with a config.json"),
        ("posenc rope config.json --out rope.png", "its frequencies as a picture"),
        ("posenc rope old.json --head-dim 128", "where the file has no head_dim"),
    )
    parser.add_argument("config", metavar="CONFIG", help="a config.json, or the folder that has it")
    parser.add_argument(
        "--head-dim", type=int, metavar="N", help="channels per head, if the file has none"
    )
    parser.add_argument(
        "--out",
        type=picture_file,
        metavar="FILE",
        help="draw the frequencies: ends in .png, .svg or .pdf",
    )


def run(options: dict[str, Any]) -> int:
    """Print what the configuration says, draw it with ``--out``, and return the exit status 0."""
    path = Path(options["config"])
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{str(path)!r} has no config.json, so it is no model")
        path = path / "config.json"
    form = picture.form_of(options["out"]) if options["out"] else ""
    config = _load(path)
    reading = hf.read(config, head_dim=options["head_dim"])
    print(describe(reading, str(config.get("model_type", ""))))
    sections = any(key.rpartition(".")[2] in AXIS_SECTIONS for key in reading.kept)
    if sections and len(reading.ropes) == 1 and not reading.unknown:
        print("\n".join(_axes_lines(hf.mrope_from_hf(config, head_dim=options["head_dim"]))))
    if options["out"]:
        if not any(isinstance(rope, RoPE) for rope in reading.ropes.values()):
            raise ValueError("no layer rotates: there is nothing to draw")
        page = picture.page([_panel(reading)], path.name, _small_print(reading), form)
        print(picture.write(page, options["out"]))
    return 0


def describe(reading: hf.Reading, model: str = "") -> str:
    """The text of a configuration that was read: layer types, then keys and notes."""
    lines = [f"model type   {model}"] if model else []
    if reading.part:
        lines.append(f"read from    {reading.part}")
    if reading.max_len is not None:
        lines.append(f"max length   {reading.max_len} tokens")
    for kind, rope in reading.ropes.items():
        lines += ["", kind or "all layers", *_scheme_lines(rope, reading.max_len)]
    known = {**keys.KEPT, **keys.KEPT_OUTSIDE}
    for title, texts in {
        "kept, without an effect on frequencies": [
            f"{key} = {_short(value)}: {known[key.rpartition('.')[2]]}"
            for key, value in reading.kept.items()
        ],
        "notes": list(reading.notes),
        "NOT UNDERSTOOD": [f"{key}{hint}" for key, hint in reading.unknown.items()],
    }.items():
        lines += ["", title] if texts else []
        for text in texts:
            lines += textwrap.wrap(
                text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False
            )
    return "\n".join(lines)


def _axes_lines(scheme: MRoPE) -> list[str]:
    """Which axis turns which channel pairs, as ``MRoPE.from_hf`` reads it."""
    sections = " + ".join(map(str, scheme.sections or ()))
    return ["", "several axes", *_rows({"order": scheme.layout, "pairs": f"{sections}, by axis"})]


def _scheme_lines(rope: RoPE | NoPE, max_len: int | None) -> list[str]:
    if not isinstance(rope, RoPE):
        return ["  NoPE: no rotation"]
    dim = rope.rotary_dim or rope.head_dim
    rows = {
        "type": _scaling(rope),
        "base": f"{rope.base:.15g}",
        "channels": f"{dim} of {rope.head_dim} per head rotate, layout {rope.layout!r}",
    }
    longer = rope if max_len is None else rope.at_length(max_len)
    if longer == rope:
        return _rows(rows | _frequency_rows(rope, max_len))
    first = getattr(rope.scaling, "train_len", 0)
    return [
        *_rows(rows), f"  up to {first} tokens", *_rows(_frequency_rows(rope, first), 4),
        f"  with {max_len} tokens", *_rows(_frequency_rows(longer, max_len), 4),
    ]  # fmt: skip


def _frequency_rows(rope: RoPE, max_len: int | None) -> dict[str, str]:
    """Facts that follow from the frequencies."""
    turning = [f for f in rope.frequencies() if f]
    waves = [2 * math.pi / f for f in turning]
    still = len(rope.frequencies()) - len(turning)
    parts = [f"{min(waves):.4g} to {max(waves):.4g} tokens"] if waves else []
    parts += [f"{still} frequencies are 0"] if still else []
    slow = 0 if max_len is None else sum(wave > max_len for wave in waves)
    parts += [f"{slow} of {len(waves)} are longer than {max_len}"] if slow else []
    factor, softmax = rope.attention_factor, rope.scale(rope.head_dim) * math.sqrt(rope.head_dim)
    rows = {"factor": f"{factor:.6g} on cosines and sines, so {factor**2:.6g} on scores"}
    if not math.isclose(softmax, 1, rel_tol=1e-12):
        rows["softmax"] = f"its scale is multiplied by {softmax:.6g}"
    return rows | {"wavelengths": ", ".join(parts), "context": _context(rope)}


def _context(rope: RoPE) -> str:
    """Two bounds on rotated channels, which are no limit of a model: others do not fade."""
    by_base, found = length_by_base(rope.base), length_by_cosines(rope.frequencies(), _FAR)
    if 0 < by_base < math.inf:
        table = f"about {_thousands(by_base)} tokens by the base (interpolated)"
    else:
        table = (
            "less than 1k tokens by the base" if not by_base else "more than 1M tokens by the base"
        )
    end = f"up to {_thousands(found)}" if found < _FAR else f"to {_thousands(_FAR)} and beyond"
    others = "" if rope.head_dim == 128 else ", for heads of 128 channels"
    return (
        f"a bound on the rotated channels, no limit of the model (arXiv 2405.14591): {table}"
        f"{others}; by these frequencies {end}"
    )


def _scaling(rope: RoPE) -> str:
    """The scaling with all options, lists shortened."""
    if rope.scaling is None:
        return "plain RoPE"
    given = {f.name: getattr(rope.scaling, f.name) for f in fields(rope.scaling)}
    options = ", ".join(f"{name}={_short(value)}" for name, value in given.items())
    return f"{type(rope.scaling).__name__}({options})"


def _short(value: Any) -> str:
    """A value as text; of a long list its ends."""
    if not isinstance(value, list | tuple) or len(value) <= _MOST_NUMBERS:
        return repr(value)
    first, last = (", ".join(map(repr, part)) for part in (value[:2], value[-2:]))
    return f"[{first}, … {last}] ({len(value)})"


def _rows(rows: Mapping[str, str], indent: int = 2) -> list[str]:
    lines = []
    for name, text in rows.items():
        start = f"{'':{indent}}{name:<11}  "
        lines += textwrap.wrap(
            start + text, _WIDTH, subsequent_indent=" " * len(start), break_on_hyphens=False
        )
    return lines


def _thousands(tokens: float) -> str:
    if tokens < 1000:
        return f"{tokens:.0f}"
    return f"{tokens / 2**10:.3g}k" if tokens < 2**20 else f"{tokens / 2**20:.3g}M"


def _load(path: Path) -> Mapping[str, Any]:
    """A configuration's file; errors say what is wrong with it."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))  # with or without a mark
    except OSError as error:
        raise OSError(error.errno, f"cannot read: {error.strerror}", str(path)) from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def _small_print(reading: hf.Reading) -> list[str]:
    texts = [
        f"{kind or 'all layers'}: base {rope.base:.15g}, {_scaling(rope)}"
        for kind, rope in reading.ropes.items()
        if isinstance(rope, RoPE)
    ]
    return [textwrap.shorten(text, 130, placeholder=" …") for text in texts]


def _panel(reading: hf.Reading) -> picture.Panel:
    ropes = {k or "all layers": r for k, r in reading.ropes.items() if isinstance(r, RoPE)}
    for kind, rope in list(ropes.items()):
        if reading.max_len is not None and rope.at_length(reading.max_len) != rope:
            ropes[f"{kind}, {reading.max_len} tokens"] = rope.at_length(reading.max_len)
    return 4.0, partial(_paint, ropes, reading.max_len)


def _paint(ropes: Mapping[str, RoPE], max_len: int | None, figure: Figure) -> None:
    """Wavelengths by index, and each frequency as a part of plain RoPE's."""
    left, right = figure.subplots(1, 2)
    unscaled: dict[tuple[float, int], None] = {}
    for number, (kind, rope) in enumerate(ropes.items()):
        f, style = np.asarray(rope.frequencies()), {"color": f"C{number}", "markersize": 3}
        turning = np.flatnonzero(f)
        left.plot(turning, 2 * np.pi / f[turning], ".-", label=kind, **style)
        right.plot(f / _plain(rope.base, len(f)), ".-", **style)
        if rope.scaling is not None:
            unscaled[rope.base, len(f)] = None
    for n, (base, count) in enumerate(unscaled):
        name = None if n else "without scaling"
        left.plot(2 * np.pi / _plain(base, count), ":", color="0.4", linewidth=1, label=name)
    if max_len is not None:
        left.axhline(max_len, color="0.6", linewidth=0.8, label="max length")
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    picture.label(left, "wavelengths", "frequency k", "tokens per turn")
    picture.label(right, "scaling", "frequency k", "frequency / frequency without scaling")
    for axes in (left, right):
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8, frameon=False)


def _plain(base: float, count: int) -> Array:
    """The frequencies of RoPE without a scaling."""
    return base ** (-np.arange(count) / count)
