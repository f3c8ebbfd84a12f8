"""The interface of a task: ``Task``, which draws examples with the answers that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from posenc.contract.declared import Declared
from posenc.contract.protocol import PositionScheme
from posenc.study.tasks import drawing
from posenc.study.tasks.examples import NO_ANSWER, Answer, Examples, Integers

if TYPE_CHECKING:
    from posenc.study.corpus import Corpus
    from posenc.study.recipe import Recipe

KINDS = ("sanity", "separating", "must fail")
SCORES = ("token_accuracy", "exact_match", "loss")


__all__ = ["KINDS", "NO_ANSWER", "Answer", "Examples", "Integers", "Task"]


@dataclass(frozen=True)
class Task(Declared):
    """Base class of tasks: what a model learns at one size and is tested on at others.

    A task is a frozen dataclass. Its fields are its options, checked as they are annotated. Facts
    are keywords of the class: ``class Copy(Task, kind="separating", paper="...")``.
    """

    _FACTS: ClassVar[Mapping[str, type]] = {
        "kind": str, "paper": str, "score": str, "solved_by": str, "solved_at": float,
        "varied": bool, "running": bool, "groups": str, "answers": str, "tied": bool,
        "settings": dict,
    }  # fmt: skip

    # ``ClassVar``, because dataclass fields are options.
    kind: ClassVar[str] = "separating"
    """``"separating"``: what a comparison is for; ``"sanity"``: every scheme solves it;
    ``"must fail"``: see ``must_fail``."""
    paper: ClassVar[str] = ""
    """Authors, year and arXiv number."""
    score: ClassVar[str] = "token_accuracy"
    """What tables and figures show: ``"token_accuracy"``, the share of right answers;
    ``"exact_match"``, the share of examples in which all answers are right; or ``"loss"``, in
    ``unit``, lower is better."""
    solved_by: ClassVar[str] = "exact_match"
    """The score by which the task counts as solved, at sizes of training."""
    solved_at: ClassVar[float] = 0.99
    """The score from which it is solved."""
    varied: ClassVar[bool] = False
    """Whether training draws sizes from ``least_size`` to the training length, one per example."""
    running: ClassVar[bool] = False
    """Whether answers are asked along the way. Then only those beyond the training length count at
    longer lengths: early ones are as easy as in training."""
    groups: ClassVar[str] = ""
    """What the groups of answers are, as ``"depth"``; empty for none."""
    answers: ClassVar[str] = "answer"
    """What one answer is, for the unit of losses: ``"token"`` for bits per token."""
    tied: ClassVar[bool] = False
    """Whether the matrix of logits is that of the token embeddings."""
    settings: ClassVar[Mapping[str, Any]] = {
        "train_len": 16, "multiples": (1, 2, 4), "steps": 1000, "batch_size": 64, "layers": 2,
        "dim": 64, "heads": 4, "learning_rate": 3e-3, "position_lr_scale": 10.0, "warmup": 50,
        "weight_decay": 0.01, "clip": 1.0, "eval_windows": 256, "random_positions": 0,
        "dtype": "float32", "accumulate": 1, "compile": False, "vocabulary_size": 0,
    }  # fmt: skip
    """Defaults of the study's options; a class names those that differ from its base's.
    ``multiples`` of ``train_len`` are the lengths of evaluation."""

    def __init_subclass__(cls, **facts: Any) -> None:
        super().__init_subclass__(**facts)
        if cls.score not in SCORES:
            accepted = ", ".join(map(repr, SCORES))
            raise TypeError(f"class {cls.__name__}: score must be {accepted}, got {cls.score!r}")

    @property
    def unit(self) -> str:
        """The unit of losses."""
        return f"bits per {self.answers}"

    @property
    def vocabulary(self) -> int:
        """Number of tokens, which are also the answers."""
        raise NotImplementedError(f"class {type(self).__name__} has no property vocabulary")

    @property
    def least_size(self) -> int:
        """The smallest size of an example."""
        return 2

    @property
    def chance(self) -> float:
        """The score of a guess."""
        return 0.0

    def draw(self, rng: np.random.Generator, size: int, count: int) -> Examples:
        """Draw ``count`` examples of a size, all of equally many tokens."""
        raise NotImplementedError(f"class {type(self).__name__} has no method draw")

    def tokens(self, size: int) -> int:
        """Number of tokens of an example."""
        return int(self.draw(np.random.default_rng(0), size, 1).tokens.shape[1])

    def check_size(self, size: int) -> None:
        """``ValueError`` if no example has this size."""
        if size < self.least_size:
            raise ValueError(f"sizes must be at least {self.least_size}, got {size}")

    def tests(self) -> Mapping[str, Task]:
        """What a trained model is tested on, by name; the empty name is as in training."""
        return {"": self}

    def group_names(self) -> tuple[str, ...]:
        """Names of the groups, in the order of their numbers."""
        return ()

    def must_fail(self, scheme: PositionScheme) -> bool:
        """Whether no model with this scheme can solve the task beyond the training length.

        If one does, the harness leaks the answer.
        """
        return self.kind == "must fail"

    def word(self, token: int) -> str:
        """A token as text, without spaces."""
        return str(token)

    # What a study asks of a task. Text overrides these.

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Names of the fields that a label may set."""
        own = (item for item in fields(cls) if item.init and item.metadata.get("option", True))
        return tuple(sorted(item.name for item in own))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """All ``settings``, those of base classes too."""
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            found |= vars(base).get("settings", {})
        return found

    @property
    def digest(self) -> str:
        """Names the data, where these do not follow from the fields."""
        return ""

    def with_text(self, corpus: Corpus) -> Task:
        """The task with the text of a study."""
        return self

    def training(self, recipe: Recipe, seed: int, first: int, steps: int) -> Examples:
        """The batches of some steps, ``(steps, batch_size, T)``; they depend on the seed alone."""
        return drawing.batches(self, recipe, seed, first, steps)

    def in_domain(self, recipe: Recipe, seed: int) -> Examples | None:
        """Fresh examples like those of training, which say when it is solved; None if never."""
        return drawing.in_domain(self, recipe, seed)

    def scores(self, recipe: Recipe, seed: int, answer: Answer, windowed: bool) -> dict[str, Any]:
        """What a record says of a trained model."""
        return drawing.scores(self, recipe, seed, answer)

    def check_validation(self, recipe: Recipe) -> None:
        """``ValueError`` if the data do not suffice for ``validation``."""

    def validation(self, recipe: Recipe, seed: int, answer: Answer) -> dict[str, Any]:
        """The ``loss`` of a trained model in ``unit``, by which a sweep chooses.

        It is at the training length, on data that ``scores`` does not use.
        """
        return drawing.validation(self, recipe, seed, answer)
