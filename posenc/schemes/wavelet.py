"""Wavelets of distance, at several scales and shifts: a query scores one of them per channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from posenc.contract.checks import check_channels
from posenc.contract.fields import Count, Distance, Positive
from posenc.contract.operations import constant_array, device
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace

# From here on a wavelet of scale 1 is below 2**-64.
_ENDS = {"ricker": 10, "gaussian": 7}
_MOST = 2**16  # numbers of a query that nobody asked for


@dataclass(frozen=True)
class Wavelet(PositionScheme, relative=True, paper="Oka et al. 2025, arXiv 2502.02004"):
    """``q_i . (k_j + p_n) / sqrt(D)`` at distance ``n = i - j``, with a wavelet in each channel.

    ``p_n = psi((n - b) / a)``, with the Ricker wavelet ``psi(t) = (1 - t^2) exp(-t^2 / 2)``.
    The ``D`` channels have all pairs of ``s`` scales ``a = a_0 2^0 .. a_0 2^(s-1)`` and ``D / s``
    shifts ``b = 0 .. D/s - 1``, the shifts of the first scale first. Nothing is learned, and all
    heads have the same wavelets.

    A query needs one number per distance, ``q_i . p_n / sqrt(D)``, as in the authors' second tip,
    so memory is linear in the number of queries. The paper clips no distance, and neither do the
    defaults: the widest wavelet is below ``2**-64`` from ``10 a + b`` on, 1295 tokens for the
    paper's 128 channels, and a query needs no numbers beyond.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``.
    scales
        Number of scales, ``s``, which divides ``D``. With ``head_dim`` the default of
        ``posenc.make("wavelet")`` is the largest of 8, 4, 2, 1 that does.
    min_scale
        The smallest scale, ``a_0``; 4 in the paper's models of 4096 tokens.
    wavelet
        ``"ricker"``, or ``"gaussian"``: ``exp(-t^2)``, as good in the paper.
    max_distance
        The largest distance with a number of its own; farther keys count as ones at it. Default:
        where the widest wavelet ends. With ``max_len=L``, the default of ``posenc.make`` is
        ``L - 1``.
    bidirectional
        Whether keys after the query have wavelets of negative distances; a query then needs twice
        the numbers. If not, such keys count as distance 0. It does not mask.

    Equations 10 to 14; appendix A.6. The authors published no code.
    """

    head_dim: Count
    scales: Count = 8
    min_scale: Positive = 1.0
    wavelet: Literal["ricker", "gaussian"] = "ricker"
    max_distance: Distance | None = None
    bidirectional: bool = False
    _a: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _b: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _last: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shifts, rest = divmod(self.head_dim, self.scales)
        if rest:
            raise ValueError(
                f"head_dim={self.head_dim} must be a multiple of scales, got scales={self.scales}"
            )
        a = [math.ldexp(self.min_scale, n) for n in range(self.scales)]
        last = math.ceil(_ENDS[self.wavelet] * a[-1]) + shifts - 1
        if self.max_distance is None and last > _MOST:
            raise ValueError(
                f"max_distance must be given: a wavelet of scale {a[-1]:g} reaches {last} tokens, "
                f"and a query would need as many numbers; got scales={self.scales}, "
                f"min_scale={self.min_scale:g}"
            )
        object.__setattr__(self, "_last", min(last, self.max_distance or last))
        object.__setattr__(self, "_a", tuple(scale for scale in a for _ in range(shifts)))
        object.__setattr__(self, "_b", tuple(float(b) for _ in a for b in range(shifts)))

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        options = {}
        if "head_dim" in sizes:
            options["scales"] = math.gcd(8, sizes["head_dim"])
        if "max_len" in sizes:
            options["max_distance"] = max(1, sizes["max_len"] - 1)
        return options

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"r": FeatureSpec(self._of_distances, of="query", reads="vectors")}

    def _of_distances(
        self, q: Array, pos: Array, *, scale: float, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("q", q, self.head_dim)
        here, work = device(q), q.dtype
        first = -self._last if self.bidirectional else 0
        n = xp.astype(xp.arange(first, self._last + 1, dtype=xp.int32, device=here), work)
        a, b = (constant_array(v, dtype=work, device=here, xp=xp) for v in (self._a, self._b))
        # The clip keeps squares finite, where a wavelet is 0.
        t = xp.clip((n - b[:, None]) / a[:, None], -64, 64)
        p = xp.exp(-t * t) if self.wavelet == "gaussian" else (1 - t) * (1 + t) * xp.exp(-t * t / 2)
        return scale * xp.matmul(q, p)

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        first = -self._last if self.bidirectional else 0
        return params.query["r"][xp.clip(q - k, first, self._last) - first]
