"""Runs of a study: a task, a scheme and a seed. Runs may share one training."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import posenc
from posenc.layers import LayerPlan
from posenc.schemes import NoPE
from posenc.study import extension, windows
from posenc.study.checkpoints import Checkpoint
from posenc.study.corpus import Corpus, printable
from posenc.study.decoder import Decoder
from posenc.study.history import History
from posenc.study.identity import fingerprint, posenc_digest, versions
from posenc.study.recipe import DTYPES, Recipe
from posenc.study.results import Record
from posenc.study.schedule import learning_rate
from posenc.study.specs import Plans, sides
from posenc.study.tasks.catalogue import TEXT
from posenc.study.tasks.drawing import summarise
from posenc.study.tasks.examples import Integers
from posenc.study.tasks.task import Task
from posenc.study.trainer import Trainer, load_trainer, needs

Report = Callable[[int, float], None]
Keep = Callable[["Run", Trainer], None]
_CHUNK = 50  # steps between two reports
_CHECKS = 2  # in a row above the score at which a task is solved
_COOL = 100  # steps after that
_READABLE = 60  # characters of a label in the name of a file
_MEANING = {
    "descriptions": "the scheme's fields",
    "windows": "the layers' windows",
    "source_digest": "the files of the scheme, the task or the model",
    "described": "the task's options",
    "tested": "the scheme at test time",
    "posenc_digest": "posenc's files",
    "versions": "packages",
}


@dataclass(frozen=True, kw_only=True)
class Run(Recipe):
    """One task, scheme and seed of a study: JSON-able, named by the digest of all its fields."""

    scheme: str
    label: str  # of the study: the scheme without the values that a sweep chose for it
    seed: int
    text: tuple[str, ...]
    data: str  # names the data of the task: of text, its digest
    described: str  # the task, with all its options
    windowed: bool
    backend: str
    device: str
    descriptions: tuple[str, ...]  # the layers' schemes, with all their fields
    windows: tuple[int | None, ...]  # of the layers
    source_digest: str  # of files of schemes, tasks, models of other packages, and their imports
    tested: str  # digest of the last three for the layers at test time; empty: as in training
    posenc_digest: str  # of posenc's own files
    versions: tuple[str, ...]
    version: str = posenc.__version__
    tuning: tuple[tuple[str, float], ...] = ()  # the values that a sweep tries; empty: a result

    @property
    def trained_as(self) -> str:
        """The label of the scheme that is trained: that before ``~``."""
        return sides(self.scheme)[0]

    def digest(self) -> str:
        """Names this run: two runs with one digest have the same results."""
        return self._digest()

    def training_digest(self) -> str:
        """Names this run's training: runs with the same one may share it."""
        return self._digest(scheme=self.trained_as, label=None, windowed=None, tested=None)

    def _digest(self, **replaced: Any) -> str:
        canonical = json.dumps({**asdict(self), "text": None, **replaced}, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def file_name(self) -> str:
        """Unique to this configuration, readable, and short enough for every file system."""
        label = self.scheme if self.task == TEXT else f"{self.task} {self.scheme}"
        readable = re.sub(r"[^a-z0-9]+", "-", label.lower())[:_READABLE]
        return f"{readable}-{self.seed}-{self.digest()[:16]}.json"


def carry_out(
    job: Sequence[Run],
    corpus: Corpus | None,
    report: Report = lambda step, loss: None,
    scratch: Path | None = None,
    checkpoint: Checkpoint | None = None,
    keep: Keep = lambda run, model: None,
) -> Iterator[Record]:
    """Records of runs that share a training: it happens once, and then each run is scored.

    ``corpus`` is for the task ``text``. ``report(step, loss in bits)`` is called after every 50
    steps, ``keep(run, model)`` with the trained model of each run that is scored. A training that
    fails raises its error; a run that cannot be scored becomes a record with ``status``
    ``"failed"``. The checkpoint of a fine-tuning is removed when its record was taken.
    """
    began, clock = time.time(), time.perf_counter()
    task = _task(job[0], corpus)
    checkpoint = checkpoint or Checkpoint(None, "")
    trained = _trained(job[0], task, report, scratch, checkpoint)
    for run in job:
        own = checkpoint.of(run.digest())
        try:
            finetuned = _finetuned(run, trained, task, report, scratch, own)
            record = _scored(run, finetuned, task)
            keep(run, finetuned.model)
        except Exception as error:
            yield failure_record(run, error)
            continue
        yield {**record, "began": began, "seconds": time.perf_counter() - clock}
        own.remove()
        began, clock = time.time(), time.perf_counter()


def failure_record(run: Run, error: BaseException) -> Record:
    """The record of a run that did not finish; that a tried value diverges is a result."""
    diverged = bool(run.tuning) and isinstance(error, FloatingPointError)
    return {
        **_named(run),
        "status": "diverged" if diverged else "failed",
        "error": str(error) if diverged else f"{type(error).__name__}: {error}",
    }


def _named(run: Run) -> Record:
    """What names a record."""
    return {
        "run": run.digest(),
        "task": run.task,
        "scheme": run.label,
        "seed": run.seed,
        "backend": run.backend,
        "train_len": run.train_len,
        **({"tuning": dict(run.tuning)} if run.tuning else {}),
        "recipe": asdict(run.training()),
        "text": _text_name(run) if run.task == TEXT else None,
        "data": run.data,
        "posenc": run.version,
    }


def _text_name(run: Run) -> str:
    """Names of the files; ``data`` is their digest."""
    names = [printable(Path(path).name) for path in run.text]
    return ", ".join(names) or "Python's standard library"


@dataclass(frozen=True)
class _Trained:
    """A trained model; ``facts`` are the part of a record that its runs share."""

    model: Trainer
    facts: Record
    is_finetuned: bool = False  # then it is the run's own, and of the schemes that are tested


def _task(run: Run, corpus: Corpus | None) -> Task:
    """The task with its data, which must be that of the plan."""
    task = run.of_task if corpus is None else run.of_task.with_text(corpus)
    if task.digest != run.data:
        raise ValueError(f"the text changed: sha256 {task.digest[:12]}, not {run.data[:12]}")
    return task


def _trained(
    run: Run, task: Task, report: Report, scratch: Path | None, checkpoint: Checkpoint
) -> _Trained:
    plans = Plans.of(run.scheme, run)
    _check_planned(run, **fingerprint(plans, run.backend, run))
    decoder = Decoder.of(run, plans.trained, run.seed)
    model = make_trainer(run, decoder, scratch)
    if run.model:
        decoder = decoder.with_weights_of(model.state())
    facts = {
        **_train(run, task, model, report, checkpoint),
        "trained_as": run.trained_as,
        "training": secrets.token_hex(8),
        "params": decoder.sizes(),
        "weights_sha256": decoder.digest(),
        "schemes": [repr(scheme) for scheme in decoder.schemes],
        "windows": list(plans.trained.windows),
        "versions": model.versions(),
    }
    return _Trained(model, facts)


def _finetuned(
    run: Run,
    trained: _Trained,
    task: Task,
    report: Report,
    scratch: Path | None,
    checkpoint: Checkpoint,
) -> _Trained:
    """The model, trained on as the run's scheme is tested; as it was without fine-tuning."""
    if not run.finetune_steps:
        return trained
    begin = time.perf_counter()
    plans = Plans.of(run.scheme, run)
    state = trained.model.state()
    decoder = extension.starting_point(run, plans, run.scheme, run.seed, state)
    model = make_trainer(run, decoder, scratch)
    before = extension.before(task.scores(run, run.seed, partial(_answer, model, None), False))
    scored = time.perf_counter() - begin
    tuning = extension.fine_tune(
        model,
        decoder,
        task,
        run.seed,
        lambda step, loss: report(run.steps + step, loss),
        checkpoint,
    )
    own = {"before": before, "finetune": {**tuning, "before_seconds": scored}}
    facts = {**trained.facts, "params": decoder.sizes(), **own}
    return _Trained(model, facts, is_finetuned=True)


def _scored(run: Run, trained: _Trained, task: Task) -> Record:
    begin = time.perf_counter()
    plans = Plans.of(run.scheme, run)
    _check_planned(run, **fingerprint(plans, run.backend, run))
    same = not run.tested
    answer = partial(_answer, trained.model, None if same or trained.is_finetuned else plans.tested)
    if run.tuning:
        scores = {"validation": _finite(task.validation(run, run.seed, answer))}
    else:
        scores = task.scores(run, run.seed, answer, run.windowed)
    return {
        **_named(run),
        "status": "ok",
        "error": None,
        **scores,
        **trained.facts,
        "eval_seconds": time.perf_counter() - begin,
        "tested_schemes": None if same else [repr(scheme) for scheme in plans.tested.schemes],
        "tested_windows": None if same else list(plans.tested.windows),
    }


def _finite(validation: Record) -> Record:
    if not math.isfinite(validation["loss"]):
        raise FloatingPointError("training diverged: the validation loss is not finite")
    return validation


def check_can_train(run: Run, scratch: Path | None = None, keep_weights: bool = False) -> None:
    """``RuntimeError`` if no run like this one can begin: its backend, device or versions fail.

    ``TypeError`` if its trainer has no weights to keep. The run's own scheme is not tried; it may
    fail alone.
    """
    _check_planned(run, posenc_digest=posenc_digest(run.backend), versions=versions(run.backend))
    plain = LayerPlan.of(NoPE(), run.layers)
    try:
        model = make_trainer(replace(run, scheme="nope"), Decoder.of(run, plain, run.seed), scratch)
        if run.finetune_steps:
            needs(model, "state", "finetune_steps")
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        what = f" the model {run.model!r}" if run.model else ""
        where = f"backend {run.backend!r} cannot train{what} on device {run.device!r}"
        raise RuntimeError(f"{where}: {cause}") from error
    if keep_weights:
        needs(model, "state", "keep_weights")


def make_trainer(run: Run, decoder: Decoder, scratch: Path | None = None) -> Trainer:
    """The decoder, or a model of one's own, in the backend's framework, ready to train."""
    kind = load_trainer(run.backend)
    for name, plain in (("dtype", DTYPES[0]), ("accumulate", 1), ("compile", False)):
        if getattr(run, name) != plain and name not in getattr(kind, "computes", ()):
            raise ValueError(
                f"{name}={getattr(run, name)} needs a trainer that names it in computes, and "
                f"{kind.__module__}.{kind.__name__} of backend {run.backend!r} does not"
            )
    if run.model and not getattr(kind, "trains_models", False):
        raise ValueError(
            f"model names {run.model!r}, but backend {run.backend!r} trains only posenc's own: "
            f"{kind.__name__} has no trains_models"
        )
    return kind(decoder, run.device, scratch)


def _check_planned(run: Run, **present: Any) -> None:
    """``RuntimeError`` where this process differs from the one that planned the study."""
    if found := _changed(run, present):
        name, planned, value = found
        raise RuntimeError(
            f"{_MEANING[name]} changed since the study was planned: from {_short(planned)} to "
            f"{_short(value)}; restart the study, and any workers that were already running"
        )


def difference(run: Run, **present: Any) -> str:
    """In what this process differs from another one that planned the study; empty if in nothing."""
    if not (found := _changed(run, present)):
        return ""
    name, planned, value = found
    if name == "versions":  # those that differ
        planned, value = (
            tuple(each for each in one if each not in other)
            for one, other in ((planned, value), (value, planned))
        )
    return f"{_MEANING[name]} differ: {_short(value)}, and in the study {_short(planned)}"


def _changed(run: Run, present: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field that is not as it was planned, with both values."""
    for name, value in present.items():
        planned = getattr(run, name)
        if planned != value:
            return name, planned, value
    return None


def _short(value: str | tuple[object, ...]) -> str:
    """Twelve characters of a digest, or windows, or names and versions."""
    return value[:12] if isinstance(value, str) else ", ".join(map(str, value))


def _train(run: Run, task: Task, model: Trainer, report: Report, checkpoint: Checkpoint) -> Record:
    """Train to the last step, or until the task is solved in domain.

    Solved is what two checks in a row say. The rate then falls to 0 over ``_COOL`` further steps.
    """
    positions = windows.training_positions(
        run.drawn_from, seed=run.seed, steps=run.steps, length=run.train_tokens
    )
    sample, done = task.in_domain(run, run.seed), checkpoint.resume(model)
    begin = time.perf_counter() - done.seconds[-1]
    while done.step < (end := _last_step(run, done)):
        steps = range(done.step, min(done.step + _CHUNK, end))
        batch = task.training(run, run.seed, steps.start, len(steps))
        rates = np.array([learning_rate(run, step) for step in steps])
        if done.solved is not None:
            rates *= np.array([1 - (step - done.solved) / _COOL for step in steps])
        # Trainers that know of no positions still train at the plain ones.
        at: dict[str, Any] = {}
        if positions is not None:
            at["positions"] = positions[steps.start : steps.stop]
        losses = np.asarray(model.train(batch.tokens, batch.labels, rates, **at)) / math.log(2)
        if not np.isfinite(losses).all():
            wrong = steps.start + int(np.argmin(np.isfinite(losses)))
            raise FloatingPointError(f"training diverged: the loss of step {wrong} is not finite")
        norms = getattr(model, "gradient_norms", None)  # not every trainer tells them
        done.add(losses, norms, run.clip, time.perf_counter() - begin)
        report(*done.curve[-1])
        if sample is not None and done.solved is None:
            _, right = model.answers(sample.tokens, sample.labels, None)
            score = summarise(sample.labels, np.asarray(right))[task.solved_by] or 0.0
            done.checks = done.checks + 1 if score >= task.solved_at else 0
            if done.checks == _CHECKS:
                done.solved = done.step
        if done.step < _last_step(run, done):
            checkpoint.keep(model, done)
    times = done.seconds
    warm = min(1, len(times) - 2)  # a study of a single chunk counts it all
    seen = (done.step - warm * _CHUNK) * run.batch_size * run.train_tokens
    return {**done.facts(), "tokens_per_second": seen / (times[-1] - times[warm])}


def _last_step(run: Run, done: History) -> int:
    return run.steps if done.solved is None else min(run.steps, done.solved + _COOL)


def _answer(
    model: Trainer, plan: LayerPlan | None, tokens: Integers, labels: Integers, window: int | None
) -> tuple[Integers, Integers]:
    other = {} if plan is None else {"plan": plan}
    return model.answers(tokens, labels, window, **other)
