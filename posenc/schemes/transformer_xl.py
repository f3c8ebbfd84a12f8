"""Transformer-XL's relative positions: a query scores the projected sinusoid of each distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc.contract.checks import check_channels
from posenc.contract.fields import Count
from posenc.contract.operations import device
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec, Role
from posenc.schemes.sinusoidal import Sinusoidal


@dataclass(frozen=True)
class TransformerXL(PositionScheme, relative=True, paper="Dai et al. 2019, arXiv 1901.02860"):
    """``[(q_i + u) . k_j + (q_i + v) . w R(i - j)] / sqrt(D)``, with sinusoids ``R``.

    ``R(n)`` is ``[sin(n f), cos(n f)]`` with the ``dim / 2`` frequencies ``10000**(-2c/dim)``, all
    sines first. Learned arrays: ``u (H, D)``, ``v (H, D)`` and ``w (H, D, dim)``, at first normal
    with standard deviation 0.02. Distances above ``max_distance`` count as ``max_distance``, as
    ``clamp_len`` in the authors' code. A query needs ``max_distance + 1`` numbers per head, so
    memory is linear in the number of queries.

    The authors' code stores ``w`` as ``r_net.weight``, ``(H * D, dim)``, ``u`` as ``r_w_bias`` and
    ``v`` as ``r_r_bias``. XLNet's ``r (dim, H, D)`` is transposed. XLNet's term for two sentences
    is left out: it does not depend on positions, and segments of posenc do not see each other.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    head_dim
        Channels per head, ``D``.
    dim
        Width of the sinusoids, even; in the paper the width of the model.
    max_distance
        The largest distance with a sinusoid of its own. With ``max_len=L``, the default of
        ``posenc.make("transformer_xl")`` is ``min(1024, L - 1)``.
    bidirectional
        Whether keys after the query have sinusoids of negative distances, as in XLNet; a query then
        needs ``2 max_distance + 1`` numbers. If not, such keys count as distance 0. It does not
        mask.

    Section 3.3. XLNet (Yang et al. 2019, arXiv 1906.08237) uses it in both directions.
    """

    num_heads: Count
    head_dim: Count
    dim: Count
    max_distance: Count = 1024
    bidirectional: bool = False
    _sinusoids: Sinusoidal = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sinusoids", Sinusoidal(self.dim, layout="concatenated"))

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        if "max_len" not in sizes:
            return {}
        return {"max_distance": min(1024, max(1, sizes["max_len"] - 1))}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        rows = (self.num_heads, self.head_dim)
        return {"u": ParamSpec(rows), "v": ParamSpec(rows), "w": ParamSpec((*rows, self.dim))}

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        if role == "key":
            return x
        u = params["u"][:]
        return xp.astype(xp.astype(x, u.dtype) + u, x.dtype)

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"r": FeatureSpec(self._of_distances, of="query", reads="vectors")}

    def _of_distances(
        self, q: Array, pos: Array, *, scale: float, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("q", q, self.head_dim)
        first = -self.max_distance if self.bidirectional else 0
        distances = xp.arange(first, self.max_distance + 1, dtype=xp.int32, device=device(q))
        sinusoids = self._sinusoids.embedding(distances, params=params, xp=xp)
        # Projected first: a number per head and channel, instead of one per query and frequency.
        keys = xp.matmul(params["w"], xp.matrix_transpose(sinusoids))
        return scale * xp.matmul(q + params["v"][:, None, :], keys)

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        first = -self.max_distance if self.bidirectional else 0
        return params.query["r"][xp.clip(q - k, first, self.max_distance) - first]
