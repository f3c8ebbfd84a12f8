"""Makes docs/atlas.md from its stored records, and computes those that are missing.

=========================================================  ======================================
``python docs/atlas.py``                                   the page and its picture, nothing else
``python docs/atlas.py --task text passkey``               every scheme of the catalogue
``python docs/atlas.py --task copy --schemes t5 --seeds 5``  two more seeds of one scheme
``python docs/atlas.py --add FOLDER...``                   a finished ``posenc compare``
=========================================================  ======================================

Each scheme gets three seeds, and five where it solves the task with some of them only.

Records lie in docs/atlas, one file for each task, JSON Lines compressed by xz. A record is never
computed twice: another seed, scheme or task adds rows. It must have the task's own settings and the
text of the others. Runs in progress are kept in ``--out``: the same command goes on from there. The
page shows a task when most schemes have three seeds of it; until then it says that it is begun.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posenc.study.joined import read
from posenc.study.origin import processor
from posenc.study.recipe import Recipe
from posenc.study.runner import compute, jobs, plan
from posenc.study.study import Study

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_site")]
import atlas_page  # noqa: E402

FOLDER = HERE / "atlas"
BACKEND = "jax"
# What the page does not need: curves of training, losses by position, names of the user's files.
_LEFT_OUT = ("curve", "gradient_norms", "loss_by_position", "resumed", "seal")

Record = dict[str, Any]


def main() -> None:
    """Compute, add, then write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", default=[], help="tasks to compute; text is one")
    parser.add_argument("--schemes", nargs="+", default=["all"], help="default: the catalogue")
    parser.add_argument(
        "--seeds", type=int, default=atlas_page.SEEDS, help="number of seeds, 0 .. N - 1"
    )
    parser.add_argument(
        "--mixed-seeds", type=int, default=5,
        help="seeds of a scheme that solves a task with some of them only; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=0, help="processes; default: one per core")
    parser.add_argument("--scheduler", default="", help="of Dask, as for posenc compare")
    parser.add_argument("--out", default="posenc-atlas", help="folder of runs in progress")
    parser.add_argument("--add", nargs="+", default=[], type=Path, metavar="FOLDER")
    options = parser.parse_args()
    for folder in options.add:
        add_folder(folder)
    for task in options.task:
        run(task, options.schemes, options.seeds, options)
        if schemes := mixed(task, options.schemes):
            run(task, schemes, options.mixed_seeds, options)
    FOLDER.mkdir(exist_ok=True)
    atlas_page.write(HERE, stored())


def mixed(task: str, schemes: Iterable[str]) -> list[str]:
    """Those of the schemes that solve the task with some seeds and not with others."""
    solved: dict[str, set[bool]] = {}
    for record in load(task):
        if record["status"] == "ok" and "solved" in record:
            solved.setdefault(record["scheme"], set()).add(record["solved"] is not None)
    return [name for name in Study(schemes=tuple(schemes)).labels if len(solved.get(name, ())) > 1]


def run(task: str, schemes: Iterable[str], seeds: int, options: argparse.Namespace) -> None:
    """Compute the runs of a task that have no record, and add their records."""
    study = Study(
        task=(task,), schemes=tuple(schemes), seeds=seeds, backend=BACKEND,
        workers=options.workers, scheduler=options.scheduler,
        out=f"{options.out}/{file_name(task)}",
    )  # fmt: skip
    done = {(record["scheme"], record["seed"]) for record in load(task) if record["status"] == "ok"}
    corpus = study.corpus()
    kept, missing = plan(study, corpus)
    missing = [each for each in missing if (each.label, each.seed) not in done]
    print(f"{task}: {len(done)} records stored, {len(kept)} kept, {len(jobs(missing))} to train")
    found = [record for record in kept if (record["scheme"], record["seed"]) not in done]
    began = time.monotonic()
    try:
        for record in compute(study, missing):
            found.append(record)
            minutes = (time.monotonic() - began) / 60
            state = record["error"] or "ok"
            print(f"  {record['scheme']}, seed {record['seed']}: {state} ({minutes:.0f} min)")
    finally:  # also on Ctrl-C
        add(found, "workers of a scheduler" if options.scheduler else processor())


def add_folder(folder: Path) -> None:
    """Store the records of a finished ``posenc compare``, of this machine or another one."""
    part = read(folder)
    if part.summary["config"]["sweep"]:
        raise ValueError(f"the atlas has no tuned runs, and {str(folder)!r} is of a sweep")
    add(part.records, part.summary["versions"]["processor"])


def add(records: Iterable[Record], machine: str) -> None:
    """Store records; a finished one of a scheme and seed stays, a failed one is replaced."""
    own: dict[str, list[Record]] = {}
    for record in records:
        check(record)
        own.setdefault(record["task"], []).append(record)
    for task, new in own.items():
        before = load(task)
        check_data([*before, *new])
        by_run = {(record["scheme"], record["seed"]): record for record in before}
        for record in new:
            name = record["scheme"], record["seed"]
            if name not in by_run or by_run[name]["status"] != "ok":
                by_run[name] = slim(record, machine)
        save(task, by_run.values())


def check(record: Record) -> None:
    """``ValueError`` unless the record has its task's own settings and the atlas's framework."""
    usual = json.loads(json.dumps(asdict(Recipe(task=record["task"]))))
    for name, value in usual.items():
        given = record["recipe"].get(name, value)
        if given != value:
            raise ValueError(
                f"{record['task']} {record['scheme']}: the atlas has {name} {value}, got {given}"
            )
    if record["backend"] != BACKEND:
        raise ValueError(f"the atlas is of backend {BACKEND}, got {record['backend']}")


def check_data(records: Iterable[Record]) -> None:
    """``ValueError`` unless all records of a task are of the same text or examples."""
    first, *others = records
    for other in others:
        if other["data"] != first["data"]:
            raise ValueError(
                f"{other['task']} {other['scheme']}: the atlas has data {first['data'][:12]}, got "
                f"{other['data'][:12]}: another text, Python or form of the task"
            )


def slim(record: Record, machine: str) -> Record:
    """The record without what the page does not need, and with the machine that it came from."""
    kept = {name: value for name, value in record.items() if name not in _LEFT_OUT}
    if record["status"] == "ok":
        kept["versions"] = {**record["versions"], "processor": machine}
    return kept


def stored() -> dict[str, list[Record]]:
    """All records by task, in the order of the catalogue of tasks."""
    found = {}
    for path in FOLDER.glob("*.jsonl.xz"):
        records = _read(path)
        found[records[0]["task"]] = records
    order = atlas_page.tasks()
    return {task: found[task] for task in sorted(found, key=order.index)}


def load(task: str) -> list[Record]:
    """The records of a task; none if there is no file."""
    path = FOLDER / f"{file_name(task)}.jsonl.xz"
    return _read(path) if path.exists() else []


def save(task: str, records: Iterable[Record]) -> None:
    """Write the records of a task, sorted by scheme and seed."""
    FOLDER.mkdir(exist_ok=True)
    ordered = sorted(records, key=lambda record: (record["scheme"], record["seed"]))
    text = "".join(json.dumps(record, sort_keys=True) + "\n" for record in ordered)
    (FOLDER / f"{file_name(task)}.jsonl.xz").write_bytes(lzma.compress(text.encode(), preset=9))


def file_name(task: str) -> str:
    """``passkey:shared=True`` as part of a file's name."""
    return re.sub(r"[^a-z0-9_]+", "-", task.lower())


def _read(path: Path) -> list[Record]:
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]


if __name__ == "__main__":
    main()
