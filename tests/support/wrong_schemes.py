"""Schemes that are wrong where nobody looks: far away, in long rows, in larger batches, once.

Each is right in a few short sequences at small positions, and does one thing wrong elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from subjects import MAX_LEN

import posenc
from posenc import FeatureSpec, ParamSpec, PositionScheme
from posenc.contract.params import Params
from posenc.schemes import FoX, Shaw, Sum
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM, Fading, uniform


class Ours(posenc.ALiBi):
    """The right one, to begin with."""


def length(array, axis=-1):
    """The size of an axis, 1 where there is none."""
    return array.shape[axis] if array.ndim >= -axis else 1


@dataclass(frozen=True)
class Decay(PositionScheme, relative=True):
    """What many of these begin with, and right: ``-p ln(1 + a|i-j|)``, and no option but heads."""

    num_heads: int = HEADS

    def param_specs(self):
        shape = (self.num_heads,)
        return {"a": ParamSpec(shape, uniform(0.1, 1)), "p": ParamSpec(shape, uniform(0.1, 2))}

    def bias(self, q, k, *, params, xp):
        distance = xp.astype(xp.abs(q - k), params["a"].dtype)
        return -params["p"] * xp.log1p(params["a"] * distance)


# Wrong in long rows.


@dataclass(frozen=True)
class LongRow(Decay):
    """Another bias in rows of more than 64 keys."""

    most: ClassVar[int] = 64

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return found if length(k) <= self.most else 1.5 * found


@dataclass(frozen=True)
class LongerRow(LongRow):
    """Likewise, from the length that it was trained at."""

    most: ClassVar[int] = 4096


@dataclass(frozen=True)
class LongColumn(Decay):
    """Another bias for more than 64 queries at once."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return found if length(q, -2) <= 64 else 1.5 * found


@dataclass(frozen=True)
class Normalised(Decay):
    """Divided by the length of the row, which few keys hide in float32."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return found / max(1.0, length(k) / 512)


@dataclass(frozen=True)
class LongKeys(Ours):
    """Another key bias for more than 64 keys."""

    def key_bias(self, k, *, params, xp):
        found = super().key_bias(k, params=params, xp=xp)
        return found if length(k) <= 64 else 2 * found


@dataclass(frozen=True)
class LongTurn(posenc.RoPE):
    """Turned otherwise in sequences of more than 64 tokens."""

    def transform(self, x, pos, *, role, params, xp):
        at = pos if x.shape[-2] <= 64 else 2 * pos
        return super().transform(x, at, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class LongEmbedding(posenc.Sinusoidal):
    """Less of it in sequences of more than 64 tokens."""

    def embedding(self, pos, *, params, xp):
        found = super().embedding(pos, params=params, xp=xp)
        return found if pos.shape[-1] <= 64 else found / 2


@dataclass(frozen=True)
class LongGate(Fading):
    """Gates less their number, in sequences of more than 64 tokens."""

    def log_gates(self, x, *, params, xp):
        found = super().log_gates(x, params=params, xp=xp)
        return found if x.shape[-2] <= 64 else found * (64 / x.shape[-2])


# Wrong in larger batches.


@dataclass(frozen=True)
class CrowdedGate(Fading):
    """A gate that looks at its batch from three rows on."""

    def log_gates(self, x, *, params, xp):
        if x.shape[0] >= 3:
            x = x - xp.mean(x, axis=0, keepdims=True)
        return super().log_gates(x, params=params, xp=xp)


@dataclass(frozen=True)
class Crowded(Decay):
    """A bias that looks at its batch from three rows on."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return found if length(q, -4) < 3 else 1.5 * found


