"""Weights that ``posenc compare --keep-weights`` kept, as ``posenc probe`` measures them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posenc.contract.protocol import PositionScheme
from posenc.layers import LayerPlan
from posenc.probe.schemes import rope_in
from posenc.probe.text import Array
from posenc.schemes import RoPE
from posenc.study import weights
from posenc.study.specs import Plans
from posenc.study.tasks.catalogue import TEXT
from posenc.study.trainer import Trainer, choose_backend, load_trainer

_AT_ONCE = 32768  # tokens


class Kept:
    """A decoder of ``posenc compare`` that was trained on text, whose tokens are bytes.

    Parameters
    ----------
    path
        A file of ``weights/``.
    device, dtype, batch_size
        As for a model of transformers; numbers are float32.
    """

    def __init__(
        self, path: str, device: str = "auto", dtype: str = "auto", batch_size: int | None = None
    ) -> None:
        self.folder, self._device = Path(path), device
        if dtype not in ("auto", "float32"):
            raise ValueError(f"dtype must be float32 for kept weights, got {dtype}")
        self._kept = weights.read(path)
        if self._kept.recipe.task != TEXT:
            raise ValueError(
                f"{path!r} was trained on the task {self._kept.recipe.task!r}; a probe needs a "
                "model of text"
            )
        self.backend, self.dtype, self.device_name = choose_backend("auto"), "float32", device
        self.tokenizer = bytes
        self.vocabulary = int(self._kept.recipe.of_task.vocabulary)
        self.start = self.end = None
        self.notes: list[str] = []
        self._batch_size = batch_size
        self._trainer: Trainer | None = None
        self._plan: LayerPlan | None = None

    def ids(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode(self, text: str) -> tuple[Array, Array]:
        """The bytes of a text, each of which is one."""
        data = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        return data, np.ones_like(data)

    def sizes(self) -> dict[str, int]:
        """The sizes that schemes depend on, by the names that makers know, and ``layers``."""
        recipe = self._kept.recipe
        return {
            "layers": recipe.layers, "num_heads": recipe.heads, "dim": recipe.dim,
            "head_dim": recipe.dim // recipe.heads, "hidden_dim": recipe.dim,
            "train_len": recipe.train_len,
        }  # fmt: skip

    def ropes(self) -> list[RoPE | None]:
        """The RoPE of each layer, or None."""
        plan = Plans.of(self._kept.scheme, self._kept.recipe).trained
        return [rope_in(scheme) for scheme in plan.schemes]

    def facts(self) -> dict[str, Any]:
        """What else the numbers depend on."""
        digest = hashlib.sha256(self.folder.read_bytes()).hexdigest()
        return {
            "model": digest, "trained as": self._kept.scheme, "seed": self._kept.seed,
            "backend": self.backend, "device": self._device,
        }  # fmt: skip

    def load(self) -> None:
        """Make the decoder."""
        self._trainer = load_trainer(self.backend)(self._kept.decoder(), self._device)
        self.device_name = self._trainer.versions()["device"]

    def use(self, scheme: Sequence[PositionScheme] | LayerPlan | None) -> Kept:
        """Test under another scheme, or as it was trained for None.

        ``ValueError`` if it needs learned arrays that the training does not have.
        """
        plan = None
        if scheme is not None:
            trained = Plans.of(self._kept.scheme, self._kept.recipe).trained
            windows = None if isinstance(scheme, LayerPlan) else list(trained.windows)
            plan = LayerPlan.of(scheme, self._kept.recipe.layers, windows)
            for layer, (own, other) in enumerate(zip(trained.schemes, plan.schemes, strict=True)):
                have, need = (set(each.param_specs()) for each in (own, other))
                if not need <= have:
                    raise ValueError(
                        f"layer {layer} needs the learned arrays {sorted(need)}, and its training "
                        f"as {self._kept.scheme!r} has {sorted(have) or 'none'}"
                    )
        self._plan = plan
        return self

    def untrained(self) -> list[str]:
        """No arrays: ``use`` refuses them."""
        return []

    def answers(self, tokens: Array, labels: Array) -> tuple[Array, Array]:
        """Losses in nats of ``labels (N, T)``, and whether the likeliest token is the label."""
        assert self._trainer is not None
        if self._plan is None:
            return self._trainer.answers(tokens, labels, None)
        return self._trainer.answers(tokens, labels, None, self._plan)

    def distances(self, tokens: Array) -> Array:
        """``NotImplementedError``: trainers give no attention."""
        raise NotImplementedError("trainers of posenc compare give no attention")

    def batch_size(self, length: int) -> int:
        """Windows at once."""
        return self._batch_size or max(1, _AT_ONCE // length)

    def bytes_per_token(self) -> int:
        """About what a layer holds of a token at once."""
        return int(4 * (20 * self._kept.recipe.dim + 3 * self.vocabulary))
