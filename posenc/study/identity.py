"""What a result depends on beside its recipe: schemes as they are built, sources, versions."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from types import CellType, CodeType
from typing import Any

import numpy as np

from posenc.layers import LayerPlan
from posenc.protocol import PositionScheme
from posenc.study.source import OWN, source

TRAINERS = "posenc.trainers"  # the entry-point group
_DISTRIBUTIONS = {"jax": ("jax", "jaxlib")}  # of a framework that is not one of its own name
# What shows results, and what a study never calls. All other files of the packages count.
_SHOWING = (
    "posenc/__main__.py",
    "posenc/cli/list.py",
    "posenc/cli/main.py",
    "posenc/cli/show.py",
    "posenc/cli/picture.py",
    "posenc/study/stopping.py",
    "posenc/study/columns.py",
    "posenc/study/comparisons.py",
    "posenc/study/origin.py",
    "posenc/study/outputs.py",
    "posenc/study/panels.py",
    "posenc/study/plots.py",
    "posenc/study/report.py",
    "posenc/study/statistics.py",
    "posenc/study/tables.py",
    "posenc/study/terminal.py",
    "posenc/testing/",
    "posenc_jax/testing.py",
    "posenc_torch/testing.py",
)


# What is asked about a backend is asked once: what a process has loaded stays what it was.
def ingredients(plan: LayerPlan, backend: str) -> dict[str, Any]:
    """Fields of a ``Cell`` by which an edited scheme, maker, posenc or framework is noticed."""
    return {
        "built": tuple(described(scheme) for scheme in plan.schemes),
        "windows": plan.windows,
        "source": source(plan.schemes, (_trainer(backend),)),
        "own": own_sources(backend),
        "versions": versions(backend),
    }


def described(scheme: PositionScheme) -> str:
    """A scheme as text, the same in every process: its class and all its fields, arrays whole."""
    kind = type(scheme)
    state = _fields(scheme) if is_dataclass(scheme) else vars(scheme)
    return json.dumps([_named(kind), _described(state)], sort_keys=True)


@functools.cache
def versions(backend: str) -> tuple[str, ...]:
    """The installed versions of NumPy and of the framework, which is not imported."""
    names = ("numpy", *_DISTRIBUTIONS.get(backend, (backend,)))
    return tuple(f"{name} {_version(name)}" for name in names)


@functools.cache
def own_sources(backend: str) -> str:
    """A digest of posenc's files, and of the backend's if it is ours, but for those that show."""
    digest = hashlib.sha256()
    for package in sorted({"posenc", _trainer(backend).partition(".")[0]} & OWN):
        for name, file in sorted(_files(package)):
            digest.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files(package: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(package)
    for place in (spec.submodule_search_locations if spec else None) or ():
        for file in Path(place).rglob("*.py"):
            name = f"{package}/{file.relative_to(place).as_posix()}"
            if not name.startswith(_SHOWING):
                yield name, file


@functools.cache
def _trainer(backend: str) -> str:
    """The module that a backend's learner lies in, not imported."""
    return next((entry.module for entry in entry_points(group=TRAINERS, name=backend)), backend)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _described(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return [_named(type(value)), _described(_fields(value))]
    if isinstance(value, Mapping):
        return {_text(key): _described(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_described(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_described(each), sort_keys=True) for each in value)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), _described(value.co_consts), list(value.co_names)]
    return _function(value) if hasattr(value, "__code__") else _text(value)


def _fields(value: Any) -> dict[str, Any]:
    """What it was made with; other fields follow from these."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def _named(kind: Any) -> str:
    return f"{kind.__module__}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def _function(function: Any) -> list[Any]:
    """A function as a field: what it does, and what it was closed over."""
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    parts = [function.__defaults__, [_named(x) if callable(x) else x for x in held]]
    return [_named(function), _described(function.__code__), *map(_described, parts)]


def _text(value: Any) -> str:
    """``repr`` without the addresses of objects, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
