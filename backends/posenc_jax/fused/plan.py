"""What a fused kernel computes from: a call cut into blocks, its bias in a form a kernel can take.

A bias reaches a kernel in one of two forms. *Pairs*: the scheme's own ``bias`` on a tile, with one
number a head of each param; so ALiBi, KERPLE and gated schemes, whose coordinates stand for
positions. *Table*: its values by distance, so T5 at consecutive positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from posenc.blocks import meeting
from posenc.call import Call
from posenc.lowerings import by_distance
from posenc.negligible import negligible
from posenc.params import Params, per_head
from posenc.positions import visible
from posenc.protocol import Namespace, PositionScheme

Form: TypeAlias = Literal["none", "pairs", "table"]

HIDDEN = -1e30  # a score that may not be seen
FLOOR = HIDDEN / 2  # the highest score before the first: what is hidden has weight 0 beside it


@dataclass(frozen=True)
class Plan:
    """What is static in a call.

    Attributes
    ----------
    scheme, causal, window, scale
        As in ``posenc.call.Call``.
    form
        How the bias arrives.
    learned, fixed
        Names of params that learn and that do not, one number a head each, in the order of the
        columns of ``Operands.numbers``.
    aligned
        Query ``i`` stands at ``k_len - q_len + i``, key ``j`` at ``j``; no positions are given.
    q_len, k_len, block
        Lengths without padding; so many queries, and so many keys, make a block.
    """

    scheme: PositionScheme
    form: Form
    learned: tuple[str, ...]
    fixed: tuple[str, ...]
    causal: bool
    window: int | None
    scale: float
    aligned: bool
    q_len: int
    k_len: int
    block: int

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

    def bias(self, numbers: Sequence[Array], q: Array, k: Array, xp: Namespace = jnp) -> Array:
        """The bias on a tile, from one head's numbers and positions or coordinates."""
        named = Params(dict(zip(self.learned + self.fixed, numbers, strict=True)), jnp.float32)
        found = self.scheme.bias(q, k, params=named, xp=xp)
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
        found = visible(q_pos, k_pos, q_seg, k_seg, causal=self.causal, window=self.window)
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
    q_coords, k_coords
        ``(B, H, Q)`` and ``(B, H, K)`` float32, the coordinates of a gated scheme; or None.
    """

    q: Array
    k: Array
    v: Array
    numbers: Array | None
    table: Array | None
    q_coords: Array | None
    k_coords: Array | None


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
    read = numbers_read(call) if form == "pairs" else ((), ())
    assert read is not None
    learned, fixed = read
    plan = Plan(
        scheme=call.scheme,
        form=form,
        learned=learned,
        fixed=fixed,
        causal=call.causal,
        window=call.window,
        scale=call.scale,
        aligned=call.aligned,
        q_len=call.q.shape[2],
        k_len=call.k.shape[2],
        block=block,
    )
    gated = form == "pairs" and call.q_coords is not None
    operands = Operands(
        q=_padded(call.q, block, axis=2),
        k=_padded(call.k, block, axis=2),
        v=_padded(call.v, block, axis=2),
        numbers=_numbers(call, plan),
        table=_table(call, plan) if form == "table" else None,
        q_coords=_padded(call.q_coords, block, axis=2, mode="edge") if gated else None,
        k_coords=_padded(call.k_coords, block, axis=2, mode="edge") if gated else None,
    )
    keys, queries = needed(call, block)
    # Padded positions repeat the last, which exists, as the ranges of blocks do.
    pos = (
        (None, None) if call.aligned else (_rows(call, p, block) for p in (call.q_pos, call.k_pos))
    )
    seg = (None if s is None else _rows(call, s, block) for s in (call.q_seg, call.k_seg))
    return plan, operands, Places(*pos, *seg, keys, queries)


def numbers_read(call: Call) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Names of the params that a bias reads: those that learn, and the others.

    None if one is more than a number a head, or for all. A gate may have others.
    """
    read: list[str] = []

    class Reading(Params):
        def __getitem__(self, name: str) -> Array:
            read.append(name)
            return super().__getitem__(name)

    views = Reading(per_head(call.scheme, call.arrays, dtype=call.dtype, xp=jnp), call.dtype)
    kind = call.k_pos.dtype if call.k_coords is None else call.dtype
    at = jax.ShapeDtypeStruct((1, 1, 1, 1), kind)
    jax.eval_shape(lambda q, k: call.scheme.bias(q, k, params=views, xp=jnp), at, at)
    specs = call.scheme.param_specs()
    own = (specs[name] for name in read if name in specs)
    if any(len(spec.shape) > (1 if spec.per_head else 0) for spec in own):
        return None
    names = tuple(dict.fromkeys(read))
    return tuple(n for n in names if n in specs), tuple(n for n in names if n not in specs)


def needed(call: Call, block: int) -> tuple[Array, Array]:
    """Bounds of key blocks for blocks of queries, and the other way round, as in ``Places``.

    Between them lie all pairs that see each other and leave a trace in the result.
    """
    call = _constant(call)
    some, every = meeting(call, block)
    kept = some[:, None]
    if call.skip_blocks and (nothing := negligible(call, block, whole=every)) is not None:
        kept = kept & ~nothing
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
        q_coords=stop(call.q_coords), k_coords=stop(call.k_coords),
    )  # fmt: skip


def _numbers(call: Call, plan: Plan) -> Array | None:
    names, heads = plan.learned + plan.fixed, call.q.shape[1]
    if plan.form != "pairs":
        return None
    columns = [jnp.broadcast_to(call.arrays[name], (heads,)) for name in names]
    return jnp.stack(columns or [jnp.zeros(heads)], axis=-1).astype(jnp.float32)


def _table(call: Call, plan: Plan) -> Array:
    """The bias by distance, with zeros where no pair is: see ``Operands.table``."""
    values = by_distance(call)
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
