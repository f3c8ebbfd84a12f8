"""What ``posenc compare`` prints and writes: progress, then tables, figures and the report."""

from __future__ import annotations

import platform
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

from posenc.study.columns import shorten
from posenc.study.comparisons import comparisons_csv
from posenc.study.corpus import Corpus, printable
from posenc.study.estimate import estimate
from posenc.study.identity import posenc_digest
from posenc.study.live import LiveLine
from posenc.study.origin import command, commit, cores, processor
from posenc.study.outcomes import has_text, outcomes, tasks, text_records
from posenc.study.outputs import check_folder, holds_results, publish, task_file
from posenc.study.picture import FORMATS
from posenc.study.plots import loss_against_length
from posenc.study.recipe import Recipe
from posenc.study.report import study_markdown, study_text, write_report
from posenc.study.results import Record, seconds, write_tables, write_whole
from posenc.study.run import Run
from posenc.study.runner import (
    Log,
    compute,
    jobs,
    plan,
    plan_tuning,
    weights_folder,
    without_weights,
)
from posenc.study.specs import fitted_settings
from posenc.study.statistics import Records, Summary
from posenc.study.stopping import exit_status
from posenc.study.study import Study
from posenc.study.sweep_plots import tuning_picture
from posenc.study.sweep_tables import tuning_csv, tuning_summary
from posenc.study.sweeps import SEED
from posenc.study.task_plots import task_picture
from posenc.study.task_tables import tasks_csv
from posenc.study.tasks.catalogue import TEXT
from posenc.study.trackers import Tracker, Trackers, make_trackers
from posenc.study.trainer import choose_backend

_EVERY, _SHARE = 5.0, 0.02  # least seconds between progress lines, also as a share of all
_NONE: Mapping[str, float] = {}
_INDENT, _SHORTEST = " " * 8, 12  # characters; a shortened name keeps at least 12


def compare(study: Study) -> int:
    """Run a study and write its results, tables, figures and report into ``study.out``.

    Returns the exit status: 0, 1 if a run failed, 130 after Ctrl-C and 143 after SIGTERM. Finished
    runs are always kept.
    """
    check_folder(Path(study.out))
    backend, corpus = choose_backend(study.backend), study.corpus()
    tracker = Trackers(make_trackers(study.tracker, Path(study.out)))
    tried, untried = plan_tuning(study, corpus)
    records, missing = plan(study, corpus, () if untried else tried)
    live = LiveLine()
    new = partial(Progress, study, write=live.print, show=live.show)
    progress = new(len(records), trainings=len(jobs(missing)))
    progress.header(corpus, backend, estimated(study, [*untried, *missing]))
    if again := without_weights(study, () if untried else missing):
        print(f"{again} finished runs are run again: their weights are missing")
    status, runs = 0, _digests(tried, untried)
    try:
        if untried:
            records = []  # those on disk are not tuned
            _tune(study, tried, untried, tracker, new)
            records, missing = plan(study, corpus, tried)
            progress = new(len(records), trainings=len(jobs(missing)))
        progress.kept()
        runs += _digests(records, missing)
        for record in compute(study, missing, log=_both(progress, tracker)):
            progress.result(record)
            tracker.finish(record)
            records.append(record)
    except KeyboardInterrupt as stop:
        status = exit_status(stop)
        live.clear()
        print("\nstopped; the same command continues from here")
    finally:
        live.clear()
        tracker.close()
    summary = _summary(study, corpus, backend, records, tried if records else ())
    write_all(Path(study.out), summary, _sort(study, records), runs)
    if study.keep_weights and any(record["status"] == "ok" for record in records):
        print(f"  {weights_folder(study)}: trained weights of each run")
    failed = any(record["status"] != "ok" for record in records)
    return status or int(failed)


def _digests(records: Records, missing: Sequence[Run]) -> list[str]:
    return [record["run"] for record in records] + [run.digest() for run in missing]


def _tune(
    study: Study, tried: list[Record], untried: Sequence[Run], tracker: Tracker,
    new: Callable[..., Progress],
) -> None:  # fmt: skip
    """Carry out the runs of a sweep that are missing, and add their records."""
    total = len(tried) + len(untried)
    progress = new(len(tried), trainings=len(jobs(untried)), total=total)
    seeds = f"seed {SEED}"
    if study.sweep_seeds > 1:
        seeds = f"seeds {SEED} to {SEED + study.sweep_seeds - 1}"
    print(f"tuning: {total} runs of {seeds}, then the study with the values of the lowest loss")
    progress.kept()
    for record in compute(study, untried, log=_both(progress, tracker)):
        progress.result(record)
        tracker.finish(record)
        tried.append(record)
    print("tuned; now the study")


