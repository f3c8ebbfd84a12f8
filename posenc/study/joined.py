"""Studies of several machines as one: their summaries and records joined, or refused.

Comparable is what one study could have made: everything equal but schemes, seeds, tasks and the
machine.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.study.outputs import STUDY, check_folder
from posenc.study.recipe import Recipe
from posenc.study.results import Record, seconds
from posenc.study.statistics import Records, Summary
from posenc.study.terminal import write_all

RESULTS = "results.jsonl"
# Of a record and of its fine-tuning: what differs from one computation to the next.
_OF_ONE_TIME = frozenset((
    "began", "seconds", "train_seconds", "eval_seconds", "before_seconds", "tokens_per_second",
    "training", "resumed",
))  # fmt: skip
# Options that need not be equal: what is joined, and where a study ran or wrote.
_OPEN = frozenset((
    "schemes", "seeds", "task", "baseline", "windowed", "text", "out", "workers", "scheduler",
    "keep_weights",
))  # fmt: skip
_OF_TASKS = frozenset(Recipe.__dataclass_fields__) - {"task"}  # each task has its own
_MACHINE = ("machine", "processor", "cores")
_FILES = "posenc files"


@dataclass(frozen=True)
class Part:
    """A study on disk: its folder, what ``study.json`` says, and its records."""

    folder: Path
    summary: Summary
    records: list[Record]


def report(folders: Sequence[str], out: str) -> int:
    """Join the studies of ``folders`` and write their tables, figures and report into ``out``.

    Returns the exit status: 0, or 1 if a run failed.

    Raises
    ------
    FileNotFoundError, ValueError
        A folder holds no study, or one that is not comparable with the first.
    """
    target = Path(out)
    if target.resolve() in [Path(folder).resolve() for folder in folders]:
        raise ValueError(f"out must be a folder of its own, got {out!r}, which is joined")
    check_folder(target)
    parts = [read(Path(folder)) for folder in dict.fromkeys(folders)]
    command = shlex.join(["posenc", "report", *folders, "--out", out])
    summary, records = join(parts)
    summary["command"] = "\n".join([command, *_each(p.summary.get("command") for p in parts)])
    summary["config"]["out"] = out
    write_all(target, summary, records, [record["run"] for record in records])
    return int(any(record["status"] != "ok" for record in records))


def read(folder: Path) -> Part:
    """The study whose files are in a folder.

    Raises
    ------
    FileNotFoundError
        There is none.
    ValueError
        Its files are no study's, or were edited since.
    """
    if not (folder / STUDY).is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} holds no study: it has no {STUDY}, which posenc compare writes"
        )
    try:
        summary = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        sealed = summary["sha256"][RESULTS]
        known = {"config", "tasks", "versions"} <= summary.keys()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        known, sealed = False, ""
    if not known:
        raise ValueError(f"{str(folder / STUDY)!r} is not that of a study of posenc compare")
    data = (folder / RESULTS).read_bytes()
    if hashlib.sha256(data).hexdigest() != sealed:
        raise ValueError(f"{str(folder / RESULTS)!r} was edited since the study wrote it")
    return Part(folder, summary, [json.loads(line) for line in data.decode().splitlines()])


def join(parts: Sequence[Part]) -> tuple[dict[str, Any], list[Record]]:
    """The summary and the records of several studies as of one, in the order of its tables.

    Raises
    ------
    ValueError
        Two are not comparable, or a run has other results in one than in another. The message
        names the option or the run, both values and both folders.
    """
    first = parts[0]
    for other in parts[1:]:
        _check_comparable(first, other)
    for number, one in enumerate(parts):
        for other in parts[:number]:
            _check_tasks(other, one)
    records = _records(parts)
    summaries = [part.summary for part in parts]
    every = {key: about for summary in summaries for key, about in summary["tasks"].items()}
    tasks = {
        key: {**about, "must_fail": _must_fail(summaries, key)} for key, about in every.items()
    }
    config = _config(parts)
    return {
        **first.summary,
        "config": config,
        "tasks": tasks,
        "corpus": next((s["corpus"] for s in summaries if s.get("corpus")), {}),
        "fitted": _fitted(summaries) if len(tasks) == 1 else {},
        "versions": _versions(summaries),
        **_tuning(parts),
        **seconds(records),
    }, _sort(records, tasks, config["schemes"])


def _refuse(name: str, first: Part, one: Any, other: Part, two: Any) -> ValueError:
    shown = (f"{json.dumps(value)} in {str(part.folder)!r}" for part, value in
             ((first, one), (other, two)))  # fmt: skip
    return ValueError(f"cannot join studies whose {name} differs: {', '.join(shown)}")


def _check_comparable(first: Part, other: Part) -> None:
    """``ValueError`` for the first thing in which two studies must be equal and are not."""
    one, two = first.summary, other.summary
    options, others = one["config"], two["config"]
    _check_equal("backend", first, options["backend"], other, others["backend"])
    files = _FILES if all(_FILES in s["versions"] for s in (one, two)) else "posenc commit"
    for name in ("posenc", files, "numpy", options["backend"]):
        versions = one["versions"].get(name), two["versions"].get(name)
        _check_equal(f"version of {name}", first, versions[0], other, versions[1])
    for name in dict.fromkeys([*options, *others]):
        if name not in _OPEN | _OF_TASKS:
            _check_equal(name, first, options.get(name), other, others.get(name))
    texts = [s["corpus"]["sha256"] if s.get("corpus") else None for s in (one, two)]
    if all(texts):
        _check_equal("text", first, texts[0], other, texts[1])
    named = [o["baseline"] for o in (options, others) if o.get("baseline")]
    if len(named) == 2:
        _check_equal("baseline", first, named[0], other, named[1])
    devices = [_on_cpu(part.records) for part in (first, other)]
    if all(devices):
        _check_equal("device", first, devices[0], other, devices[1])


def _check_equal(name: str, first: Part, one: Any, other: Part, two: Any) -> None:
    if one != two:
        raise _refuse(name, first, one, other, two)


def _on_cpu(records: Records) -> str:
    """Whether the runs trained on processors or on accelerators; empty if none has finished."""
    devices = {r["versions"].get("device") for r in records if r["status"] == "ok"}
    return ("cpu" if devices == {"cpu"} else "accelerator") if devices else ""


def _check_tasks(first: Part, other: Part) -> None:
    """``ValueError`` if a task that both have is not set up alike."""
    one, two = first.summary["tasks"], other.summary["tasks"]
    if {about["recipe"]["task"] for about in one.values()} & {
        about["recipe"]["task"] for about in two.values()
    }:  # a list of training lengths decides the names of all tasks
        lengths = [part.summary["config"]["train_len"] for part in (first, other)]
        if any(isinstance(length, list) for length in lengths):
            _check_equal("train_len", first, lengths[0], other, lengths[1])
    for key in (key for key in one if key in two):
        mine, others = ({**s[key]["recipe"], **s[key]} for s in (one, two))
        for name in dict.fromkeys([*mine, *others]):
            if name not in ("must_fail", "recipe"):
                where = f"{name} (of the task {key})"
                _check_equal(where, first, mine.get(name), other, others.get(name))


def _records(parts: Sequence[Part]) -> list[Record]:
    """Each run once; of two records one that has finished."""
    found: dict[tuple[Any, ...], tuple[Part, Record]] = {}
    for part in parts:
        for record in part.records:
            place = (record["task"], record["train_len"], record["scheme"], record["seed"])
            before, kept = found.get(place, (part, record))
            if record["status"] == kept["status"] == "ok":
                _check_same(before, kept, part, record)
            if place not in found or kept["status"] != "ok":
                found[place] = part, record
    return [record for _, record in found.values()]


def _check_same(first: Part, one: Record, other: Part, two: Record) -> None:
    """``ValueError`` if a run was computed twice with different results."""
    named = f"{one['scheme']}, seed {one['seed']}, of the task {one['task']}"
    results, others = _results(one), _results(two)
    differ = [n for n in dict.fromkeys([*results, *others]) if results.get(n) != others.get(n)]
    if not differ:
        return
    what = "has other results" if one["run"] == two["run"] else "is another run"
    fields = [name for name in differ if name != "run"] or differ
    raise ValueError(
        f"{named}, {what} in {str(other.folder)!r} than in {str(first.folder)!r}: they differ in "
        f"{', '.join(fields[:3])}{' and more' * (len(fields) > 3)}"
    )


def _results(record: Mapping[str, Any]) -> Record:
    """A record without what differs from one computation to the next."""
    return {
        name: _results(value) if isinstance(value, dict) and name == "finetune" else value
        for name, value in record.items()
        if name not in _OF_ONE_TIME
    }


def _config(parts: Sequence[Part]) -> dict[str, Any]:
    """The options of the study that would have all runs; None where tasks differ in one."""
    configs = [part.summary["config"] for part in parts]
    config = {
        name: value if all(c.get(name) == value for c in configs) else None
        for name, value in configs[0].items()
    }
    for name in ("schemes", "task", "windowed", "text"):
        config[name] = list(dict.fromkeys(each for c in configs for each in c.get(name, ())))
    return {
        **config,
        "seeds": max(c["seeds"] for c in configs),
        "baseline": next((c["baseline"] for c in configs if c.get("baseline")), ""),
    }


def _must_fail(summaries: Sequence[Summary], key: str) -> dict[str, bool]:
    found = (summary["tasks"].get(key, {}).get("must_fail", {}) for summary in summaries)
    return {label: fails for one in found for label, fails in one.items()}


def _fitted(summaries: Sequence[Summary]) -> dict[str, str]:
    return {label: text for s in summaries for label, text in s.get("fitted", {}).items()}


def _versions(summaries: Sequence[Summary]) -> dict[str, str]:
    """Those of the first study, with the machines of all."""
    every = {name: _each(s["versions"].get(name) for s in summaries) for name in _MACHINE}
    return {**summaries[0]["versions"], **{name: "; ".join(all_) for name, all_ in every.items()}}


def _each(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


def _tuning(parts: Sequence[Part]) -> dict[str, Any]:
    """What a sweep tried and chose, of every scheme once."""
    found: dict[tuple[str, str], tuple[Part, Mapping[str, Any]]] = {}
    for part in parts:
        for one in part.summary.get("tuning", {}).get("schemes", ()):
            name = one["task"], one["scheme"]
            before, kept = found.setdefault(name, (part, one))
            _check_equal(
                f"choice of the sweep for {one['scheme']}, task {one['task']},",
                before, kept["chosen"], part, one["chosen"],
            )  # fmt: skip
    if not found:
        return {}
    seeds = {seed for part in parts for seed in part.summary.get("tuning", {}).get("seeds", ())}
    return {"tuning": {"seeds": sorted(seeds), "schemes": [one for _, one in found.values()]}}


def _sort(
    records: Iterable[Record], tasks: Mapping[str, Mapping[str, Any]], schemes: Sequence[str]
) -> list[Record]:
    keys = [(about["recipe"]["task"], about["recipe"]["train_len"]) for about in tasks.values()]
    return sorted(
        records,
        key=lambda r: (
            keys.index((r["task"], r["train_len"])), schemes.index(r["scheme"]), r["seed"]
        ),
    )  # fmt: skip
