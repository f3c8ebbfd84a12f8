"""What a fused kernel computes from: a call cut into blocks, its bias in a form a kernel can take.

A bias reaches a kernel in one of two forms. *Pairs*: the scheme's own ``bias`` on a tile, with one
number a head of each param, and at most one number of each query and one of each key; so ALiBi,
KERPLE, FoX and their sums. *Table*: its values by distance, so T5 at consecutive positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc.backend import (
    Call,
    Features,
    Namespace,
    Params,
    PositionScheme,
    Role,
    Window,
    bias_by_distance,
    head_views,
    negligible_blocks,
    tile_views,
    visible,
    visible_blocks,
)

Form: TypeAlias = Literal["none", "pairs", "table"]

HIDDEN = -1e30  # a score that may not be seen
FLOOR = HIDDEN / 2  # the highest score before the first: what is hidden has weight 0 beside it


class Tokens(NamedTuple):
    """Queries or keys of a tile, as a bias reads them: positions, and one number each, or None."""

    pos: Array
    feature: Array | None = None


@dataclass(frozen=True)
class Plan:
    """What is static in a call.

    Attributes
    ----------
    scheme, causal, window, sink_tokens, scale
        As in ``posenc.attn.call.Call``.
    form
        How the bias arrives.
    learned, fixed
        Names of params that learn and that do not, one number a head each, in the order of the
        columns of ``Operands.numbers``.
    q_reads, k_reads
        Name of the feature that the bias reads of queries, and of keys, or None.
    aligned
        Query ``i`` stands at ``k_len - q_len + i``, key ``j`` at ``j``; no positions are given.
    q_len, k_len, block
        Lengths without padding; so many queries, and so many keys, make a block.
    """

    scheme: PositionScheme
    form: Form
    learned: tuple[str, ...]
    fixed: tuple[str, ...]
    q_reads: str | None
    k_reads: str | None
    causal: bool
    window: Window | None
    sink_tokens: int
    scale: float
    aligned: bool
    q_len: int
    k_len: int
    block: int

    @classmethod
    def trial(cls, scheme: PositionScheme, read: Read, size: int) -> Plan:
        """One block of a bias in the form ``"pairs"``, to see whether that can be lowered."""
        return cls(
            scheme=scheme, form="pairs", learned=read.learned, fixed=read.fixed,
            q_reads=_first(read.query), k_reads=_first(read.key), causal=False, window=None,
            sink_tokens=0, scale=1.0, aligned=True, q_len=size, k_len=size, block=size,
        )  # fmt: skip

    @property
    def q_blocks(self) -> int:
        """How many blocks the queries make."""
        return -(-self.q_len // self.block)

    @property
    def k_blocks(self) -> int:
        """How many blocks the keys make."""
        return -(-self.k_len // self.block)

    @property
    def hides_padding(self) -> bool:
        """Whether padded keys must be hidden: aligned and causal, no query that counts sees one."""
        return self.k_len % self.block != 0 and not (self.aligned and self.causal)

    def bias(self, numbers: Sequence[Array], q: Tokens, k: Tokens, xp: Namespace = jnp) -> Array:
        """The bias on a tile, from one head's numbers, positions and features."""
        named = Params(
            dict(zip(self.learned + self.fixed, numbers, strict=True)),
            jnp.float32,
            Features({} if self.q_reads is None else {self.q_reads: q.feature}, "query"),
            Features({} if self.k_reads is None else {self.k_reads: k.feature}, "key"),
        )
        found = self.scheme.bias(q.pos, k.pos, params=named, xp=xp)
        assert found is not None
        return found

    def seen(
        self,
        q_pos: Array,
        k_pos: Array,
        k_index: Array,
        q_seg: Array | None = None,
        k_seg: Array | None = None,
    ) -> Array | None:
        """Which pairs of a tile are visible; None if all are."""
        found = visible(
            q_pos, k_pos, q_seg, k_seg,
            causal=self.causal, window=self.window, sink_tokens=self.sink_tokens,
        )  # fmt: skip
        if not self.hides_padding:
            return found
        real = k_index < self.k_len
        return real if found is None else found & real


class Operands(NamedTuple):
    """The arrays of a call, padded to whole blocks: ``Q`` and ``K`` are multiples of the block.

    Attributes
    ----------
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``, zeros at padding.
    numbers
        ``(H, P)`` float32: params of the bias; None unless the form is ``"pairs"``.
    table
        ``(H, nq + nk, n)`` float32, for the form ``"table"``. Entry ``x`` of the flattened last
        axes is the bias at ``j - i = x - nq * n + 1`` for query ``i`` and key ``j``: query block
        ``a`` and key block ``b`` find theirs in rows ``d`` and ``d + 1``, ``d = nq - 1 + b - a``.
    q_feature, k_feature
        ``(B, H, Q)`` and ``(B, H, K)`` float32, what the bias reads of each query and of each key
        beside positions; or None.
    """

    q: Array
    k: Array
    v: Array
    numbers: Array | None
    table: Array | None
    q_feature: Array | None
    k_feature: Array | None


