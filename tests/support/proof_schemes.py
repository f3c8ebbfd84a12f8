"""Schemes of others' that show what the contract can say, each as short as it can be.

``tests/core/test_what_schemes_can_say.py`` holds each against its formula; every law is tried on
all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import posenc
from posenc import ParamSpec, PositionScheme
from posenc.schemes import Sink, Sum

HEADS, DIM, WIDTH = 4, 8, 6


def uniform(low, high):
    return lambda rng, shape: rng.uniform(low, high, shape)


def log_sigmoid(z, xp):
    return xp.minimum(z, xp.zeros_like(z)) - xp.log1p(xp.exp(-xp.abs(z)))


@dataclass(frozen=True)
class Forgetting(PositionScheme):
    """Gates ``log sigmoid(w x + b)``, as in FoX; the bias is the difference of their sums."""

    cumulative: ClassVar[tuple[str, ...]] = ("c",)
    num_heads: int = HEADS

    def param_specs(self):
        return {
            "w": ParamSpec((self.num_heads, WIDTH), init=uniform(-1, 1)),
            "b": ParamSpec((self.num_heads,), init=uniform(0, 2)),
        }

    def hidden_features(self, x, *, role, params, xp):
        return {"c": self.gates(x, params, xp)} if role == "key" else {}

    def gates(self, x, params, xp):
        z = xp.matmul(x, xp.matrix_transpose(params["w"])) + params["b"]
        return xp.matrix_transpose(log_sigmoid(z, xp))

    def bias(self, q, k, *, params, xp):
        return params.query["c"] - params.key["c"]

    def key_bias(self, k, *, params, xp):
        return -params.key["c"]


@dataclass(frozen=True)
class Fading(Forgetting):
    """Gates, with a bias in which softmax can see the query's own sum."""

    def bias(self, q, k, *, params, xp):
        return -2 * xp.log1p(xp.abs(params.query["c"] - params.key["c"]))

    def key_bias(self, k, *, params, xp):
        return None


@dataclass(frozen=True)
class Shaw(PositionScheme):
    """Shaw et al. 2018: a learned vector for each distance up to ``reach``, seen by the query."""

    relative: ClassVar[bool] = True
    head_dim: int = DIM
    reach: int = 3

    def param_specs(self):
        shape = (2 * self.reach + 1, self.head_dim)
        return {"table": ParamSpec(shape, uniform(-1, 1), per_head=False)}

    def query_features(self, q, pos, *, scale, params, xp):
        return {"r": scale * xp.matmul(q, xp.matrix_transpose(params["table"]))}

    def bias(self, q, k, *, params, xp):
        return params.query["r"][xp.clip(k - q, -self.reach, self.reach) + self.reach]


@dataclass(frozen=True)
class TransformerXL(PositionScheme):
    """Dai et al. 2019: ``(q + u) k + (q + v) W r(i - j)``, with sinusoids ``r``."""

    relative: ClassVar[bool] = True
    num_heads: int = HEADS
    head_dim: int = DIM
    longest: int = 24

    def param_specs(self):
        h, d = self.num_heads, self.head_dim
        return {
            "u": ParamSpec((h, d), uniform(-1, 1)),
            "v": ParamSpec((h, d), uniform(-1, 1)),
            "w": ParamSpec((h, d, d), uniform(-0.5, 0.5)),
        }

    def transform(self, x, pos, *, role, params, xp):
        if role == "key":
            return x
        u = params["u"][:]
        return xp.astype(xp.astype(x, u.dtype) + u, x.dtype)

    def query_features(self, q, pos, *, scale, params, xp):
        far = xp.arange(self.longest, dtype=xp.int32, device=posenc_device(q))
        r = posenc.embedding(posenc.Sinusoidal(self.head_dim), far, dtype=q.dtype, xp=xp)
        mixed = xp.matmul(q + params["v"][:, None, :], params["w"])
        return {"r": scale * xp.matmul(mixed, xp.matrix_transpose(r))}

    def bias(self, q, k, *, params, xp):
        return params.query["r"][xp.clip(q - k, 0, self.longest - 1)]


def posenc_device(array):
    from array_api_compat import device

    return device(array)


@dataclass(frozen=True)
class KeySide(PositionScheme):
    """DeBERTa's other half: ``k . t(clip(i - j))``, a table of each key."""

    relative: ClassVar[bool] = True
    head_dim: int = DIM
    reach: int = 4

    def param_specs(self):
        return {"t": ParamSpec((2 * self.reach, self.head_dim), uniform(-1, 1), per_head=False)}

    def key_features(self, k, pos, *, scale, params, xp):
        return {"t": scale * xp.matmul(k, xp.matrix_transpose(params["t"]))}

    def bias(self, q, k, *, params, xp):
        return params.key["t"][xp.clip(q - k + self.reach, 0, 2 * self.reach - 1)]


@dataclass(frozen=True)
class Inkling(PositionScheme):
    """A feature of the query's hidden state times a learned table of distances up to ``extent``."""

    relative: ClassVar[bool] = True
    num_heads: int = HEADS
    rank: int = 3
    extent: int = 5

    def param_specs(self):
        return {
            "w": ParamSpec((self.num_heads, self.rank, WIDTH), uniform(-1, 1)),
            "p": ParamSpec((self.rank, self.extent), uniform(-1, 1), per_head=False),
        }

    def hidden_features(self, x, *, role, params, xp):
        if role == "key":
            return {}
        r = xp.matmul(x[:, None, :, :], xp.matrix_transpose(params["w"]))
        return {"r": xp.matmul(r, params["p"])}

    def bias(self, q, k, *, params, xp):
        found = params.query["r"][xp.clip(q - k, 0, self.extent - 1)]
        return xp.where((q >= k) & (q - k < self.extent), found, 0.0)


