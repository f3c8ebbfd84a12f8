"""A study's files: put in place together, and those of another study kept beside them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posenc.study.results import Record, partial, sweep
from posenc.study.stopping import undisturbed

STUDY = "study.json"  # what the files beside it are of
_UNTOLD = ("results.csv", "results.jsonl", "table.md", "loss.png", "report.html")


def study_digest(runs: Iterable[str]) -> str:
    """Names a study by the digests of its runs, in any order."""
    return hashlib.sha256("\n".join(sorted(runs)).encode()).hexdigest()


def holds_results(out: Path) -> bool:
    """Whether the files of a study with a run that ended well are there."""
    return bool(_told(out).get("runs"))


def publish(
    out: Path,
    summary: dict[str, Any],
    records: Sequence[Record],
    runs: Iterable[str],
    render: Callable[[Path], None],
) -> tuple[list[str], Path | None]:
    """Put what ``render(folder)`` writes into ``out``, all of it or, if anything fails, nothing.

    Files of another study, or of more runs that ended well, go to ``earlier/`` first.

    Returns
    -------
    names, earlier
        The files, and where those from before are now; None if there were none to keep.
    """
    told = {
        "study": study_digest(runs),
        "runs": sum(record["status"] == "ok" for record in records),
        **summary,
    }
    sweep(out)
    with _staging(out / "results") as folder:
        render(folder)
        names = sorted(path.name for path in folder.iterdir())
        text = json.dumps({**told, "files": names}, indent=1, sort_keys=True)
        (folder / STUDY).write_text(text + "\n", encoding="utf-8")
        before = _told(out)
        superseded = before.get("study") == told["study"] and before["runs"] <= told["runs"]
        earlier = None if superseded or not before.get("runs") else _keep(out, before)
        with undisturbed():
            for name in set(before.get("files", ())) - {*names}:
                (out / name).unlink(missing_ok=True)
            for name in (*names, STUDY):
                (folder / name).replace(out / name)
    return names, earlier


def _told(out: Path) -> dict[str, Any]:
    """What ``study.json`` says of the files; made up for those of a release that wrote none."""
    try:
        told = json.loads((out / STUDY).read_text(encoding="utf-8"))
        # Only names in the folder itself: the file may have come from anywhere.
        files = [n for n in told["files"] if Path(n).name == n and (out / n).is_file()]
        return {"study": _digest(told["study"]), "runs": int(told["runs"]), "files": files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    files = [name for name in _UNTOLD if (out / name).is_file()]
    if "table.md" not in files:  # every run failed
        return {"files": files}
    digest = hashlib.sha256((out / "table.md").read_bytes()).hexdigest()
    return {"study": digest, "runs": 1, "files": files}


def _digest(text: str) -> str:
    return text if re.fullmatch("[0-9a-f]{64}", text) else hashlib.sha256(text.encode()).hexdigest()


def _keep(out: Path, before: dict[str, Any]) -> Path:
    """A copy of the files under ``earlier/``, whole or not at all; an older one gives way."""
    place = out / "earlier" / str(before["study"])[:12]
    place.parent.mkdir(exist_ok=True)
    sweep(place.parent)
    with _staging(place) as folder:
        for name in (*before["files"], STUDY):
            if (out / name).is_file():
                shutil.copy2(out / name, folder / name)
        shutil.rmtree(place, ignore_errors=True)
        folder.rename(place)
    return place


@contextmanager
def _staging(beside: Path) -> Iterator[Path]:
    folder = partial(beside)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
