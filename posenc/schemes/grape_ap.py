"""GRAPE-AP, path integrals: a key's penalty sums what its query makes of all tokens after it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from posenc.angles.fixed import Turns
from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.activations import log_sigmoid
from posenc.schemes.alibi import ALiBi
from posenc.schemes.cope import sums_from
from posenc.schemes.rope import rotate

_EPS = 2.0**-23  # in the mean of squares, as PyTorch's RMSNorm in float32


@dataclass(frozen=True)
class GRAPEAP(
    PositionScheme,
    whole_rows="a bias sums, over all tokens between its query and its key, numbers of that query "
    "with each",
    paper="Zhang et al. 2025, arXiv 2512.07805",
):
    """``bias = sum of psi_h(i, l)`` over tokens ``l = j + 1 .. i``, the path-integral GRAPE.

    ``psi_h(i, l) = m_h log sigmoid(p_i . R_l n(p_l) / d)``, with ALiBi's slope ``m_h``. ``p = w x``
    comes from hidden states. ``n`` divides it by the root of its mean square; ``R_l`` turns the
    channel pairs ``(c, c + d/2)`` by ``-l`` radians. A potential without ``p_i`` would make it FoX
    times slopes; ``w = 0`` is ALiBi with slopes ``m_h ln 2``.

    ``R_l`` turns by the position of ``l`` alone, so the bias is not relative: if all tokens move,
    results change. Tokens that the mask hides from a query are not on its path. Keys after the
    query have no bias.

    Learned array: ``w (H, d, C)``, at first normal with standard deviation ``0.5 / sqrt(C)``.

    ``chunked`` and the reference compute it, in whole rows. The potential of a pair is no sum of a
    number of the query and one of the key, so its sums are no differences of sums over tokens, as
    FoX's are: a tile would have to know those of all tiles between it and its query. The authors'
    code has whole rows too. Its choices to take queries, keys or values for ``p`` are left out.

    Parameters
    ----------
    num_heads
        Number of query heads ``H``.
    hidden_dim
        Width ``C`` of hidden states.
    p_head_dim
        Channels ``d`` of ``p`` per head, even; 8 in the authors' configurations.
    normalized
        Whose ``p`` is divided by its root mean square: of the ``"key"``, as in the authors' code,
        or of ``"both"``, as in the paper's formula.

    Section on path-integral additive GRAPE; ``llama-mha-grape-ap-v1.py`` of the authors' code.
    """

    num_heads: Count
    hidden_dim: Count
    p_head_dim: Count = 8
    normalized: Literal["key", "both"] = "key"
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _turns: Turns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.p_head_dim % 2:
            raise ValueError(
                f"p_head_dim must be even, got {self.p_head_dim}: rotation acts on channel pairs"
            )
        object.__setattr__(self, "_slopes", ALiBi(self.num_heads).head_slopes())
        object.__setattr__(self, "_turns", Turns([1.0] * (self.p_head_dim // 2)))

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"w": ParamSpec((self.num_heads, self.p_head_dim, self.hidden_dim), _normal)}

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return {"slopes": self._slopes}

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        of_query = self._unit if self.normalized == "both" else self._p
        return {
            "query_p": FeatureSpec(of_query, of="query"),
            "key_p": FeatureSpec(self._unit, of="key"),
        }

    def _p(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        """``p (B, H, L, d)`` of hidden states ``x (B, L, C)``."""
        return xp.matmul(x[:, None, :, :], xp.matrix_transpose(params["w"]))

    def _unit(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        p = self._p(x, params=params, xp=xp)
        return p / xp.sqrt(xp.mean(p * p, axis=-1, keepdims=True) + _EPS)

    def adjust_scores(
        self, scores: Array, q: Array, k: Array, *, visible: Array | None, params: Any,
        xp: Namespace,
    ) -> Array:  # fmt: skip
        of_query, of_key = params.query["query_p"][:], params.key["key_p"][:]
        on_path = k <= q
        if visible is not None:
            on_path = on_path & visible
            # NaN in padding.
            of_query = xp.where(xp.any(visible, axis=-1)[..., None], of_query, 0.0)
            of_key = xp.where(xp.any(visible, axis=-2)[..., None], of_key, 0.0)
        sin, cos = self._turns.sincos(k[:, :, 0, :], dtype=of_key.dtype, xp=xp)
        turned = rotate(of_key, -sin, cos, layout="half", xp=xp)
        z = xp.matmul(of_query, xp.matrix_transpose(turned)) / self.p_head_dim
        psi = xp.where(on_path, params["slopes"] * log_sigmoid(z, xp), 0.0)
        return scores + sums_from(psi, k, own=False, in_order=params.in_order, xp=xp)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return rng.normal(0.0, 0.5 / math.sqrt(shape[-1]), shape)
