"""The schemes that every law is tried on: the catalogue, its options, and the ones below.

The schemes below use every hook of the contract, so that a test that passes says something about
schemes that are not written yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from proof_schemes import DIM, HEADS, PROOFS, WIDTH, Fading, Forgetting, uniform

import posenc
from posenc import ParamSpec, PositionScheme
from posenc.evaluate import ATTENTION_HOOKS
from posenc.params import head_count
from posenc.testing.framework import readonly

__all__ = ["DIM", "HEADS", "WIDTH", "Fading", "Forgetting", "uniform"]
MAX_LEN = 64


@dataclass(frozen=True)
class Kerple(PositionScheme):
    """``-p ln(1 + a|i-j|)``: two learned, positive numbers a head."""

    relative: ClassVar[bool] = True
    num_heads: int = HEADS

    def param_specs(self):
        shape = (self.num_heads,)
        return {
            "a": ParamSpec(shape, init=uniform(0.1, 1)),
            "p": ParamSpec(shape, init=uniform(0.1, 2)),
        }

    def bias(self, q, k, *, params, xp):
        distance = xp.astype(xp.abs(q - k), params["a"].dtype)
        return -params["p"] * xp.log1p(params["a"] * distance)


@dataclass(frozen=True)
class Fence(PositionScheme):
    """Nothing to see from ``reach`` on, and a learned slope up to there."""

    relative: ClassVar[bool] = True
    reach: int = 4

    def param_specs(self):
        return {"slope": ParamSpec((HEADS,), init=uniform(0.1, 0.5))}

    def bias(self, q, k, *, params, xp):
        m = params["slope"]
        distance = xp.abs(q - k)
        return xp.where(distance < self.reach, -m * xp.astype(distance, m.dtype), -xp.inf)


@dataclass(frozen=True)
class Cooled(PositionScheme):
    """Scores are divided by ``D`` instead of its root."""

    power: float = 1.0

    def scale(self, head_dim):
        return head_dim**-self.power


@dataclass(frozen=True)
class Stretching(posenc.RoPE):
    """RoPE whose base grows with the length of the context."""

    trained: int = 16

    def at_length(self, length):
        return replace(self, base=self.base * max(1, length / self.trained))


@dataclass(frozen=True)
class Sharpening(PositionScheme):
    """Queries grow with the logarithm of their position, each head at a rate of its own."""

    def param_specs(self):
        return {"rate": ParamSpec((HEADS,), init=uniform(0.1, 0.5))}

    def transform(self, x, pos, *, role, params, xp):
        if role == "key":
            return x
        rate = params["rate"]
        grown = 1 + rate * xp.log1p(xp.astype(xp.abs(pos), rate.dtype))[..., None]
        return xp.astype(xp.astype(x, rate.dtype) * grown, x.dtype)


@dataclass(frozen=True)
class Parabola(PositionScheme):
    """Two learned coefficients that all heads share."""

    relative: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def param_specs(self):
        return {"c": ParamSpec((2,), init=uniform(0.1, 0.3), per_head=False)}

    def bias(self, q, k, *, params, xp):
        c = params["c"]
        ratio = xp.astype(xp.abs(q - k), c.dtype) / 16
        return -(c[0] * ratio + c[1] * ratio * ratio)


@dataclass(frozen=True)
class Checkered(PositionScheme):
    """A learned table a head, of two indices, by position modulo 3 and 5."""

    def param_specs(self):
        return {"cells": ParamSpec((HEADS, 3, 5), init=uniform(-1, 1))}

    def bias(self, q, k, *, params, xp):
        return params["cells"][q % 3, k % 5]


@dataclass(frozen=True)
class Tide(PositionScheme):
    """A bias of ``i + j``: not relative; its heads' strengths are constants."""

    strengths: tuple[float, ...] = (0.25, 0.5, 1.0, -2.0)

    def constants(self):
        return {"strength": self.strengths}

    def bias(self, q, k, *, params, xp):
        m = params["strength"]
        return m * xp.tanh(xp.astype(q + k, m.dtype) / 32)


@dataclass(frozen=True)
class Silent(PositionScheme):
    """Has the hook for a bias, and no bias."""

    def bias(self, q, k, *, params, xp):
        return None


@dataclass(frozen=True)
class Both(posenc.RoPE):
    """A rotation and a bias together."""

    relative: ClassVar[bool] = True
    constants = Tide(strengths=(0.1, 0.2, 0.4, 0.8)).constants

    def bias(self, q, k, *, params, xp):
        m = params["strength"]
        return m * xp.astype(k - q, m.dtype)

    def key_bias(self, k, *, params, xp):
        return params["strength"] * xp.astype(k, params["strength"].dtype)


