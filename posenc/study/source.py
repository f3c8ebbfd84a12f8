"""A digest of the files that define a scheme of another package."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from posenc.contract.protocol import PositionScheme

OWN = frozenset(("posenc", "posenc_jax", "posenc_torch"))  # covered by posenc_digest
_INSTALLED = {"site-packages", "dist-packages"}
_BY_RUNNING = {"*", "__getattr__", "globals", "vars", "exec", "setattr"}  # may define any name
_STDLIB = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


def source_digest(schemes: Iterable[Any], modules: Iterable[str] = ()) -> str:
    """A digest of the files that define schemes or tasks of other packages, and of ``modules``.

    Empty where there are none: posenc's own files have their own digest.

    An edited scheme must not reuse earlier results. So the digest covers the modules of its class
    and base classes, and those of what its fields hold: parts of a sum, a scaling. It covers the
    packages these lie in, and from there follows every ``import``, at the top of a file or inside a
    function. It leaves out the standard library and other installed packages.

    It also leaves out data files and modules imported by a computed name. It does not read the
    function that makes a scheme; the scheme's fields count instead. A class defined at a prompt has
    no file.
    """
    kinds = {type(part) for scheme in schemes for part in _parts(scheme)}
    roots = {base.__module__ for kind in kinds for base in kind.__mro__} | {*modules}
    packages = {name.partition(".")[0] for name in roots} - OWN
    texts: dict[str, bytes] = {}
    seen: set[str] = set()
    waiting = {name for root in roots for name in _with_parents(root)}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        file = None if name.partition(".")[0] in OWN else find_file(name)
        if file is not None and _is_followed(name, file, packages):
            texts[name] = file.read_bytes()
            waiting |= _imports(texts[name], _package(name, file)) - seen
    parts = (name.encode() + b"\0" + text for name, text in sorted(texts.items()))
    return hashlib.sha256(b"\0".join(parts)).hexdigest() if texts else ""


def _parts(value: Any) -> Iterator[Any]:
    """A scheme, and all schemes and other dataclasses that its fields hold."""
    if isinstance(value, PositionScheme) or (is_dataclass(value) and not isinstance(value, type)):
        yield value
        value = vars(value)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for each in value:
            yield from _parts(each)


def _with_parents(module: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``: an import runs them all."""
    return itertools.accumulate(module.split("."), "{}.{}".format)


def find_file(module: str) -> Path | None:
    """The file of a module, without importing it; None if there is none."""
    name = getattr(sys.modules.get(module), "__file__", None)
    if name is None and (spec := _spec(module)) is not None:
        name = spec.origin
    return Path(name) if name is not None and Path(name).is_file() else None


def names_at_top(file: Path) -> frozenset[str] | None:
    """Names in the text of a module, outside of its functions and classes, and their own names.

    What is not among them, the module does not define. None where only running it could tell.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python repeats them when the file is imported
            waiting: list[ast.AST] = [ast.parse(file.read_bytes())]
    except (SyntaxError, ValueError):
        return None  # a compiled module, or an error that its import has too
    names: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.Name):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return None if names & _BY_RUNNING else frozenset(names)


def _spec(module: str) -> ModuleSpec | None:
    parent = module.rpartition(".")[0]
    if not parent:
        try:
            return find_spec(module)
        except ValueError:  # a module made by hand has no spec
            return None
    above = _spec(parent)  # find_spec(module) would import the parent
    within = above.submodule_search_locations if above else None
    return PathFinder.find_spec(module, within) if within else None


def _is_followed(module: str, file: Path, packages: set[str]) -> bool:
    if _INSTALLED & set(file.parts):  # first: these may lie inside the standard library's folder
        return module.partition(".")[0] in packages
    return not any(file.is_relative_to(folder) for folder in _STDLIB)


def _package(module: str, file: Path) -> str:
    """The package that a relative import in this file starts from."""
    return module if file.stem == "__init__" else module.rpartition(".")[0]


@functools.cache  # a study asks once per run
def _imports(text: bytes, package: str) -> frozenset[str]:
    """Names that a file imports; some may be attributes of modules, which have no file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python repeats them when the file is imported
            nodes = list(ast.walk(_Run().visit(ast.parse(text))))
    except (SyntaxError, ValueError):
        return frozenset()  # a compiled module
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= _imported_from(node, package)
    return frozenset(each for name in names for each in _with_parents(name))


class _Run(ast.NodeTransformer):
    """What runs: a type checker's own imports do not."""

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
        return self.generic_visit(node)


def _imported_from(node: ast.ImportFrom, package: str) -> set[str]:
    try:
        home = resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:  # more dots than packages
        return set()
    return {f"{home}.{alias.name}" for alias in node.names}
