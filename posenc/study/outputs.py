"""A study's files: moved into place together; files of another study are kept in ``earlier/``."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posenc.study.picture import FORMATS
from posenc.study.results import Record, partial_path, sweep
from posenc.study.stopping import delay_signals

STUDY = "study.json"  # names the study that made the other files
# Every name that a study writes. No other file is ever moved, replaced or removed.
_DRAWN = ("attention", "loss", "passkey", "position")  # of a study, or of a probe
NAMES = (
    *(f"{name}.{form}" for name in _DRAWN for form in FORMATS),
    "differences.csv",
    "report.html",
    "results.csv",
    "results.jsonl",
    "table.md",
    "tasks.csv",
    "tuning.csv",
    *(f"tuning.{form}" for form in FORMATS),
)
_OF_A_TASK = re.compile(rf"task-[a-z0-9-]+\.({'|'.join(FORMATS)})")
_NO_JSON = (ValueError, ArithmeticError, RecursionError)  # also of numbers, and of nesting
_STAGED, _STAGED_EARLIER = "results", r"[0-9a-f]{12}(-\d+)?"  # folders that are being filled


def study_digest(runs: Iterable[str]) -> str:
    """A digest of a study: of the digests of its runs, in any order."""
    return hashlib.sha256("\n".join(sorted(runs)).encode()).hexdigest()


def holds_results(out: Path) -> bool:
    """Whether the folder holds files of a study in which a run succeeded."""
    return bool(_read_study(out).get("runs"))


def publish(
    out: Path,
    summary: dict[str, Any],
    records: Sequence[Record],
    runs: Iterable[str],
    render: Callable[[Path], None],
) -> tuple[list[str], Path | None]:
    """Move the files that ``render(folder)`` writes into ``out``: all, or none if anything fails.

    Files of another study, or of more successful runs, go to ``earlier/`` first. So do files that
    no study wrote, or that were edited since.

    Returns
    -------
    names, earlier
        Names of the new files, and the folder of the earlier ones or None.
    """
    about = {
        "study": study_digest(runs),
        "runs": sum(record["status"] == "ok" for record in records),
        **summary,
    }
    check_folder(out)
    sweep(out, _STAGED)
    with _staging(out / _STAGED) as folder:
        render(folder)
        names = sorted(path.name for path in folder.iterdir())
        if strange := [name for name in names if not _is_name(name)]:
            raise ValueError(f"a study writes {', '.join(NAMES)}, got {', '.join(sorted(strange))}")
        sealed = {name: _sha256(folder / name) for name in names}
        text = json.dumps({**about, "files": names, "sha256": sealed}, indent=1, sort_keys=True)
        (folder / STUDY).write_text(text + "\n", encoding="utf-8")
        before = _read_study(out)
        superseded = before.get("study") == about["study"] and before["runs"] <= about["runs"]
        other = bool(before.get("runs")) and not superseded
        present = _present(out)
        kept = [n for n in present if other or (n in names and n not in before["files"])]
        earlier = _keep(out, before, [*kept, STUDY] if other else kept) if other or kept else None
        with delay_signals():
            for name in set(before["files"]) - {*names}:
                (out / name).unlink(missing_ok=True)
            for name in (*names, STUDY):
                (folder / name).replace(out / name)
    return names, earlier


def task_file(label: str, form: str) -> str:
    """The name of a task's figure."""
    return f"task-{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}.{form}"


def _is_name(name: str) -> bool:
    return name in NAMES or bool(_OF_A_TASK.fullmatch(name))


def _present(out: Path) -> list[str]:
    """The files in the folder that have a name of ours."""
    found = out.iterdir() if out.is_dir() else ()
    return sorted(path.name for path in found if _is_name(path.name) and _is_file(path))


def check_folder(out: Path) -> None:
    """Check that results can be written into ``out``, which need not exist yet.

    Raises
    ------
    NotADirectoryError
        It is a file, or in one.
    IsADirectoryError
        A folder in it, which is not ours to replace, has the name of a file.
    PermissionError
        The folder, or the one that it would be made in, cannot be written into.
    """
    first = next((path for path in (out, *out.parents) if path.exists()), None)
    if first is not None and not first.is_dir():
        raise NotADirectoryError(
            f"out must be a folder, got {str(out)!r}: {str(first)!r} is a file"
        )
    if first is not None and not os.access(first, os.W_OK | os.X_OK):
        raise PermissionError(
            f"out must be a folder for results, got {str(out)!r}: {str(first)!r} cannot be written "
            "into"
        )
    named = [p.name for p in out.iterdir() if _is_name(p.name)] if out.is_dir() else []
    for name in (*named, STUDY):
        if (out / name).is_dir():
            raise IsADirectoryError(f"out: cannot write {name!r} into {str(out)!r}: it is a folder")


def _read_study(out: Path) -> dict[str, Any]:
    """The study and runs that ``study.json`` names, and its files that nobody edited since.

    The file may have come from anywhere: it is no reason to remove a file of another name or
    content. Without it, a table is that of an earlier study.
    """
    try:
        about = json.loads((out / STUDY).read_text(encoding="utf-8"))
        sealed = about.get("sha256", {})
        files = [n for n in _present(out) if n in sealed]
        files = [n for n in files if sealed[n] == _sha256(out / n)]
        return {"study": _digest(about["study"]), "runs": int(about["runs"]), "files": files}
    except (OSError, LookupError, TypeError, AttributeError, *_NO_JSON):
        pass
    if not _is_file(out / "table.md"):
        return {"files": []}
    return {"study": _sha256(out / "table.md"), "runs": 1, "files": []}


def _is_file(path: Path) -> bool:
    return path.is_file() or path.is_symlink()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(text: str) -> str:
    return text if re.fullmatch("[0-9a-f]{64}", text) else hashlib.sha256(text.encode()).hexdigest()


def _keep(out: Path, before: dict[str, Any], names: Sequence[str]) -> Path:
    """Copy the files under ``earlier/``, all or none, in place of an older copy of that study.

    An older copy that holds anything else stays, and the new one gets another name.
    """
    digest = before.get("study") or study_digest(_sha256(out / name) for name in names)
    first = out / "earlier" / str(digest)[:12]
    further = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    target = next(filter(_is_free, itertools.chain([first], further)))
    target.parent.mkdir(exist_ok=True)
    sweep(target.parent, _STAGED_EARLIER)
    with _staging(target) as folder:
        for name in names:
            if (out / name).is_file():
                shutil.copy2(out / name, folder / name)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return target


def _is_free(target: Path) -> bool:
    """Whether nothing is lost if this folder is replaced: it is a copy that nobody edited."""
    if target.is_symlink() or not target.is_dir():
        return not os.path.lexists(target)
    return {path.name for path in target.iterdir()} <= {*_read_study(target)["files"], STUDY}


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A temporary folder next to ``target``, removed at the end."""
    folder = partial_path(target)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
