"""Schemes that are wrong in regions, whole rows, sinks, long sequences, wide heads, or seldom.

Each is right where short calls look, as those of ``wrong_schemes``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from wrong_schemes import Decay, Ours, length

import posenc
from posenc import ParamSpec, PositionScheme
from posenc.schemes import Chunk, DualChunk, LogScale, ReRoPE, Shaw, Sink, Sum
from posenc.schemes.rope import rotate
from posenc.testing.examples import HEAD_DIM, HEADS, Fading, Level, Tide, uniform

# Wrong regions.


@dataclass(frozen=True)
class Meeting(Level):
    """ALiBi for keys up to a distance, and one bias from another distance on."""

    near: int = 64
    far: int = 65

    def bias(self, q, k, *, params, xp):
        return None

    def regions(self):
        near, far = posenc.ALiBi(self.num_heads, learned=True), Level(self.num_heads, self.distance)
        return (near, (self.near, None)), (far, (None, -self.far))


@dataclass(frozen=True)
class Skipping(DualChunk):
    """Keys two chunks before the query are in no region: no window says so, but a bias."""

    def regions(self):
        own, before, earlier, *rest = super().regions()
        rope, chunk = earlier[0].schemes
        further = Sum(rope, Chunk(chunk.size, (None, -3)))
        return own, before, (further, earlier[1]), *rest


@dataclass(frozen=True)
class Within(PositionScheme):
    """Near keys have regions of their own, one of which ends too early."""

    end: int = 40

    def regions(self):
        rope = posenc.RoPE(HEAD_DIM)
        return (Halves(self.end), (99, None)), (rope, (None, -100))


@dataclass(frozen=True)
class Halves(PositionScheme):
    """Two regions, from ``end`` and from 42 on."""

    end: int = 41

    def regions(self):
        turned = posenc.RoPE(HEAD_DIM, base=100.0)
        return (posenc.RoPE(HEAD_DIM), (self.end, None)), (turned, (None, -42))


@dataclass(frozen=True)
class NearAlone(PositionScheme):
    """One scheme for near keys, RoPE for the others."""

    near: PositionScheme = field(default_factory=Halves)

    def regions(self):
        return (self.near, (59, None)), (posenc.RoPE(HEAD_DIM), (None, -60))


# Wrong rows of scores.


@dataclass(frozen=True)
class Adjusting(PositionScheme):
    """Right, to begin with: scores grow with their mean over visible keys."""

    strength: float = 0.5

    def adjust_scores(self, scores, q, k, *, visible, params, xp):
        return scores * (1 + self.strength * xp.tanh(self.means(scores, q, k, visible, xp)))

    def means(self, scores, q, k, visible, xp):
        ones = xp.ones_like(scores)
        seen = ones if visible is None else xp.where(visible, ones, 0.0)
        kept = xp.where(seen > 0, scores, 0.0)
        total = xp.sum(kept, axis=-1, keepdims=True)
        return total / xp.maximum(xp.sum(seen, axis=-1, keepdims=True), ones[..., :1])


@dataclass(frozen=True)
class ThroughWindows(Adjusting):
    """The mean is over all keys up to the query, also over those that a window hides."""

    def means(self, scores, q, k, visible, xp):
        return super().means(scores, q, k, (k <= q) & (scores == scores), xp)


@dataclass(frozen=True)
class ThroughMasks(Adjusting):
    """The mean is over every second key."""

    def means(self, scores, q, k, visible, xp):
        return super().means(scores, q, k, ((q - k) % 2 == 0) & (scores == scores), xp)


@dataclass(frozen=True)
class LongAdjusting(Adjusting):
    """Another strength in rows of more than 64 keys."""

    most: ClassVar[int] = 64

    def adjust_scores(self, scores, q, k, *, visible, params, xp):
        own = self if scores.shape[-1] <= self.most else replace(self, strength=1.0)
        return Adjusting.adjust_scores(own, scores, q, k, visible=visible, params=params, xp=xp)


@dataclass(frozen=True)
class LongerAdjusting(LongAdjusting):
    """Likewise, of more than 512 keys."""

    most: ClassVar[int] = 512


@dataclass(frozen=True)
class ManyAdjusting(Adjusting):
    """Another strength for more than 64 queries."""

    def adjust_scores(self, scores, q, k, *, visible, params, xp):
        own = self if scores.shape[-2] <= 64 else replace(self, strength=1.0)
        return Adjusting.adjust_scores(own, scores, q, k, visible=visible, params=params, xp=xp)


@dataclass(frozen=True)
class FarAdjusting(Adjusting):
    """NaN from position 4096 on."""

    def means(self, scores, q, k, visible, xp):
        found = super().means(scores, q, k, visible, xp)
        return xp.where(q < 4096, found, xp.nan * found)


@dataclass(frozen=True)
class CrowdedAdjusting(Adjusting):
    """The mean of a batch, from three sequences on."""

    def means(self, scores, q, k, visible, xp):
        own = super().means(scores, q, k, visible, xp)
        return own if own.shape[0] < 3 else xp.mean(own, axis=0, keepdims=True) + 0 * own


@dataclass(frozen=True)
class AcrossQueries(Adjusting):
    """The mean of all queries."""

    def means(self, scores, q, k, visible, xp):
        own = super().means(scores, q, k, visible, xp)
        return xp.mean(own, axis=-2, keepdims=True) + 0 * own


# Wrong decays of channels.


@dataclass(frozen=True)
class Fall(PositionScheme):
    """Right, to begin with: all channels of a head fall with distance."""

    def param_specs(self):
        return {"rates": ParamSpec((HEADS,), uniform(0.01, 0.02))}

    def channel_decay(self, q, k, *, params, xp):
        rates = params["rates"]
        return self.of(-rates * xp.astype(q - k, rates.dtype), xp)

    def of(self, fall, xp):
        return fall


@dataclass(frozen=True)
class FallByPower(Fall):
    """As a power of distance, which is no sum along the way."""

    def of(self, fall, xp):
        return -xp.log1p(xp.abs(fall))


@dataclass(frozen=True)
class Rise(Fall):
    """Scores grow with distance."""

    def of(self, fall, xp):
        return -fall


@dataclass(frozen=True)
class FallEnding(Fall):
    """Infinite far away."""

    def of(self, fall, xp):
        return xp.where(fall > -5000, fall, -xp.inf)


# Wrong sinks, and factors of the bias.


@dataclass(frozen=True)
class Sinking(Ours):
    """A sink that falls with the position of its query: right, to begin with."""

    def sink(self, q, *, params, xp):
        return self.of(xp.astype(q, params["slopes"].dtype), xp)

    def of(self, at, xp):
        return 1 - xp.abs(at) / (1 + xp.abs(at))


@dataclass(frozen=True)
class SinkOfOthers(Sinking):
    """A sink that looks at the mean of all queries."""

    def of(self, at, xp):
        return super().of(at - xp.mean(at, axis=-2, keepdims=True), xp)


@dataclass(frozen=True)
class SinkOfMany(Sinking):
    """Another sink for more than 64 queries."""

    def of(self, at, xp):
        return super().of(at, xp) * (1 if length(at, -2) <= 64 else 2)


@dataclass(frozen=True)
class SinkOfBatch(Sinking):
    """The sinks of the first sequence, from three on."""

    def of(self, at, xp):
        return super().of(at if length(at, -4) < 3 else at[:1, ...] + 0 * at, xp)


@dataclass(frozen=True)
class SinkEnding(Sinking):
    """NaN from position 4096 on."""

    def of(self, at, xp):
        return super().of(at, xp) * xp.where(at < 4096, xp.ones_like(at), xp.nan)


@dataclass(frozen=True)
class SinkOnce(Sinking):
    """NaN at one position."""

    def of(self, at, xp):
        return super().of(at, xp) * xp.where(at == 3001, xp.nan * at, xp.ones_like(at))


@dataclass(frozen=True)
class Factor(LogScale):
    """A factor of the bias, right to begin with."""

    def bias_factor(self, q, *, params, xp):
        return self.of(super().bias_factor(q, params=params, xp=xp), q, xp)

    def of(self, found, q, xp):
        return found


@dataclass(frozen=True)
class FactorOfOthers(Factor):
    """Relative to the factor of the first query."""

    def of(self, found, q, xp):
        return found + (found[..., -1:, :] - found[..., :1, :]) if length(q, -2) > 1 else found


@dataclass(frozen=True)
class FactorOfMany(Factor):
    """Another factor for more than 64 queries."""

    def of(self, found, q, xp):
        return found if length(q, -2) <= 64 else 2 * found


@dataclass(frozen=True)
class FactorBelowZero(Factor):
    """Negative from 5000 on."""

    def of(self, found, q, xp):
        return xp.where(q < 5000, found, -found)


# Wrong seldom.


@dataclass(frozen=True)
class Ends(posenc.T5Bias):
    """Constant from a distance on, as it says, but for some distances."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return xp.where(self.untrue(xp.abs(q - k)), 2 * found, found)

    def untrue(self, distance):
        return (distance > 5000) & (distance < 8000)


