"""Results of earlier commits: which commits, their files, and what the repository keeps."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from asv.benchmarks import Benchmarks
from asv.config import Config
from asv.machine import Machine
from asv.results import Results, get_filename, iter_results, iter_results_for_machine
from asv.util import load_json, write_json
from harness.sources import CODE, ROOT, git

KEPT = ROOT / "benchmarks" / "results" / "asv"


def last_commits(number: int) -> list[str]:
    """The last commits that touch measured code, oldest first."""
    return git("rev-list", "--reverse", f"--max-count={number}", "HEAD", "--", *CODE).split()


def ancestors(commit: str) -> list[str]:
    """The commit and what it builds on, oldest first."""
    return git("rev-list", "--reverse", "--topo-order", commit).split()


def results_until(folder: str, commits: Sequence[str]) -> list[Results]:
    """Results in the order of the commits, of one machine, processor and environment."""
    place = {commit: index for index, commit in enumerate(commits)}
    every = [one for one in iter_results(folder) if one.commit_hash in place]
    if not every:
        raise SystemExit(f"no results of commit {commits[-1]} or an earlier one in {folder}")
    every.sort(key=lambda one: (place[one.commit_hash], _started(one)))
    return [one for one in every if _where(one) == _where(every[-1])]


def _started(one: Results) -> float:
    return max(filter(None, one.started_at.values()), default=0)


def _where(one: Results) -> tuple[str, ...]:
    """A name may pass to another processor, whose times are others."""
    return one.params["machine"], one.params["cpu"], one.params["num_cpu"], one.env_name


def is_measured(conf: Config, commit: str, bench: str | None) -> bool:
    """Whether this machine has results of the commit for each of these benchmarks as they are."""
    asked = Benchmarks.load(conf, regex=bench)
    own = iter_results_for_machine(conf.results_dir, Machine.get_unique_machine_name())
    return any(
        one.commit_hash == commit and set(asked) == one.get_result_keys(asked) for one in own
    )


def keep(history: Sequence[Results], results: Path, name: str) -> None:
    """Let the repository keep these results, and no others, under a name for their machine.

    Names and paths of the real machine, and the build of its kernel, are left out.
    """
    shutil.rmtree(KEPT, ignore_errors=True)
    machine = history[-1].params["machine"]
    neutral = {"machine": name, "os": platform.system()}
    write_json(
        KEPT / name / "machine.json", load_json(results / machine / "machine.json") | neutral
    )
    shutil.copyfile(results / "benchmarks.json", KEPT / "benchmarks.json")
    for one in history:
        stored = load_json(results / get_filename(machine, one.commit_hash, one.env_name))
        own = {"python": platform.python_version(), "env_name": "existing"}
        params = stored["params"] | neutral | {"python": own["python"]}
        path = KEPT / get_filename(name, one.commit_hash, own["env_name"])
        write_json(path, stored | own | {"params": params}, compact=True)
