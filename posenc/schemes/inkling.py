"""Inkling's relative bias: learned curves over distance, mixed by the query's token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.contract.checks import check_positive
from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec


@dataclass(frozen=True)
class Inkling(
    PositionScheme,
    relative=True,
    paper="Thinking Machines Lab 2026, a model with no paper",
):
    """``b_ij = r_i . p[:, i - j]`` for ``0 <= i - j < extent``, else 0; ``r_i = w x_i``.

    ``x_i (C,)`` is the hidden state of query ``i``, before the model's projections and short
    convolutions. Learned arrays: ``w (H, rank, C)``, at first uniform in plus or minus
    ``1 / sqrt(C)``, and ``p (rank, extent)``, which heads share, at first normal with standard
    deviation 0.02.

    A query needs ``extent`` numbers per head, so memory is linear in the number of queries.

    The models' norms (or clips) of queries and keys are not the scheme's. Their log-position
    scaling multiplies queries and bias: ``Sum(Inkling(...), LogScale("inkling", train_len=L))``.
    Inkling 2 also has a sink per query: ``Sink(scheme, per_query=True, hidden_dim=C)``.

    ``posenc.make("inkling", train_len=T)`` changes the default of ``extent`` to ``min(1024, T)``,
    so that training sees every column of ``p``.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    hidden_dim
        Width ``C`` of hidden states.
    rank
        Rows of ``p``.
    extent
        The number of distances with a bias. In the models 1024, and in layers with a window the
        window.
    version
        1: scores are divided by ``D``. 2: by ``sqrt(D)``, and ``r_i`` is clipped. The model's
        learned scale of ``r_i`` before the clip is a factor of ``w``'s rows.
    clip
        The largest length of ``r_i``; longer ones are scaled to it. Version 2 only, default 8.

    As in ``modeling_inkling.py`` and ``modeling_inkling2.py`` of transformers. The models have no
    rotation.
    """

    num_heads: Count
    hidden_dim: Count
    rank: Count = 16
    extent: Count = 1024
    version: int = 1
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.version not in (1, 2):
            raise ValueError(f"version must be 1 or 2, got {self.version!r}")
        if self.version == 2:
            clip = check_positive("clip", 8.0 if self.clip is None else self.clip)
            object.__setattr__(self, "clip", clip)
        elif self.clip is not None:
            raise ValueError(f"clip={self.clip!r}: version 1 has none; version 2 has")

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        """Default options for the sizes of a model: distances that training sees."""
        return {"extent": min(1024, sizes["train_len"])} if "train_len" in sizes else {}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {
            "w": ParamSpec((self.num_heads, self.rank, self.hidden_dim), _linear),
            "p": ParamSpec((self.rank, self.extent), per_head=False),
        }

    def scale(self, head_dim: int) -> float:
        return 1 / head_dim if self.version == 1 else super().scale(head_dim)

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"b": FeatureSpec(self._of_distances, of="query")}

    def _of_distances(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        r = xp.matmul(x[:, None, :, :], xp.matrix_transpose(params["w"]))
        if self.clip is not None:
            squares = xp.sum(r * r, axis=-1, keepdims=True)
            # The maximum comes before the root, whose derivative at 0 is not finite.
            r = r * (self.clip / xp.sqrt(xp.maximum(squares, xp.full_like(squares, self.clip**2))))
        return xp.matmul(r, params["p"])

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        value = params.query["b"][xp.clip(q - k, 0, self.extent - 1)]
        return xp.where((q >= k) & (q - k < self.extent), value, 0.0)


def _linear(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """As PyTorch starts linear layers."""
    most = 1 / math.sqrt(shape[-1])
    return rng.uniform(-most, most, shape)
