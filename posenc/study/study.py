"""A study: which schemes on which tasks, how trained, how evaluated. Its fields are the options."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from posenc.contract.checks import check_count, nearest
from posenc.study.corpus import Corpus, check_size, from_files, standard_library
from posenc.study.identity import fingerprint
from posenc.study.models import model_name
from posenc.study.recipe import Recipe, option
from posenc.study.run import Run
from posenc.study.specs import ALL, Plans, expand
from posenc.study.tasks.catalogue import TEXT
from posenc.study.tasks.catalogue import expand as expand_tasks
from posenc.study.tasks.task import Task

_AUTO = ("auto",)
_WINDOWED = ("rope",)  # a label of the default study, not an ability of a scheme
_DEFAULT = ("alibi", "t5", "rope", "sinusoidal", "learned", "nope")


@dataclass(frozen=True, kw_only=True)
class Study(Recipe):
    """A comparison: the same training once for every scheme and seed."""

    task: tuple[str, ...] = option(  # type: ignore[assignment]  # one for each model, several here
        (TEXT,),
        "tasks of `posenc list`, with options as passkey:shared=True; text is the loss of text, "
        "all is every task",
    )
    schemes: tuple[str, ...] = option(
        _DEFAULT,
        "names of `posenc list`, with options as rope:base=500000; a+b is their sum on one layer, "
        "a/b gives layers in turn, a@512/b the first of them a window of 512, a~b trains as a and "
        "tests as b; all is the whole catalogue",
    )
    seeds: int = option(3, "number of seeds, 0 .. N - 1")
    baseline: str = option("", "scheme that the others are compared with; default: the first")
    text: tuple[str, ...] = option((), "files to train on; default: Python's standard library")
    windowed: tuple[str, ...] = option(
        _AUTO,
        "schemes to evaluate also inside a window of the training length; auto: rope, if it is "
        "in the study",
    )
    backend: str = option("auto", "framework that trains: jax, torch, or auto, what is installed")
    device: str = option("auto", "auto, cpu, or a name of the backend's, such as cuda")
    workers: int = option(0, "processes; default: one per core, one in all on an accelerator")
    out: str = option("posenc-compare", "folder of the results")
    keep_weights: bool = option(False, "keep the trained weights of every run, in OUT/weights")

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", model_name(self.model))
        if isinstance(self.task, str):
            object.__setattr__(self, "task", (self.task,))
        if not self.task:
            raise ValueError("task is empty; name at least one of `posenc list`")
        if len(set(self.task)) < len(self.task):
            raise ValueError(f"task must name each task once, got {list(self.task)}")
        if len(self.recipes) == 1:  # its values are those of the study
            for name, value in vars(next(iter(self.recipes.values()))).items():
                if name != "task":
                    object.__setattr__(self, name, value)
        for name in ("text", "windowed"):
            if getattr(self, name) not in ((), _AUTO) and TEXT not in self.recipes:
                tasks = ", ".join(self.recipes)
                raise ValueError(f"{name} is for the task text, which is none of: {tasks}")
        check_count("seeds", self.seeds)
        check_count("workers", self.workers, least=0)
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
        for label in self.windowed if self.windowed != _AUTO else ():
            if label not in self.labels:
                name = f"{label!r}{nearest(label, self.labels)}"
                raise ValueError(f"windowed names {name}; it takes schemes of the study")

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of ``schemes``, with ``all`` replaced by the labels of the catalogue."""
        return expand(self.schemes)

    @functools.cached_property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipe of each task: what the study sets, and else the task's own settings."""
        names = [name for name in Recipe.__dataclass_fields__ if name != "task"]
        given = {name: getattr(self, name) for name in names}
        return {label: Recipe(task=label, **given) for label in expand_tasks(self.task)}

    @property
    def of_task(self) -> Task:
        """The only task; ``ValueError`` if there are several, each with its own recipe."""
        if len(self.recipes) > 1:
            raise ValueError(f"the study has {len(self.recipes)} tasks; each has one of recipes")
        return next(iter(self.recipes.values())).of_task

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
        recipe = self.recipes.get(TEXT)
        if recipe is None:
            return None
        corpus = read_corpus(self.text)
        check_size(
            corpus, train_len=recipe.train_len, longest=recipe.longest, windows=recipe.eval_windows
        )
        return corpus

    def runs(self, corpus: Corpus | None, backend: str) -> list[Run]:
        """One run per task, seed and scheme, the last innermost: early stops leave comparisons."""
        return [
            run
            for recipe in self.recipes.values()
            for run in self._runs_of(recipe, corpus if recipe.task == TEXT else None, backend)
        ]

    def _runs_of(self, recipe: Recipe, corpus: Corpus | None, backend: str) -> list[Run]:
        task = recipe.of_task if corpus is None else recipe.of_task.with_text(corpus)
        made = {
            label: fingerprint(self.plans(label, recipe), backend, recipe) for label in self.labels
        }
        text = tuple(str(Path(p).resolve()) for p in self.text) if corpus else ()
        return [
            Run(
                **asdict(recipe),
                scheme=label,
                seed=seed,
                text=text,
                data=task.digest,
                windowed=recipe.task == TEXT and self.is_windowed(label),
                backend=backend,
                device=self.device,
                **made[label],
            )
            for seed in range(self.seeds)
            for label in self.labels
        ]


@functools.lru_cache(maxsize=1)
def read_corpus(text: tuple[str, ...]) -> Corpus:
    """The user's files, or the standard library; kept for the next run of this process."""
    return from_files([Path(p) for p in text]) if text else standard_library()


def _check_scheme(label: str, recipe: Recipe) -> None:
    """``ValueError`` before any training if a scheme fails at an evaluation length."""
    for scheme in Plans.of(label, recipe).tested.schemes:
        for length in recipe.eval_lens:
            try:
                scheme.at_length(recipe.of_task.tokens(length)).param_specs()
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise ValueError(f"scheme {label!r} fails at length {length}: {cause}") from error
