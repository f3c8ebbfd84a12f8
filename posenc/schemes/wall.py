"""Wall attention: each channel of a score decays by gates of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posenc.contract.fields import Count, Finite
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.activations import log_sigmoid


@dataclass(frozen=True)
class Wall(
    PositionScheme,
    paper="Pai, Averbuch et al. 2026, a blog of Tilde Research with no paper",
):
    """``sum_n q_in k_jn exp(P_in - P_jn) / sqrt(D)``, where ``P`` sums ``log sigmoid(w x + 8)``.

    ``P_t (H, D)`` is the sum of the gates of the tokens up to ``t``, in the order of positions,
    within a segment; ``x_t`` are the hidden states. Gates of 0 are NoPE. If all channels of a head
    have one gate, a score is multiplied by ``exp(c_i - c_j)``, where FoX with these gates adds
    ``c_i - c_j``.

    A transform beside it in a ``Sum`` turns queries and keys first. Keys after the query do not
    decay: it is for causal attention.

    Learned array: ``w (H, D, C)``, at first normal with standard deviation 0.02. A first gate is
    about ``-exp(-8)``, so a channel remembers some 3000 tokens.

    ``chunked`` and the reference compute it; the reference in memory of about ``10 + D / 5`` arrays
    of scores. The authors' further gate, which is added to scores, is
    ``Sum(Wall(...), FoX(...))``.

    Parameters
    ----------
    num_heads
        Number of query heads ``H``.
    head_dim
        Channels per head, ``D``.
    hidden_dim
        Width ``C`` of hidden states.
    offset
        What is added to ``w x``. 8 as released: at first nearly nothing is forgotten.

    blog.tilderesearch.com/blog/wall-attn; ``ops/wall_attn/naive.py`` of
    flash-linear-attention.
    """

    num_heads: Count
    head_dim: Count
    hidden_dim: Count
    offset: Finite = 8.0

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"w": ParamSpec((self.num_heads, self.head_dim, self.hidden_dim))}

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"p": FeatureSpec(self._log_gates, of="key", cumulative=True)}

    def _log_gates(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        z = xp.matmul(x[:, None, :, :], xp.matrix_transpose(params["w"]))
        return log_sigmoid(z + self.offset, xp)

    def channel_decay(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        return params.query["p"] - params.key["p"]