@dataclass(frozen=True)
class EndsOften(Ends):
    """Another bias at every hundredth distance."""

    def untrue(self, distance):
        return (distance % 100 == 37) & (distance > 128)


@dataclass(frozen=True)
class EndsFar(Ends):
    """Another bias between 300 000 and 400 000."""

    def untrue(self, distance):
        return (distance > 300_000) & (distance < 400_000)


@dataclass(frozen=True)
class KeysOften(Ours):
    """A key bias that is untrue at every hundredth key."""

    def key_bias(self, k, *, params, xp):
        found = super().key_bias(k, params=params, xp=xp)
        return xp.where(k % 100 == 37, 1.5 * found, found)


@dataclass(frozen=True)
class KeysOfMany(Ours):
    """Another key bias for more than 100 000 keys."""

    def key_bias(self, k, *, params, xp):
        found = super().key_bias(k, params=params, xp=xp)
        return found if length(k) <= 100_000 else 1.5 * found


@dataclass(frozen=True)
class AbsoluteOften(Decay):
    """Not relative at every hundredth distance."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return xp.where(((q - k) % 100 == 61) & (q % 3 == 1), 1.5 * found, found)


@dataclass(frozen=True)
class OnceNaN(Decay):
    """NaN at one distance."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return xp.where(xp.abs(q - k) == 3001, xp.nan * found, found)


