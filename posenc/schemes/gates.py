"""Gates of tokens, summed: what FoX and CABLE have in common.

Token ``t`` has a gate ``g_t <= 0`` in each head, computed from its hidden state. ``c_t`` is the sum
of the gates up to token ``t``, and the bias is ``c_i - c_j``, the sum of the gates after key ``j``
up to query ``i``. A constant gate ``-m`` gives ALiBi with slope ``m``.

Sums are float32, or float64 if an argument is. A sum rounds by ``2**-24`` of itself, so the bias of
near keys has that error too: with FoX's first gates (-0.7 a token), up to 2e-4 after 4096 tokens
and 4e-3 after 65536 in PyTorch; 5e-4 and 1e-2 in JAX, which adds in a tree. With ``bias_init=5``
it is a hundredth of that. Segments start again from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Initializer, Namespace, ParamSpec


@dataclass(frozen=True)
class SummedGates(PositionScheme):
    """``bias = c_i - c_j``, where ``c`` sums ``log_gates``, which a subclass computes."""

    num_heads: Count
    hidden_dim: Count

    def param_specs(self) -> Mapping[str, ParamSpec]:
        w = ParamSpec((self.num_heads, self.hidden_dim))
        return {"w": w, "b": ParamSpec((self.num_heads,), lambda rng, shape: np.zeros(shape))}

    def log_gates(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        """The gates ``(B, L, H)`` of tokens with hidden states ``x (B, L, C)``."""
        raise NotImplementedError

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"c": FeatureSpec(self._gates_by_head, of="key", cumulative=True)}

    def _gates_by_head(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        return xp.matrix_transpose(self.log_gates(x, params=params, xp=xp))

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        return params.query["c"] - params.key["c"]

    def key_bias(self, k: Array, *, params: Any, xp: Namespace) -> Array | None:
        return -params.key["c"]


def logits(x: Array, params: Arrays, xp: Namespace) -> Array:
    """``w_h . x_t + b_h``, ``(B, L, H)``."""
    return xp.matmul(x, xp.matrix_transpose(params["w"])) + params["b"]


def uniform_by_inputs(inputs: int) -> Initializer:
    """First values of a linear layer: uniform up to ``1 / sqrt(inputs)``."""
    most = 1 / math.sqrt(inputs)
    return lambda rng, shape: rng.uniform(-most, most, shape)
