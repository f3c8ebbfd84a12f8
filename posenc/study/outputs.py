"""A study's files: moved into place together; files of another study are kept in ``earlier/``."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posenc.study.results import Record, partial_path, sweep
from posenc.study.stopping import delay_signals

STUDY = "study.json"  # names the study that made the other files
_WITHOUT_STUDY = ("results.csv", "results.jsonl", "table.md", "loss.png", "report.html")


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

    Files of another study, or of more successful runs, go to ``earlier/`` first.

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
    sweep(out)
    with _staging(out / "results") as folder:
        render(folder)
        names = sorted(path.name for path in folder.iterdir())
        text = json.dumps({**about, "files": names}, indent=1, sort_keys=True)
        (folder / STUDY).write_text(text + "\n", encoding="utf-8")
        before = _read_study(out)
        superseded = before.get("study") == about["study"] and before["runs"] <= about["runs"]
        earlier = None if superseded or not before.get("runs") else _keep(out, before)
        with delay_signals():
            for name in set(before.get("files", ())) - {*names}:
                (out / name).unlink(missing_ok=True)
            for name in (*names, STUDY):
                (folder / name).replace(out / name)
    return names, earlier


def _read_study(out: Path) -> dict[str, Any]:
    """The study, runs and files that ``study.json`` names; guessed where there is no such file."""
    try:
        about = json.loads((out / STUDY).read_text(encoding="utf-8"))
        # Only names in the folder itself: the file may have come from anywhere.
        files = [n for n in about["files"] if Path(n).name == n and (out / n).is_file()]
        return {"study": _digest(about["study"]), "runs": int(about["runs"]), "files": files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    files = [name for name in _WITHOUT_STUDY if (out / name).is_file()]
    if "table.md" not in files:  # every run failed
        return {"files": files}
    digest = hashlib.sha256((out / "table.md").read_bytes()).hexdigest()
    return {"study": digest, "runs": 1, "files": files}


def _digest(text: str) -> str:
    return text if re.fullmatch("[0-9a-f]{64}", text) else hashlib.sha256(text.encode()).hexdigest()


def _keep(out: Path, before: dict[str, Any]) -> Path:
    """Copy the files under ``earlier/``, all or none, in place of an older copy of that study."""
    target = out / "earlier" / str(before["study"])[:12]
    target.parent.mkdir(exist_ok=True)
    sweep(target.parent)
    with _staging(target) as folder:
        for name in (*before["files"], STUDY):
            if (out / name).is_file():
                shutil.copy2(out / name, folder / name)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    return target


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A temporary folder next to ``target``, removed at the end."""
    folder = partial_path(target)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
