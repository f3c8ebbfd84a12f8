"""Shaw's relative positions: a learned vector per distance, added to the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.contract.checks import check_channels
from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec


@dataclass(frozen=True)
class Shaw(PositionScheme, relative=True, paper="Shaw et al. 2018, arXiv 1803.02155"):
    """``q_i . (k_j + a_n) / sqrt(D)`` with ``a_n = table[clip(j - i, -K, K) + K]``.

    ``K`` is ``max_distance``. Learned array: ``table (2K + 1, D)``, which all heads share. Its
    first values are uniform in plus or minus ``sqrt(6 / (2K + 1 + D))``, as in the authors' code
    (Xavier).

    A query needs ``2K + 1`` numbers, ``q_i . a_n / sqrt(D)``, so memory is linear in the number of
    queries. The paper's second table, which is added to values, is left out: posenc's schemes act
    on scores. In the paper's table 3, attention without it is as good.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``.
    max_distance
        The largest distance ``K`` with a vector of its own; farther keys share it.

    Equations 2 and 4.
    """

    head_dim: Count
    max_distance: Count = 16

    def param_specs(self) -> Mapping[str, ParamSpec]:
        shape = (2 * self.max_distance + 1, self.head_dim)
        return {"table": ParamSpec(shape, _xavier, per_head=False)}

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"r": FeatureSpec(self._of_distances, of="query", reads="vectors")}

    def _of_distances(
        self, q: Array, pos: Array, *, scale: float, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("q", q, self.head_dim)
        return scale * xp.matmul(q, xp.matrix_transpose(params["table"]))

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        at = xp.clip(k - q, -self.max_distance, self.max_distance) + self.max_distance
        return params.query["r"][at]


def _xavier(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    most = math.sqrt(6 / sum(shape))
    return rng.uniform(-most, most, shape)