@dataclass(frozen=True)
class OnceNaNTurn(posenc.RoPE):
    """NaN at one position."""

    def transform(self, x, pos, *, role, params, xp):
        found = super().transform(x, pos, role=role, params=params, xp=xp)
        return xp.where((pos == 777)[..., None], xp.nan * found, found)


# Wrong in rows of thousands.


@dataclass(frozen=True)
class Row5000(Decay):
    """Another bias in rows of more than 5000 keys."""

    most: ClassVar[int] = 5000

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return found if length(k) <= self.most else 1.5 * found


@dataclass(frozen=True)
class Row100000(Row5000):
    """Likewise, of more than 100 000."""

    most: ClassVar[int] = 100_000


@dataclass(frozen=True)
class Column5000(Decay):
    """Another bias for more than 5000 queries."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return found if length(q, -2) <= 5000 else 1.5 * found


@dataclass(frozen=True)
class Turn5000(posenc.RoPE):
    """Turned otherwise in sequences of more than 5000 tokens."""

    def transform(self, x, pos, *, role, params, xp):
        at = pos if x.shape[-2] <= 5000 else 2 * pos
        return super().transform(x, at, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class Embedding5000(posenc.Sinusoidal):
    """Less of it in sequences of more than 5000 tokens."""

    def embedding(self, pos, *, params, xp):
        found = super().embedding(pos, params=params, xp=xp)
        return found if pos.shape[-1] <= 5000 else found / 2


@dataclass(frozen=True)
class Gate5000(Fading):
    """Other gates in sequences of more than 5000 tokens."""

    def log_gates(self, x, *, params, xp):
        found = super().log_gates(x, params=params, xp=xp)
        return found if x.shape[-2] <= 5000 else found / 2


# Wrong in wide heads, and one token at a time.


@dataclass(frozen=True)
class WideByIndex(posenc.RoPE):
    """Turned by the place in memory, in heads of more than 8 channels."""

    def transform(self, x, pos, *, role, params, xp):
        places = 0 * pos + xp.arange(x.shape[-2], dtype=pos.dtype)
        at = pos if x.shape[-1] <= 8 else places
        return super().transform(x, at, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class WideMean(PositionScheme):
    """Less the mean of the tokens, in heads of more than 8 channels; it has no head_dim."""

    def transform(self, x, pos, *, role, params, xp):
        return x if x.shape[-1] <= 8 else x - xp.mean(x, axis=-2, keepdims=True)


@dataclass(frozen=True)
class WideNeighbours(Shaw):
    """A feature of the query that stands before, in heads of more than 64 channels."""

    def _of_distances(self, q, pos, *, scale, params, xp):
        if q.shape[-1] > 64:
            q = xp.concat([q[:, :, :1, :], q[:, :, :-1, :]], axis=2)
        return super()._of_distances(q, pos, scale=scale, params=params, xp=xp)


@dataclass(frozen=True)
class OneByOne(posenc.RoPE):
    """The position of the first sequence for all, where each has one token."""

    def transform(self, x, pos, *, role, params, xp):
        if x.shape[-2] == 1 and pos.ndim > 1:
            pos = pos[:1, ...] + 0 * pos
        return super().transform(x, pos, role=role, params=params, xp=xp)


# Case -> scheme, by the name of the law that tells.
@dataclass(frozen=True)
class FirstRow(posenc.RoPE):
    """A fast path for one token per sequence, which takes the position of the first sequence."""

    def transform(self, x, pos, *, role, params, xp):
        if x.shape[-2] == 1 and role == "query":
            pos = xp.broadcast_to(pos[:1, ...], pos.shape)
            sin, cos = self.sincos(pos[..., None], params, dtype=xp.float32, xp=xp)
            return rotate(x, sin, cos, layout=self.layout, xp=xp)
        return super().transform(x, pos, role=role, params=params, xp=xp)


WRONG: dict[str, PositionScheme] = {
    "rows_of_one_token_have_positions_of_their_own": FirstRow(HEAD_DIM),
    "each_pair_is_in_one_region (overlap at 64)": Meeting(far=64),
    "each_pair_is_in_one_region (gap at 64)": Meeting(near=63),
    "each_pair_is_in_one_region (overlap far)": Meeting(near=2**20 + 700, far=2**20 + 700),
    "each_pair_is_in_one_region (gap far)": Meeting(near=70_000, far=70_002),
    "each_pair_is_in_one_region (chunks)": Skipping(HEAD_DIM, 2048),
    "each_pair_is_in_one_region (nested)": Within(),
    "adjusted_rows_read_what_they_see (window)": ThroughWindows(),
    "adjusted_rows_read_what_they_see (mask)": ThroughMasks(),
    "adjusted_rows_read_what_they_see (queries)": AcrossQueries(),
    "adjusted_rows_may_be_long (64 keys)": LongAdjusting(),
    "adjusted_rows_may_be_long (512 keys)": LongerAdjusting(),
    "adjusted_rows_may_be_long (64 queries)": ManyAdjusting(),
    "adjusted_rows_may_be_long (NaN far)": FarAdjusting(),
    "adjusted_rows_may_be_long (batch)": CrowdedAdjusting(),
    "channel_decay_adds_up (power)": FallByPower(),
    "channel_decay_adds_up (rising)": Rise(),
    "channel_decay_adds_up (infinite)": FallEnding(),
    "sink_and_bias_factor_are_query_local (other queries)": SinkOfOthers(HEADS),
    "sink_and_bias_factor_are_query_local (64 queries)": SinkOfMany(HEADS),
    "sink_and_bias_factor_are_query_local (batch)": SinkOfBatch(HEADS),
    "sink_and_bias_factor_are_query_local (NaN far)": SinkEnding(HEADS),
    "sink_and_bias_factor_are_query_local (NaN once)": SinkOnce(HEADS),
    "sink_and_bias_factor_are_query_local (factor)": FactorOfOthers("inkling", 4),
    "sink_and_bias_factor_are_query_local (factor of many)": FactorOfMany("inkling", 4),
    "sink_and_bias_factor_are_query_local (negative)": FactorBelowZero("inkling", 4),
    "constant_beyond_is_as_claimed (band)": Ends(HEADS),
    "constant_beyond_is_as_claimed (every hundredth)": EndsOften(HEADS),
    "constant_beyond_is_as_claimed (far band)": EndsFar(HEADS),
    "key_bias_is_as_claimed (every hundredth)": KeysOften(HEADS),
    "relative_is_as_claimed (every hundredth)": AbsoluteOften(),
    "bias_is_finite_or_masks (once)": OnceNaN(),
    "tokens_far_away_are_finite (once)": OnceNaNTurn(HEAD_DIM),
    "tile_is_slice (5000 keys)": Row5000(),
    "tile_is_slice (100 000 keys)": Row100000(),
    "tile_is_slice (5000 queries)": Column5000(),
    "tile_is_slice (100 000 keys of a key_bias)": KeysOfMany(HEADS),
    "transform_is_row_local (5000 tokens)": Turn5000(HEAD_DIM),
    "embedding_is_one_row_per_position (5000 tokens)": Embedding5000(HEAD_DIM),
    "features_are_row_local (5000 tokens)": Gate5000(),
    "transform_is_row_local (wide heads)": WideByIndex(HEAD_DIM),
    "transform_is_row_local (wide heads, any)": WideMean(),
    "features_are_row_local (wide heads)": WideNeighbours(HEAD_DIM),
    "one_token_per_sequence_equals_prefill": OneByOne(HEAD_DIM),
}


def by_hand(q, k, v, *parts, sinks=()):
    """Causal attention where each part turns the keys at distances below its own."""
    pos = np.arange(q.shape[2])
    distance, scores = pos[:, None] - pos[None, :], np.full((*q.shape[:3], pos.size), -np.inf)
    for scheme, low, high in parts:
        turned = (posenc.transform(scheme, a, pos, role=r) for a, r in ((q, "query"), (k, "key")))
        one, other = turned
        own = one @ np.swapaxes(other, -1, -2) / math.sqrt(q.shape[-1])
        scores = np.where((distance >= low) & (distance < high), own, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    off = sum(np.exp(sink - scores.max(axis=-1, keepdims=True)) for sink in sinks)
    return weights @ v / (weights.sum(axis=-1, keepdims=True) + off)


ROPE, OTHER = posenc.RoPE(HEAD_DIM), posenc.RoPE(HEAD_DIM, base=100.0)
# What a region's scheme does beyond a transform and a bias: the scheme, and its attention.
NESTED: dict[str, Any] = {
    "regions": (
        NearAlone(Halves()),
        lambda q, k, v: by_hand(q, k, v, (ROPE, 0, 42), (OTHER, 42, 60), (ROPE, 60, 90)),
    ),
    "a sink": (
        NearAlone(Sink(OTHER, learned=False, value=1.5)),
        lambda q, k, v: by_hand(q, k, v, (OTHER, 0, 60), (ROPE, 60, 90), sinks=(1.5,)),
    ),
}

# Biases that are large against the unit of float32.


@dataclass(frozen=True)
class Steps(PositionScheme, relative=True):
    """``-m (|i - j| // 4)``: keys of a step share a bias of some thousands, and its rounding."""

    def param_specs(self):
        return {"m": ParamSpec((HEADS,), uniform(0.9e4, 1e4))}

    def bias(self, q, k, *, params, xp):
        m = params["m"]
        return -m * xp.astype(xp.abs(q - k) // 4, m.dtype)


# What these began with, and others of the same kinds that are right.
RIGHT: dict[str, PositionScheme] = {
    "regions that meet": Meeting(),
    "regions that meet further away": Meeting(near=100, far=101),
    "regions and chunks": Sum(ReRoPE(HEAD_DIM, window=100), Chunk(50)),
    "adjusted scores": Adjusting(),
    "channels that fall": Fall(),
    "a sink of positions": Sinking(HEADS),
    "a sink around regions": Sink(DualChunk(HEAD_DIM, 256), HEADS, value=0.5),
    "steps of 1e4": Steps(),
    "tides of 1e4": Tide(strengths=(1e4, -1e4, 1.0, 2e4)),
    "slopes of 1e4": posenc.ALiBi(HEADS, slopes=[1e4, 5e3, 1.0, 2e4]),
    "slopes of 1e4 upwards": posenc.ALiBi(HEADS, slopes=[-1e4] * HEADS),
    "learned slopes of 1e4": posenc.ALiBi(
        HEADS, slopes=[1e4] * HEADS, learned=True, noncausal="two_sided"
    ),
    "a factor": Sum(Factor("inkling", 4), posenc.ALiBi(HEADS)),
}
