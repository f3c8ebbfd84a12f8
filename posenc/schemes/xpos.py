"""xPos: rotation, and a decay with distance as a factor of the query times one of the key.

Or, without a centre, as a decay between the two (``PositionScheme.channel_decay``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, get_args

from posenc.contract.checks import check_channels, check_count
from posenc.contract.fields import Positive
from posenc.contract.operations import constant_array, device
from posenc.contract.params import float_dtype
from posenc.contract.protocol import Array, Arrays, Hook, Namespace, PositionScheme, Role
from posenc.schemes.rope import Layout, RoPE, rotate

_LARGEST_EXPONENT = 40.0
"""A score of two tokens then stays finite in float32: ``exp(40) * exp(40) = 5.5e34``."""


@dataclass(frozen=True)
class XPos(PositionScheme, paper="Sun et al. 2022, arXiv 2212.10554"):
    """RoPE whose channel pairs decay with distance, as ``zeta_k**((i - j) / scale_base)``.

    Pair ``k`` of a query is multiplied by ``zeta_k**((pos - center) / scale_base)``, that of a key
    by the inverse; ``zeta_k = (2k + 0.4 D) / (1.4 D)``, ``k = 0 .. D/2 - 1``. Scores of keys after
    the query grow: xPos is for causal attention.

    Range: with a centre, every implementation serves it. A factor is then at most ``exp(40)``, at
    least ``exp(-40)``. Scores are those of the formula while
    ``|pos - center| <= 40 scale_base / ln(1 / zeta_0)``, which is 16,347 positions at the default
    ``scale_base``. Farther away, the factors of pair 0 no longer change, then those of pair 1, and
    so on: these pairs rotate without decay. Two tokens on the same side of the centre are then
    scored too high, and everything stays finite, but for float16, which ends at 65504: about
    ``11 scale_base / 1.25 = 4,500`` positions before the centre queries are infinite, and as far
    after it keys. Results are then NaN wherever transformed vectors are kept in float16; PyTorch's
    kernel for CPUs gives 0 for NaN where there are fewer than 16 keys.

    ``center=None``: scores are those of the formula at any positions, in any dtype. Factors are
    taken between query and key, so ``chunked`` and the reference alone compute it. Keys after the
    query do not grow.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``, even.
    base
        Base of the frequencies.
    scale_base
        Distance at which pair ``k`` has decayed to ``zeta_k``.
    center
        Position at which both factors are 1; it cancels in scores. Released code takes half of the
        current length, so that cached keys of different lengths disagree: keep one centre, near the
        middle of the positions. None: there is none.
    layout
        Which channels pair up, as in ``RoPE``.

    Algorithm 1.
    """

    head_dim: int
    base: float = 10_000.0
    scale_base: Positive = 512.0
    center: int | None = 0
    layout: Layout = "half"
    _rope: RoPE = field(init=False, repr=False, compare=False)
    _of_channels: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _limits: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _rates: tuple[tuple[float, ...], tuple[float, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rope", RoPE(self.head_dim, self.base, self.layout))
        if self.center is not None:
            if not -(2**30) <= check_count("center", self.center, least=-(2**30)) < 2**30:
                raise ValueError(f"center must be a position below 2**30, got {self.center}")
            self._leave_out(Hook.CHANNEL_DECAY)
        zetas = [(2 * k / self.head_dim + 0.4) / 1.4 for k in range(self.head_dim // 2)]
        rates = [math.log(zeta) / self.scale_base for zeta in zetas]
        of_channels = (
            2 * rates if self.layout == "half" else [rates[n // 2] for n in range(2 * len(rates))]
        )
        limits = [min(2**31 - 1, int(_LARGEST_EXPONENT / -rate)) for rate in rates]
        high = [_rounded(rate, 24 - n.bit_length()) for rate, n in zip(rates, limits, strict=True)]
        low = [rate - rounded for rate, rounded in zip(rates, high, strict=True)]
        object.__setattr__(self, "_of_channels", tuple(of_channels))
        object.__setattr__(self, "_limits", tuple(limits))
        object.__setattr__(self, "_rates", (tuple(high), tuple(low)))

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        tables = self.tables(x, pos, params=params, xp=xp)
        sin, cos = tables[f"{role}_sin"], tables[f"{role}_cos"]
        return rotate(x, sin, cos, layout=self.layout, xp=xp)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        angles = self._rope.rotary(pos, dtype=dtype, params=params, xp=xp)
        if self.center is None:
            return {f"{role}_{name}": a for role in get_args(Role) for name, a in angles.items()}
        limits = constant_array(self._limits, dtype=xp.int32, device=device(pos), xp=xp)
        steps = xp.maximum(xp.minimum((pos - self.center)[..., None], limits), -limits)
        steps = xp.astype(steps, dtype)
        tables: dict[str, Array] = {}
        for role, signed in (("query", steps), ("key", -steps)):
            # The product with the first part is exact: one product would be off by 40 roundings.
            first, second = (
                xp.exp(signed * constant_array(rates, dtype=dtype, device=device(pos), xp=xp))
                for rates in self._rates
            )
            for name, table in angles.items():
                tables[f"{role}_{name}"] = table * first * second
        return tables

    def channel_decay(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        dtype = float_dtype(params, xp)
        rates = constant_array(self._of_channels, dtype=dtype, device=device(q), xp=xp)
        return xp.astype(q - k, dtype) * rates


def _rounded(value: float, bits: int) -> float:
    """``value`` with so many binary digits, at least one."""
    mantissa, exponent = math.frexp(value)
    unit = 2.0 ** max(1, bits)
    return math.ldexp(round(mantissa * unit) / unit, exponent)
