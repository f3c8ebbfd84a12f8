"""JSON: all fields of all records, for programs. Its schema has a version."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from posenc.audit.expected import Judged
from posenc.audit.outputs.run import Run, counted
from posenc.audit.record import Record

SCHEMA = "posenc.audit/1"
"""Fields may be added under this name; one that changes or goes gets a new number."""


def write(records: Sequence[Record], judged: Judged, run: Run) -> str:
    """An object with ``schema``, the run, counts, the exit status and ``records``.

    A record has the fields of ``Record``, its ``name``, and ``expected``: the reason that the file
    of expected failures gives, or null. JSON has no infinity and no NaN, so those of ``error`` are
    the strings ``"Infinity"`` and ``"NaN"``.
    """
    page = {
        "schema": SCHEMA,
        "command": run.command,
        "grid": run.grid,
        "time": run.time,
        "seconds": round(run.seconds, 3),
        "versions": {**run.versions, **{r.library: r.version for r in records if r.version}},
        "platform": run.platform,
        "exit_status": judged.exit_status(records),
        "counts": counted(records, judged),
        "expected_failures": {"errors": [*judged.errors], "notes": [*judged.notes]},
        "records": [_record(record, judged) for record in records],
    }
    return json.dumps(page, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _record(record: Record, judged: Judged) -> dict[str, Any]:
    reason = judged.reason(record) if judged.expects(record) else None
    return {
        **record.as_dict(),
        "error": _number(record.error),
        "tolerance": _number(record.tolerance),
        "where": {name: int(value) for name, value in record.where.items()},
        "expected": reason,
    }


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else float(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