@dataclass(frozen=True)
class Selective(PositionScheme):
    """Angles from hidden states, summed up to a token, as in Selective RoPE."""

    cumulative: ClassVar[tuple[str, ...]] = ("angle",)
    num_heads: int = HEADS
    head_dim: int = DIM

    def param_specs(self):
        shape = (self.num_heads, self.head_dim // 2, WIDTH)
        return {"w": ParamSpec(shape, uniform(-0.5, 0.5))}

    def hidden_features(self, x, *, role, params, xp):
        if role == "query":
            return {}
        return {"angle": xp.matmul(x[:, None, :, :], xp.matrix_transpose(params["w"]))}

    def transform(self, x, pos, *, role, params, xp):
        angle = params.of(role)["angle"]
        sin, cos = xp.sin(angle), xp.cos(angle)
        wide = xp.astype(x, angle.dtype)
        a, b = wide[..., : self.head_dim // 2], wide[..., self.head_dim // 2 :]
        return xp.astype(xp.concat([a * cos - b * sin, b * cos + a * sin], axis=-1), x.dtype)


@dataclass(frozen=True)
class Axial(PositionScheme):
    """Half of the channels turned by the first coordinate, half by the second."""

    axes: ClassVar[int] = 2
    head_dim: int = DIM

    def transform(self, x, pos, *, role, params, xp):
        half, own = self.head_dim // 2, posenc.RoPE(self.head_dim // 2)
        parts = (
            own.transform(x[..., part], pos[..., axis], role=role, params=params, xp=xp)
            for axis, part in enumerate((slice(half), slice(half, None)))
        )
        return xp.concat(list(parts), axis=-1)


@dataclass(frozen=True)
class Streets(PositionScheme):
    """ALiBi on a plane: a slope times the sum of the distances along both axes."""

    axes: ClassVar[int] = 2
    relative: ClassVar[bool] = True
    slopes: tuple[float, ...] = (0.5, 0.25, 0.125, 1.0)

    def constants(self):
        return {"slopes": self.slopes}

    def bias(self, q, k, *, params, xp):
        m = params["slopes"]
        away = (
            xp.astype(xp.abs(params.query["places"][axis] - params.key["places"][axis]), m.dtype)
            for axis in (0, 1)
        )
        return -m * sum(away)


@dataclass(frozen=True)
class CoPE(PositionScheme):
    """Golovneva et al. 2024: positions counted by gates of the scores, over whole rows."""

    head_dim: int = DIM
    most: int = 6

    def param_specs(self):
        return {"e": ParamSpec((self.most, self.head_dim), uniform(-1, 1), per_head=False)}

    def query_features(self, q, pos, *, scale, params, xp):
        return {"e": xp.matmul(q, xp.matrix_transpose(params["e"]))}

    def adjust_scores(self, scores, q, k, *, visible, params, xp):
        gates = 1 / (1 + xp.exp(-scores))
        # In the order of positions, whatever the order in memory.
        after = xp.astype((k[..., None, :] >= k[..., :, None]) & (q == q)[..., None], gates.dtype)
        gates = gates if visible is None else xp.where(visible, gates, 0.0)
        counted = xp.clip(xp.sum(gates[..., None, :] * after, axis=-1), max=self.most - 1)
        low = xp.floor(counted)
        part, at = counted - low, xp.astype(low, xp.int32)
        table = params.query["e"]
        return scores + table[at] * (1 - part) + table[xp.clip(at + 1, max=self.most - 1)] * part


@dataclass(frozen=True)
class AsIfAt(PositionScheme):
    """Keys as they are, and queries turned as if all were ``away`` tokens after them."""

    head_dim: int = DIM
    away: int = 4

    def transform(self, x, pos, *, role, params, xp):
        if role == "key":
            return x
        turned = posenc.RoPE(self.head_dim).transform
        return turned(x, 0 * pos + self.away, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class ReRoPE(PositionScheme):
    """Distances from ``window`` on are as if they were ``window``."""

    head_dim: int = DIM
    window: int = 4

    def regions(self):
        near, far = posenc.RoPE(self.head_dim), AsIfAt(self.head_dim, self.window)
        return ((near, (self.window - 1, None)), (far, (None, -self.window)))


PROOFS: dict[str, PositionScheme] = {
    "forgetting": Forgetting(),
    "fading": Fading(),
    "shaw": Shaw(),
    "transformer-xl": TransformerXL(),
    "key-side": KeySide(),
    "inkling": Inkling(),
    "selective": Selective(),
    "axial": Axial(),
    "streets": Streets(),
    "cope": CoPE(),
    "rerope": ReRoPE(),
    "forgetting+alibi": Sum(Forgetting(), posenc.ALiBi(HEADS)),
    "rope+alibi": Sum(posenc.RoPE(DIM), posenc.ALiBi(HEADS)),
    "rope+key-side": Sum(posenc.RoPE(DIM), KeySide()),
    "sink": Sink(posenc.ALiBi(HEADS)),
    "sink-of-queries": Sink(posenc.NoPE(), HEADS, per_query=True, hidden_dim=WIDTH),
    "sink-off-by-one": Sink(posenc.RoPE(DIM), learned=False),
}
