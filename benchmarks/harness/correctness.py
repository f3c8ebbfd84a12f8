"""Every implementation against the float64 reference: results and all gradients."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from harness.cases import CORE, LAYOUTS, random_call, schemes
from harness.clock import Budget
from harness.record import fault, finite, first_line
from posenc.testing import AttentionCase
from posenc.testing.framework import Framework, Host, NumPy
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR

Row = dict[str, Any]
STAGES = 6
# An expected array counts as at least this large, by root mean square. What sums over n rows, as
# gradients of params do, has sqrt(n) times the rounding errors of a row, also where it vanishes.
_MIN_RMS = 1e-2
_LATER = 3  # in the order of checks: steps by which other implementations follow the first
_KEPT = 100  # results of the reference
TF32_TOL = 2e-3  # four roundings to 11 bits, 2**-11 each: of q, k, weights and values
_KEYS = 50  # up to so many keys the tolerances of the laws hold unchanged


@dataclass(frozen=True)
class Check:
    """One implementation on one kind of call.

    Attributes
    ----------
    both
        With and without skipping of key blocks.
    tf32
        Float32 products may be rounded to TF32, as is JAX's default on a GPU.
    """

    implementation: str
    scheme: str
    layout: str
    dtype: str
    both: bool = False
    tf32: bool = False

    @property
    def stage(self) -> int:
        """Rank in the order of checks: first every scheme, then every kind of call."""
        if self.tf32:
            return 2
        if self.layout == "causal":
            return {"bfloat16": 0, "float32": 1}.get(self.dtype, 3)
        if self.scheme in CORE:
            return {"bfloat16": 2, "float32": 4}.get(self.dtype, 5)
        return 5


@dataclass(frozen=True)
class Expected:
    """A random call, a gradient of its result, and what the reference answers in float64."""

    call: AttentionCase
    d_out: Host
    answers: dict[str, Host]


def plan(
    framework: Framework,
    compiled: Sequence[str],
    stages: int = STAGES,
    first: Sequence[str] = (),
) -> list[Check]:
    """All checks of a framework, in the order in which they run.

    Parameters
    ----------
    compiled
        Implementations that compile for every kind of call; they run last in each half of the
        stages.
    stages
        Number of stages.
    first
        Compiled implementations that run before the others.
    """
    checks = [
        Check(implementation, scheme, layout, dtype, both=layout in ("causal", "long"))
        for implementation in framework.implementations
        for scheme in schemes(64)
        for layout in LAYOUTS
        for dtype in framework.dtypes
    ] + [
        Check(implementation, scheme, "causal", "float32", tf32=True)
        for implementation in framework.implementations
        for scheme in schemes(64)
        if scheme in CORE
    ]  # fmt: skip
    names, layouts = list(schemes(64)), list(LAYOUTS)

    def order(check: Check) -> tuple[Any, ...]:
        late, slow = check.stage > 2, check.implementation in compiled
        rank = names.index(check.scheme), layouts.index(check.layout)
        # Only some compiled checks will run: choose some of every scheme and of every layout.
        later = _LATER * bool(first and check.implementation not in first)
        step = sum(rank) + later if slow else check.stage
        return late, slow, step, check.stage, *rank, check.implementation, check.dtype

    return sorted((check for check in checks if check.stage < stages), key=order)


def run(
    checks: Iterable[Check],
    framework: Framework,
    budget: Budget,
    seed: int,
    *,
    scale: float = 1.0,
    compiled: Sequence[str] = (),
) -> Iterator[Row]:
    """One record per check, also for those that the budget does not allow."""
    longest: dict[bool, float] = {True: 0.0, False: 0.0}
    reference = lru_cache(_KEPT)(partial(_reference, framework, scale))
    for check in checks:
        slow = check.implementation in compiled
        reason = budget.refuses(longest[slow], compiles=int(slow))
        if reason is not None:
            yield asdict(check) | {"status": "not run", "reason": reason}
            continue
        begun = time.perf_counter()
        # The same for all implementations, so that the reference computes it once.
        own = seed + zlib.crc32(f"{check.scheme} {check.layout}".encode()) % 2**20
        row = asdict(check) | run_check(check, framework, own, scale, reference)
        seconds = time.perf_counter() - begun
        row["seconds"] = round(seconds, 3)
        if row["status"] != "refused":
            longest[slow] = max(longest[slow], seconds)
            budget.compiles -= int(slow)
        yield row
        if row["status"] == "failed":
            framework.check_device()


def run_check(
    check: Check,
    framework: Framework,
    seed: int,
    scale: float = 1.0,
    reference: Callable[[str, str, int], Expected] | None = None,
) -> Row:
    """The result of one check, with the seed that repeats it; it never raises.

    ``reference(scheme, layout, seed)``: what is expected, if it may be known already.
    """
    reference = reference or partial(_reference, framework, scale)
    try:
        row = _compare(check, framework, reference(check.scheme, check.layout, seed))
    except NotImplementedError as refused:
        row = {"status": "refused", "reason": first_line(refused)}
    except Exception as error:
        row = {"status": "failed", **fault(error)}
    return row | {"seed": seed}


def _reference(framework: Framework, scale: float, scheme: str, layout: str, seed: int) -> Expected:
    call, d_out = random_call(scheme, LAYOUTS[layout], seed, scale)
    return Expected(call, d_out, _answers(call, framework, "reference", "float64", d_out))


def _compare(check: Check, framework: Framework, known: Expected) -> Row:
    row: Row = {"status": "right", "reason": None}
    call, d_out, expected = known.call, known.d_out, known.answers
    if (check.implementation, check.dtype) == ("reference", "float64"):
        # The float64 reference is itself checked against NumPy.
        expected = {"out": call.attend_eagerly(NumPy(), "reference", dtype="float64")}
    calls = {"": call}
    if check.both and check.implementation != "reference":
        calls = {
            prefix: replace(call, options={**call.options, "skip_blocks": skip})
            for prefix, skip in (("", True), ("all blocks: ", False))
        }
    errors, answers = {}, {}
    for prefix, option in calls.items():
        with framework.tf32() if check.tf32 else nullcontext():
            answers[prefix], row["reason"] = _result_and_gradients(option, framework, check, d_out)
        for name in answers[prefix].keys() & expected.keys():
            least = _least_rms(name, call)
            errors[prefix + name] = array_errors(answers[prefix][name], expected[name], least)
    if len(answers) == 2:
        for name, array in answers[""].items():
            other, least = answers["all blocks: "][name], _least_rms(name, call)
            errors["skipping or not: " + name] = array_errors(array, other, least)
    row["errors"] = dict(sorted(errors.items()))
    for name, error in errors.items():
        error["allowed"] = tolerance = tolerance_of(check, name.rpartition(": ")[2], call)
        if not all(n is not None and n <= tolerance for n in error.values()):
            row["status"] = "wrong"
    return row


def _result_and_gradients(
    call: AttentionCase, framework: Framework, check: Check, d_out: Host
) -> tuple[dict[str, Host], str | None]:
    """Result and gradients; or the result alone, and why there are no gradients."""
    try:
        return _answers(call, framework, check.implementation, check.dtype, d_out), None
    except NotImplementedError as refused:
        out = call.attend_eagerly(framework, check.implementation, dtype=check.dtype)
        return {"out": out}, f"no gradients: {first_line(refused)}"


def _answers(
    call: AttentionCase, framework: Framework, implementation: str, dtype: str, d_out: Host
) -> dict[str, Host]:
    out, gradients = call.gradients(framework, implementation, d_out, dtype=dtype)
    return {"out": out, **gradients}


def tolerance_of(check: Check, name: str, call: AttentionCase) -> float:
    """Tolerance of a result or a gradient: ``posenc.testing.tolerances``, for longer sums.

    Those are for 20 keys of 8 channels. Half precision is rounded once at any length, and so is
    TF32. A gradient of gates, however, adds up the rounding errors of each row's weights.
    """
    keys = max(1.0, call.tensors["k"].shape[2] / _KEYS)
    once = check.tf32 or check.dtype in ("float16", "bfloat16")
    tolerance = TF32_TOL if check.tf32 else ATTENTION_TOL[check.dtype]
    if not once:
        tolerance *= keys
    if name not in ("out", "q", "k", "v"):
        reads_hidden = "tokens.x" in call.floats()
        tolerance *= REDUCTION_FACTOR * (math.sqrt(keys) if once and reads_hidden else 1.0)
    return float(f"{tolerance:.3g}")


def _least_rms(name: str, call: AttentionCase) -> float:
    """What an expected array counts as at least, by root mean square."""
    if name in ("out", "q", "k", "v"):
        return _MIN_RMS
    batch, _, rows, _ = call.tensors["q"].shape
    return _MIN_RMS * math.sqrt(batch * rows)


def array_errors(actual: Host, expected: Host, least: float = _MIN_RMS) -> dict[str, float | None]:
    """Error of an array: relative root mean square, and the largest relative to the maximum or 1.

    ``least``: the root mean square that ``expected`` counts as at least. None if something is not
    finite.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}, not {expected.shape}")
    difference = np.abs(actual - expected)
    floor = least * math.sqrt(expected.size)
    relative = np.linalg.norm(difference) / max(floor, float(np.linalg.norm(expected)))
    largest = np.max(difference, initial=0) / max(1.0, np.max(np.abs(expected), initial=0))
    return {"relative": finite(relative), "largest": finite(float(largest))}
