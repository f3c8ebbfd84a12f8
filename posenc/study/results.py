"""Records on disk: one JSON file per run, written whole or not at all; then JSON Lines and CSV."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import platform
import re
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from posenc.study.history import mean_norm
from posenc.study.tasks.catalogue import TEXT

Record = dict[str, Any]

# What a row needs so that the files of several studies join; the last tells any two runs apart.
ABOUT = (
    "learning_rate",
    "position_lr_scale",
    "weight_decay",
    "batch_size",
    "layers",
    "dim",
    "heads",
    "text",
    "data",
    "posenc",
    "gradient_norm",
    "largest_gradient_norm",
    "spikes",
    "run",
)
COLUMNS = (
    "scheme",
    "seed",
    "train_len",
    "eval_len",
    "loss",
    "tokens_per_second",
    "loss_same_targets",
    "loss_key_bytes",
    "key_bytes",
    "loss_windowed",
    "status",
    "error",
    "backend",
    "steps",
    "train_seconds",
    "eval_seconds",
    "parameters",
    "position_parameters",
    "trained_as",
    "loss_unit",
    *ABOUT,
)

UNIT = "bits per byte"  # of the loss of text, but for tokens of a file


def worded(text: str, records: Iterable[Mapping[str, Any]]) -> str:
    """Words about bytes, of records of text: about tokens, where a file of them was trained on."""
    recipe = next(iter(records), {}).get("recipe", {})
    if not recipe.get("vocabulary_size"):
        return text
    return text.replace("byte", "token").replace("Byte", "Token")


# Held while a record is written, so that a worker finishes it before it leaves.
WRITING = threading.Lock()
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"
# The names of ``partial_path`` and of progress files, and no others.
_PARTIAL = re.compile(r"\.(.+)\.([0-9a-f]{8})-(\d{1,10})-[0-9a-f]{8}\.partial", re.ASCII)
_PROGRESS = re.compile(r"[a-z0-9-]*-\d+-[0-9a-f]{16}\.json\.progress", re.ASCII)
# Written into ``runs/``.
RECORDS = r"[a-z0-9-]*-\d+-[0-9a-f]{16}\.json(\.progress)?|[0-9a-f]{16}\.checkpoint"
_DAY = 86400.0
_CAN_ASK = os.name == "posix"  # on Windows, os.kill(process, 0) would send Ctrl-C


def partial_path(path: Path) -> Path:
    """A temporary name next to ``path`` that no other process or thread uses."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.partial")


def own_folder(out: str | os.PathLike[str], name: str, written: str) -> Path:
    """A folder in ``out`` for files of the names ``written``, swept; made if missing.

    ``OSError`` if it cannot be written.
    """
    folder = Path(out) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = partial_path(folder / "probe")
        trial.touch()
        trial.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"out: cannot write results into {str(out)!r}: {reason}") from error
    sweep(folder, f"probe|{written}")
    return folder


def sweep(folder: Path, written: str) -> None:
    """Remove what dead processes left half written, and nothing that a user may have made.

    ``written`` is a pattern of the names that this package writes into the folder.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):
            if _is_leftover(path, written):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_leftover(path: Path, written: str) -> bool:
    match = _PARTIAL.fullmatch(path.name)
    own = match is not None and re.fullmatch(written, match[1])
    if path.is_symlink() or not (own or _is_progress(path.name, written)):
        return False
    if match is not None and match[2] == _HOST and _CAN_ASK:
        return not _is_alive(int(match[3]))
    return is_old(path)  # of another machine


def is_old(path: Path) -> bool:
    """Whether nobody has written the file for a day."""
    return time.time() - path.stat().st_mtime > _DAY


def _is_progress(name: str, written: str) -> bool:
    return bool(_PROGRESS.fullmatch(name) and re.fullmatch(written, name))


def _is_alive(process: int) -> bool:
    """Whether there is such a process; also where that cannot be known."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that nobody sees it half written, even if the process dies.

    Bytes of file names that are not valid UTF-8 become backslash escapes.
    """
    temporary = partial_path(path)
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    temporary.write_bytes(content)
    temporary.replace(path)


def save(path: Path, record: Record) -> None:
    """Write one record as JSON, sealed by a digest of its content."""
    text = json.dumps({**record, "seal": _seal(record)}, indent=1)
    with WRITING:
        write_whole(path, text + "\n")


def load(path: Path, digest: str) -> Record | None:
    """The record of the run with this digest, as it was saved, or None.

    None also for a record that was damaged or edited, or belongs to another run.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        seal = record.pop("seal")
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None
    return record if seal == _seal(record) and record.get("run") == digest else None


