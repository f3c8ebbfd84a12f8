"""TRA: keys below a threshold are left out, and distance counts only those that remain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.activations import log_sigmoid
from posenc.schemes.cope import sums_from
from posenc.schemes.gates import logits, uniform_by_inputs


@dataclass(frozen=True)
class TRA(
    PositionScheme,
    whole_rows="the distance of a key counts the later keys above the threshold",
    paper="Opper, Fernandez, Smolensky, Gao 2025, arXiv 2503.23174",
):
    """``s_ij + delta_i n_ij`` for keys with ``s_ij > 0``; others get no weight.

    ``n_ij`` counts the visible keys ``t`` with ``s_it > 0`` at the position of ``j`` or after it,
    ``j`` itself included. ``delta_i = ln sigmoid(w_h . x_i + b_h)``, at most 0, with the query's
    hidden state ``x_i (C,)``. A query without a key above the threshold gets 0.

    Learned arrays: ``w (H, C)`` and ``b (H,)``, at first uniform up to ``1 / sqrt(C)``. The
    threshold itself has no gradient. In the authors' model q and k have passed an RMSNorm without
    gains; that is left to the model.

    ``chunked`` and the reference compute it, in whole rows. The distance of a key needs the scores
    of all later keys, but a fused kernel sees a tile of scores at a time.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    hidden_dim
        Width ``C`` of hidden states.

    From the authors' code, ``TRA_FFL.ipynb`` of the workshop MOSS, submission 96.
    """

    num_heads: Count
    hidden_dim: Count

    def param_specs(self) -> Mapping[str, ParamSpec]:
        first = uniform_by_inputs(self.hidden_dim)
        return {
            "w": ParamSpec((self.num_heads, self.hidden_dim), first),
            "b": ParamSpec((self.num_heads,), first),
        }

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"delta": FeatureSpec(self._delta, of="query")}

    def _delta(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        return xp.matrix_transpose(log_sigmoid(logits(x, params, xp), xp))

    def adjust_scores(
        self, scores: Array, q: Array, k: Array, *, visible: Array | None, params: Any,
        xp: Namespace,
    ) -> Array:  # fmt: skip
        kept = scores > 0
        if visible is not None:
            kept = kept & visible
        counted = sums_from(xp.astype(kept, scores.dtype), k, in_order=params.in_order, xp=xp)
        return xp.where(kept, scores + params.query["delta"] * counted, -math.inf)
