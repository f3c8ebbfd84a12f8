"""How one model is built, trained and evaluated. The fields are options of ``posenc compare``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posenc.contract.checks import check_count, check_positive
from posenc.contract.declared import Declared


def option(default: Any, help: str) -> Any:
    """A dataclass field that the command line offers as an option."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Recipe(Declared):
    """Sizes, training and evaluation of one model: everything that all schemes share."""

    train_len: int = option(64, "tokens (bytes) of a training sequence")
    eval_lens: tuple[int, ...] = option((), "lengths to evaluate at; default 1, 2, 4, 8, 16 times")
    steps: int = option(900, "training steps")
    batch_size: int = option(16, "sequences per step")
    layers: int = option(2, "layers of the decoder")
    dim: int = option(64, "width of the decoder")
    heads: int = option(8, "attention heads")
    learning_rate: float = option(1.2e-2, "peak of AdamW's learning rate")
    position_lr_scale: float = option(10.0, "its factor for learned position params")
    warmup: int = option(50, "steps of linear warm-up; linear decay follows")
    weight_decay: float = option(0.1, "of matrices, never of position params")
    clip: float = option(1.0, "largest norm of a gradient")
    eval_windows: int = option(32, "held-out windows of the longest length")
    random_positions: int = option(
        0, "train at positions drawn from 0 .. N - 1, anew at every step; default: at 0, 1, 2, ..."
    )

    def __post_init__(self) -> None:
        for name in ("train_len", "steps", "batch_size", "layers", "dim", "heads", "eval_windows"):
            check_count(name, getattr(self, name), least=2 if name == "train_len" else 1)
        for name in ("learning_rate", "position_lr_scale", "clip"):
            check_positive(name, getattr(self, name))
        check_count("warmup", self.warmup, least=0)
        if check_count("random_positions", self.random_positions, least=0):
            check_count("random_positions", self.random_positions, least=self.train_len)
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim={self.dim}, got {self.heads}")
        lengths = self.eval_lens or tuple(self.train_len * 2**n for n in range(5))
        for length in lengths:
            check_count("eval_lens", length)
        object.__setattr__(self, "eval_lens", tuple(sorted(set(lengths))))

    def training(self) -> Recipe:
        """The recipe alone: what all runs of a study share."""
        return Recipe(**{name: getattr(self, name) for name in Recipe.__dataclass_fields__})

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.dim // self.heads

    @property
    def longest(self) -> int:
        """The longest evaluation length."""
        return max(self.eval_lens)
