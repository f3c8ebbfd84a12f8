"""The API reference: a page for each public module, with every name of its ``__all__``.

Pages are written to ``docs/api``; autodoc and numpydoc fill them from docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from markdown_parts import put

DOCS = Path(__file__).parents[1]
FOLDER = DOCS / "api"
# Modules with an interface that users may rely on, and what each is for.
MODULES = {
    "posenc": "schemes, attention, tokens, masks",
    "posenc.schemes": "the catalogue, as classes",
    "posenc.positions": "packing, padding, grids, images beside text",
    "posenc.presets": "layer plans of published models",
    "posenc.layers": "scheme and window of each layer",
    "posenc.angles": "sines and cosines that are exact at any position",
    "posenc.hf": "configurations of Hugging Face, read and written",
    "posenc.weights": "learned arrays and projections of checkpoints",
    "posenc.study": "train short, test long",
    "posenc.study.tasks": "tasks",
    "posenc.probe": "models that exist, measured by length",
    "posenc.testing": "the laws that every scheme keeps",
    "posenc.audit": "what other code computes, against the definition",
    "posenc.vectors": "golden vectors for other languages",
    "posenc.backend": "what a backend of one's own needs of the core",
    "posenc_torch": "PyTorch",
    "posenc_torch.hf": "models of Hugging Face transformers",
    "posenc_torch.drop_in": "modules with the signatures of other libraries",
    "posenc_jax": "JAX",
}
# Those of libraries that the tests' environment has not; the site's has them.
OF_LIBRARIES = {
    "posenc_jax.flax": ("flax", "modules of Flax"),
    "posenc_jax.equinox": ("equinox", "modules of Equinox"),
    "posenc_keras": ("keras", "layers of Keras"),
}
MODULES |= {name: what for name, (library, what) in OF_LIBRARIES.items() if find_spec(library)}

# They gather names of others; the last describes what no other has.
_GATHER = {"posenc": 1, "posenc.study": 1, "posenc.backend": 2}


def setup(app: Any) -> dict[str, Any]:
    """Write the pages before Sphinx looks for them, and mend docstrings before numpydoc does."""
    app.connect("builder-inited", lambda app: write())
    app.connect("autodoc-process-docstring", _mend, priority=100)
    app.connect("autodoc-process-signature", _plain)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        put(FOLDER / f"{name}.md", text)


def pages() -> dict[str, str]:
    """The text of each page by its name."""
    done: dict[int, str] = {}  # what is described already, by identity: its full name
    # A name's own module describes it, and modules above it point there.
    order = sorted(MODULES, key=lambda name: (_GATHER.get(name, 0), name))
    made = {name: page(name, done) for name in order}
    return {"index": index(), **{name: made[name] for name in MODULES}}


def index() -> str:
    """The page that lists the modules."""
    rows = [f"| [`{name}`]({name}.md) | {what} |" for name, what in MODULES.items()]
    return "\n".join(
        [
            "# API",
            "",
            "Every public name. What is not here may change without notice.",
            "",
            "| module | what |",
            "| :-- | :-- |",
            *rows,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *MODULES,
            "```",
            "",
        ]
    )


def public(name: str) -> list[str]:
    """The public names of a module."""
    module = importlib.import_module(name)
    return sorted(module.__all__, key=lambda each: (each.lower(), each))


def page(name: str, done: dict[int, str]) -> str:
    """The page of one module, in Markdown around directives of autodoc."""
    module = importlib.import_module(name)
    groups: dict[str, list[str]] = {"Classes": [], "Functions": [], "Data": []}
    for each in public(name):
        groups[_group(getattr(module, each))].append(each)
    lines = [f"# `{name}`", "", "```{eval-rst}", f".. automodule:: {name}", "```", ""]
    for title, names in groups.items():
        if not names:
            continue
        lines += [f"## {title}", ""]
        for each in names:
            lines += ["```{eval-rst}", *_directive(name, each, done), "```", ""]
    return "\n".join(lines)


def _group(value: Any) -> str:
    if hasattr(value, "__metadata__") or typing.get_origin(value):  # a type with a check, an alias
        return "Data"
    if inspect.isclass(value):
        return "Classes"
    return "Functions" if callable(value) else "Data"


def _directive(module: str, name: str, done: dict[int, str]) -> list[str]:
    value, full = getattr(importlib.import_module(module), name), f"{module}.{name}"
    group = _group(value)
    if group == "Data":
        return [f".. py:data:: {name}", f"   :module: {module}", "", *_of_data(value)]
    kind = "class" if group == "Classes" else "function"
    home = done.setdefault(id(value), full)
    if home != full:
        alias = [f".. py:{kind}:: {name}", f"   :module: {module}"]
        if kind == "class" and _GATHER.get(module) != 1:  # or a type has two targets
            alias.append("   :no-index:")
        return [*alias, "", f"   The same as :py:obj:`{home}`."]
    if not inspect.isclass(value) and not inspect.isfunction(value):  # an instance, as a mask
        return [f".. autodata:: {full}", "   :no-value:"]
    if kind == "function":
        return [f".. autofunction:: {full}"]
    lines = [f".. autoclass:: {full}", "   :members:"]
    if name == "PositionScheme":  # attributes of a base count as undocumented, and are not
        return [*lines, "   :inherited-members:", "   :undoc-members:"]
    return [*lines, "   :exclude-members: paper"]  # declared by each scheme, described once


def _of_data(value: Any) -> list[str]:
    """A constant's value, the keys of a mapping, or a field's type with its check."""
    if hasattr(value, "__metadata__"):
        checks = [inspect.getdoc(check) or "" for check in value.__metadata__]
        said = " ".join(check.partition("\n")[0] for check in checks)
        return [f"   ``{value.__origin__.__name__}``, checked as a field of a scheme. {said}"]
    if isinstance(value, dict) or hasattr(value, "keys"):
        keys = ", ".join(f"``{key}``" for key in value)
        return [f"   A mapping with the keys {keys}."]
    text = repr(value)
    if len(text) < 300:
        return [f"   ``{text}``"]
    return [f"   A value of {type(value).__name__}."]


def _plain(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str | None, str | None]:
    """A checked field's type without its check, as ``int`` for ``Count``; defaults that parse.

    Sphinx shows the whole path of each type where it cannot parse a default.
    """
    check = re.compile(r"~?(?:typing\.)?Annotated\[(\w+), <function \w+ at 0x[0-9a-f]+>\]")
    address = re.compile(r"<function (\w+)(?:\.<locals>)?[^>]*>(?:\.?\w+ at 0x[0-9a-f]+>)?")
    unnamed = re.compile(r"<factory>|<function <lambda>[^>]*>")
    a_class = re.compile(r"<class '([\w.]+)'>")

    def plain(text: str) -> str:
        text = address.sub(r"\1", check.sub(r"\1", text))
        return a_class.sub(r"\1", unnamed.sub("...", text))

    return signature and plain(signature), returns and plain(returns)


def _mend(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Give prose that follows the parameters a section of its own, or numpydoc reads parameters.

    posenc's docstrings end so: "Equation 34.", after an empty line.
    """
    starts = [n for n in range(1, len(lines)) if re.fullmatch("-{3,}", lines[n])]
    for start in reversed(starts):
        title = lines[start - 1]
        if title not in ("Parameters", "Attributes", "Returns", "Raises"):
            continue
        end = min((n - 1 for n in starts if n > start), default=len(lines))
        if title in ("Returns", "Raises") and end == len(lines):
            continue
        for n in range(start + 1, end):
            line, after = lines[n], lines[n + 1] if n + 1 < len(lines) else ""
            head = line and not line[0].isspace() and not lines[n - 1].strip()
            if head and not after.startswith(" "):
                lines[end:end] = [] if end == len(lines) else [""]
                lines[n:n] = ["Notes", "-----"]
                break
    for n, line in enumerate(lines):
        if line == "Notes" and "Notes" in lines[:n]:
            lines[n : n + 2] = []
            break
