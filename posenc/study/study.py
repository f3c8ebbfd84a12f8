"""A study: which schemes on which tasks, how trained, how evaluated. Its fields are the options."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from posenc.contract.checks import check_count, nearest
from posenc.study.corpus import Corpus, check_size, from_files, standard_library
from posenc.study.identity import fingerprint
from posenc.study.models import model_name
from posenc.study.recipe import Recipe, option
from posenc.study.run import Run
from posenc.study.scales import SCALES, VOCABULARY, check_scale
from posenc.study.specs import ALL, Plans, expand
from posenc.study.sweeps import SEED, Tuning, Values, axes_of, tunings, with_values
from posenc.study.tasks.catalogue import TEXT
from posenc.study.tasks.catalogue import expand as expand_tasks
from posenc.study.tasks.task import Task
from posenc.study.token_file import from_tokens
from posenc.study.trackers import check_names

_AUTO = ("auto",)
_WINDOWED = ("rope",)  # a label of the default study, not an ability of a scheme
_DEFAULT = ("alibi", "t5", "rope", "sinusoidal", "learned", "nope")
# What the runs of a sweep leave out.
_TRAINING_ALONE: dict[str, Any] = {
    "stride": 0, "finetune_steps": 0, "finetune_len": None, "finetune_learning_rate": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Study(Recipe):
    """A comparison: the same training once for every scheme and seed."""

    task: tuple[str, ...] = option(  # type: ignore[assignment]  # one for each model, several here
        (TEXT,),
        "tasks of `posenc list`, with options as passkey:shared=True; text is the loss of text, "
        "all is every task",
    )
    train_len: tuple[int, ...] = option(  # type: ignore[assignment]  # one for each model too
        None,
        "tokens (bytes) of a training sequence; the size of a task's examples; several lengths "
        "are trained side by side, each evaluated at its own multiples",
    )
    schemes: tuple[str, ...] = option(
        _DEFAULT,
        "names of `posenc list`, with options as rope:base=500000; a+b is their sum on one layer, "
        "a/b gives layers in turn, a@512/b the first of them a window of 512, a~b trains as a and "
        "tests as b; all is the whole catalogue",
    )
    sweep: tuple[str, ...] = option(
        (),
        "options to tune for each scheme, as learning-rate, learning-rate=3e-3,6e-3 or rope:base: "
        "every combination of the values is trained, chosen on text or examples that no result "
        "scores; without values, 1/4, 1/2, 1, 2 and 4 times the setting",
    )
    sweep_seeds: int = option(
        1, "seeds that train each value of a sweep, apart from those of the results; the lowest "
        "mean loss wins",
    )  # fmt: skip
    seeds: int = option(3, "number of seeds, 0 .. N - 1")
    baseline: str = option("", "scheme that the others are compared with; default: the first")
    scale: str = option(
        "", "gpu or small: a set of options for what is not given, with tokens of a file; small "
        "tries on a CPU what gpu does"
    )  # fmt: skip
    tokens: tuple[str, ...] = option(
        (), "file of tokens to train on in place of text, .bin of 16-bit integers (nanoGPT) or "
        ".npy, and one that is held out; default: its last tenth",
    )  # fmt: skip
    text: tuple[str, ...] = option((), "files to train on; default: Python's standard library")
    windowed: tuple[str, ...] = option(
        _AUTO,
        "schemes to evaluate also inside a window of the training length; auto: rope, if it is "
        "in the study",
    )
    backend: str = option("auto", "framework that trains: jax, torch, or auto, what is installed")
    device: str = option("auto", "auto, cpu, or a name of the backend's, such as cuda")
    workers: int = option(0, "processes; default: one per core, one in all on an accelerator")
    scheduler: str = option(
        "", "train on the workers of a Dask scheduler, tcp://host:port; default: processes here"
    )
    out: str = option("posenc-compare", "folder of the results")
    tracker: tuple[str, ...] = option(
        (), "where progress also goes: tensorboard, wandb-offline, or one of your own, "
        "module:function; default: nowhere",
    )  # fmt: skip
    keep_weights: bool = option(False, "keep the trained weights of every run, in OUT/weights")

    def __post_init__(self) -> None:
        self._set_scale()
        object.__setattr__(self, "model", model_name(self.model))
        if isinstance(self.task, str):
            object.__setattr__(self, "task", (self.task,))
        if not self.task:
            raise ValueError("task is empty; name at least one of `posenc list`")
        if len(set(self.task)) < len(self.task):
            raise ValueError(f"task must name each task once, got {list(self.task)}")
        self._check_lengths()
        if self.stride and not self._of_text:
            raise ValueError(f"stride is for the task text, which is none of: {self._tasks()}")
        if len(self.recipes) == 1:  # its values are those of the study
            for name, value in vars(next(iter(self.recipes.values()))).items():
                if name != "task":
                    object.__setattr__(self, name, value)
        for name in ("text", "windowed", "tokens", "scale"):
            if getattr(self, name) not in ((), "", _AUTO) and not self._of_text:
                raise ValueError(f"{name} is for the task text, which is none of: {self._tasks()}")
        self._check_tokens()
        check_count("seeds", self.seeds)
        check_count("sweep_seeds", self.sweep_seeds)
        if self.sweep_seeds > 1 and not self.sweep:
            raise ValueError(f"sweep_seeds={self.sweep_seeds} needs sweep, which is empty")
        check_count("workers", self.workers, least=0)
        self._check_scheduler()
        check_names(self.tracker)
        if not self.schemes:
            raise ValueError("schemes is empty; name at least one of `posenc list`")
        labels = list(self.schemes)
        if len(set(labels)) < len(labels):
            raise ValueError(f"schemes must name each scheme once, got {labels}")
        for label in self.schemes:
            if not label.isprintable():  # no figure could show it
                raise ValueError(f"schemes names {label!r}, with characters that are not printable")
            if label != ALL:
                for recipe in self.recipes.values():
                    _check_scheme(label, recipe)
        if self.baseline and self.baseline not in self.labels:
            name = f"{self.baseline!r}{nearest(self.baseline, self.labels)}"
            raise ValueError(f"baseline names {name}; it takes a scheme of the study")
        if self.tunings and self.seeds > SEED:
            raise ValueError(f"seeds must be at most {SEED} with a sweep, which trains seed {SEED}")
        for label in self.windowed if self.windowed != _AUTO else ():
            if label not in self.labels:
                name = f"{label!r}{nearest(label, self.labels)}"
                raise ValueError(f"windowed names {name}; it takes schemes of the study")

    def _check_scheduler(self) -> None:
        if self.scheduler and not re.fullmatch(r"\w+://\S+", self.scheduler):
            raise ValueError(f"scheduler must be as tcp://host:port, got {self.scheduler!r}")
        if self.scheduler and self.workers:
            raise ValueError(
                f"workers={self.workers} is for processes here; a scheduler has its own workers"
            )
        if self.scheduler and self.tokens:
            raise ValueError(
                "tokens are read from files of this machine, which a scheduler's workers lack; "
                "give text, or leave out scheduler"
            )

    def _set_scale(self) -> None:
        """Give the scale's values to the options that are left at their defaults."""
        check_scale(self.scale)
        if not self.scale:
            return
        settings = dict(SCALES[self.scale])
        if self.tokens:
            settings["vocabulary_size"] = VOCABULARY
        for item in fields(self):
            if item.name in settings and getattr(self, item.name) == item.default:
                object.__setattr__(self, item.name, settings[item.name])

    def _check_tokens(self) -> None:
        """A file of tokens needs a vocabulary, and a scale one of them."""
        if self.tokens and self.text:
            raise ValueError("give text or tokens, not both")
        sizes = {recipe.vocabulary_size for recipe in self._of_text}
        if self.tokens and 0 in sizes:
            raise ValueError(
                f"vocabulary_size is missing, which tokens need: GPT-2's is 50257, and "
                f"{VOCABULARY} is the next multiple of 64"
            )
        if not self.tokens and sizes - {0}:
            raise ValueError(f"vocabulary_size={max(sizes)} needs tokens, which is empty")
        if self.scale and not (self.tokens or self.text):
            raise ValueError(
                f"scale={self.scale!r} needs tokens, such as the files train.bin and val.bin that "
                "nanoGPT's data/openwebtext/prepare.py makes, or files of text"
            )

    def _check_lengths(self) -> None:
        """Several training lengths are a tuple, and one is a number."""
        if not isinstance(self.train_len, (tuple, list)):
            return
        lengths = tuple(self.train_len)
        if not lengths or len(set(lengths)) < len(lengths):
            raise ValueError(f"train_len must name each length once, got {list(lengths)}")
        object.__setattr__(self, "train_len", lengths if len(lengths) > 1 else lengths[0])

    def _tasks(self) -> str:
        return ", ".join(dict.fromkeys(recipe.task for recipe in self.recipes.values()))

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of ``schemes``, with ``all`` replaced by the labels of the catalogue."""
        return expand(self.schemes)

    @functools.cached_property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipe of each task: what the study sets, and else the task's own settings.

        Its key is the task, ``text``, or with several training lengths ``text, 64``.
        """
        names = [name for name in Recipe.__dataclass_fields__ if name != "task"]
        given = {name: getattr(self, name) for name in names}
        lengths = self.train_len if isinstance(self.train_len, tuple) else (self.train_len,)
        return {
            self.key(label, length): Recipe(task=label, **{**given, "train_len": length})
            for label in expand_tasks(self.task)
            for length in lengths
        }

    def key(self, task: str, train_len: int | None) -> str:
        """The key of a task and training length in ``recipes``."""
        return f"{task}, {train_len}" if isinstance(self.train_len, tuple) else task

    @property
    def _of_text(self) -> list[Recipe]:
        return [recipe for recipe in self.recipes.values() if recipe.task == TEXT]

    @property
    def of_task(self) -> Task:
        """The only task; ``ValueError`` if there are several, each with its own recipe."""
        if len(self.recipes) > 1:
            tasks = len(dict.fromkeys(recipe.task for recipe in self.recipes.values()))
            several = f"{tasks} tasks" if tasks > 1 else f"{len(self.recipes)} training lengths"
            raise ValueError(f"the study has {several}; each has one of recipes")
        return next(iter(self.recipes.values())).of_task

    @functools.cached_property
    def tunings(self) -> tuple[Tuning, ...]:
        """What ``sweep`` tries: one for each task and trained scheme."""
        axes = axes_of(self.sweep)
        return tunings(axes, self.recipes, self.labels, self.plans) if axes else ()

    def plans(self, label: str, recipe: Recipe) -> Plans | None:
        """The layers of a label; None if they cannot be made, which only labels of ``all`` may."""
        try:
            return Plans.of(label, recipe)
        except Exception:
            return None  # its run fails with this error, and so becomes a row

    def is_windowed(self, label: str) -> bool:
        """Whether a scheme is evaluated inside a window too."""
        return label in (_WINDOWED if self.windowed == _AUTO else self.windowed)

    def corpus(self) -> Corpus | None:
        """The text, checked to be large enough; None if no task reads it."""
        if not self._of_text:
            return None
        if self.tokens:
            corpus = read_tokens(self.tokens, self._of_text[0].vocabulary_size)
        else:
            corpus = read_corpus(self.text)
        for one in self._of_text:
            of_training = max(one.train_len, one.finetune_len or 0)
            check_size(corpus, train_len=of_training, longest=one.longest, windows=one.eval_windows)
            if self.tunings:
                one.of_task.with_text(corpus).check_validation(one)
        return corpus

    def runs(
        self,
        corpus: Corpus | None,
        backend: str,
        chosen: Mapping[str, Mapping[str, Values]] | None = None,
    ) -> list[Run]:
        """One run per task, seed and scheme, the last innermost: early stops leave comparisons.

        ``chosen`` are values of a sweep, by the key of the recipe and the label.
        """
        found = []
        for key, recipe in self.recipes.items():
            own = (chosen or {}).get(key, {})
            each = [self._run(n, recipe, own.get(n, {}), corpus, backend) for n in self.labels]
            found += [replace(run, seed=seed) for seed in range(self.seeds) for run in each]
        return found

    def trials(self, corpus: Corpus | None, backend: str) -> list[tuple[Tuning, list[Run]]]:
        """The runs of each tuning, in the order of its combinations; of each, one per seed."""
        return [
            (
                one,
                [
                    replace(
                        self._run(one.trained, self.recipes[one.key], values, corpus, backend),
                        seed=seed,
                        windowed=False,
                        tuning=tuple(values.items()),
                        **_TRAINING_ALONE,
                    )
                    for values in one.combinations()
                    for seed in range(SEED, SEED + self.sweep_seeds)
                ],
            )
            for one in self.tunings
        ]

    def _run(
        self, label: str, recipe: Recipe, values: Values, corpus: Corpus | None, backend: str
    ) -> Run:
        """The run of seed 0, with values of a sweep."""
        scheme, recipe = with_values(label, recipe, values)
        text = corpus if recipe.task == TEXT else None
        task = recipe.of_task if text is None else recipe.of_task.with_text(text)
        return Run(
            **asdict(recipe),
            scheme=scheme,
            label=label,
            seed=0,
            text=tuple(str(Path(p).resolve()) for p in self.tokens or self.text) if text else (),
            data=task.digest,
            windowed=recipe.task == TEXT and self.is_windowed(label),
            backend=backend,
            device=self.device,
            **fingerprint(self.plans(scheme, recipe), backend, recipe),
        )


@functools.lru_cache(maxsize=1)
def read_corpus(text: tuple[str, ...]) -> Corpus:
    """The user's files, or the standard library; kept for the next run of this process."""
    return from_files([Path(p) for p in text]) if text else standard_library()


@functools.lru_cache(maxsize=1)
def read_tokens(files: tuple[str, ...], vocabulary: int) -> Corpus:
    """The user's files of tokens; kept likewise."""
    return from_tokens(files, vocabulary)


def _check_scheme(label: str, recipe: Recipe) -> None:
    """``ValueError`` before any training if a scheme fails at an evaluation length."""
    for scheme in Plans.of(label, recipe).tested.schemes:
        for length in (*recipe.eval_lens, *filter(None, [recipe.finetune_len])):
            try:
                scheme.at_length(recipe.of_task.tokens(length)).param_specs()
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise ValueError(f"scheme {label!r} fails at length {length}: {cause}") from error
