"""Schemes for fused kernels that reach what those of ``subjects`` do not."""

from __future__ import annotations

from dataclasses import dataclass

from subjects import HEADS, WIDTH, Forgetting, uniform

import posenc
from posenc import ParamSpec, PositionScheme
from posenc.schemes import Sink, Sum


@dataclass(frozen=True)
class Leaning(PositionScheme):
    """One number of each token of one side, from its hidden state, times a learned tenth of the
    distance: the bias reads a feature, positions and a param at once.
    """

    side: str = "key"
    num_heads: int = HEADS

    def param_specs(self):
        return {
            "w": ParamSpec((self.num_heads, WIDTH), init=uniform(-1, 1)),
            "m": ParamSpec((self.num_heads,), init=uniform(0.1, 0.3)),
        }

    def hidden_features(self, x, *, role, params, xp):
        if role != self.side:
            return {}
        return {"lean": xp.matrix_transpose(xp.matmul(x, xp.matrix_transpose(params["w"])))}

    def bias(self, q, k, *, params, xp):
        m, lean = params["m"], params.of(self.side)["lean"]
        return lean * m * xp.astype(q - k, m.dtype) / 10 + lean / 4


@dataclass(frozen=True)
class Wide(PositionScheme):
    """What no kernel reads: a table of each key, or two numbers of it."""

    table: bool = True

    def key_features(self, k, pos, *, scale, params, xp):
        return {"t": k} if self.table else {"a": k[..., 0], "b": k[..., 1]}

    def bias(self, q, k, *, params, xp):
        key = params.key
        return key["t"][0] if self.table else key["a"] + key["b"]


@dataclass(frozen=True)
class Level(PositionScheme):
    """The bias of ALiBi at one distance, at all of them."""

    num_heads: int = HEADS
    distance: int = 5

    def param_specs(self):
        return {"slopes": ParamSpec((self.num_heads,), init=uniform(0.1, 0.3))}

    def bias(self, q, k, *, params, xp):
        return -params["slopes"] * self.distance


@dataclass(frozen=True)
class Levelled(Level):
    """ALiBi for near keys, and one bias for all far ones, as ReRoPE does with rotations."""

    def bias(self, q, k, *, params, xp):
        raise AssertionError("each region has its own")

    def regions(self):
        near = posenc.ALiBi(self.num_heads, learned=True)
        far = Level(self.num_heads, self.distance)
        return (near, (self.distance - 1, None)), (far, (None, -self.distance))


def fox_alibi(num_heads: int = HEADS) -> PositionScheme:
    """FoX and ALiBi with learned slopes: sums of gates, positions and a learned number a head."""
    return Sum(Forgetting(num_heads), posenc.ALiBi(num_heads, learned=True))


def sunk(scheme: PositionScheme) -> PositionScheme:
    """With a learned sink, 0.5 at first."""
    return Sink(scheme, value=0.5)
