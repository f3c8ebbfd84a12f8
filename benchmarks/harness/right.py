"""Every implementation against the float64 reference: results and all gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from harness.cases import CORE, LAYOUTS, problem, schemes
from harness.clock import Budget
from harness.record import finite
from posenc.testing import AttentionCase
from posenc.testing.framework import Framework, Host, NumPy
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR

Row = dict[str, Any]
STAGES = 6
_LEAST = 1e-2  # root mean square below which an expected array counts as this large
_KEYS = 50  # up to which the tolerances of the laws hold as they are


@dataclass(frozen=True)
class Check:
    """One implementation on one kind of call; ``both`` also without skipping blocks of keys."""

    implementation: str
    scheme: str
    layout: str
    dtype: str
    both: bool = False

    @property
    def stage(self) -> int:
        """What matters most comes first: every scheme, then every kind of call."""
        if self.layout == "causal":
            return {"bfloat16": 0, "float32": 1}.get(self.dtype, 3)
        if self.scheme in CORE:
            return {"bfloat16": 2, "float32": 4}.get(self.dtype, 5)
        return 5


def plan(framework: Framework, compiled: Sequence[str], stages: int = STAGES) -> list[Check]:
    """All checks of a framework, in the order in which they are run.

    Parameters
    ----------
    compiled
        Paths that compile for every kind of call: at the end of their half of the stages.
    stages
        How many of them.
    """
    found = [
        Check(implementation, scheme, layout, dtype, both=layout in ("causal", "long"))
        for implementation in framework.implementations
        for scheme in schemes(64)
        for layout in LAYOUTS
        for dtype in framework.dtypes
    ]
    names, layouts = list(schemes(64)), list(LAYOUTS)

    def order(check: Check) -> tuple[Any, ...]:
        late, slow = check.stage > 2, check.implementation in compiled
        rank = names.index(check.scheme), layouts.index(check.layout)
        # Of what compiles only some will be run: some of every scheme, and of every layout.
        first = sum(rank) if slow else check.stage
        return late, slow, first, check.stage, *rank, check.implementation, check.dtype

    return sorted((check for check in found if check.stage < stages), key=order)


def run(
    checks: Iterable[Check],
    framework: Framework,
    budget: Budget,
    seed: int,
    *,
    scale: float = 1.0,
    compiled: Sequence[str] = (),
    told: Callable[[Row], None] = lambda row: None,
) -> Iterator[Row]:
    """One record a check, also of those that the budget does not allow."""
    longest: dict[bool, float] = {True: 0.0, False: 0.0}
    for number, check in enumerate(checks):
        slow = check.implementation in compiled
        reason = budget.refuses(longest[slow], compiles=int(slow))
        if reason is not None:
            yield asdict(check) | {"status": "not run", "reason": reason}
            continue
        begun = time.perf_counter()
        row = asdict(check) | judged(check, framework, seed + number, scale)
        seconds = time.perf_counter() - begun
        row["seconds"] = round(seconds, 3)
        if row["status"] != "refused":
            longest[slow] = max(longest[slow], seconds)
            budget.compiles -= int(slow)
        told(row)
        yield row


def judged(check: Check, framework: Framework, seed: int, scale: float = 1.0) -> Row:
    """What one check found, with the seed that repeats it; it never raises."""
    try:
        row = _judged(check, framework, *problem(check.scheme, LAYOUTS[check.layout], seed, scale))
    except NotImplementedError as refused:
        row = {"status": "refused", "reason": said(refused)}
    except Exception as error:
        row = {"status": "failed", "reason": f"{type(error).__name__}: {said(error)}"}
    return row | {"seed": seed}


def _judged(check: Check, framework: Framework, asked: AttentionCase, d_out: Host) -> Row:
    row: Row = {"status": "right", "reason": None}
    itself = (check.implementation, check.dtype) == ("reference", "float64")
    if itself:  # what all others are put beside is put beside NumPy
        expected = {"out": asked.eagerly(NumPy(), "reference", dtype="float64")}
    else:
        expected = _answers(asked, framework, "reference", "float64", d_out)
    calls = {"": asked}
    if check.both and check.implementation != "reference":
        calls = {
            prefix: replace(asked, options={**asked.options, "skip_blocks": skip})
            for prefix, skip in (("", True), ("all blocks: ", False))
        }
    errors, answers = {}, {}
    for prefix, call in calls.items():
        found, reason = _served(call, framework, check, d_out)
        row["reason"] = reason
        answers[prefix] = found
        for name in found.keys() & expected.keys():
            errors[prefix + name] = apart(found[name], expected[name])
    if len(answers) == 2:
        for name, array in answers[""].items():
            errors["skipping or not: " + name] = apart(array, answers["all blocks: "][name])
    row["errors"] = dict(sorted(errors.items()))
    for name, error in errors.items():
        error["allowed"] = tolerance = allowed(check.dtype, name.rpartition(": ")[2], asked)
        if not all(n is not None and n <= tolerance for n in error.values()):
            row["status"] = "wrong"
    return row


def _served(
    call: AttentionCase, framework: Framework, check: Check, d_out: Host
) -> tuple[dict[str, Host], str | None]:
    """Result and gradients; where an implementation has none, the result alone and the reason."""
    try:
        return _answers(call, framework, check.implementation, check.dtype, d_out), None
    except NotImplementedError as refused:
        out = call.eagerly(framework, check.implementation, dtype=check.dtype)
        return {"out": out}, f"no gradients: {said(refused)}"


def _answers(
    call: AttentionCase, framework: Framework, implementation: str, dtype: str, d_out: Host
) -> dict[str, Host]:
    out, gradients = call.gradients(framework, implementation, d_out, dtype=dtype)
    return {"out": out, **gradients}


def allowed(dtype: str, name: str, asked: AttentionCase) -> float:
    """How far a result or a gradient may be off: ``posenc.testing.tolerances`` for longer sums.

    Those are for 20 keys of 8 channels. Half precision is rounded once, whatever the length; but a
    gradient of gates adds up what each row's weights lack, as far as the result was rounded.
    """
    keys = max(1.0, asked.tensors["k"].shape[2] / _KEYS)
    tolerance, half = ATTENTION_TOL[dtype], dtype in ("float16", "bfloat16")
    if not half:
        tolerance *= keys
    if name not in ("out", "q", "k", "v"):
        tolerance *= REDUCTION_FACTOR * (math.sqrt(keys) if half and "x" in asked.tensors else 1.0)
    return float(f"{tolerance:.3g}")


def apart(found: Host, expected: Host) -> dict[str, float | None]:
    """How far arrays are apart: by root mean squares, and at most, relative to the largest or 1.

    None if something is not finite.
    """
    if found.shape != expected.shape:
        raise AssertionError(f"shape {found.shape}, not {expected.shape}")
    difference = np.abs(found - expected)
    least = _LEAST * np.sqrt(expected.size)
    relative = np.linalg.norm(difference) / max(least, np.linalg.norm(expected))
    largest = np.max(difference, initial=0) / max(1.0, np.max(np.abs(expected), initial=0))
    return {"relative": finite(relative), "largest": finite(largest)}


def said(error: BaseException) -> str:
    """The first line of an error, and not all of it."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