def _both(progress: Progress, tracker: Tracker) -> Log:
    def log(run: Run, step: int, values: Mapping[str, float]) -> None:
        progress.step(run, step, values["loss"], values)
        tracker.log(run, step, values)

    return log


def write_results(study: Study, records: Sequence[Record]) -> str:
    """Write tables, figures and the report of a study's records into ``study.out``.

    The same files as those of ``posenc compare``, for ``records = list(run_study(...))``. Files of
    an earlier study there are kept in ``earlier/``.

    Returns
    -------
    The table that the command prints.

    Raises
    ------
    RuntimeError
        No run has succeeded; the message has the first error.
    """
    errors = [record["error"] for record in records if record["status"] != "ok"]
    if len(errors) == len(records):
        raise RuntimeError(f"no run of the study has succeeded: {errors[0] if errors else 'none'}")
    backend, corpus = choose_backend(study.backend), study.corpus()
    tried, _ = plan_tuning(study, corpus)
    kept, missing = plan(study, corpus, tried)
    runs = [each["run"] for each in (*tried, *kept)] + [run.digest() for run in missing]
    summary = _summary(study, corpus, backend, records, tried)
    chosen = _sort(study, records)
    publish(Path(study.out), summary, chosen, runs, partial(_render, summary, chosen))
    return study_text(summary, chosen, width())


def _summary(
    study: Study, corpus: Corpus | None, backend: str, records: Sequence[Record],
    tried: Sequence[Record],
) -> dict[str, Any]:  # fmt: skip
    """What ``describe`` says, seconds, and what a sweep chose."""
    times = seconds([*tried, *records])
    summary = describe(study, corpus, backend, times["wall_seconds"]) | times
    if study.tunings and tried:
        summary["tuning"] = tuning_summary(study.trials(corpus, backend), tried)
    escaped: dict[str, Any] = _escape_bytes(summary)
    return escaped


def estimated(study: Study, missing: Sequence[Run]) -> float | None:
    """Seconds that the missing runs take; None where they train on no processor of this machine."""
    if study.device not in ("auto", "cpu") or study.scheduler or not missing:
        return None
    trainings = Counter(study.key(job[0].task, job[0].train_len) for job in jobs(missing))
    every = Counter(study.key(run.task, run.train_len) for run in missing)
    each = [(study.recipes[key], count, every[key]) for key, count in trainings.items()]
    return estimate(each, study.workers or min(cores(), len(jobs(missing))))


