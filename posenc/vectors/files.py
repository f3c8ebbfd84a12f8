"""The files of golden vectors, and the folder that holds them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

import posenc
from posenc.contract.checks import nearest
from posenc.makers import catalogue
from posenc.schemes.rope import RoPE
from posenc.study.stopping import delay_signals
from posenc.vectors.answers import answer, context_length, reason, tolerances
from posenc.vectors.cases import Case, cases
from posenc.vectors.inputs import Array
from posenc.weights.safetensors import dump

FORMAT = "posenc.vectors/1"
"""Fields may be added under this name; one that changes or goes gets a new number."""
SUMS = "SHA256SUMS"


def write(out: str | PathLike[str], schemes: Iterable[str] = ()) -> list[Path]:
    """Write two files for each scheme, ``NAME.safetensors`` and ``NAME.json``, and ``SHA256SUMS``.

    Parameters
    ----------
    out
        A folder that does not exist, or is empty, or holds what an earlier call wrote and nobody
        edited; that is replaced.
    schemes
        Names of the catalogue. Default: all schemes of posenc.

    Returns
    -------
    The paths of all files.

    Raises
    ------
    ValueError
        There is no such scheme.
    FileExistsError
        The folder holds something else.
    """
    folder, names = Path(out), _names(schemes)
    before = _replaceable(folder)
    files = {name: content for scheme in names for name, content in contents(scheme).items()}
    sums = "".join(f"{hashlib.sha256(files[n]).hexdigest()}  {n}\n" for n in sorted(files))
    files[SUMS] = sums.encode()
    with delay_signals():
        folder.mkdir(parents=True, exist_ok=True)
        for name in before:
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return [folder / name for name in files]


def contents(scheme: str) -> dict[str, bytes]:
    """The two files of a scheme, by name."""
    tensors: dict[str, Array] = {}
    listed = [_describe(case, tensors) for case in cases(scheme)]
    about = {
        "format": FORMAT,
        "posenc": posenc.__version__,
        "scheme": scheme,
        "tensors": f"{scheme}.safetensors",
        "cases": listed,
    }
    text = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    data = dump(tensors, {"format": FORMAT, "scheme": scheme})
    return {f"{scheme}.safetensors": data, f"{scheme}.json": text.encode()}


def _describe(case: Case, tensors: dict[str, Array]) -> dict[str, Any]:
    """A case for the JSON; its arrays go to ``tensors``."""

    def keep(group: str, arrays: dict[str, Array]) -> dict[str, str]:
        names: dict[str, str] = {}
        for name, array in arrays.items():
            same = (n for n in names if np.array_equal(arrays[n], array))
            first = next(same, name)  # a rotation of queries is mostly that of keys, too
            names[name] = f"{case.name}.{group}.{first}"
            tensors[names[name]] = np.array(arrays[first])
        return names

    results = answer(case)
    found: dict[str, Any] = {
        "name": case.name,
        "kind": case.kind,
        "options": dict(case.options),
        "sizes": dict(case.sizes),
        "context_length": context_length(case),
        "inputs": keep("input", dict(case.inputs)),
        "params": keep("param", dict(case.params)),
        "expected": keep("expected", results),
        "expected_float32": keep("float32", {n: a.astype(np.float32) for n, a in results.items()}),
        "tolerances": tolerances(case, results),
        "reason": reason(case),
    }
    scheme = case.scheme.at_length(context_length(case))
    if type(scheme) is RoPE:
        found["frequencies"] = [float(f) for f in scheme.frequencies()]
        found["attention_factor"] = float(scheme.attention_factor)
    if case.kind == "attention":
        found |= {"causal": True, "scale": float(scheme.scale(case.sizes["head_dim"]))}
    return found


def _names(schemes: Iterable[str]) -> list[str]:
    known = catalogue()
    for name in (given := list(schemes)):
        if name not in known:
            raise ValueError(
                f"unknown scheme {name!r}{nearest(name, known, listing='`posenc list`')}"
            )
    own = [n for n, maker in known.items() if maker.__module__.startswith("posenc.")]
    return sorted(set(given) or own)


def _replaceable(folder: Path) -> list[str]:
    """The files of an earlier call; an error if the folder holds anything else."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise FileExistsError(f"out must be a folder, got the file {str(folder)!r}")
    present = {path.name: path for path in folder.iterdir()}
    sealed: dict[str, str] = {}
    if SUMS in present:
        lines = present[SUMS].read_text(encoding="utf-8", errors="replace").splitlines()
        sealed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name, path in sorted(present.items()):
        ours = name == SUMS or (name in sealed and path.is_file())
        if not ours or (name != SUMS and _digest(path) != sealed[name]):
            raise FileExistsError(
                f"out must be empty, or hold vectors of posenc that nobody edited; {str(folder)!r} "
                f"holds {name!r}"
            )
    return list(present)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
