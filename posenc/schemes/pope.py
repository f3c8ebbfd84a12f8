"""PoPE: polar coordinate position embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from posenc.angles.fixed import Turns, frequencies
from posenc.contract.checks import check_channels
from posenc.contract.fields import Count, Positive
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, Initializer, Namespace, ParamSpec, Role
from posenc.schemes.activations import softplus
from posenc.schemes.rope import Layout

FirstPhase = Literal["zero", "uniform"]
_INIT: dict[str, Initializer] = {
    "zero": lambda rng, shape: np.zeros(shape),
    "uniform": lambda rng, shape: rng.uniform(-2 * math.pi, 0, shape),
}


@dataclass(frozen=True)
class PoPE(PositionScheme, paper="Gopalakrishnan et al. 2025, arXiv 2509.10534"):
    """Length of a channel by content, direction by position: ``2D`` channels of ``D``.

    RoPE reads a channel pair as a vector: its length and its direction both come from content. PoPE
    takes only the length from content, and the direction from position.

    The score is ``sum_c softplus(q_c) softplus(k_c) cos((j - i) theta_c + delta_c) / sqrt(D)``,
    with ``theta_c = base**(-c/D)``, ``c = 0 .. D - 1``. Query and key become ``2D`` wide, a cosine
    and a sine of each channel. So a cache of transformed keys takes twice the memory; it may hold
    raw keys instead.

    Parameters
    ----------
    num_heads
        Number of heads of keys and values, ``Hk``. The learned phases ``delta (Hk, D)`` belong to
        keys; they count as 0 above 0, and as ``-2 pi`` below that.
    head_dim
        Channels per head, ``D``, before the transform.
    base
        Base of the frequencies.
    init
        First values of ``delta``: ``"zero"``, for longer contexts than in training; or
        ``"uniform"`` in ``[-2 pi, 0]``, slightly better in training lengths.
    layout
        Order of the ``2D`` channels: ``"half"``, all cosines, then all sines; ``"interleaved"``,
        cosine and sine of each channel in turn. Scores are the same.

    Equation 6.
    """

    num_heads: Count
    head_dim: Count
    base: Positive = 10_000.0
    init: FirstPhase = "zero"
    layout: Layout = "half"
    _turns: Turns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        exponents = (Fraction(c, self.head_dim) for c in range(self.head_dim))
        object.__setattr__(self, "_turns", Turns(frequencies(self.base, exponents)))

    def param_specs(self) -> Mapping[str, ParamSpec]:
        shape = (self.num_heads, self.head_dim)
        return {"delta": ParamSpec(shape, _INIT[self.init], of_keys=True)}

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        tables = self.tables(x, pos, params=params, xp=xp)
        sin, cos = tables["sin"], tables["cos"]
        work = sin.dtype
        if role == "key":
            # Not clip, whose gradient at a bound differs between libraries.
            delta = xp.astype(params["delta"][:], work)
            delta = xp.minimum(delta, xp.zeros_like(delta))
            delta = xp.maximum(delta, xp.full_like(delta, -2 * math.pi))
            sin_delta, cos_delta = xp.sin(delta), xp.cos(delta)
            sin, cos = sin * cos_delta + cos * sin_delta, cos * cos_delta - sin * sin_delta
        wide = xp.astype(x, work, copy=False)
        length = softplus(wide, xp)
        both = [length * cos, length * sin]
        if self.layout == "half":
            return xp.astype(xp.concat(both, axis=-1), x.dtype, copy=False)
        pairs = xp.stack(both, axis=-1)
        pairs = xp.reshape(pairs, (*x.shape[:-1], 2 * self.head_dim))
        return xp.astype(pairs, x.dtype, copy=False)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        sin, cos = self._turns.sincos(pos, dtype=dtype, xp=xp)
        return {"sin": sin, "cos": cos}