class Places(NamedTuple):
    """Integers of a call: what has no gradient.

    Attributes
    ----------
    q_pos, k_pos
        ``(B, Q)`` and ``(B, K)`` int32; None if aligned.
    q_seg, k_seg
        Likewise; None without segments.
    keys
        ``(2, B, H, nq)`` int32: queries of a block need key blocks ``first .. end - 1``.
    queries
        ``(2, B, H, nk)``: key blocks are needed by query blocks ``first .. end - 1``.
    """

    q_pos: Array | None
    k_pos: Array | None
    q_seg: Array | None
    k_seg: Array | None
    keys: Array
    queries: Array


def planned(call: Call, form: Form, block: int) -> tuple[Plan, Operands, Places]:
    """A call as kernels compute from it, its bias in a form that it has."""
    read = read_by_bias(call) if form == "pairs" else Read((), (), (), ())
    plan = Plan(
        scheme=call.scheme,
        form=form,
        learned=read.learned,
        fixed=read.fixed,
        q_reads=_first(read.query),
        k_reads=_first(read.key),
        causal=call.causal,
        window=call.window,
        sink_tokens=call.sink_tokens,
        scale=call.scale,
        aligned=call.aligned,
        q_len=call.q.shape[2],
        k_len=call.k.shape[2],
        block=block,
    )
    operands = Operands(
        q=_padded(call.q, block, axis=2),
        k=_padded(call.k, block, axis=2),
        v=_padded(call.v, block, axis=2),
        numbers=_numbers(call, plan),
        table=_table(call, plan) if form == "table" else None,
        q_feature=_feature(call, call.query.features, plan.q_reads, block),
        k_feature=_feature(call, call.key.features, plan.k_reads, block),
    )
    keys, queries = needed(call, block)
    # Padded positions repeat the last, which exists, as the ranges of blocks do.
    sides = call.query, call.key
    pos = (None if call.aligned else _rows(call, side.pos, block) for side in sides)
    seg = (None if side.seg is None else _rows(call, side.seg, block) for side in sides)
    return plan, operands, Places(*pos, *seg, keys, queries)


class Read(NamedTuple):
    """Names of what a bias reads: params that learn, and others; features of each side."""

    learned: tuple[str, ...]
    fixed: tuple[str, ...]
    query: tuple[str, ...]
    key: tuple[str, ...]


def read_by_bias(call: Call) -> Read:
    """What the bias of a call reads, seen by tracing it at one pair."""
    params: list[str] = []
    features: dict[str, list[str]] = {"query": [], "key": []}

    class Reading(Params):
        def __getitem__(self, name: str) -> Array:
            params.append(name)
            return super().__getitem__(name)

    class ReadingFeatures(Features):
        def __getitem__(self, name: str) -> Array:
            found = super().__getitem__(name)
            features[self._role].append(name)
            return found

    def asked(
        q: Array, k: Array, arrays: Mapping[str, Array], *found: Mapping[str, Array]
    ) -> Array:
        views = head_views(call.scheme, arrays, dtype=call.dtype, xp=jnp)
        sides = (
            ReadingFeatures(tile_views(own, role, xp=jnp), role)
            for own, role in zip(found, features, strict=True)
        )
        return call.scheme.bias(q, k, params=Reading(views, call.dtype, *sides), xp=jnp)

    def one(side: Mapping[str, Array]) -> dict[str, jax.ShapeDtypeStruct]:
        """A token of them."""
        return {n: jax.ShapeDtypeStruct((1, 1, 1, *a.shape[3:]), a.dtype) for n, a in side.items()}

    at = jax.ShapeDtypeStruct((1, 1, 1, 1), call.key.pos.dtype)
    jax.eval_shape(
        asked, at, at, dict(call.arrays), one(call.query.features), one(call.key.features)
    )
    specs, names = call.scheme.param_specs(), tuple(dict.fromkeys(params))
    return Read(
        tuple(n for n in names if n in specs),
        tuple(n for n in names if n not in specs),
        *(tuple(dict.fromkeys(features[role])) for role in features),
    )


