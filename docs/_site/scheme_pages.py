"""One page for each name of the catalogue, and their index, written to ``docs/schemes``.

A page has no words of its own but a title, a formula and conventions, which ``schemes.toml`` holds.
The rest is asked: options of the scheme's signature and docstring, implementations of ``explain``,
rows of the pages ``compare.md``, ``tasks.md`` and ``exactness.md``, the picture of ``posenc show``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import multiprocessing
import os
import re
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import posenc
from posenc.cli import list as catalogue_list
from posenc.cli import show
from posenc.cli.pages import docstring_texts, signature_of
from posenc.makers import maker_of
from posenc.schemes.sizes import SIZES

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
FOLDER = DOCS / "schemes"
_SIZES = {"num_heads": 8, "head_dim": 64, "dim": 512, "max_len": 128}
_SHOWN = _SIZES | {"hidden_dim": 512, "max_len": 16384, "train_len": 4096}  # in examples
_PLACES = {
    "embedding": "It is added to the embeddings of tokens.",
    "transform": "It changes queries and keys.",
    "bias": "It is added to the scores.",
    "features": "It reads queries, keys or hidden states.",
    "sink": "It adds a logit to the softmax.",
    "whole rows": "It changes whole rows of scores.",
    "regions": "It treats near and far keys differently, and merges their parts.",
}
_GROUPS = (
    ("Queries and keys are turned", ("transform",)),
    ("Near and far keys differ", ("regions",)),
    ("A bias by distance is added to the scores", ("bias",)),
    ("Content decides", ("features", "whole rows")),
    ("Something is added to embeddings", ("embedding",)),
    ("The softmax changes, or nothing", ("sink", "")),
)


def setup(app: Any) -> dict[str, Any]:
    """Write the pages before Sphinx looks for them."""
    app.connect("builder-inited", lambda app: write(pictures=True))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


@cache
def facts() -> dict[str, dict[str, Any]]:
    """What ``schemes.toml`` says of each name."""
    return tomllib.loads((DOCS / "_site" / "schemes.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """The names of the catalogue that are posenc's own."""
    return [n for n, maker in posenc.catalogue().items() if _home(maker).startswith("posenc.")]


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


def put(path: Path, text: str) -> None:
    """Write a file unless it has that text already, so that Sphinx reads only what changed."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def page(name: str, row: catalogue_list.Row) -> str:
    """The page of one scheme, in Markdown."""
    fact, maker = facts()[name], maker_of(name)
    file = source_of(name)
    sections: list[tuple[str, str]] = [
        ("", _head(name, row, maker)),
        ("Options", _options(maker)),
        ("Conventions that differ", _list(fact["conventions"])),
        ("Models", _models(name)),
        ("Implementations", _implementations(name)),
        ("In the study", _study(name)),
        ("In the tasks", _tasks(name)),
        ("Exactness", _exactness(name)),
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
                _short_paper(row.paper),
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
    for place in ("whole rows", "regions", "features", "transform", "bias", "embedding"):
        if place in where:
            return next(title for title, places in _GROUPS if place in places)
    return _GROUPS[-1][0]


def source_of(name: str) -> str:
    """The file of a scheme, from the root of the repository."""
    maker = maker_of(name)
    parts = [v for v in getattr(maker, "preset", {}).values() if isinstance(v, type)]
    source = parts[-1] if parts else inspect.unwrap(maker)
    return Path(inspect.getsourcefile(source) or "").resolve().relative_to(ROOT).as_posix()


@cache
def pages_of_files() -> dict[str, str]:
    """The page of each scheme's file: that of the first name."""
    found: dict[str, str] = {}
    for name in sorted(names()):
        found.setdefault(source_of(name), name)
    return found


def _home(maker: Callable[..., Any]) -> str:
    return str(inspect.unwrap(maker).__module__)


def _head(name: str, row: catalogue_list.Row, maker: Any) -> str:
    formula = facts()[name]["formula"]
    scheme = _scheme(name)
    needed = [p for p in _parameters(maker) if _needed(maker, p)]
    if any(p not in SIZES for p in needed):  # the factor of a scaling follows from both lengths
        needed += ["max_len", "train_len"]
    sizes = {p: _SHOWN[p] for p in dict.fromkeys(needed) if p in SIZES}
    call = ", ".join([repr(name), *(f"{key}={value}" for key, value in sizes.items())])
    arrays = [f"`{n}` {spec.shape}" for n, spec in scheme.param_specs().items()]
    trained = getattr(maker, "trained_as", None)
    lines = [
        f"{_code(row.title)}",
        "",
        f"$$\n{formula}\n$$",
        "",
        f"![What {name} does to attention, drawn by posenc show]({name}.png)",
        "",
        *table(
            ("", ""),
            [
                ("name", f"`{name}`"),
                ("paper", _paper(row.paper) or "none"),
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
        f"posenc compare --schemes alibi {f'{trained}~{name}' if trained else name}",
        f"posenc show {name}",
        "```",
    ]
    return "\n".join(lines)


def _scheme(name: str) -> posenc.PositionScheme:
    return posenc.make(name, **_SIZES, train_len=32, hidden_dim=512)


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
            _code(texts.get(name, "")),
        )
        for name, p in _parameters(maker).items()
    ]
    return "\n".join(table(("option", "default", "meaning"), cells)) if cells else "None."


