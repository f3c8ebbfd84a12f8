"""The progress of a study in words: its start, runs that go on, runs that end."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from posenc.study.columns import shorten
from posenc.study.corpus import Corpus
from posenc.study.origin import command
from posenc.study.recipe import Recipe
from posenc.study.results import Record
from posenc.study.run import Run
from posenc.study.study import Study
from posenc.study.sweeps import SEED
from posenc.study.tasks.catalogue import TEXT

_EVERY, _SHARE = 5.0, 0.02  # least seconds between progress lines, also as a share of all
_NONE: Mapping[str, float] = {}
_INDENT, _SHORTEST = " " * 8, 12  # characters; a shortened name keeps at least 12


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
        schemes = _counted(len(study.labels), "scheme")
        start = f"{schemes} x {_counted(study.seeds, 'seed')} with {backend}"
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
        for warmup, steps in sorted({(r.warmup, r.steps) for r in study.recipes.values()}):
            if warmup >= steps:
                self._print_wrapped(
                    f"warmup {warmup} takes all {steps} steps: the learning rate ends at "
                    f"{steps / warmup:.0%} of its value and never declines; give --warmup less"
                )
        if seconds is not None:
            self._print(f"about {duration(seconds)} on an idle machine, by estimate")
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


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