def why_not_pairs(call: Call) -> str | None:
    """Why a bias needs more than a number a head and a number a token; None if it does not."""
    name, read = f"the bias of {type(call.scheme).__name__}", read_by_bias(call)
    specs = call.scheme.param_specs()
    if any(len(specs[n].shape) > (1 if specs[n].per_head else 0) for n in read.learned):
        return f"{name} reads params of more than one number a head"
    sides: tuple[tuple[Role, Mapping[str, Array], tuple[str, ...]], ...] = (
        ("query", call.query.features, read.query),
        ("key", call.key.features, read.key),
    )
    for role, features, names in sides:
        for each in names:
            if features[each].ndim != 3:
                return f"{name} reads a table of each {role}, {each!r}; kernels take one number"
        if len(names) > 1:
            several = f"{len(names)} numbers of each {role}, {', '.join(names)}"
            return f"{name} reads {several}; kernels take one"
    return None


def _first(names: tuple[str, ...]) -> str | None:
    return names[0] if names else None


def needed(call: Call, block: int) -> tuple[Array, Array]:
    """Bounds of key blocks for blocks of queries, and the other way round, as in ``Places``.

    Between them lie all pairs that see each other and leave a trace in the result; with sink tokens
    and a window, also the blocks between these two, which are computed and hidden.
    """
    call = _constant(call)
    any_visible, all_visible = visible_blocks(call, block)
    kept = any_visible[:, None]
    if call.skip_blocks:
        negligible = negligible_blocks(call, block, all_visible=all_visible)
        kept = kept if negligible is None else kept & ~negligible
    shape = (call.q.shape[0], call.q.shape[1], *kept.shape[2:])
    return _bounds(kept, shape[:3]), _bounds(jnp.swapaxes(kept, 2, 3), (*shape[:2], shape[3]))


def _bounds(kept: Array, shape: tuple[int, ...]) -> Array:
    """First and end of what is kept along the last axis, ``(2, *shape)``; 0 and 0 for nothing."""
    count = kept.shape[-1]
    some = jnp.any(kept, axis=-1)
    first = jnp.argmax(kept, axis=-1)
    end = count - jnp.argmax(kept[..., ::-1], axis=-1)
    both = jnp.stack([jnp.where(some, first, 0), jnp.where(some, end, 0)])
    return jnp.broadcast_to(both.astype(jnp.int32), (2, *shape))


def _constant(call: Call) -> Call:
    """The call without gradients."""
    stop = lax.stop_gradient
    return replace(
        call, q=stop(call.q), k=stop(call.k), v=stop(call.v), arrays=stop(dict(call.arrays)),
        query=call.query.map_features(stop), key=call.key.map_features(stop),
    )  # fmt: skip


def _numbers(call: Call, plan: Plan) -> Array | None:
    names, heads = plan.learned + plan.fixed, call.q.shape[1]
    if plan.form != "pairs":
        return None
    columns = [jnp.broadcast_to(call.arrays[name], (heads,)) for name in names]
    return jnp.stack(columns or [jnp.zeros(heads)], axis=-1).astype(jnp.float32)


def _feature(
    call: Call, features: Mapping[str, Array], name: str | None, block: int
) -> Array | None:
    """``(B, H, L)`` float32, padded."""
    if name is None:
        return None
    found = features[name].astype(jnp.float32)
    found = jnp.broadcast_to(found, (*call.q.shape[:2], found.shape[2]))
    return _padded(found, block, axis=2, mode="edge")


def _table(call: Call, plan: Plan) -> Array:
    """The bias by distance, with zeros where no pair is: see ``Operands.table``."""
    values = bias_by_distance(call)
    assert values is not None
    before = plan.q_blocks * plan.block - plan.q_len
    size = (plan.q_blocks + plan.k_blocks) * plan.block
    values = jnp.pad(values, ((0, 0), (before, size - before - values.shape[-1])))
    values = jnp.broadcast_to(values, (call.q.shape[1], size))
    return values.reshape(values.shape[0], -1, plan.block)


def _padded(array: Array, block: int, *, axis: int, mode: str = "constant") -> Array:
    missing = -array.shape[axis] % block
    if not missing:
        return array
    widths = [(0, missing if n == axis else 0) for n in range(array.ndim)]
    return jnp.pad(array, widths, mode=mode)


def _rows(call: Call, values: Array, block: int) -> Array:
    """Integers ``(L,)`` or ``(B, L)`` as ``(B, L)`` of 32 bits, padded."""
    values = jnp.atleast_2d(values).astype(jnp.int32)
    values = jnp.broadcast_to(values, (call.q.shape[0], values.shape[1]))
    return _padded(values, block, axis=1, mode="edge")