def from_catalogue() -> dict[str, PositionScheme]:
    sizes = {"num_heads": HEADS, "head_dim": DIM, "max_len": MAX_LEN}
    return {name: posenc.make(name, **sizes) for name in posenc.catalogue()}


SUBJECTS: dict[str, PositionScheme] = from_catalogue() | {
    "alibi-learned": posenc.ALiBi(HEADS, learned=True),
    "alibi-geometric": posenc.ALiBi(3, slopes="geometric"),
    "alibi-given": posenc.ALiBi(HEADS, slopes=[0.0, 1.0, -0.5, 3.0]),
    "alibi-far": posenc.ALiBi(HEADS, slopes=[0.5, 0.5, 0.25, 0.125]),
    "learned-offset": posenc.Learned(max_len=MAX_LEN, dim=DIM, offset=2),
    "rope-base": posenc.RoPE(DIM, base=100.0),
    "rope-interleaved": posenc.RoPE(DIM, layout="interleaved"),
    "rope-partial": posenc.RoPE(DIM, rotary_dim=4),
    "sinusoidal-base": posenc.Sinusoidal(HEADS * DIM, base=100.0),
    "sinusoidal-concatenated": posenc.Sinusoidal(HEADS * DIM, layout="concatenated"),
    "sinusoidal-tensor2tensor": posenc.Sinusoidal(HEADS * DIM, layout="tensor2tensor"),
    "t5-causal": posenc.T5Bias(HEADS, causal=True),
    "t5-few": posenc.T5Bias(HEADS, num_buckets=8, max_distance=20),
    "t5-far": posenc.T5Bias(HEADS, max_distance=129),
    "t5-unscaled": posenc.T5Bias(HEADS, scaled=False),
    "kerple": Kerple(),
    "fence": Fence(),
    "fence-wide": Fence(reach=9),
    "cooled": Cooled(),
    "stretching": Stretching(DIM),
    "stretched": Stretching(DIM).at_length(64),
    "sharpening": Sharpening(),
    "parabola": Parabola(),
    "checkered": Checkered(),
    "tide": Tide(),
    "silent": Silent(),
    "both": Both(DIM),
    **PROOFS,
}


def heads(scheme: PositionScheme) -> int:
    """How many heads to try a scheme with: its own count where it has one."""
    return head_count(scheme) or HEADS


def params_of(scheme: PositionScheme, seed: int = 0, dtype: str = "float32"):
    """First values, read-only."""
    values = posenc.init_params(scheme, seed)
    return {name: readonly(value.astype(dtype)) for name, value in values.items()}


def normal(shape: Sequence[int], seed: int, dtype: str = "float64"):
    """Independent normal values, read-only, that half precision holds exactly."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return readonly((np.round(values * 32) / 32).astype(dtype))


def steers_attention(scheme: PositionScheme) -> bool:
    """Whether attention can see the scheme at all: by a transform, a bias, a scale."""
    return bool(scheme.hooks() & ATTENTION_HOOKS)


@dataclass(frozen=True)
class Fire(PositionScheme):
    """FIRE, Li et al. 2023, arXiv 2310.04418: ``MLP(psi(|i - j|) / psi(max(i, L)))``, with
    ``psi(x) = ln(1 + c x)``, and ``c`` and the threshold ``L`` learned.

    ``threshold`` steers the first value of ``L`` alone; what precedes the heads, all of them share.
    """

    num_heads: int = HEADS
    hidden: int = 8
    threshold: float = 12.5

    def param_specs(self):
        def shared(shape, init):
            return ParamSpec(shape, init, per_head=False)

        def first(value):
            return lambda rng, shape: np.full(shape, value)

        return {
            "c": shared((), first(0.1)),
            "length": shared((), first(self.threshold)),
            "w1": shared((self.hidden,), uniform(-1, 1)),
            "b1": shared((self.hidden,), uniform(-0.5, 0.5)),
            "w2": ParamSpec((self.num_heads, self.hidden), uniform(-1, 1)),
            "b2": ParamSpec((self.num_heads,), uniform(-0.1, 0.1)),
        }

    def bias(self, q, k, *, params, xp):
        c, w1, b1, w2 = (params[name] for name in ("c", "w1", "b1", "w2"))

        def psi(x):
            return xp.log1p(xp.abs(c) * x)

        distance = xp.astype(xp.abs(q - k), c.dtype)
        x = psi(distance) / (
            psi(xp.maximum(xp.astype(q, c.dtype), xp.abs(params["length"]))) + 1e-6
        )
        units = (w1[n] * x + b1[n] for n in range(self.hidden))
        return params["b2"] + sum(w2[n] * (xp.abs(z) + z) / 2 for n, z in enumerate(units))