def _seal(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def before_finetuning(record: Mapping[str, Any]) -> Record:
    """The record with the scores that the model had before fine-tuning."""
    return {**record, **record.get("before", {})}


def stages(record: Mapping[str, Any]) -> list[tuple[Record, int]]:
    """A record before and after fine-tuning, each with its steps of it; one record without."""
    if "before" not in record:
        return [({**record}, 0)]
    return [(before_finetuning(record), 0), ({**record}, record["finetune"]["steps"])]


def seconds(records: Iterable[Record]) -> Record:
    """Seconds of a study's finished runs, on any day: wall time, sum, and longest run."""
    ok = [record for record in records if record["status"] == "ok"]
    wall, until = 0.0, -math.inf
    for begin, end in sorted((r["began"], r["began"] + r["seconds"]) for r in ok):
        wall += max(0.0, end - max(begin, until))
        until = max(until, end)
    each = [record["seconds"] for record in ok]
    return {"wall_seconds": wall, "run_seconds": sum(each), "longest_run": max(each, default=0.0)}


def write_tables(folder: Path, records: Sequence[Record]) -> None:
    """Write ``results.jsonl``, one record per line, and of text ``results.csv``, one per length."""
    lines = [json.dumps(record, sort_keys=True) + "\n" for record in records]
    write_whole(folder / "results.jsonl", "".join(lines))
    if all(record.get("task", TEXT) != TEXT for record in records):
        return
    text = io.StringIO(newline="")
    asked = {"loss_sliding": "loss_sliding", "before": "finetune_steps"}
    more = [column for key, column in asked.items() if any(key in record for record in records)]
    writer = csv.DictWriter(text, [*COLUMNS, *more], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows(records))
    write_whole(folder / "results.csv", text.getvalue())


def about(record: Mapping[str, Any]) -> Record:
    """The cells of ``ABOUT``: how the run was trained, on what, and how smoothly."""
    found = {name: record.get(name, record.get("recipe", {}).get(name)) for name in ABOUT}
    if norms := record.get("gradient_norms"):
        found["gradient_norm"] = mean_norm(norms)
        found["largest_gradient_norm"] = max(largest for _, _, largest in norms)
    return found


def rows(records: Iterable[Record]) -> Iterable[Record]:
    """Tidy rows of text, one per run and length; a failed run has one row without losses.

    A run that was fine-tuned has another one per length, before that.
    """
    of_text = (record for record in records if record.get("task", TEXT) == TEXT)
    for record, tuned in (stage for one in of_text for stage in stages(one)):
        common = {name: record.get(name) for name in COLUMNS} | about(record)
        common["loss_unit"] = worded(UNIT, [record])
        if record["status"] != "ok":
            yield common
            continue
        common["parameters"] = record["params"]["total"]
        common["position_parameters"] = record["params"]["position"]
        for length in sorted(record["loss"], key=int):  # JSON sorts them as strings
            by_length = {
                "eval_len": int(length),
                "loss": record["loss"][length],
                "loss_same_targets": record["loss_same_targets"][length],
                "loss_key_bytes": (record.get("loss_key_bytes") or {}).get(length),
                "key_bytes": (record.get("key_bytes") or {}).get(length),
                "loss_windowed": (record["loss_windowed"] or {}).get(length),
                "loss_sliding": record.get("loss_sliding", {}).get(length),
                "finetune_steps": tuned,
            }
            yield common | by_length
