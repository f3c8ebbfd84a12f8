"""Regenerates docs/audit.md: ``python docs/audit.py``.

It audits every planted candidate of ``tests/audit/candidates.py`` and writes what was printed. The
text before that part is this file's.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import posenc
from posenc.audit import gold
from posenc.audit.arguments import NAMES
from posenc.audit.audit import candidate_of, cases_of
from posenc.audit.check import check
from posenc.audit.conventions import framework
from posenc.audit.grid import FAR, cases
from posenc.audit.record import Record
from posenc.testing.tolerances import rounding_bound

HERE = Path(__file__).parent
PLANTED_AT = HERE.parent / "tests" / "audit"
PAGE = HERE / "audit.md"
PART = "## Bugs of others, and what the audit prints"
GRID = "full"


def planted() -> tuple[Any, ...]:
    """The wrong candidates."""
    if str(PLANTED_AT) not in sys.path:
        sys.path.append(str(PLANTED_AT))
    import candidates

    found: tuple[Any, ...] = candidates.PLANTED
    return found


def named(one: Any) -> Record:
    """The first record that names the fault of a candidate."""
    candidate = candidate_of(
        one.f,
        one.label,
        kind=one.kind,
        framework=one.framework,
        subject=one.name,
        reproducer=f"from candidates import {one.name} as f",
    )
    arrays, last = framework(candidate.framework), None
    for case in cases_of(candidate, GRID):
        record = check(candidate, case, "float32", arrays)
        if record is not None and record.status == "differs":
            last = record
            if one.phrase in record.message:
                return record
    said = last.message if last else "nothing differs"
    raise AssertionError(f"{one.name}: no record says {one.phrase!r}; the last says: {said}")


def part(records: list[tuple[Any, Record]]) -> str:
    """The generated part."""
    shown = ", ".join(
        f"{name} {number}"
        for name, number in (
            ("python", platform.python_version()),
            ("posenc", posenc.__version__),
            ("numpy", np.__version__),
            ("torch", version("torch")),
        )
    )
    lines = [
        PART, "",
        "Each candidate is a few lines of plain code in `tests/audit/candidates.py`, with one bug "
        "that another project had. Below it is the first record of the audit that names the bug.",
        "", f"Versions: {shown}.",
    ]  # fmt: skip
    for one, record in records:
        issues = f" ({', '.join(one.issues)})" if one.issues else ""
        lines += [
            "", f"**`{one.name}`** as `{_short(one.label)}`{issues}", "",
            f"> *{record.check}:* {record.message}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _short(label: str) -> str:
    return label if len(label) < 120 else f"{label[:110]}..."


def about() -> str:
    """The part of this page that is written by hand, with its tables of facts."""
    values = {dtype: f"{2 * rounding_bound(gold.ROTATION_ROUNDINGS, 1, dtype):.1e}"
              for dtype in ("float32", "bfloat16", "float16")}  # fmt: skip
    far = f"{2 * rounding_bound(gold.ANGLE_ROUNDINGS, 1, 'float32') * FAR[-1]:.2f}"
    bias = f"{rounding_bound(gold.BIAS_ROUNDINGS, 1, 'float32'):.1e}"
    rows = []
    for kind in ("rotation", "bias", "attention"):
        for case in cases(kind):
            why = ", ".join(case.why) or "-"
            short = "yes" if case.ci else ""
            rows.append(f"| {kind} | {case.name} | {short} | {why} |")
    names = "\n".join(f"| {role} | {', '.join(own)} |" for role, own in NAMES.items())
    text = (HERE / "audit_about.txt").read_text(encoding="utf-8")
    for name, value in {
        "CHECKS": "\n".join(rows), "NAMES": names, "FAR": far, "BIAS": bias,
        "F32": values["float32"], "BF16": values["bfloat16"], "F16": values["float16"],
    }.items():  # fmt: skip
        text = text.replace(f"{{{name}}}", value)
    return text


def main() -> None:
    """Audit the candidates and write the page."""
    records = [(one, named(one)) for one in planted()]
    PAGE.write_text(f"{about()}\n{part(records)}", encoding="utf-8")


if __name__ == "__main__":
    main()
