"""``posenc compare --dry-run``: what a study takes, before anything starts or is written."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

from posenc.study.columns import align
from posenc.study.estimate import Speed, estimate, memory_of, parameters, speed_of
from posenc.study.origin import cores
from posenc.study.outputs import check_folder
from posenc.study.progress import Progress, duration, number, width
from posenc.study.run import Run
from posenc.study.runner import jobs, plan, plan_tuning
from posenc.study.study import Study
from posenc.study.trackers import tracker_kinds
from posenc.study.trainer import choose_backend

_COLUMNS = (
    "task", "runs", "trainings", "steps", "tokens", "parameters", "time/training", "memory/process",
)  # fmt: skip


def dry_run(study: Study) -> int:
    """Print the runs that are missing, their steps, and an estimate of time and memory.

    Everything that can be checked without a framework is checked, with the errors of the study
    itself. Returns the exit status, 0.
    """
    check_folder(Path(study.out))
    tracker_kinds(study.tracker)
    backend, corpus = choose_backend(study.backend), study.corpus()
    tried, untried = plan_tuning(study, corpus, writes=False)
    kept, missing = plan(study, corpus, () if untried else tried, writes=False)
    every = [*untried, *missing]
    progress = Progress(study, 0, print)
    progress.header(corpus, backend)
    total = len(tried) + len(kept) + len(every)
    said = f"{len(every)} runs are missing, {total - len(every)} of {total} are in {study.out!r}"
    _print(f"{said}; of those, {len(untried)} tune" if untried else said)
    if every:
        _print_missing(study, every)
    _print("dry run: nothing was started or written")
    return 0


def _print_missing(study: Study, every: list[Run]) -> None:
    speed = speed_of(study.device)
    trainings = Counter(study.key(job[0].task, job[0].train_len) for job in jobs(every))
    runs = Counter(study.key(run.task, run.train_len) for run in every)
    rows = [_row(study, key, runs[key], count, speed) for key, count in trainings.items()]
    print()
    print(align([_COLUMNS, *rows], width()))
    print()
    each = [(study.recipes[key], count, runs[key]) for key, count in trainings.items()]
    on_cpu = study.device in ("auto", "cpu")
    workers = study.workers or (min(cores(), len(jobs(every))) if on_cpu else 1)
    largest = max(memory_of(study.recipes[key], study.device) for key in trainings)
    processes = f"{workers} processes" if workers > 1 else "one process"
    _print(
        f"time: about {duration(estimate(each, workers, speed))} in {processes}, by "
        f"estimate: {speed.said}"
    )
    where = "" if on_cpu else " of the device"
    _print(
        f"memory: about {number(workers * largest)}B{where} in {processes}, by estimate: weights, "
        "gradients, moments, activations and logits; a scheme with its own tables needs more"
    )


def _row(study: Study, key: str, runs: int, trainings: int, speed: Speed) -> tuple[str, ...]:
    recipe = study.recipes[key]
    tuning = recipe.finetuning() if recipe.finetune_steps else None
    of_training = recipe.steps * recipe.batch_size * recipe.train_tokens
    of_tuning = tuning.steps * tuning.batch_size * tuning.train_tokens if tuning else 0
    steps = trainings * recipe.steps + runs * recipe.finetune_steps
    return (
        key,
        f"{runs}",
        f"{trainings}",
        f"{steps:,}",
        number(trainings * of_training + runs * of_tuning),
        number(parameters(recipe)),
        duration(estimate([(recipe, 1, 1)], 1, speed)),
        f"{number(memory_of(recipe, study.device))}B",
    )


def _print(text: str) -> None:
    wrapper = textwrap.TextWrapper(break_long_words=False, break_on_hyphens=False)
    wrapper.width, wrapper.subsequent_indent = width(), "  "
    print(wrapper.fill(text))
