"""Example schemes: every hook of ``posenc.PositionScheme`` is used by at least one of them.

Each is as short as it can be, to be read and copied. Tests, benchmarks and docs use them together
with the catalogue, so that a passing check also covers schemes that nobody has written yet.

- ``bias``: ``Fence``, ``Parabola``, ``Checkered``, ``Tide``, ``Level``,
  ``Silent`` (the hook, without a bias); with ``key_bias``: ``Both``.
- ``transform``: ``Sharpening``, ``Both``.
- ``scale``: ``Cooled``; ``at_length``: ``Stretching``; ``constants``: ``Tide``.
- ``feature_specs``, of hidden states: ``Leaning``; summed: ``Fading``; of keys: ``Wide``.
- ``regions``: ``Levelled``.

``embedding`` is in ``posenc.Sinusoidal`` and ``posenc.Learned``, ``axes`` in
``posenc.schemes.AxialRoPE`` and ``posenc.schemes.ALiBi2D``, ``sink`` in
``posenc.schemes.Sink``, features of queries in ``posenc.schemes.Shaw``, ``adjust_scores`` in
``posenc.schemes.CoPE``, ``channel_decay`` in ``posenc.schemes.Wall``, a ``lookback`` in
``posenc.schemes.SelectiveRoPE``. Without arguments the schemes are small: ``HEADS`` heads of
``HEAD_DIM`` channels, and hidden states of ``HIDDEN_DIM`` channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import posenc
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import (
    Array,
    FeatureSpec,
    Initializer,
    Namespace,
    ParamSpec,
    Role,
    Window,
)
from posenc.schemes.activations import log_sigmoid
from posenc.schemes.gates import SummedGates, logits

HEADS, HEAD_DIM, HIDDEN_DIM = 4, 8, 12


def uniform(low: float, high: float) -> Initializer:
    """First values between two numbers."""
    return lambda rng, shape: rng.uniform(low, high, shape)


@dataclass(frozen=True)
class Fence(PositionScheme, relative=True):
    """A bias that masks: keys ``reach`` tokens away or more are hidden; a learned slope before."""

    reach: int = 4

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"slope": ParamSpec((HEADS,), init=uniform(0.1, 0.5))}

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        m = params["slope"]
        distance = xp.abs(q - k)
        return xp.where(distance < self.reach, -m * xp.astype(distance, m.dtype), -xp.inf)


@dataclass(frozen=True)
class Cooled(PositionScheme):
    """Scores are divided by ``D`` instead of its root."""

    power: float = 1.0

    def scale(self, head_dim: int) -> float:
        return float(head_dim**-self.power)


@dataclass(frozen=True)
class Stretching(posenc.RoPE):
    """RoPE whose base grows with the length of the context."""

    trained: int = 16

    def at_length(self, length: int) -> Stretching:
        return replace(self, base=self.base * max(1, length / self.trained))


@dataclass(frozen=True)
class Sharpening(PositionScheme):
    """Queries grow with the logarithm of their position, at a learned rate per head."""

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"rate": ParamSpec((HEADS,), init=uniform(0.1, 0.5))}

    def transform(self, x: Array, pos: Array, *, role: Role, params: Any, xp: Namespace) -> Array:
        if role == "key":
            return x
        rate = params["rate"]
        factor = 1 + rate * xp.log1p(xp.astype(xp.abs(pos), rate.dtype))[..., None]
        return xp.astype(xp.astype(x, rate.dtype) * factor, x.dtype)


@dataclass(frozen=True)
class Parabola(PositionScheme, relative=True, shared=True):
    """Two learned coefficients that all heads share, and all layers."""

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"c": ParamSpec((2,), init=uniform(0.1, 0.3), per_head=False)}

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        c = params["c"]
        ratio = xp.astype(xp.abs(q - k), c.dtype) / 16
        return -(c[0] * ratio + c[1] * ratio * ratio)


@dataclass(frozen=True)
class Checkered(PositionScheme):
    """A learned table per head with two indices: positions modulo 3 and 5."""

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"cells": ParamSpec((HEADS, 3, 5), init=uniform(-1, 1))}

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        return params["cells"][q % 3, k % 5]


@dataclass(frozen=True)
class Tide(PositionScheme):
    """A bias of ``i + j``, which is not relative, with a constant strength per head."""

    strengths: tuple[float, ...] = (0.25, 0.5, 1.0, -2.0)

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return {"strength": self.strengths}

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        m = params["strength"]
        return m * xp.tanh(xp.astype(q + k, m.dtype) / 32)


@dataclass(frozen=True)
class Silent(PositionScheme):
    """Writes the hook for a bias, and has no bias."""

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> None:
        return None


@dataclass(frozen=True)
class Both(posenc.RoPE, relative=True):
    """A rotation and a bias together."""

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return {"strength": (0.1, 0.2, 0.4, 0.8)}

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        m = params["strength"]
        return m * xp.astype(k - q, m.dtype)

    def key_bias(self, k: Array, *, params: Any, xp: Namespace) -> Array:
        return params["strength"] * xp.astype(k, params["strength"].dtype)


@dataclass(frozen=True)
class Fading(SummedGates):
    """FoX's gates, with a bias in which softmax can see the query's own sum."""

    num_heads: int = HEADS
    hidden_dim: int = HIDDEN_DIM

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {
            "w": ParamSpec((self.num_heads, self.hidden_dim), init=uniform(-1, 1)),
            "b": ParamSpec((self.num_heads,), init=uniform(0, 2)),
        }

    def log_gates(self, x: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        return log_sigmoid(logits(x, params, xp), xp)

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        return -2 * xp.log1p(xp.abs(params.query["c"] - params.key["c"]))

    def key_bias(self, k: Array, *, params: Any, xp: Namespace) -> None:
        return None


@dataclass(frozen=True)
class Leaning(PositionScheme):
    """A bias that reads a feature, positions and a param at once.

    It is ``lean * (m * (q - k) / 10 + 1 / 4)``. The feature ``lean`` is a number per token of one
    side, from its hidden state, and ``m`` is learned.
    """

    side: Role = "key"
    num_heads: int = HEADS

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {
            "w": ParamSpec((self.num_heads, HIDDEN_DIM), init=uniform(-1, 1)),
            "m": ParamSpec((self.num_heads,), init=uniform(0.1, 0.3)),
        }

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"lean": FeatureSpec(self._lean, of=self.side)}

    def _lean(self, x: Array, *, params: Any, xp: Namespace) -> Array:
        return xp.matrix_transpose(xp.matmul(x, xp.matrix_transpose(params["w"])))

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        m, lean = params["m"], params.of(self.side)["lean"]
        return lean * m * xp.astype(q - k, m.dtype) / 10 + lean / 4


@dataclass(frozen=True)
class Wide(PositionScheme):
    """Features that no fused kernel reads: a table per key, or two numbers of it."""

    table: bool = True

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        computed = {"t": _whole} if self.table else {"a": _first, "b": _second}
        return {n: FeatureSpec(of_k, of="key", reads="vectors") for n, of_k in computed.items()}

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        key = params.key
        return key["t"][0] if self.table else key["a"] + key["b"]


def _whole(k: Array, pos: Array, **_: Any) -> Array:
    return k


def _first(k: Array, pos: Array, **_: Any) -> Array:
    return k[..., 0]


def _second(k: Array, pos: Array, **_: Any) -> Array:
    return k[..., 1]


@dataclass(frozen=True)
class Level(PositionScheme):
    """One learned number per head at every distance: what ALiBi has at ``distance``."""

    num_heads: int = HEADS
    distance: int = 5

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"slopes": ParamSpec((self.num_heads,), init=uniform(0.1, 0.3))}

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        return -params["slopes"] * self.distance


@dataclass(frozen=True)
class Levelled(Level):
    """ALiBi for near keys, and one bias for all far ones, as ReRoPE does with rotations."""

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        raise AssertionError("each region has its own")

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        near = posenc.ALiBi(self.num_heads, learned=True)
        far = Level(self.num_heads, self.distance)
        return (near, (self.distance - 1, None)), (far, (None, -self.distance))
