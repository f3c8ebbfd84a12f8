"""What a bias reads, recorded while tracing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import Call, Features, Params, Role, has_bias_by_key, head_views, tile_views
from posenc_jax.fused.float_positions import exact_in_float32
from posenc_jax.fused.shapes import array_type


class BiasReads(NamedTuple):
    """What an elementwise bias reads.

    Attributes
    ----------
    trainable, fixed
        Names of per-head scalars, in the order of the columns of ``Operands.head_scalars``.
    query, key
        Names of the features of each side; kernels take at most one.
    float_positions
        Whether kernels give the bias its positions as float32, which is as exact here and needs no
        conversion for every pair. A mask compares integers all the same.
    by_key
        Whether kernels may add ``w(k - q0)`` instead of the bias, one number per key of a tile
        whose first query is at ``q0``. For a relative ``bias(q, k) = u(q) + w(k)`` that leaves out
        ``u(q - q0)``, a number per query that softmax does not see. Small, because ``q0`` is near.
    """

    trainable: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    float_positions: bool = False
    by_key: bool = False

    @property
    def scalars(self) -> tuple[str, ...]:
        """The params and constants, trainable ones first."""
        return self.trainable + self.fixed

    @property
    def q_feature(self) -> str | None:
        """The feature per query, or None."""
        return self.query[0] if self.query else None

    @property
    def k_feature(self) -> str | None:
        """The feature per key, or None."""
        return self.key[0] if self.key else None


def trace_bias_reads(call: Call) -> BiasReads:
    """What the bias of a call reads, recorded while tracing it at one pair."""
    params: list[str] = []
    recorded: dict[str, list[str]] = {"query": [], "key": []}
    roles: tuple[Role, Role] = ("query", "key")

    class RecordingParams(Params):
        def __getitem__(self, name: str) -> Array:
            params.append(name)
            value: Array = super().__getitem__(name)
            return value

    class RecordingFeatures(Features):
        def __getitem__(self, name: str) -> Array:
            value: Array = super().__getitem__(name)
            recorded[self._role].append(name)
            return value

    def bias(
        q: Array,
        k: Array,
        arrays: Mapping[str, Array],
        *features: Mapping[str, Array],
    ) -> Array | None:
        views = head_views(call.scheme, arrays, dtype=call.dtype, xp=jnp)
        sides = (
            RecordingFeatures(tile_views(own, role, xp=jnp), role)
            for own, role in zip(features, roles, strict=True)
        )
        return call.scheme.bias(q, k, params=RecordingParams(views, call.dtype, *sides), xp=jnp)

    def at_one_token(side: Mapping[str, Array]) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: array_type((1, 1, 1, *a.shape[3:]), a.dtype) for name, a in side.items()}

    pos = array_type((1, 1, 1, 1), call.key.pos.dtype)
    sides = (at_one_token(side.features) for side in (call.query, call.key))
    traced = jax.make_jaxpr(bias)(pos, pos, dict(call.arrays), *sides)
    furthest = max(call.q.shape[2], call.k.shape[2])  # of default positions
    bounds = [furthest] * 2 + [None] * (len(traced.jaxpr.invars) - 2)
    specs, names = call.scheme.param_specs(), tuple(dict.fromkeys(params))
    float_positions = call.aligned and exact_in_float32(traced, bounds)
    return BiasReads(
        trainable=tuple(name for name in names if name in specs),
        fixed=tuple(name for name in names if name not in specs),
        query=tuple(dict.fromkeys(recorded["query"])),
        key=tuple(dict.fromkeys(recorded["key"])),
        float_positions=float_positions,
        by_key=float_positions and _has_key_bias(call, names, furthest),
    )


def _has_key_bias(call: Call, names: Sequence[str], furthest: int) -> bool:
    """Whether a key bias of differences of positions may replace the bias that reads ``names``."""
    if not (has_bias_by_key(call) and call.scheme.relative):
        return False

    def key_bias(k: Array, arrays: Mapping[str, Array]) -> Array | None:
        views = head_views(call.scheme, arrays, dtype=call.dtype, xp=jnp)
        only = Params({name: views[name] for name in names}, call.dtype)
        value: Array | None = call.scheme.key_bias(k, params=only, xp=jnp)
        return value

    pos = array_type((1, 1, 1, 1), call.key.pos.dtype)
    try:
        traced = jax.make_jaxpr(key_bias)(pos, dict(call.arrays))
    except KeyError:  # it reads features, whose sums may be large, or more params than the bias
        return False
    exact = exact_in_float32(traced, [furthest] + [None] * (len(traced.jaxpr.invars) - 1))
    return exact and len(traced.jaxpr.outvars) == 1


def why_not_elementwise(call: Call, reads: BiasReads) -> str | None:
    """Why a bias needs more than per-head scalars and one scalar per token; None if it does not."""
    name = f"the bias of {type(call.scheme).__name__}"
    specs = call.scheme.param_specs()
    if any(len(specs[n].shape) > (1 if specs[n].per_head else 0) for n in reads.trainable):
        return f"{name} reads params of more than one number per head"
    sides: tuple[tuple[Role, Mapping[str, Array], tuple[str, ...]], ...] = (
        ("query", call.query.features, reads.query),
        ("key", call.key.features, reads.key),
    )
    for role, features, names in sides:
        for each in names:
            if features[each].ndim != 3:
                return f"{name} reads a table per {role}, {each!r}; kernels take one number"
        if len(names) > 1:
            several = f"{len(names)} numbers per {role}, {', '.join(names)}"
            return f"{name} reads {several}; kernels take one"
    return None
