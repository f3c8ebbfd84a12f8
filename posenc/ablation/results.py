"""Records on disk: one JSON file a run, written whole or not at all; then JSON Lines and CSV."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

COLUMNS = (
    "scheme",
    "seed",
    "train_len",
    "eval_len",
    "loss",
    "tokens_per_second",
    "loss_same_targets",
    "loss_windowed",
    "status",
    "error",
    "backend",
    "steps",
    "train_seconds",
    "eval_seconds",
    "parameters",
    "position_parameters",
)


_NEEDED = {
    *("scheme", "seed", "status", "params", "tokens_per_second"),
    *("loss", "loss_same_targets", "loss_windowed", "loss_by_position", "curve"),
}


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written, even if the process dies."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def save(path: Path, record: Record) -> None:
    """One record as JSON."""
    write_whole(path, json.dumps(record, indent=1, sort_keys=True) + "\n")


def load(path: Path) -> Record | None:
    """A record that an earlier study finished; None if there is none that can be read whole."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    needed = _NEEDED if record.get("status") == "ok" else {"scheme", "seed", "status"}
    return record if needed <= record.keys() else None


def write_tables(folder: Path, records: Sequence[Record]) -> None:
    """``results.jsonl``, one record a line, and ``results.csv``, one row a length."""
    lines = [json.dumps(record, sort_keys=True) + "\n" for record in records]
    write_whole(folder / "results.jsonl", "".join(lines))
    partial = folder / "results.csv.partial"
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows(records))
    partial.replace(folder / "results.csv")


def rows(records: Iterable[Record]) -> Iterable[Record]:
    """Tidy rows: a run that failed has one, without losses."""
    for record in records:
        same = {name: record.get(name) for name in COLUMNS}
        if record["status"] != "ok":
            yield same
            continue
        same["parameters"] = record["params"]["total"]
        same["position_parameters"] = record["params"]["position"]
        for length, loss in record["loss"].items():
            by_length = {
                "eval_len": int(length),
                "loss": loss,
                "loss_same_targets": record["loss_same_targets"][length],
                "loss_windowed": (record["loss_windowed"] or {}).get(length),
            }
            yield same | by_length