def describe(study: Study, corpus: Corpus | None, backend: str, wall: float) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a study."""
    origin = {"posenc commit": commit()}
    return {
        "command": command(study),
        "fitted": _fitted(study),
        "config": {**asdict(study), "schemes": study.labels, "backend": backend},
        "tasks": {label: _about(study, recipe) for label, recipe in study.recipes.items()},
        "corpus": {} if corpus is None else _about_text(corpus),
        "versions": {
            "posenc": _version("posenc"),
            "posenc files": posenc_digest(backend)[:16],
            **{name: value for name, value in origin.items() if value},
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            backend: _version(backend),
            "machine": f"{platform.system()} {platform.machine()}",
            "processor": processor(),
            "cores": str(cores()),
        },
        "wall_seconds": wall,
    }


def _about_text(corpus: Corpus) -> dict[str, Any]:
    unit = "bytes" if isinstance(corpus.train, bytes) else "tokens"
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        f"train_{unit}": len(corpus.train),
        f"validation_{unit}": len(corpus.validation),
        "train_files": corpus.train_files,
        "validation_files": corpus.validation_files,
    }


def _fitted(study: Study) -> dict[str, str]:
    """Options that follow from the sizes of a model; those of several tasks are not one set."""
    if len(study.recipes) > 1:
        return {}
    (recipe,) = study.recipes.values()
    return fitted_settings([n for n in study.labels if study.plans(n, recipe)], recipe)


def _about(study: Study, recipe: Recipe) -> dict[str, Any]:
    """What tables and figures say of a task."""
    task = recipe.of_task
    plans = {label: study.plans(label, recipe) for label in study.labels}
    return {
        "kind": task.kind,
        "paper": task.paper,
        "title": (task.__doc__ or "").strip().partition("\n")[0],
        "score": task.score,
        "unit": task.unit,
        "chance": task.chance,
        "groups": task.groups,
        "group_names": task.group_names(),
        "tests": tuple(task.tests()),
        "train_len": recipe.train_len,
        "eval_lens": recipe.eval_lens,
        "must_fail": {
            label: plan is not None and all(map(task.must_fail, plan.trained.schemes))
            for label, plan in plans.items()
        },
        "recipe": asdict(recipe),
    }


class Progress:
    """Prints lines about a running study: at its start, during runs, at the end of each run.

    ``trainings`` is the number of trainings that the missing runs need, by default one each.
    ``show`` replaces the last line of a terminal; without it, runs that go on are lines too.
    """

    def __init__(
        self,
        study: Study,
        kept: int,
        write: Callable[[str], None],
        *,
        trainings: int | None = None,
        total: int | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._study, self._print, self._show = study, write, show
        self._total = total or len(study.recipes) * len(study.labels) * study.seeds
        self._steps_each = mean(recipe.steps for recipe in study.recipes.values())
        self._kept = self._done = kept
        self._trainings = self._total - kept if trainings is None else trainings
        self._begin = time.perf_counter()
        self._last_line: float | None = None
        self._first: tuple[float, int] | None = None  # time and steps of the first report
        self._steps: dict[tuple[str, str, str], int] = {}
        self._usage: dict[tuple[str, str, str], Mapping[str, float]] = {}  # of runs that go on
        self._trained: dict[str, float] = {}  # seconds by training
        self._scored: list[float] = []  # seconds of runs
        self._failed = 0

    def header(self, corpus: Corpus | None, backend: str, seconds: float | None = None) -> None:
        """Print what the study will do, and an estimate of how long that takes here."""
        study = self._study
        if corpus is not None:
            unit = "MB" if isinstance(corpus.train, bytes) else "M tokens"
            self._print_wrapped(
                f"{corpus.name}: {len(corpus.train) / 1e6:.1f} {unit} to train, "
                f"{len(corpus.validation) / 1e6:.1f} {unit} held out (sha256 {corpus.sha256[:12]})"
            )
        if study.scale:
            self._print_wrapped(f"scale {study.scale}: {command(study)}")
        start = f"{len(study.labels)} schemes x {study.seeds} seeds with {backend}"
        parts = {label: _sizes(recipe) for label, recipe in study.recipes.items()}
        if len(parts) == 1:
            self._print_wrapped(f"{start}: {next(iter(parts.values()))}")
        else:
            tasks = len({recipe.task for recipe in study.recipes.values()})
            lengths = len(parts) // tasks
            each = f"{lengths} training lengths x " * (lengths > 1)
            self._print_wrapped(f"{tasks} tasks x " * (tasks > 1) + each + start)
            for label, sizes in parts.items():
                self._print_wrapped(f"{label}: {sizes}")
        if seconds is not None:
            self._print(f"at most about {duration(seconds)} on this machine, by estimate")
        sys.stdout.flush()

    def kept(self) -> None:
        """Print how many trainings runs share, and how many runs are on disk already."""
        if self._trainings < self._total - self._kept:
            self._print(f"{self._total - self._kept} runs share {self._trainings} trainings")
        if self._kept:
            self._print(f"{self._kept} of {self._total} runs are kept from before")
        sys.stdout.flush()

    def step(self, run: Run, step: int, loss: float, usage: Mapping[str, float] = _NONE) -> None:
        """Show the progress of a run; as lines, less often the longer the study takes."""
        now = time.perf_counter()
        key = self._study.key(run.task, run.train_len)
        which = _which(run.seed, dict(run.tuning))
        place = key, run.label, which
        # Fine-tuning adds no steps of training, whichever run of a training it is of.
        self._steps[place] = step if step <= run.steps else self._steps.get(place, 0)
        self._usage[place] = usage
        if self._first is None:
            self._first = now, sum(self._steps.values())
        pause = 0.0 if self._show else max(_EVERY, _SHARE * (now - self._begin))
        if self._last_line is None or now - self._last_line >= pause:
            self._last_line = now
            at, left, used = _stage(run, step), self._time_left(now), self._used()
            unit = f"bits/{self._study.recipes[key].of_task.answers}"
            loss_at = f"{at}, {loss:.2f} {unit}"
            forms = [f"{loss_at}{''.join(used[:n])}{left}" for n in range(len(used), -1, -1)]
            forms += [f"{at}{left}", at]
            name = self._name(key, run.label)
            line = [f"{which}: {form}" for form in forms]
            if self._show:
                self._show(_line(self._count(self._done), name, line))
            else:
                self._print(_line(_INDENT, name, line))
            sys.stdout.flush()

    def result(self, record: Record) -> None:
        """Print the result of a run."""
        self._done += 1
        task, tuning = record.get("task", TEXT), record.get("tuning", {})
        scheme, which = record["scheme"], _which(record["seed"], tuning)
        key = self._study.key(task, record.get("train_len"))
        self._steps.pop((key, scheme, which), None)
        self._usage.pop((key, scheme, which), None)
        count = self._count(self._done)
        name = self._name(key, scheme)
        if record["status"] != "ok":
            self._failed += 1
            failed = "failed: " * (record["status"] == "failed")
            reason = f"{failed}{record['error']}"
            self._print_wrapped(f"{count}{name}{which}: {reason}")
        elif tuning:
            self._trained[record["training"]] = record["train_seconds"]
            self._scored.append(record["eval_seconds"])
            unit = self._study.recipes[key].of_task.unit
            shown = f"{which}  {record['validation']['loss']:.3f} {unit}"
            self._print(_line(count, name, [shown]))
        else:
            self._trained[record["training"]] = record["train_seconds"]
            extension = record.get("finetune", {})
            own = extension.get("seconds", 0.0) + extension.get("before_seconds", 0.0)
            self._scored.append(record["eval_seconds"] + own)
            found = record["loss"] if task == TEXT else self._scores(key, record)
            at = sorted(found, key=int)  # JSON sorts them as strings
            losses = [f"{length}: {found[length]:.3f}" for length in at]
            self._print(_line(count, name, [f"{which}  {some}" for some in _shorter_forms(losses)]))
        self._last_line = time.perf_counter()
        sys.stdout.flush()

    def _count(self, done: int) -> str:
        return f"[{done:{len(str(self._total))}}/{self._total}] "

    def _used(self) -> list[str]:
        """Tokens per second and memory of all runs that go on, as far as they are known."""
        now = [usage for usage in self._usage.values() if usage]
        speed = sum(usage["tokens_per_second"] for usage in now)
        memory = sum(usage["memory"] for usage in now)
        shown = [f"{number(speed)} tokens/s"] * (speed > 0) + [f"{number(memory)}B"] * (memory > 0)
        return [f", {each}" for each in shown]

    def _name(self, key: str, scheme: str) -> str:
        """The scheme, after the task and length if there are several."""
        return scheme if len(self._study.recipes) == 1 else f"{key} {scheme}"

    def _scores(self, key: str, record: Record) -> dict[str, float]:
        score = self._study.recipes[key].of_task.score
        return {n: cell[score] for n, cell in record["scores"][""].items() if cell["examples"]}

    def _print_wrapped(self, text: str) -> None:
        wrapper = textwrap.TextWrapper(break_long_words=False, break_on_hyphens=False)
        wrapper.width, wrapper.subsequent_indent = width(), "  "
        self._print(wrapper.fill(text))

    def _time_left(self, now: float) -> str:
        """An estimate from the finished part; before any run has finished, a lower bound."""
        stepped = sum(self._steps.values())
        if self._trained:
            train = sum(self._trained.values()) / len(self._trained)
            score = sum(self._scored) / len(self._scored)
            # A failed run counts as a training that ended, though it may have shared one.
            trained = len(self._trained) + self._failed + stepped / self._steps_each
            done = trained * train + (len(self._scored) + self._failed) * score
            whole = self._trainings * train + (self._total - self._kept) * score
            seconds = (now - self._begin) * max(0.0, whole - done) / done
            return f", about {duration(seconds)} left"
        # The time for scoring is unknown before a run has finished, so this counts steps only.
        then, before = self._first or (now, stepped)
        steps = self._trainings * self._steps_each - stepped
        if stepped <= before or steps <= 0:
            return ""
        return f", more than {duration(steps * (now - then) / (stepped - before))} left"


def _which(seed: int, tuning: Mapping[str, float]) -> str:
    """Which run of a scheme: its seed, or the values of a sweep, and which seed after the first."""
    values = "".join(f" {name}={value:g}" for name, value in tuning.items())
    return values if values and seed == SEED else f"{values} seed {seed}"


def _stage(run: Run, step: int) -> str:
    """What a run does after a step, counted on through its fine-tuning."""
    if step < run.steps:
        return f"step {step} of {run.steps}"
    if run.steps < step < run.steps + run.finetune_steps:
        return f"fine-tuning, step {step - run.steps} of {run.finetune_steps}"
    return "trained, now scored"


def _sizes(recipe: Recipe) -> str:
    """The model, training and lengths of a task."""
    lengths = ", ".join(map(str, recipe.eval_lens))
    what = "bytes" if recipe.task == TEXT and not recipe.vocabulary_size else "tokens"
    steps = f"{recipe.steps} steps of {recipe.batch_size} x {recipe.train_tokens} {what}"
    if recipe.finetune_steps:
        tuning = recipe.finetuning()
        steps += f", then {tuning.steps} of {tuning.batch_size} x {tuning.train_tokens}"
    model = f"{recipe.layers} layers, width {recipe.dim}, {recipe.heads} heads"
    return f"{model}; {steps}; scored at {lengths}"


def _line(start: str, name: str, forms: Sequence[str]) -> str:
    """One line: ``start``, the name, shortened if needed, and the first of ``forms`` that fits."""
    room = width() - len(start)
    fitting = [form for form in forms if min(len(name), _SHORTEST) + len(form) <= room]
    end = [*fitting, forms[-1]][0]
    return start + shorten(name, max(_SHORTEST, room - len(end))) + end


def _shorter_forms(losses: list[str]) -> list[str]:
    """All losses, then ever fewer: the middle ones are left out first, at least two remain."""
    forms = ["  ".join(losses)]
    for kept in range(len(losses) - 1, 1, -1):
        front = (kept + 1) // 2
        forms.append("  ".join([*losses[:front], "…", *losses[front - kept :]]))
    return forms


def number(value: float) -> str:
    """Two or three digits and a power of a thousand: ``61 k``, ``1.2 G``."""
    powers = (" ", " k", " M", " G", " T", " P")
    power = 0
    while value >= 999.5 and power < len(powers) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.{0 if value >= 9.95 or not power else 1}f}{powers[power].rstrip()}"


def duration(seconds: float) -> str:
    """A time to two digits or so."""
    if seconds > 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def width() -> int:
    """Columns of the terminal; 80 without a terminal."""
    return max(40, shutil.get_terminal_size().columns)


def write_all(out: Path, summary: dict[str, Any], records: list[Record], runs: list[str]) -> None:
    """Write all files of a study, and print its tables and the names of the files."""
    succeeded = any(record["status"] == "ok" for record in records)
    if not succeeded:
        print("every run failed" if records else "no run has finished yet")
        if holds_results(out):
            print(f"the files in {out} belong to an earlier study and are kept")
        if not records or holds_results(out):
            return

    names, earlier = publish(out, summary, records, runs, partial(_render, summary, records))
    if earlier is not None:
        print(f"the files of an earlier study are now in {earlier}")
    if succeeded:
        print(f"\n{study_text(summary, records, width())}")
    print(f"\n{summary['wall_seconds']:.0f} s; wrote")
    for name in names:
        print(f"  {out / name}")


def _render(summary: Summary, records: Sequence[Record], folder: Path) -> None:
    write_tables(folder, records)
    if any(record["status"] == "ok" for record in records):
        write_whole(folder / "table.md", study_markdown(summary, records))
        if has_text(summary):
            _write_text(folder, summary, text_records(summary, records))
        if summary.get("tuning"):
            _write_tuning(folder, summary)
        if tasks(summary):
            _write_tasks(folder, summary, records)
        write_report(summary, records, folder / "report.html")


def _write_text(folder: Path, summary: Summary, records: Records) -> None:
    write_whole(folder / "differences.csv", comparisons_csv(summary, records))
    for form in FORMATS:
        loss_against_length(records, folder / f"loss.{form}", summary, form)


def _write_tuning(folder: Path, summary: Summary) -> None:
    write_whole(folder / "tuning.csv", tuning_csv(summary))
    for form in FORMATS:
        (folder / f"tuning.{form}").write_bytes(tuning_picture(summary, form))


def _write_tasks(folder: Path, summary: Summary, records: Records) -> None:
    write_whole(folder / "tasks.csv", tasks_csv(summary, records))
    order = list(summary["config"]["schemes"])
    for label, about in tasks(summary).items():
        found = outcomes(about, records)
        for form in FORMATS:
            picture = task_picture(label, about, found, order, form)
            (folder / task_file(label, form)).write_bytes(picture)


def _sort(study: Study, records: Sequence[Record]) -> list[Record]:
    task = {label: n for n, label in enumerate(study.recipes)}
    place = {label: n for n, label in enumerate(study.labels)}

    def rank(record: Record) -> tuple[int, int, int]:
        of = task[study.key(record["task"], record["train_len"])]
        return of, place[record["scheme"]], record["seed"]

    return sorted(records, key=rank)


def _escape_bytes(value: Any) -> Any:
    """The same values, with backslash escapes for bytes of file names that are not valid UTF-8."""
    if isinstance(value, dict):
        return {key: _escape_bytes(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(_escape_bytes, value))
    return printable(value) if isinstance(value, str) else value


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
