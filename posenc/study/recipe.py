"""How one model is built, trained and evaluated. The fields are options of ``posenc compare``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from posenc.contract.checks import check_count, check_positive
from posenc.contract.declared import Declared
from posenc.study.float_positions import units
from posenc.study.models import model_name
from posenc.study.tasks.catalogue import TEXT, make_task
from posenc.study.tasks.task import Task
from posenc.study.tasks.text import TokenText

DTYPES = ("float32", "bfloat16")
_GENTLER = 10  # the rate of training over that of fine-tuning; docs/extension.md says why


def option(default: Any, help: str) -> Any:
    """A dataclass field that the command line offers as an option."""
    return field(default=default, metadata={"help": help})


def setting(help: str) -> Any:
    """An option whose default is that of the task."""
    return option(None, help)


@dataclass(frozen=True, kw_only=True)
class Recipe(Declared):
    """Sizes, training and evaluation of one model: everything that all schemes share."""

    task: str = option("text", "")
    train_len: int = setting("tokens (bytes) of a training sequence; the size of a task's examples")
    eval_lens: tuple[int, ...] = setting(
        "lengths to evaluate at; default 1, 2, 4, 8, 16 times, of other tasks 1, 2, 4 times"
    )
    steps: int = setting("training steps")
    batch_size: int = setting("sequences per step")
    layers: int = setting("layers of the decoder")
    dim: int = setting("width of the decoder")
    heads: int = setting("attention heads")
    learning_rate: float = setting("peak of AdamW's learning rate")
    position_lr_scale: float = setting("its factor for learned position params")
    warmup: int = setting("steps of linear warm-up; linear decay follows")
    weight_decay: float = setting("of matrices, never of position params")
    clip: float = setting("largest norm of a gradient")
    eval_windows: int = setting(
        "held-out windows of the longest length; of other tasks, examples of each length"
    )
    dtype: str = setting("of products: float32 or bfloat16; weights and moments are float32")
    accumulate: int = setting("parts in which a step computes its batch, one after the other")
    compile: bool | None = setting(
        "compile the training step with torch.compile; JAX always compiles"
    )
    vocabulary_size: int = setting("ids of tokens are below it; default: text is bytes")
    random_positions: int = setting(
        "train at positions drawn from 0 .. N - 1, anew at every step; default: at 0, 1, 2, ..."
    )
    random_float_positions: int = option(
        0,
        "train at real positions drawn from 0 to N; evaluation spreads tokens evenly over them",
    )
    finetune_steps: int = option(
        0, "steps of further training, after the change of scheme of a~b; default: none"
    )
    finetune_len: int = option(
        None, "tokens (bytes) of its sequences; default: the longest evaluation length"
    )
    finetune_learning_rate: float = option(
        None, "peak of its learning rate; default: a tenth of that of training"
    )
    stride: int = option(
        0, "also evaluate text in windows that advance by N bytes, of which the last N are scored"
    )
    model: str = option("", "a model of your own, module:function; default: posenc's decoder")

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", model_name(self.model))
        task = self.of_task
        settings = task.defaults()
        multiples = settings.pop("multiples")
        for name, value in settings.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("train_len", "steps", "batch_size", "layers", "dim", "heads", "eval_windows"):
            check_count(name, getattr(self, name), least=2 if name == "train_len" else 1)
        for name in ("learning_rate", "position_lr_scale", "clip"):
            check_positive(name, getattr(self, name))
        check_count("warmup", self.warmup, least=0)
        lengths = self.eval_lens or tuple(self.train_len * n for n in multiples)
        for length in lengths:
            check_count("eval_lens", length)
        object.__setattr__(self, "eval_lens", tuple(sorted(set(lengths))))
        for length in (self.train_len, *self.eval_lens):
            _check_size(task, self.task, length)
        for name in ("random_positions", "random_float_positions"):
            if check_count(name, getattr(self, name), least=0):
                check_count(name, getattr(self, name), least=self.train_tokens)
        if self.random_positions and self.random_float_positions:
            raise ValueError(
                f"give random_positions or random_float_positions, not both, got "
                f"{self.random_positions} and {self.random_float_positions}"
            )
        self._check_computing()
        self._set_finetuning(task)
        self._set_stride()
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and at least 0, got {self.weight_decay}")
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim={self.dim}, got {self.heads}")

    def _check_computing(self) -> None:
        """Check how a step is computed, and of what tokens."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {self.dtype!r}")
        if self.batch_size % check_count("accumulate", self.accumulate):
            raise ValueError(
                f"accumulate must divide batch_size={self.batch_size}, got {self.accumulate}"
            )
        check_count("vocabulary_size", self.vocabulary_size, least=0)
        if self.task != TEXT:  # the study checks that text is among its tasks
            object.__setattr__(self, "vocabulary_size", 0)
        for name in ("dtype", "compile"):
            if self.model and getattr(self, name) not in (DTYPES[0], False):
                raise ValueError(
                    f"{name}={getattr(self, name)} is for posenc's decoder; the model "
                    f"{self.model!r} may do so itself"
                )

    def _set_finetuning(self, task: Task) -> None:
        """Check the options of fine-tuning, and set those that are left open."""
        if not check_count("finetune_steps", self.finetune_steps, least=0):
            for name in ("finetune_len", "finetune_learning_rate"):
                if (given := getattr(self, name)) is not None:
                    raise ValueError(f"{name}={given} needs finetune_steps, which is 0")
            return
        if self.finetune_len is None:
            object.__setattr__(self, "finetune_len", self.longest)
        if self.finetune_learning_rate is None:
            object.__setattr__(self, "finetune_learning_rate", self.learning_rate / _GENTLER)
        check_count("finetune_len", self.finetune_len, least=2)
        check_positive("finetune_learning_rate", self.finetune_learning_rate)
        _check_size(task, self.task, self.finetune_len)
        tokens = task.tokens(self.finetune_len)
        if 0 < self.positions_reach < tokens:
            name = "random_positions" if self.random_positions else "random_float_positions"
            raise ValueError(
                f"{name} must be at least {tokens}, the tokens of finetune_len="
                f"{self.finetune_len}, got {self.positions_reach}"
            )

    def _set_stride(self) -> None:
        if not check_count("stride", self.stride, least=0):
            return
        if self.task != TEXT:  # the study checks that text is among its tasks
            object.__setattr__(self, "stride", 0)
        elif self.stride > min(self.eval_lens):
            shortest = min(self.eval_lens)
            raise ValueError(
                f"stride must be at most {shortest}, the shortest of eval_lens, got {self.stride}: "
                "a longer one would leave bytes out"
            )

    def finetuning(self) -> Recipe:
        """The recipe of further training: another length, the same tokens a step, another rate."""
        tokens = self.of_task.tokens(self.finetune_len)
        batch_size = max(1, round(self.batch_size * self.train_tokens / tokens))
        changed = {
            "train_len": self.finetune_len,
            "steps": self.finetune_steps,
            "batch_size": batch_size,
            "learning_rate": self.finetune_learning_rate,
            "warmup": min(self.warmup, self.finetune_steps // 10),
            "accumulate": math.gcd(batch_size, self.accumulate),
            "finetune_steps": 0,
            "finetune_len": None,
            "finetune_learning_rate": None,
        }
        return Recipe(**{**self._values(), **changed})

    @property
    def positions_reach(self) -> int:
        """How far random positions reach; 0 for positions 0, 1, 2, ..."""
        return self.random_positions or self.random_float_positions

    @property
    def drawn_from(self) -> int:
        """Random positions are integers ``0 .. drawn_from - 1``: float ones are so many units."""
        reach = self.random_float_positions
        return reach * units(reach) if reach else self.random_positions

    @property
    def of_task(self) -> Task:
        """The task; that of text has no text yet."""
        if self.vocabulary_size and self.task == TEXT:
            return TokenText(size=self.vocabulary_size)
        return make_task(self.task)

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the task, which are also the answers."""
        return self.of_task.vocabulary

    @property
    def train_tokens(self) -> int:
        """Tokens of a training sequence."""
        return self.of_task.tokens(self.train_len)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence of evaluation."""
        return self.of_task.tokens(self.longest)

    def training(self) -> Recipe:
        """The recipe alone: what all runs of a study share."""
        return Recipe(**self._values())

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Recipe.__dataclass_fields__}

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.dim // self.heads

    @property
    def longest(self) -> int:
        """The longest evaluation length."""
        return max(self.eval_lens)


def _check_size(task: Task, label: str, size: int) -> None:
    try:
        task.check_size(size)
        task.tokens(size)
    except ValueError as error:
        raise ValueError(f"task {label!r}, length {size}: {error}") from None
