"""``posenc show``: a scheme as one picture, or examples of a task."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.cli import tasks
from posenc.cli.drawing import draw
from posenc.cli.pages import picture_file
from posenc.cli.parser import Parser
from posenc.contract.checks import check_count
from posenc.makers import maker_of
from posenc.presets import PLANS
from posenc.study import weights
from posenc.study.specs import parse

_DEFAULTS = {"length": 128, "heads": 8, "head_dim": 64}


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
    heads = check_count("--heads", given["heads"])
    head_dim = check_count("--head-dim", given["head_dim"])
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


def _file_name(label: str) -> str:
    return re.sub(r"[\W_]+", "-", label.lower()).strip("-")
