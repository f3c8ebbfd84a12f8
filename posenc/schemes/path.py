"""PaTH: reflections of every token between a query and a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import device

from posenc.contract.checks import check_channels
from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.gates import log_sigmoid, logits, uniform_by_inputs

_EPS = 1e-6  # in the norm of a direction, as released


@dataclass(frozen=True)
class PaTH(
    PositionScheme,
    whole_rows="a score depends on all tokens between its query and its key",
    key_pairs=True,
    paper="Yang et al. 2025, arXiv 2505.16381",
):
    """``q_i^T H_i H_{i-1} .. H_{j+1} k_j / sqrt(D)`` with ``H_t = I - beta_t w_t w_t^T``.

    ``w_t`` is the direction ``w x_t``, divided by its length, and ``beta_t = 2 sigmoid(beta . x_t +
    b)``, one of each per head, from the hidden state ``x_t``. ``beta_t = 1`` forgets a direction,
    2 reflects, and 0 everywhere is NoPE.

    The product runs over the tokens of the segment after the key, up to the query, in the order of
    positions; tokens that share a position follow each other as in memory. A mask of the caller
    hides keys and leaves the product as it is. A softcap caps ``q . k`` before it.

    Learned arrays: ``w (H, D, C)``, ``beta (H, C)``, ``b (H,)``; with ``conv`` above 1 also
    ``taps (H, D, conv)``. At first ``w`` and ``taps`` are uniform up to ``1 / sqrt(n)`` with ``n``
    the inputs of each number, ``beta`` is normal with standard deviation 0.02, and ``b`` is 0.

    Only the reference computes it, in ``O(K^2 (D + K))`` steps and memory of a few arrays of
    scores. The product changes with every pair of tokens, but a fused kernel knows a query, a key
    and numbers of each. The authors' forget gate is ``Sum(PaTH(...), FoX(...))``, except that they
    multiply it by ``1 / sqrt(D)``.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    head_dim
        Channels per head, ``D``.
    hidden_dim
        Width ``C`` of hidden states.
    conv
        Tokens that a convolution of ``w x`` over tokens reads, before a SiLU; the authors use 3.
        1: no convolution, and no SiLU.

    Sections 2 and 3.
    """

    num_heads: Count
    head_dim: Count
    hidden_dim: Count
    conv: Count = 1

    def param_specs(self) -> Mapping[str, ParamSpec]:
        heads, dim, width = self.num_heads, self.head_dim, self.hidden_dim
        specs = {
            "w": ParamSpec((heads, dim, width), uniform_by_inputs(width)),
            "beta": ParamSpec((heads, width)),
            "b": ParamSpec((heads,), lambda rng, shape: np.zeros(shape)),
        }
        if self.conv > 1:
            specs["taps"] = ParamSpec((heads, dim, self.conv), uniform_by_inputs(self.conv))
        return specs

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {
            "w": FeatureSpec(self._direction, of="key", lookback=self.conv - 1),
            "beta": FeatureSpec(self._beta, of="key"),
            "q": FeatureSpec(self._query, of="query", reads="vectors"),
            "k": FeatureSpec(self._key, of="key", reads="vectors"),
        }

    def _direction(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        w = xp.matrix_transpose(params["w"])
        if self.conv == 1:
            w = xp.matmul(x[:, None, :, :], w)
        else:
            each = xp.matmul(xp.permute_dims(x, (2, 0, 1, 3))[:, :, None, :, :], w)
            taps = xp.permute_dims(params["taps"], (2, 0, 1))[:, None, :, None, :]
            w = xp.sum(each * taps, axis=0)
            w = w * xp.exp(log_sigmoid(w, xp))
        return w / xp.sqrt(xp.sum(w * w, axis=-1, keepdims=True) + _EPS)

    def _beta(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        z = logits(x, {"w": params["beta"], "b": params["b"]}, xp)
        return xp.matrix_transpose(2 * xp.exp(log_sigmoid(z, xp)))

    def _query(self, q: Array, pos: Array, *, scale: float, **_: Any) -> Array:
        check_channels("q", q, self.head_dim)
        return scale * q

    def _key(self, k: Array, pos: Array, **_: Any) -> Array:
        return k

    def adjust_scores(
        self, scores: Array, q: Array, k: Array, *, visible: Array | None, params: Any,
        xp: Namespace,
    ) -> Array:  # fmt: skip
        # k_j after the tokens up to t is k_j - sum_{s <= t} w_s z_sj, where
        # z_tj = beta_t w_t . (k_j - sum_{j < s < t} w_s z_sj): a triangular system for each key.
        queries, keys, w = params.query["q"][:], params.key["k"][:], params.key["w"][:]
        if visible is not None:  # NaN in padding
            queries = xp.where(xp.any(visible, axis=-1)[..., None], queries, 0.0)
            keys = xp.where(xp.any(visible, axis=-2)[..., None], keys, 0.0)
        beta, transposed = xp.matrix_transpose(params.key["beta"]), xp.matrix_transpose
        rank = xp.argsort(xp.argsort(k, axis=-1, stable=True), axis=-1)
        later, up_to = transposed(rank) > rank, k <= q
        if "segment" in params.key:
            seg = params.key["segment"]
            later = later & (transposed(seg) == seg)
            up_to = up_to & (params.query["segment"] == seg)
        between = xp.where(later, beta * xp.matmul(w, transposed(w)), 0.0)
        one = xp.eye(w.shape[2], dtype=w.dtype, device=device(w))
        changes = xp.where(later, beta * xp.matmul(w, transposed(keys)), 0.0)
        z = xp.linalg.solve(one + between, changes)
        return scores - xp.matmul(xp.where(up_to, xp.matmul(queries, transposed(w)), 0.0), z)
