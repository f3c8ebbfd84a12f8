"""BAM: a learned power of distance, the logarithm of a generalized Gaussian prior."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from posenc.contract.fields import Count, Finite
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, Namespace, ParamSpec
from posenc.schemes.alibi import ALiBi

_EPS = 1e-5  # the authors' code adds it to the distance, because a power may be negative
_LEAST_BETA, _LARGEST_BETA = -6.0, 3.0


@dataclass(frozen=True)
class BAM(PositionScheme, relative=True, paper="Bianchessi et al. 2025, arXiv 2505.22842"):
    """``-(e^s |j - i - mu| + 1e-5)**beta``, the logarithm of a generalized Gaussian prior.

    Attention is read as a posterior over keys. The bias is the logarithm of their prior, without
    its normalization: the paper's GGD-BAM. ``beta = 1`` is ALiBi with the slope ``e^s``, 2 is
    Gaussian, and 0 is NoPE. A negative ``beta`` makes a head that prefers far keys.

    Learned arrays: ``s (H,)``, at first the logarithm of ALiBi's slopes, and ``beta (H,)``. With
    ``learned_mu`` also ``theta (H,)``, at first 0; then ``mu = e^theta - e^-theta``, in positions
    after the query.

    A ``beta`` counts as at least -6 and at most 3, without a gradient beyond. So a bias is finite
    at all positions, for ``s`` below 7.5. The authors' code has no limits.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    init_beta
        First value of ``beta``.
    learned_mu
        Whether the centre ``mu`` is learned. The authors fix it at 0.
    slope
        Where the factor ``e^s`` is. ``"inside"`` of the power, as in the paper; ``"outside"``:
        ``-e^s (|j - i - mu| + 1e-5)**beta``, as in one of the authors' two models.

    Section 2.3. The authors multiply scores by a learned multiple of the logarithm of the number of
    keys too, before this bias: ``posenc.schemes.Sum(BAM(H), LogScale("ssmax", num_heads=H))``.
    """

    num_heads: Count
    init_beta: Finite = 1.0
    learned_mu: bool = False
    slope: Literal["inside", "outside"] = "inside"
    _first_s: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Here, because torch's compiler would trace the logarithms.
        first = tuple(math.log(slope) for slope in ALiBi(self.num_heads).head_slopes())
        object.__setattr__(self, "_first_s", first)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        heads = self.num_heads
        specs = {
            "s": ParamSpec.of_values(self._first_s),
            "beta": ParamSpec.of_values((self.init_beta,) * heads),
        }
        return {**specs, "theta": ParamSpec.of_values((0.0,) * heads)} if self.learned_mu else specs

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        slope, beta = xp.exp(params["s"]), xp.clip(params["beta"], _LEAST_BETA, _LARGEST_BETA)
        distance = xp.astype(k - q, slope.dtype)
        if self.learned_mu:
            theta = params["theta"]
            distance = distance - (xp.exp(theta) - xp.exp(-theta))
        # Without a derivative at the centre: that of JAX's abs is 1 there.
        away = xp.where(distance == 0, 0.0, xp.abs(distance))
        if self.slope == "outside":
            return -slope * (away + _EPS) ** beta
        return -((slope * away + _EPS) ** beta)
