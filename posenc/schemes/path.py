"""PaTH: reflections of every token between a query and a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.contract.checks import check_channels
from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.activations import sigmoid
from posenc.schemes.gates import logits, uniform_by_inputs
from posenc.schemes.reflections import changes_of_scores

_EPS = 1e-6  # in the norm of a direction, as released


@dataclass(frozen=True)
class PaTH(
    PositionScheme,
    whole_rows="a score depends on all tokens between its query and its key",
    key_paths=True,
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

    ``chunked`` and the reference compute it, in whole rows: 64 tokens at a time change a query, in
    about ``Q K (6 D + 128)`` operations more than without positions. The product changes with
    every pair of tokens, but a fused kernel knows a query, a key and numbers of each. A program of
    PyTorch that is compiled or exported inverts one matrix of all keys, ``O(K^2 (D + K))``.
    The authors' forget gate is ``Sum(PaTH(...), FoX(...))``, except that they multiply it by
    ``1 / sqrt(D)``.

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
            w = w * sigmoid(w, xp)
        return w / xp.sqrt(xp.sum(w * w, axis=-1, keepdims=True) + _EPS)

    def _beta(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        z = logits(x, {"w": params["beta"], "b": params["b"]}, xp)
        return xp.matrix_transpose(2 * sigmoid(z, xp))

    def _query(self, q: Array, pos: Array, *, scale: float, **_: Any) -> Array:
        check_channels("q", q, self.head_dim)
        return scale * q

    def _key(self, k: Array, pos: Array, **_: Any) -> Array:
        return k

    def adjust_scores(
        self, scores: Array, q: Array, k: Array, *, visible: Array | None, params: Any,
        xp: Namespace,
    ) -> Array:  # fmt: skip
        queries, keys, w = params.query["q"][:], params.key["k"][:], params.key["w"][:]
        beta, up_to, seg = params.key["beta"], k <= q, params.key.get("segment")
        if seg is not None:
            up_to = up_to & (params.query["segment"] == seg)
        # Slots of a cache that wait for tokens hold anything, and padding NaN.
        met = xp.any(up_to, axis=-2)
        w, beta = xp.where(met[..., None], w, 0.0), xp.where(met[..., None, :], beta, 0.0)
        if visible is not None:
            queries = xp.where(xp.any(visible, axis=-1)[..., None], queries, 0.0)
            keys = xp.where(xp.any(visible, axis=-2)[..., None], keys, 0.0)
        return scores + changes_of_scores(queries, keys, w, beta, up_to, seg, xp=xp)
