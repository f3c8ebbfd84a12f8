"""One page for each name of the catalogue, and their index, written to ``docs/schemes``.

A page has no words of its own but a title, a formula and conventions, which ``schemes.toml`` holds.
The rest is asked: options of the scheme's signature and docstring, implementations of ``explain``,
costs of ``costs.json``, rows of the pages ``compare.md``, ``tasks.md`` and ``exactness.md``, the
picture of ``posenc show``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from markdown_parts import bullets, code, paper_link, put, short_paper, table
from scheme_facts import FOLDER, MODEL_SIZES, facts, names, scheme_of, source_of
from scheme_implementations import answers_of_all, costs, digest, implementations
from scheme_models import models_of
from scheme_records import exactness, study, tasks

from posenc.cli import list as catalogue_list
from posenc.cli import show
from posenc.cli.pages import docstring_texts, signature_of
from posenc.makers import maker_of
from posenc.schemes.sizes import SIZES

_SHOWN = MODEL_SIZES | {"hidden_dim": 512, "max_len": 16384, "train_len": 4096}  # in examples
_PLACES = {
    "embedding": "It is added to the embeddings of tokens.",
    "transform": "It changes queries and keys.",
    "bias": "It is added to the scores.",
    "features": "It reads queries, keys or hidden states.",
    "sink": "It adds a logit to the softmax.",
    "channel decay": "Each channel of a score decays by itself.",
    "whole rows": "It changes whole rows of scores.",
    "regions": "It treats near and far keys differently, and merges their parts.",
}
_GROUPS = (
    ("Queries and keys are turned", ("transform",)),
    ("Near and far keys differ", ("regions",)),
    ("A bias by distance is added to the scores", ("bias",)),
    ("Content decides", ("features", "channel decay", "whole rows")),
    ("Something is added to embeddings", ("embedding",)),
    ("The softmax changes, or nothing", ("sink", "")),
)


def setup(app: Any) -> dict[str, Any]:
    """Write the pages before Sphinx looks for them."""
    app.connect("builder-inited", lambda app: write(pictures=True))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write(*, pictures: bool) -> None:
    """Write all pages, and the pictures too."""
    FOLDER.mkdir(exist_ok=True)
    if pictures:
        _ask_and_draw()
    rows = {row.name: row for row in catalogue_list.rows()}
    pages = {name: page(name, rows[name]) for name in names()}
    pages["index"] = index([rows[name] for name in names()])
    for name, text in pages.items():
        put(FOLDER / f"{name}.md", text)


def page(name: str, row: catalogue_list.Row) -> str:
    """The page of one scheme, in Markdown."""
    fact, maker = facts()[name], maker_of(name)
    file = source_of(name)
    sections: list[tuple[str, str]] = [
        ("", _head(name, row, maker)),
        ("Options", _options(maker)),
        ("Conventions that differ", bullets(fact["conventions"])),
        ("Models", models_of(name)),
        ("Implementations", implementations(name)),
        ("Cost by implementation", costs(name)),
        ("In the study", study(name)),
        ("In the tasks", tasks(name)),
        ("Exactness", exactness(name)),
        ("Source", f"One file: [{file}](../../{file}). {_api(name)}"),
    ]
    parts = [f"# {fact['title']}", *(_section(t, text) for t, text in sections if text)]
    return "\n\n".join(parts) + "\n"


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if title else text


def index(rows: Sequence[catalogue_list.Row]) -> str:
    """The index of schemes, by what a position changes."""
    lines = [
        "# Schemes",
        "",
        "Every scheme of the catalogue, by what a position changes. `posenc list` prints this "
        "table, `posenc show NAME` draws one. [Choosing a scheme](../choosing.md) says what was "
        "measured.",
    ]
    left = list(rows)
    for title, _ in _GROUPS:
        own = [row for row in left if _group(row) == title]
        if not own:
            continue
        lines += ["", f"## {title}", ""]
        cells = [
            (
                f"[`{row.name}`]({row.name}.md)",
                facts()[row.name]["title"],
                "yes" if row.learned else "",
                "yes" if row.relative else "",
                row.fusable,
                short_paper(row.paper),
            )
            for row in own
        ]
        heads = ("name", "scheme", "learned", "relative", "fused as", "paper")
        lines += table(heads, cells)
    lines += [
        "",
        "*Learned*: it has learned arrays. *Relative*: positions enter by their differences alone. "
        "*Fused as*: how a kernel applies it.",
        "",
        "Schemes combine: `rope+alibi` on one layer, `rope/nope` on layers in turn, `rope@512` "
        "with a window. Your own is one short file: [Add a scheme](../add_a_scheme.md).",
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *(row.name for row in rows),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _group(row: catalogue_list.Row) -> str:
    where = set(row.enters)
    rare = ("whole rows", "channel decay", "regions")
    for place in (*rare, "features", "transform", "bias", "embedding"):
        if place in where:
            return next(title for title, group in _GROUPS if place in group)
    return _GROUPS[-1][0]


def _head(name: str, row: catalogue_list.Row, maker: Any) -> str:
    formula = facts()[name]["formula"]
    scheme = scheme_of(name)
    needed = [p for p in _parameters(maker) if _needed(maker, p)]
    if any(p not in SIZES for p in needed):  # the factor of a scaling follows from both lengths
        needed += ["max_len", "train_len"]
    sizes = {p: _SHOWN[p] for p in dict.fromkeys(needed) if p in SIZES}
    call = ", ".join([repr(name), *(f"{key}={value}" for key, value in sizes.items())])
    arrays = [f"`{n}` {spec.shape}" for n, spec in scheme.param_specs().items()]
    trained = getattr(maker, "trained_as", None)
    beside = "rope" if name == "alibi" else "alibi"
    lines = [
        f"{code(row.title)}",
        "",
        f"$$\n{formula}\n$$",
        "",
        f"![What {name} does to attention, drawn by posenc show]({name}.png)",
        "",
        *table(
            ("", ""),
            [
                ("name", f"`{name}`"),
                ("paper", paper_link(row.paper) or "none"),
                ("acts on", " ".join(_PLACES[p] for p in row.enters) or "Nothing."),
                ("learned arrays", ", ".join(arrays) or "none"),
                ("by differences of positions alone", "yes" if row.relative else "no"),
                *(
                    [("trained as", f"[`{trained}`]({trained}.md), and tested as this scheme")]
                    if trained
                    else []
                ),
            ],
        ),
        "",
        "```python",
        "import posenc",
        "",
        f"scheme = posenc.make({call.replace(chr(39), chr(34))})",
        "```",
        "",
        "```sh",
        f"posenc compare --schemes {beside} {f'{trained}~{name}' if trained else name}",
        f"posenc show {name}",
        "```",
    ]
    return "\n".join(lines)


def _needed(maker: Any, name: str) -> bool:
    return bool(_parameters(maker)[name].default is inspect.Parameter.empty)


def _parameters(maker: Any) -> dict[str, inspect.Parameter]:
    """Parameters of a scheme, and of the scaling that its name sets."""
    preset = getattr(maker, "preset", {})
    sources = [inspect.unwrap(maker), *(v for v in preset.values() if isinstance(v, type))]
    return {
        p.name: p
        for source in sources
        for p in signature_of(source).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in preset
    }


def _options(maker: Any) -> str:
    preset = getattr(maker, "preset", {})
    sources = [inspect.unwrap(maker), *(v for v in preset.values() if isinstance(v, type))]
    texts = {n: t for source in sources for n, t in docstring_texts(source).items()}
    cells = [
        (
            f"`{name}`",
            "needed" if p.default is p.empty else _value(p.default),
            code(texts.get(name, "")),
        )
        for name, p in _parameters(maker).items()
    ]
    return "\n".join(table(("option", "default", "meaning"), cells)) if cells else "None."


def _value(value: Any) -> str:
    return f"`{value.__name__ if isinstance(value, type) else repr(value)}`".replace("'", '"')


def _api(name: str) -> str:
    maker = maker_of(name)
    parts = [v for v in getattr(maker, "preset", {}).values() if isinstance(v, type)]
    kind = parts[-1] if parts else type(scheme_of(name))
    if kind.__name__ not in importlib.import_module("posenc.schemes").__all__:
        return ""
    return f"API: {{py:class}}`posenc.schemes.{kind.__name__}`."


def _ask_and_draw() -> None:
    """Draw what these sources have not drawn yet, and ask implementations, beside each other."""
    stamp, now = FOLDER / ".drawn", digest("posenc")
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != now:
        for path in FOLDER.glob("*.png"):
            path.unlink()
    stamp.write_text(now, encoding="utf-8")
    missing = [name for name in names() if not (FOLDER / f"{name}.png").is_file()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), mp_context=context) as pool:
        asked = pool.submit(answers_of_all)  # it keeps them in a file
        list(pool.map(_draw, missing))
        asked.result()


def _draw(name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        show.run({"scheme": name, "out": str(FOLDER / f"{name}.png")})
