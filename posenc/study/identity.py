"""A fingerprint of everything that a result depends on besides its recipe and its text."""

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

from posenc.contract.protocol import PositionScheme
from posenc.layers import LayerPlan
from posenc.study.models import model_module
from posenc.study.recipe import Recipe
from posenc.study.source import OWN, source_digest
from posenc.study.specs import Plans
from posenc.study.tasks.task import Task

TRAINERS = "posenc.trainers"  # the entry-point group
_DISTRIBUTIONS = {"jax": ("jax", "jaxlib")}  # where the framework is more than its own package
# Files that show results, or that a study never calls. All other files of the packages count.
_NO_EFFECT = (
    "posenc/__main__.py",
    "posenc/audit/",
    "posenc/cli/",
    "posenc/probe/",
    "posenc/study/captions.py",
    "posenc/study/columns.py",
    "posenc/study/comparisons.py",
    "posenc/study/differences.py",
    "posenc/study/dry_run.py",
    "posenc/study/effective.py",
    "posenc/study/estimate.py",
    "posenc/study/joined.py",
    "posenc/study/live.py",
    "posenc/study/origin.py",
    "posenc/study/outcomes.py",
    "posenc/study/outputs.py",
    "posenc/study/page.py",
    "posenc/study/panels.py",
    "posenc/study/plots.py",
    "posenc/study/progress.py",
    "posenc/study/report.py",
    "posenc/study/statistics.py",
    "posenc/study/stopping.py",
    "posenc/study/sweep_plots.py",
    "posenc/study/sweep_tables.py",
    "posenc/study/table.py",
    "posenc/study/tables.py",
    "posenc/study/task_plots.py",
    "posenc/study/task_tables.py",
    "posenc/study/terminal.py",
    "posenc/testing/",
    "posenc/vectors/",
    "posenc_jax/audit/",
    "posenc_jax/testing.py",
    "posenc_torch/audit/",
    "posenc_torch/probe.py",
    "posenc_torch/testing.py",
)


def fingerprint(plans: Plans | None, backend: str, recipe: Recipe) -> dict[str, Any]:
    """Fields of a ``Run`` that change if its scheme, task, model, or what trains it, is edited.

    ``plans`` is None for a label whose schemes cannot be made.
    """
    common = {
        "posenc_digest": posenc_digest(backend),
        "versions": versions(backend),
        "described": description(recipe.of_task),
    }
    if plans is None:
        return {"descriptions": (), "windows": (), "source_digest": "", "tested": "", **common}
    trained, tested = (_of_plan(plan, backend, recipe) for plan in (plans.trained, plans.tested))
    other = json.dumps(tested, sort_keys=True).encode() if tested != trained else b""
    return {**trained, "tested": hashlib.sha256(other).hexdigest() if other else "", **common}


def _of_plan(plan: LayerPlan, backend: str, recipe: Recipe) -> dict[str, Any]:
    own = [model_module(recipe.model)] if recipe.model else []
    modules = (_trainer_module(backend), *own)
    return {
        "descriptions": tuple(description(scheme) for scheme in plan.schemes),
        "windows": plan.windows,
        "source_digest": source_digest((*plan.schemes, recipe.of_task), modules),
    }


def description(scheme: PositionScheme | Task) -> str:
    """A scheme or task as text, the same in every process: its class and all fields."""
    kind = type(scheme)
    state = _fields(scheme) if is_dataclass(scheme) else vars(scheme)
    return json.dumps([_dotted_name(kind), _describe(state)], sort_keys=True)


@functools.cache
def versions(backend: str) -> tuple[str, ...]:
    """The installed versions of NumPy and of the framework, which is not imported."""
    names = ("numpy", *_DISTRIBUTIONS.get(backend, (backend,)))
    return tuple(f"{name} {_version(name)}" for name in names)


@functools.cache
def posenc_digest(backend: str) -> str:
    """A digest of posenc's files that affect results, and of the backend's if it is ours.

    All of them, and not only those that a training step imports: to follow imports takes ten times
    as long, and misses modules that are imported by a computed name.

    Cached, because a process keeps the modules that it has loaded even if files change.
    """
    digest = hashlib.sha256()
    for package in sorted({"posenc", _trainer_module(backend).partition(".")[0]} & OWN):
        for name, file in sorted(_files(package)):
            digest.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files(package: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(package)
    for place in (spec.submodule_search_locations if spec else None) or ():
        for file in Path(place).rglob("*.py"):
            name = f"{package}/{file.relative_to(place).as_posix()}"
            if not name.startswith(_NO_EFFECT):
                yield name, file


@functools.cache
def _trainer_module(backend: str) -> str:
    """The module of a backend's trainer; it is not imported."""
    return next((entry.module for entry in entry_points(group=TRAINERS, name=backend)), backend)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _describe(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return [_dotted_name(type(value)), _describe(_fields(value))]
    if isinstance(value, Mapping):
        return {_text(key): _describe(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_describe(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_describe(each), sort_keys=True) for each in value)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), _describe(value.co_consts), list(value.co_names)]
    return _describe_function(value) if hasattr(value, "__code__") else _text(value)


def _fields(value: Any) -> dict[str, Any]:
    """The fields that its constructor takes; other fields follow from these."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def _dotted_name(kind: Any) -> str:
    return f"{kind.__module__}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def _describe_function(function: Any) -> list[Any]:
    """A function as a field: its code, defaults and closure."""
    closure = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    parts = [function.__defaults__, [_dotted_name(x) if callable(x) else x for x in closure]]
    return [_dotted_name(function), _describe(function.__code__), *map(_describe, parts)]


def _text(value: Any) -> str:
    """``repr`` without the addresses of objects, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
