"""GRAPE-A, key-gated: ALiBi's penalty, whose slope is that of the key's own gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posenc.contract.checks import check_channels
from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.activations import softplus
from posenc.schemes.alibi import ALiBi

_EPS = 1e-6  # the least length by which u is divided, as released


@dataclass(frozen=True)
class GRAPEA(PositionScheme, relative=True, paper="Zhang et al. 2025, arXiv 2512.07805"):
    """``bias = -max(i - j, 0) w_h softplus(u_h . k_j / sqrt(D))``, the key-gated additive GRAPE.

    ``w_h = m_h softplus(omega_h)``, with ALiBi's slope ``m_h``; ``u_h`` is divided by its length.
    Keys ``k_j`` are those given to attention, before a transform; the authors' have passed an
    RMSNorm. A gate of 1 is ALiBi with slopes ``w_h``. Keys after the query have no bias, as in the
    authors' code: the formula for causal models would reward them.

    Learned arrays are ``omega (H,)``, at first ``ln(e - 1)``, so that ``w_h = m_h``, and ``u (H,
    D)``, at first normal with standard deviation ``1 / sqrt(D)``. The first gates are near ln 2,
    0.69.

    Parameters
    ----------
    num_heads
        Number of query heads ``H``. With grouped queries, each head of a group gates its key by its
        own ``u``.
    head_dim
        Channels per head, ``D``.
    u_l2_norm
        Whether ``u`` is divided by its length. The authors' option of this name.

    Section on additive GRAPE; ``llama-mha-grape-a-keygated.py`` of the authors' code.
    """

    num_heads: Count
    head_dim: Count
    u_l2_norm: bool = True
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_slopes", ALiBi(self.num_heads).head_slopes())

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {
            "omega": ParamSpec((self.num_heads,), _softplus_of_one),
            "u": ParamSpec((self.num_heads, self.head_dim), _normal),
        }

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return {"slopes": self._slopes}

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"gate": FeatureSpec(self._gates, of="key", reads="vectors")}

    def _gates(self, k: Array, pos: Array, *, params: Arrays, xp: Namespace, **_: Any) -> Array:
        check_channels("k", k, self.head_dim)
        u = params["u"]
        heads, groups = u.shape[0], u.shape[0] // k.shape[1]
        if self.u_l2_norm:
            squares = xp.sum(u * u, axis=-1, keepdims=True)
            # The maximum comes before the root, whose derivative at 0 is not finite.
            u = u / xp.sqrt(xp.maximum(squares, xp.full_like(squares, _EPS**2)))
        # (B, Hk, L, D) with (Hk, D, groups), to (B, Hk, groups, L).
        of_group = xp.reshape(u, (k.shape[1], groups, self.head_dim))
        logits = xp.matrix_transpose(xp.matmul(k, xp.matrix_transpose(of_group)))
        logits = xp.reshape(logits, (k.shape[0], heads, k.shape[2]))
        return softplus(logits / math.sqrt(self.head_dim), xp)

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        w = params["slopes"] * softplus(params["omega"], xp)
        distance = xp.astype(xp.where(q > k, q - k, 0), w.dtype)
        return -w * params.key["gate"] * distance


def _softplus_of_one(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.full(shape, math.log(math.expm1(1.0)))


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return rng.normal(0.0, 1 / math.sqrt(shape[-1]), shape)