def _value(value: Any) -> str:
    return f"`{value.__name__ if isinstance(value, type) else repr(value)}`".replace("'", '"')


def _code(text: str) -> str:
    """RST's literals as Markdown's, on one line."""
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _paper(text: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _short_paper(text: str) -> str:
    """Authors and year, which are the link."""
    return re.sub(r"(.*), arXiv (\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\2)", text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown; numbers stand at the right."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    number = re.compile(r"\*{0,2}[<≥\-–]?\s?[\d.]+( ± [\d.]+)?\*{0,2}|")
    right = [
        bool(rows) and all(number.fullmatch(row[n]) for row in rows) and any(r[n] for r in rows)
        for n in range(len(heads))
    ]
    line = [" --: " if r else " :-- " for r in right]
    return [
        f"| {' | '.join(heads)} |",
        f"|{'|'.join(line)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _models(name: str) -> str:
    """Plans of released models in which the scheme stands."""
    found = models().get(name, [])
    if not found:
        return ""
    links = ", ".join(f"{{py:obj}}`~posenc.presets.{plan}`" for plan in found)
    return f"[Plans of published models](../api/posenc.presets.md) with it: {links}."


@cache
def models() -> dict[str, list[str]]:
    """The names of the plans with each scheme of the catalogue."""
    from posenc import presets

    kinds = {_kind(_scheme(name)): name for name in names()}
    found: dict[str, list[str]] = {}
    for plan in presets.__all__:
        maker = getattr(presets, plan)
        if not inspect.isfunction(maker) or plan in ("from_hf_config", "rnope", "swan", "irope"):
            continue
        needed = signature_of(inspect.unwrap(maker)).parameters.values()
        sizes = {p.name: _SIZES.get(p.name, 32) for p in needed if p.default is p.empty}
        made = maker(**{n: v for n, v in sizes.items() if n in SIZES})
        schemes = getattr(made, "schemes", (made,))
        for kind in {_kind(part) for scheme in schemes for part in _parts(scheme)}:
            if kind in kinds:
                found.setdefault(kinds[kind], []).append(plan)
    return found


def _parts(scheme: Any) -> Iterator[Any]:
    """The schemes that a sum or a wrapper is made of, and a wrapper itself."""
    inner = getattr(scheme, "schemes", None) or getattr(scheme, "scheme", None)
    if inner is None or type(scheme).__name__ == "Sink":
        yield scheme
    for part in inner if isinstance(inner, tuple | list) else (inner,):
        if part is not None:
            yield from _parts(part)


def _kind(scheme: Any) -> tuple[object, ...]:
    scaling = getattr(scheme, "scaling", None)
    kind = getattr(scheme, "kind", None) if type(scheme).__name__ == "Kerple" else None
    return type(scheme), type(scaling), kind


def _implementations(name: str) -> str:
    """What each implementation says to a plain causal call."""
    cells = [
        (framework, ", ".join(f"`{each}`" for each in which), answer)
        for framework, answers in answers_of_all()[name].items()
        for answer, which in answers.items()
    ]
    intro = (
        "Asked for a causal call of 2048 tokens, 8 heads of 64 channels, on a CPU. "
        "[Performance](../performance.md) has what was measured, and on which devices."
    )
    return "\n".join([intro, "", *table(("framework", "implementation", "answer"), cells)])


@cache
def answers_of_all() -> dict[str, dict[str, dict[str, list[str]]]]:
    """By scheme, framework and answer: the implementations; kept while the sources are these."""
    kept, now = FOLDER / ".answers.json", digest("posenc", "backends")
    if kept.is_file():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["digest"] == now:
            return dict(found["answers"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # embeddings add nothing to attention
        answers = {
            name: {"PyTorch": _grouped(_of_torch(name)), "JAX": _grouped(_of_jax(name))}
            for name in names()
        }
    kept.write_text(json.dumps({"digest": now, "answers": answers}), encoding="utf-8")
    return answers


def _grouped(answers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for implementation, answer in answers:
        found.setdefault(answer, []).append(implementation)
    return found


def _asked(
    explain: Callable[..., Any], implementations: Sequence[str]
) -> Iterator[tuple[str, str]]:
    chosen = explain("auto")["implementation"]
    for implementation in implementations:
        try:
            explain(implementation)
        except NotImplementedError as error:
            yield implementation, "no: " + _reason(str(error), implementation)
        else:
            taken = implementation == chosen
            yield implementation, "yes; `auto` takes it here" if taken else "yes, by name"


def _reason(text: str, implementation: str) -> str:
    return text.partition(f"{implementation!r} cannot serve this call: ")[2] or text


def _of_torch(name: str) -> Iterator[tuple[str, str]]:
    torch = importlib.import_module("torch")
    posenc_torch = importlib.import_module("posenc_torch")
    scheme = _scheme(name)
    q = torch.zeros(1, 8, 2048, 64)
    tensors = posenc.init_params(scheme)
    params = {n: torch.as_tensor(a, dtype=torch.float32) for n, a in tensors.items()}
    tokens = posenc.Tokens(x=torch.zeros(1, 2048, 512))

    def explain(implementation: str) -> Any:
        return posenc_torch.explain(
            q, q, q, scheme, params, causal=True, tokens=tokens, implementation=implementation
        )

    return _asked(explain, posenc_torch.IMPLEMENTATIONS)


def _of_jax(name: str) -> Iterator[tuple[str, str]]:
    numpy = importlib.import_module("jax.numpy")
    posenc_jax = importlib.import_module("posenc_jax")
    scheme = _scheme(name)
    q = numpy.zeros((1, 2048, 8, 64))
    params = {n: numpy.asarray(a, "float32") for n, a in posenc.init_params(scheme).items()}
    tokens = posenc.Tokens(x=numpy.zeros((1, 2048, 512)))

    def explain(implementation: str) -> Any:
        return posenc_jax.explain(
            q, q, q, scheme, params, causal=True, tokens=tokens, implementation=implementation
        )

    return _asked(explain, posenc_jax.IMPLEMENTATIONS)


@cache
def _text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def tables_of(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Heads and rows of each table of a text in Markdown."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [
            [c.strip() for c in line.strip("| \n").split(" | ")] for line in block.splitlines()
        ]
        yield lines[0], lines[2:]


def _is_of(label: str, name: str) -> bool:
    base = label.partition(",")[0]
    return base == name or base.endswith(f"~{name}")


def _study(name: str) -> str:
    section = _text("compare.md").partition("## The whole catalogue")[2]
    (heads, rows), *_ = tables_of(section)
    own = [row for row in rows if _is_of(row[0], name)]
    if not own:
        return "Not in the [study's table](../compare.md), which is older than this scheme."
    intro = (
        "Bits per byte, lower is better, by length; trained on 64 bytes, three seeds, "
        "non-overlapping windows. [The study](../compare.md) has the other schemes and protocols; "
        "the numbers hold for its small model."
    )
    return "\n".join([intro, "", *table(heads, own)])


def _tasks(name: str) -> str:
    cells = []
    for title, body in re.findall(
        r"^### (\S+)\n(.*?)(?=^### |^## |\Z)", _text("tasks.md"), re.MULTILINE | re.DOTALL
    ):
        for heads, rows in tables_of(body):
            if "solved" not in heads:
                continue
            lengths = [n for n, head in enumerate(heads) if re.fullmatch(r"\d+ \(\d+x\)", head)]
            for row in (row for row in rows if row[0] == name):
                scores = "; ".join(f"{heads[n]}: {row[n].replace('*', '')}" for n in lengths)
                link = f"[{title}](../tasks.md#{re.sub(r'[^a-z0-9_-]', '', title.lower())})"
                cells.append((link, row[1].partition(" [")[0], scores))
    if not cells:
        return ""
    intro = "Scores by length, mean of three seeds. [Tasks](../tasks.md) says how they are made."
    return "\n".join([intro, "", *table(("task", "solved", "score at a length"), cells)])


def _exactness(name: str) -> str:
    summary = _text("exactness.md").partition("## Summary")[2].partition("\n## ")[0]
    (heads, rows), *_ = tables_of(summary)
    own = [row for row in rows if row[0] == name]
    if not own:
        return ""
    intro = (
        "The worst error up to position 2^24, over NumPy, PyTorch and JAX, eager and compiled, "
        "against 50 digits of mpmath. [Exactness](../exactness.md) has each of them."
    )
    return "\n".join([intro, "", *table(heads[1:], [row[1:] for row in own])])


def _api(name: str) -> str:
    maker = maker_of(name)
    parts = [v for v in getattr(maker, "preset", {}).values() if isinstance(v, type)]
    kind = parts[-1] if parts else type(_scheme(name))
    if kind.__name__ not in importlib.import_module("posenc.schemes").__all__:
        return ""
    return f"API: {{py:class}}`posenc.schemes.{kind.__name__}`."


def digest(*folders: str) -> str:
    """A digest of the sources in these folders."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


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