@dataclass(frozen=True)
class CrowdedTurn(posenc.RoPE):
    """Turned by the positions of the first row, from three rows on."""

    def transform(self, x, pos, *, role, params, xp):
        at = pos[:1, ...] if pos.ndim > 1 and pos.shape[0] >= 3 else pos
        return super().transform(x, at, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class CrowdedEmbedding(posenc.Sinusoidal):
    """The positions of the first row for all, from three rows on."""

    def embedding(self, pos, *, params, xp):
        at = pos[:1, ...] + 0 * pos if pos.ndim > 1 and pos.shape[0] >= 3 else pos
        return super().embedding(at, params=params, xp=xp)


@dataclass(frozen=True)
class FewHeads(posenc.RoPE):
    """Turned otherwise where heads share their keys."""

    def transform(self, x, pos, *, role, params, xp):
        at = pos if length(x, -3) > 1 else 2 * pos
        return super().transform(x, at, role=role, params=params, xp=xp)


# Wrong far away.


@dataclass(frozen=True)
class FarKeys(Ours):
    """A key bias that is untrue between distances that few look at."""

    near: ClassVar[int] = 6000
    far: ClassVar[int] = 2**19

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        between = (xp.abs(q - k) > self.near) & (xp.abs(q - k) < self.far)
        return xp.where(between, 1.25 * found, found)


@dataclass(frozen=True)
class MidKeys(FarKeys):
    """Likewise, within the context that it was trained at."""

    near: ClassVar[int] = 100
    far: ClassVar[int] = 450


@dataclass(frozen=True)
class VeryFarKeys(FarKeys):
    """Likewise, from further away than any context."""

    near: ClassVar[int] = 2**21
    far: ClassVar[int] = 2**29


@dataclass(frozen=True)
class NegativeKeys(Ours):
    """A key bias that is untrue at negative positions."""

    def key_bias(self, k, *, params, xp):
        found = super().key_bias(k, params=params, xp=xp)
        return xp.where(k < 0, 1.5 * found, found)


@dataclass(frozen=True)
class OneHeadsKeys(Ours):
    """A key bias that is untrue for the heads in the middle."""

    def key_bias(self, k, *, params, xp):
        found, m = super().key_bias(k, params=params, xp=xp), params["slopes"]
        return xp.where((m > 2**-7) & (m < 2**-3), 1.5 * found, found)


@dataclass(frozen=True)
class AbsoluteMidway(Decay):
    """Not relative where distances are some hundreds to some thousands."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        d = xp.abs(q - k)
        return xp.where((d > 300) & (d < 5000) & (q % 2 == 0), 1.5 * found, found)


@dataclass(frozen=True)
class AbsoluteFar(Decay):
    """Not relative once a query is 5000 tokens in."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return xp.where((q > 5000) & (q < 2**17), 1.5 * found, found)


@dataclass(frozen=True)
class AbsoluteBelow(Decay):
    """Not relative at negative positions."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return xp.where(k < 0, 1.5 * found, found)


@dataclass(frozen=True)
class Floating(Decay):
    """The difference of positions in float32, which ends at 2**24."""

    def bias(self, q, k, *, params, xp):
        a = params["a"]
        distance = xp.abs(xp.astype(q, xp.float32) - xp.astype(k, xp.float32))
        return -params["p"] * xp.log1p(a * xp.astype(distance, a.dtype))


@dataclass(frozen=True)
class FarNaN(Decay):
    """NaN at one distance, which no context reaches."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return xp.where(xp.abs(q - k) == 4095, xp.nan * found, found)


@dataclass(frozen=True)
class BandNaN(Decay):
    """NaN between distances that few look at."""

    def bias(self, q, k, *, params, xp):
        d = xp.astype(xp.abs(q - k), params["a"].dtype)
        return -params["p"] * xp.sqrt((d - 700) * (d - 5000))


@dataclass(frozen=True)
class FarFromRight(Decay):
    """A gradient that is stopped beyond 100 tokens."""

    def bias(self, q, k, *, params, xp):
        own = {name: stopped(a, xp) for name, a in params.items()}
        near = super().bias(q, k, params=params, xp=xp)
        far = super().bias(q, k, params=Params(own, params.dtype), xp=xp)
        return xp.where(xp.abs(q - k) > 100, far, near)


def stopped(array, xp):
    if hasattr(array, "detach"):
        return array.detach()
    if "jax" not in xp.__name__:
        return array
    import jax

    return jax.lax.stop_gradient(array)


@dataclass(frozen=True)
class FarFromRightTurn(PositionScheme):
    """A transform whose gradient is stopped from position 100 on."""

    def param_specs(self):
        return {"rate": ParamSpec((HEADS,), uniform(0.1, 0.5))}

    def transform(self, x, pos, *, role, params, xp):
        if role == "key":
            return x
        rate = params["rate"]
        far = xp.astype(xp.abs(pos) > 100, rate.dtype)[..., None]
        rate = far * stopped(rate, xp) + (1 - far) * rate
        grown = 1 + rate * xp.log1p(xp.astype(xp.abs(pos), rate.dtype))[..., None]
        return xp.astype(xp.astype(x, rate.dtype) * grown, x.dtype)


# Wrong in one dtype.


@dataclass(frozen=True)
class NarrowKeys(posenc.RoPE):
    """Keys turned in bfloat16, where they are."""

    def transform(self, x, pos, *, role, params, xp):
        if role == "query" or "bfloat16" not in str(x.dtype):
            return super().transform(x, pos, role=role, params=params, xp=xp)
        sin, cos = (xp.astype(a, x.dtype) for a in self._turns.sincos(pos, dtype=xp.float32, xp=xp))
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return xp.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


@dataclass(frozen=True)
class WritingKeys(posenc.RoPE):
    """Turns keys where they lie, if it can."""

    def transform(self, x, pos, *, role, params, xp):
        found = super().transform(x, pos, role=role, params=params, xp=xp)
        if role == "key" and "torch" in xp.__name__ and not x.requires_grad:
            x.copy_(found)
        return found


@dataclass(frozen=True)
class NeverDouble(PositionScheme):
    """A learned embedding that is float32 in its heart."""

    max_len: int = MAX_LEN

    def param_specs(self):
        return {"table": ParamSpec((self.max_len, HEAD_DIM), per_head=False)}

    def embedding(self, pos, *, params, xp):
        found = xp.astype(params["table"], xp.float32)
        rows = xp.take(found, xp.reshape(pos, (-1,)), axis=0)
        return xp.astype(xp.reshape(rows, (*pos.shape, HEAD_DIM)), params["table"].dtype)


@dataclass(frozen=True)
class SingleBias(Decay):
    """A bias that is float32 in its heart."""

    def bias(self, q, k, *, params, xp):
        own = {name: xp.astype(a, xp.float32) for name, a in params.items()}
        found = super().bias(q, k, params=Params(own, xp.float32), xp=xp)
        return xp.astype(found, params["a"].dtype)


@dataclass(frozen=True)
class SingleTurn(posenc.RoPE):
    """A rotation that is float32 in its heart."""

    def transform(self, x, pos, *, role, params, xp):
        found = super().transform(xp.astype(x, xp.float32), pos, role=role, params=params, xp=xp)
        return xp.astype(found, x.dtype)


@dataclass(frozen=True)
class WideKeys(Ours):
    """A key bias in float64, always."""

    def key_bias(self, k, *, params, xp):
        return xp.astype(super().key_bias(k, params=params, xp=xp), xp.float64)


@dataclass(frozen=True)
class OtherKeys(Ours):
    """Another key bias outside of NumPy."""

    def key_bias(self, k, *, params, xp):
        found = super().key_bias(k, params=params, xp=xp)
        return found if "numpy" in xp.__name__ else 1.01 * found


# Keeps what it should not.


KEPT = {}


@dataclass(frozen=True)
class StaleParams(Decay):
    """Keeps the logarithm of a param: another step of training, the same bias."""

    def bias(self, q, k, *, params, xp):
        key = (self, xp.__name__, tuple(params["a"].shape), str(params["a"].dtype))
        if "numpy" not in xp.__name__:
            return super().bias(q, k, params=params, xp=xp)
        own = {"p": params["p"], "a": KEPT.setdefault(key, params["a"])}
        _ = params["a"]
        return super().bias(q, k, params=Params(own, params.dtype), xp=xp)


@dataclass(frozen=True)
class StaleShape(Decay):
    """Keeps the bias of the last square tile under its shape."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        if "numpy" not in xp.__name__ or params["a"].ndim == 0:
            return found
        return KEPT.setdefault((self, found.shape, str(found.dtype)), found)


@dataclass(frozen=True)
class Tiring(Decay):
    """Answers otherwise after some hundred calls."""

    calls: list = field(default_factory=list, compare=False, repr=False)

    def bias(self, q, k, *, params, xp):
        self.calls.append(0)
        found = super().bias(q, k, params=params, xp=xp)
        return found * (1 + 1e-3 * (len(self.calls) // 100))


@dataclass(frozen=True)
class Uncompared(Decay):
    """A field that steers, and is not compared: what was compiled for one is run for the other."""

    strength: float = field(default=1.0, compare=False)

    def bias(self, q, k, *, params, xp):
        return self.strength * super().bias(q, k, params=params, xp=xp)


# Wrong elsewhere.


@dataclass(frozen=True)
class NaNScale(Decay):
    """Scores that are not a number."""

    def scale(self, head_dim):
        return math.nan


@dataclass(frozen=True)
class ArrayScale(Decay):
    """A scale that is an array."""

    def scale(self, head_dim):
        return np.ones(HEADS)


@dataclass(frozen=True)
class Counted(Fading):
    """A gate that is closed at the first token in memory."""

    def log_gates(self, x, *, params, xp):
        found = super().log_gates(x, params=params, xp=xp)
        return found * xp.astype(xp.arange(x.shape[-2]) > 0, found.dtype)[:, None]


@dataclass(frozen=True)
class MiddleHeads(Decay):
    """Heads that look at their neighbours', but for the first and the last."""

    def bias(self, q, k, *, params, xp):
        a = params["a"]
        if a.ndim < 3:
            return super().bias(q, k, params=params, xp=xp)
        a = xp.concat([a[:1], a[2:3], a[1:2], *([a[3:]] if a.shape[0] > 3 else [])], axis=0)
        own = Params({"p": params["p"], "a": a}, params.dtype)
        return super().bias(q, k, params=own, xp=xp)


@dataclass(frozen=True)
class Forward(Decay):
    """A bias of the key's place in memory, in rows of some keys."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        if length(k) < 9:
            return found
        return found * (1 + xp.arange(length(k), dtype=found.dtype) / 100)


@dataclass(frozen=True)
class Neighbours(Shaw):
    """A feature of the query that stands before."""

    def _of_distances(self, q, pos, *, scale, params, xp):
        before = xp.concat([q[:, :, :1, :], q[:, :, :-1, :]], axis=2)
        return super()._of_distances(before, pos, scale=scale, params=params, xp=xp)


@dataclass(frozen=True)
class Waiting(FoX):
    """Gates that are summed in the order of memory, by the scheme itself."""

    def feature_specs(self):
        return {"c": FeatureSpec(self.sums, of="key"), "own": FeatureSpec(self.sums, of="query")}

    def sums(self, x, *, params, xp):
        gates = self.log_gates(x, params=params, xp=xp)
        return xp.cumulative_sum(xp.matrix_transpose(gates), axis=2)

    def bias(self, q, k, *, params, xp):
        return params.query["own"] - params.key["c"]


@dataclass(frozen=True)
class Recounting(posenc.RoPE):
    """Queries are turned by their number among those that are asked for."""

    def transform(self, x, pos, *, role, params, xp):
        at = 0 * pos + xp.arange(x.shape[-2], dtype=pos.dtype)
        if role == "query":
            pos = pos[..., :1] + at - at[..., :1] if x.shape[-2] > 1 else 0 * pos
        return super().transform(x, pos, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class Wandering(posenc.RoPE):
    """Keys are turned further in each layer."""

    calls: list = field(default_factory=list, compare=False, repr=False)

    def transform(self, x, pos, *, role, params, xp):
        if role == "key":
            self.calls.append(0)
            pos = pos + len(self.calls)
        return super().transform(x, pos, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class Sideways(posenc.RoPE, axes=2):
    """The second coordinate of a token is not where it is."""

    def transform(self, x, pos, *, role, params, xp):
        at = xp.arange(x.shape[-2], dtype=pos.dtype) + 0 * pos[..., 1]
        return super().transform(x, at, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class Meddling(Shaw):
    """A feature of all heads' queries together."""

    def _of_distances(self, q, pos, *, scale, params, xp):
        mean = xp.mean(q, axis=1, keepdims=True) + 0 * q
        return super()._of_distances(mean, pos, scale=scale, params=params, xp=xp)


@dataclass(frozen=True)
class Doubtful(posenc.ALiBi):
    """A sink that changes with each call."""

    calls: list = field(default_factory=list, compare=False, repr=False)

    def sink(self, q, *, params, xp):
        self.calls.append(0)
        return xp.zeros_like(q, dtype=xp.float32) + len(self.calls)


@dataclass(frozen=True, init=False)
class Halved(Sum):
    """A bias that is no longer the sum of those of its parts."""

    def bias(self, q, k, *, params, xp):
        return super().bias(q, k, params=params, xp=xp) / 2

    def hooks(self):
        return super().hooks() - {"key_bias"}


# Case -> scheme, by the name of the law that tells.
WRONG: dict[str, PositionScheme] = {
    "tile_is_slice (64 keys)": LongRow(),
    "tile_is_slice (4096 keys)": LongerRow(),
    "tile_is_slice (64 queries)": LongColumn(),
    "tile_is_slice (by its length)": Normalised(),
    "tile_is_slice (place in memory)": Forward(),
    "tile_is_slice (key_bias)": LongKeys(HEADS),
    "tile_is_slice (batch)": Crowded(),
    "bias_is_elementwise (heads between)": MiddleHeads(),
    "bias_is_elementwise (kept by shape)": StaleShape(),
    "bias_is_elementwise (calls)": Tiring(),
    "bias_is_finite_or_masks (one distance)": FarNaN(),
    "bias_is_finite_or_masks (band)": BandNaN(),
    "bias_is_finite_or_masks (float64 key_bias)": WideKeys(HEADS),
    "relative_is_as_claimed (distances between)": AbsoluteMidway(),
    "relative_is_as_claimed (far)": AbsoluteFar(),
    "relative_is_as_claimed (negative)": AbsoluteBelow(),
    "relative_is_as_claimed (float32)": Floating(),
    "key_bias_is_as_claimed (6000 to 2**19)": FarKeys(HEADS),
    "key_bias_is_as_claimed (100 to 450)": MidKeys(HEADS),
    "key_bias_is_as_claimed (beyond 2**21)": VeryFarKeys(HEADS),
    "key_bias_is_as_claimed (negative)": NegativeKeys(HEADS),
    "key_bias_is_as_claimed (some heads)": OneHeadsKeys(HEADS),
    "bias_terms_add_up": Halved(Decay(), posenc.T5Bias(HEADS)),
    "transform_is_row_local (64 tokens)": LongTurn(HEAD_DIM),
    "transform_is_row_local (batch)": CrowdedTurn(HEAD_DIM),
    "transform_is_row_local (heads that share)": FewHeads(HEAD_DIM),
    "embedding_is_one_row_per_position (64 tokens)": LongEmbedding(HEAD_DIM),
    "embedding_is_one_row_per_position (batch)": CrowdedEmbedding(HEAD_DIM),
    "features_are_row_local (64 tokens)": LongGate(),
    "features_are_row_local (batch)": CrowdedGate(),
    "features_are_row_local (place in memory)": Counted(),
    "features_are_row_local (queries)": Neighbours(HEAD_DIM),
    "features_follow_their_tokens": Waiting(HEADS, HIDDEN_DIM),
    "cache_holds_what_is_needed": Recounting(HEAD_DIM),
    "places_default_to_positions": Sideways(HEAD_DIM),
    "heads_are_independent": Meddling(HEAD_DIM),
    "log_sum_exp_is_that_of_the_scores": Doubtful(HEADS),
    "float32_is_float64_rounded (embedding)": NeverDouble(),
    "float32_is_float64_rounded (bias)": SingleBias(),
    "float32_is_float64_rounded (transform)": SingleTurn(HEAD_DIM),
    "half_precision_rounds_once (keys)": NarrowKeys(HEAD_DIM),
    "a_pass_changes_nothing": Wandering(HEAD_DIM),
    "arguments_stay_as_they_were (keys)": WritingKeys(HEAD_DIM),
    "answers_as_numpy_does (key_bias)": OtherKeys(HEADS),
    "gradients_of_parts_are_derivatives (bias)": FarFromRight(),
    "gradients_of_parts_are_derivatives (transform)": FarFromRightTurn(),
    "schemes_share_no_state (params)": StaleParams(),
    "schemes_share_no_state (not compared)": Uncompared(),
    "scheme_is_a_frozen_value (NaN)": NaNScale(),
    "scheme_is_a_frozen_value (scale)": ArrayScale(),
}
