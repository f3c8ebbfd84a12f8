"""What a fused kernel computes from: a call cut into blocks, and its bias in a form for kernels.

A bias reaches a kernel in one of two forms. *Elementwise*: the scheme's own ``bias`` on a tile. It
may read per-head scalars, and at most one scalar feature per query and one per key. ALiBi, KERPLE,
FoX and their sums are elementwise. *By distance*: a table of values per distance, as T5 has at the
default positions. Tiles so far from the diagonal that their bias is constant are *far*: the table
leaves them out, and a kernel reads one number per head for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from posenc.backend import (
    Call,
    Features,
    Namespace,
    Params,
    PositionScheme,
    Role,
    Window,
    bias_by_distance,
    has_bias_by_key,
    head_views,
    near_diagonals,
    tile_views,
    visible,
)
from posenc_jax.fused.float_positions import exact_in_float32
from posenc_jax.fused.shapes import array_type
from posenc_jax.needed import first_and_end, needed_pairs

Form: TypeAlias = Literal["none", "elementwise", "by distance"]

MASK_VALUE = -1e30  # the score of a masked pair
MIN_SCORE = MASK_VALUE / 2  # the running maximum starts here, so a masked score has weight 0


class Tokens(NamedTuple):
    """Queries or keys of a tile, as a bias reads them: positions, and one feature or None."""

    pos: Array
    feature: Array | None = None


class BiasReads(NamedTuple):
    """What a bias reads, by name: trainable params, constants, and features of each side.

    ``float_positions`` says whether it may read positions as float32, and ``by_key`` whether its
    key bias may replace it; both as in ``Plan``.
    """

    trainable: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    float_positions: bool = False
    by_key: bool = False


@dataclass(frozen=True)
class Plan:
    """The static part of a call.

    Attributes
    ----------
    scheme, causal, window, first_tokens, scale
        As in ``posenc.attn.call.Call``.
    form
        The form of the bias.
    trainable, fixed
        Names of the per-head scalars that the bias reads, in the order of the columns of
        ``Operands.head_scalars``.
    q_feature, k_feature
        Name of the feature that the bias reads per query, and per key, or None.
    float_positions
        Whether kernels give the bias its positions as float32, which is as exact here and needs no
        conversion for every pair. A mask compares integers all the same.
    by_key
        Whether kernels may add ``w(k - q0)`` instead of the bias, one number per key of a tile
        whose first query is at ``q0``. For a relative ``bias(q, k) = u(q) + w(k)`` that leaves out
        ``u(q - q0)``, a number per query that softmax does not see. Small, because ``q0`` is near.
    aligned
        Query ``i`` is at position ``k_len - q_len + i``, key ``j`` at ``j``; no positions are
        given.
    q_len, k_len
        Lengths without padding.
    block
        Queries per block, and keys per block.
    near
        Of a bias by distance: the tiles that are not far, as a range of diagonals ``first, end``.
        Block ``a`` of queries and block ``b`` of keys lie on diagonal ``b - a``.
    """

    scheme: PositionScheme
    form: Form
    trainable: tuple[str, ...]
    fixed: tuple[str, ...]
    q_feature: str | None
    k_feature: str | None
    float_positions: bool
    by_key: bool
    causal: bool
    window: Window | None
    first_tokens: int
    scale: float
    aligned: bool
    q_len: int
    k_len: int
    block: int
    near: tuple[int, int] = (0, 0)

    @classmethod
    def of_one_block(cls, scheme: PositionScheme, reads: BiasReads, size: int) -> Plan:
        """One block with an elementwise bias, to check whether a kernel with it lowers."""
        return cls(
            scheme=scheme, form="elementwise", trainable=reads.trainable, fixed=reads.fixed,
            q_feature=_first(reads.query), k_feature=_first(reads.key),
            float_positions=reads.float_positions, by_key=reads.by_key, causal=False, window=None,
            first_tokens=0, scale=1.0, aligned=True, q_len=size, k_len=size, block=size,
        )  # fmt: skip

    @property
    def scalars_read(self) -> tuple[str, ...]:
        """Names of the per-head scalars that the bias reads, trainable ones first."""
        return self.trainable + self.fixed

    @property
    def has_feature(self) -> bool:
        """Whether the bias reads a feature of either side."""
        return self.q_feature is not None or self.k_feature is not None

    @property
    def q_blocks(self) -> int:
        """Number of blocks of queries."""
        return -(-self.q_len // self.block)

    @property
    def k_blocks(self) -> int:
        """Number of blocks of keys."""
        return -(-self.k_len // self.block)

    @property
    def has_far(self) -> bool:
        """Whether there are far tiles."""
        return self.has_far_before or self.has_far_after

    @property
    def has_far_before(self) -> bool:
        """Whether there are far tiles before the near ones."""
        return self.form == "by distance" and self.near[0] > 1 - self.q_blocks

    @property
    def has_far_after(self) -> bool:
        """Whether there are far tiles after the near ones; a causal mask hides them."""
        return self.form == "by distance" and self.near[1] < self.k_blocks and not self.causal

    def near_keys(self, q_block: Array) -> tuple[Array, Array]:
        """Key blocks ``first .. end - 1`` are near; some of them may not exist."""
        first, end = self.near
        return q_block + first, q_block + end

    def near_queries(self, k_block: Array) -> tuple[Array, Array]:
        """Query blocks ``first .. end - 1`` are near; some of them may not exist."""
        first, end = self.near
        return k_block - (end - 1), k_block - (first - 1)

    @property
    def masks_padding(self) -> bool:
        """Whether padded keys must be masked; an aligned causal mask already masks them."""
        return self.k_len % self.block != 0 and not (self.aligned and self.causal)

    def bias(
        self, head_scalars: Sequence[Array], q: Tokens, k: Tokens, xp: Namespace = jnp
    ) -> Array:
        """The bias on a tile, from the scalars of one head, positions and features."""
        params = self._params(head_scalars, q.feature, k.feature)
        bias: Array | None = self.scheme.bias(q.pos, k.pos, params=params, xp=xp)
        assert bias is not None
        return bias

    def key_bias(self, head_scalars: Sequence[Array], k: Array, xp: Namespace = jnp) -> Array:
        """``w(k)`` of some positions, from the scalars of one head; for a plan ``by_key``."""
        params = self._params(head_scalars, None, None)
        bias: Array | None = self.scheme.key_bias(k, params=params, xp=xp)
        assert bias is not None
        return bias

    def _params(
        self, head_scalars: Sequence[Array], query: Array | None, key: Array | None
    ) -> Params:
        return Params(
            dict(zip(self.scalars_read, head_scalars, strict=True)),
            jnp.float32,
            Features({} if self.q_feature is None else {self.q_feature: query}, "query"),
            Features({} if self.k_feature is None else {self.k_feature: key}, "key"),
        )

    def mask(
        self,
        q_pos: Array,
        k_pos: Array,
        k_index: Array,
        q_seg: Array | None = None,
        k_seg: Array | None = None,
    ) -> Array | None:
        """Which pairs of a tile are visible; None if all are."""
        mask: Array | None = visible(
            q_pos, k_pos, q_seg, k_seg,
            causal=self.causal, window=self.window, first_tokens=self.first_tokens,
        )  # fmt: skip
        if not self.masks_padding:
            return mask
        exists = k_index < self.k_len
        return exists if mask is None else mask & exists

    def needs_mask(
        self, q_start: Any, q_count: int, k_start: Any, k_count: int, *, has_segments: bool
    ) -> Any:
        """Whether a tile may have a masked pair: a bool if it is static, or a scalar of a kernel.

        The tile has ``q_count`` queries, the first at default position ``q_start``, and ``k_count``
        keys from ``k_start`` on.
        """
        left, right = self.window or (None, None)
        if self.causal and right is not None and right >= 0:
            right = None  # the causal mask covers it
        by_position = self.causal or left is not None or right is not None
        if has_segments or (by_position and not self.aligned):
            return True
        # The least and the greatest query position - key position of the tile.
        least = q_start - (k_start + k_count - 1)
        most = q_start + q_count - 1 - k_start
        terms = [k_start + k_count > self.k_len] if self.masks_padding else []
        if self.causal and right is None:
            terms.append(least < 0)
        if left is not None:
            terms.append(most > left)
        if right is not None:
            terms.append(least < -right)
        return functools.reduce(operator.or_, terms) if terms else False


class Operands(NamedTuple):
    """The float arrays of a call, padded to whole blocks: ``Q`` and ``K`` are multiples of a block.

    Attributes
    ----------
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``, with zeros as padding.
    head_scalars
        ``(H, P)`` float32: the per-head scalars of an elementwise bias; otherwise None.
    table
        ``(H, m + 1, n)`` float32: a bias by distance, on the ``m`` near diagonals of tiles from
        ``first``; otherwise None. Blocks have ``n`` tokens. Flatten the last two axes: entry ``x``
        is the bias at ``j - i = x + (first - 1) * n + 1`` for query ``i`` and key ``j``. Query
        block ``a`` and key block ``b`` read rows ``d`` and ``d + 1``, where ``d = b - a - first``.
    far
        ``(H, 2)`` float32: the bias of far tiles before the near ones, and after; or None.
    q_feature, k_feature
        ``(B, H, Q)`` and ``(B, H, K)`` float32: the feature that the bias reads; or None.
    """

    q: Array
    k: Array
    v: Array
    head_scalars: Array | None
    table: Array | None
    far: Array | None
    q_feature: Array | None
    k_feature: Array | None


class Integers(NamedTuple):
    """The integer arrays of a call, which have no gradient.

    Attributes
    ----------
    q_pos, k_pos
        ``(B, Q)`` and ``(B, K)`` int32; None if aligned.
    q_seg, k_seg
        Likewise; None without segments.
    key_ranges
        ``(2, B, H, nq)`` int32: a block of queries needs key blocks ``first .. end - 1``.
    query_ranges
        ``(2, B, H, nk)`` int32: query blocks ``first .. end - 1`` need a block of keys.
    """

    q_pos: Array | None
    k_pos: Array | None
    q_seg: Array | None
    k_seg: Array | None
    key_ranges: Array
    query_ranges: Array


def plan_call(
    call: Call, form: Form, block: int, *, reads_far: bool
) -> tuple[Plan, Operands, Integers]:
    """The static part and the arrays of a call whose bias has the given form.

    ``reads_far`` is whether kernels read ``Operands.far``; if not, no tile is far.
    """
    reads = trace_bias_reads(call) if form == "elementwise" else BiasReads()
    every = 1 - -(-call.q.shape[2] // block), -(-call.k.shape[2] // block)
    near = near_diagonals(call, block) if reads_far and form == "by distance" else every
    plan = Plan(
        scheme=call.scheme,
        form=form,
        trainable=reads.trainable,
        fixed=reads.fixed,
        q_feature=_first(reads.query),
        k_feature=_first(reads.key),
        float_positions=reads.float_positions,
        by_key=reads.by_key,
        causal=call.causal,
        window=call.window,
        first_tokens=call.mask.first_tokens,
        scale=call.scale,
        aligned=call.aligned,
        q_len=call.q.shape[2],
        k_len=call.k.shape[2],
        block=block,
        near=near,
    )
    operands = Operands(
        q=_pad(call.q, block, axis=2),
        k=_pad(call.k, block, axis=2),
        v=_pad(call.v, block, axis=2),
        head_scalars=_stack_scalars(call, plan),
        table=_table(call, plan) if form == "by distance" else None,
        far=_far(call) if plan.has_far else None,
        q_feature=_feature(call, call.query.features, plan.q_feature, block),
        k_feature=_feature(call, call.key.features, plan.k_feature, block),
    )
    key_ranges, query_ranges = needed_blocks(call, block)
    # Padding repeats the last position, which exists, as the ranges of blocks assume.
    integers = Integers(
        q_pos=None if call.aligned else _as_rows(call, call.query.pos, block),
        k_pos=None if call.aligned else _as_rows(call, call.key.pos, block),
        q_seg=None if call.query.seg is None else _as_rows(call, call.query.seg, block),
        k_seg=None if call.key.seg is None else _as_rows(call, call.key.seg, block),
        key_ranges=key_ranges,
        query_ranges=query_ranges,
    )
    return plan, operands, integers


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


def why_not_elementwise(call: Call) -> str | None:
    """Why a bias needs more than per-head scalars and one scalar per token; None if it does not."""
    name, reads = f"the bias of {type(call.scheme).__name__}", trace_bias_reads(call)
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


def _first(names: tuple[str, ...]) -> str | None:
    return names[0] if names else None


def needed_blocks(call: Call, block: int) -> tuple[Array, Array]:
    """Ranges of key blocks per block of queries, and of query blocks per block of keys.

    As in ``Integers``. All visible pairs that are not negligible lie in these ranges. With sink
    tokens and a window, so do the blocks between the two, which are computed and masked.
    """
    needed = needed_pairs(call, block)
    batch, heads = call.q.shape[:2]
    q_blocks, k_blocks = needed.shape[2:]
    key_ranges = _ranges(needed, (batch, heads, q_blocks))
    query_ranges = _ranges(jnp.swapaxes(needed, 2, 3), (batch, heads, k_blocks))
    return key_ranges, query_ranges


def _ranges(needed: Array, shape: tuple[int, ...]) -> Array:
    """``first_and_end`` with all axes: ``(2, *shape)``."""
    return jnp.broadcast_to(first_and_end(needed), (2, *shape))


def _stack_scalars(call: Call, plan: Plan) -> Array | None:
    """``(H, P)`` float32; see ``Operands.head_scalars``."""
    heads = call.q.shape[1]
    if plan.form != "elementwise":
        return None
    columns = [jnp.broadcast_to(call.arrays[name], (heads,)) for name in plan.scalars_read]
    return jnp.stack(columns or [jnp.zeros(heads)], axis=-1).astype(jnp.float32)


def _feature(
    call: Call, features: Mapping[str, Array], name: str | None, block: int
) -> Array | None:
    """``(B, H, L)`` float32, padded."""
    if name is None:
        return None
    feature = features[name].astype(jnp.float32)
    feature = jnp.broadcast_to(feature, (*call.q.shape[:2], feature.shape[2]))
    return _pad(feature, block, axis=2, mode="edge")


def _table(call: Call, plan: Plan) -> Array:
    """The bias on near diagonals; see ``Operands.table``."""
    (first, end), block, heads = plan.near, plan.block, call.q.shape[1]
    ahead = plan.k_len - plan.q_len
    between = (first - 1) * block + 1 - ahead, end * block - ahead
    values: Array | None = bias_by_distance(call, between=between)
    assert values is not None
    return jnp.broadcast_to(values, (heads, values.shape[1])).reshape(heads, -1, block)


def _far(call: Call) -> Array:
    """The bias of far tiles; see ``Operands.far``."""
    columns = []
    for end, sign in zip(call.scheme.constant_beyond(), (-1, 1), strict=True):
        at = 0 if end is None else sign * end  # without an end, no tile reads the number
        value: Array | None = bias_by_distance(call, between=(at, at))
        assert value is not None
        columns.append(jnp.broadcast_to(value, (call.q.shape[1], 1)))
    return jnp.concatenate(columns, axis=1)


def _pad(array: Array, block: int, *, axis: int, mode: str = "constant") -> Array:
    """The array with a multiple of ``block`` entries along an axis."""
    missing = -array.shape[axis] % block
    if not missing:
        return array
    widths = [(0, missing if n == axis else 0) for n in range(array.ndim)]
    return jnp.pad(array, widths, mode=mode)


def _as_rows(call: Call, values: Array, block: int) -> Array:
    """Integers ``(L,)`` or ``(B, L)`` as ``(B, L)`` of 32 bits, padded."""
    values = jnp.atleast_2d(values).astype(jnp.int32)
    values = jnp.broadcast_to(values, (call.q.shape[0], values.shape[1]))
    return _pad(values, block, axis=1, mode="edge")
