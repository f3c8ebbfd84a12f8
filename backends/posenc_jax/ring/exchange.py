"""The forward and the backward pass, which send keys round the shards.

The backward pass keeps nothing of other shards. Keys travel again, attention is computed once more,
and the gradients of the keys come home with them. ``jax.checkpoint`` of a hop would be shorter, but
a scan keeps the keys of every hop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from posenc.backend import (
    Call,
    Implementation,
    LogSumExp,
    Range,
    Refusal,
    Tokens,
    visible_between,
)
from posenc_jax.tokens import Keys, Queries
from posenc_jax.trees import Arrays, gradients_as, is_float, make_varying, zero_gradients

T = TypeVar("T")


class RunningAttention(NamedTuple):
    """Attention to shards so far: the mean of their results, weighted by ``exp(lse - highest)``.

    ``highest`` is the highest that any part has, and ``total`` is the sum of the weights: the
    log-sum-exp is ``highest + log(total)``.
    """

    out: Array
    highest: Array
    total: Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> RunningAttention:
        """Attention to no key."""
        lowest = jnp.full(shape[:-1], np.finfo(dtype).min, dtype)
        return cls(jnp.zeros(shape, dtype), lowest, jnp.zeros(shape[:-1], dtype))

    def select(self, rows: slice) -> RunningAttention:
        """Attention from some of the queries."""
        return RunningAttention(*(a[:, :, rows] for a in self))

    def merge(self, out: Array, lse: LogSumExp) -> RunningAttention:
        """Attention to the keys so far and to those of a part, which has this result."""
        highest = jnp.maximum(self.highest, lse.highest)
        own = self.total * jnp.exp(self.highest - highest)
        added = jnp.exp(lse.minus(highest))
        total = own + added
        own, added = ((share / _or_one(total))[..., None] for share in (own, added))
        return RunningAttention(self.out * own + out * added, highest, total)

    def lse(self) -> LogSumExp:
        """The log-sum-exp over all parts."""
        return LogSumExp.of_weights(self.highest, self.total, jnp)

    def share_of(self, lse: LogSumExp) -> Array:
        """The share that a part has of the weight of all keys, ``(B, H, Q)``."""
        return jnp.exp(lse.minus(self.highest)) / _or_one(self.total)


def _or_one(total: Array) -> Array:
    """A sum of weights that something is divided by; 0 is that of no key, whose result is 0."""
    return jnp.where(total == 0, 1, total)


@dataclass(frozen=True, eq=False)
class Ring:
    """The static arguments of the passes.

    Attributes
    ----------
    implementation
        Computes attention to the keys of one shard.
    call
        The call, without its arrays.
    has_mask
        Whether the call is causal or has a window or segments.
    axis_name, shards
        The mesh axis and its size.
    """

    implementation: Implementation
    call: Call
    has_mask: bool
    axis_name: str | tuple[str, ...]
    shards: int

    def rotate(self, arrays: T) -> T:
        """Send arrays to the next shard, and receive those of the one before."""
        to = [(i, (i + 1) % self.shards) for i in range(self.shards)]

        def send(array: Array) -> Array:
            received: Array = lax.ppermute(array, self.axis_name, to)  # type: ignore[no-untyped-call] # untyped in JAX
            return received

        received: T = jax.tree.map(send, arrays)
        return received

    def attend(self, queries: Queries, keys: Keys, arrays: Arrays) -> tuple[Array, LogSumExp]:
        """Attention to the keys of one shard, or to some of them."""
        call = replace(
            self.call,
            q=queries.q, query=queries.side, k=keys.k, v=keys.v, key=keys.side, arrays=arrays,
        )  # fmt: skip
        planned = self.implementation.plan(call)
        if isinstance(planned, Refusal):
            raise NotImplementedError(planned.why)
        results: Any = planned.run(call)
        cast: tuple[Array, LogSumExp] = jax.tree.map(lambda a: a.astype(call.dtype), results)
        return cast

    def block_pairs(self, query: Tokens, key: Tokens) -> list[tuple[slice, slice, Array | bool]]:
        """Pairs of halves, of queries and of keys, and whether any query may see any key."""
        if not self.has_mask:
            return [(slice(None), slice(None), True)]
        halves = (_halves(side.pos.shape[-1]) for side in (query, key))
        return [
            (rows, columns, self._any_visible(query.select(rows), key.select(columns)))
            for rows, columns in product(*halves)
        ]

    def _any_visible(self, query: Tokens, key: Tokens) -> Array:
        """Whether ranges of positions and segments, over the whole batch, allow a visible pair."""
        segments = (None if side.seg is None else _range(side.seg) for side in (query, key))
        any_visible, _ = visible_between(
            self.call.mask, _range(query.pos), _range(key.pos), *segments
        )
        return jnp.all(any_visible)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_ring(
    ring: Ring, queries: Queries, keys: Keys, arrays: Arrays
) -> tuple[Array, LogSumExp]:
    """Attention ``(B, H, Q, Dv)`` of this shard's queries to all keys, and its log-sum-exp.

    Both are in the working dtype ``ring.call.dtype``.
    """
    return _forward(ring, queries, keys, arrays)[0]


def _forward(
    ring: Ring, queries: Queries, keys: Keys, arrays: Arrays
) -> tuple[tuple[Array, LogSumExp], Any]:
    """Attention, and the residuals of its gradients, which hold no array of another shard."""

    def absorb(running: RunningAttention, visiting: Keys) -> RunningAttention:
        for rows, columns, any_visible in ring.block_pairs(queries.side, visiting.side):
            some_queries, some_keys = _select(queries, rows), _select(visiting, columns)

            def merge(
                before: RunningAttention, q: Queries = some_queries, k: Keys = some_keys
            ) -> RunningAttention:
                return before.merge(*ring.attend(q, k, arrays))

            after = _cond(any_visible, merge, lambda before: before, running.select(rows))
            running = RunningAttention(
                *(a.at[:, :, rows].set(b) for a, b in zip(running, after, strict=True))
            )
        return running

    def hop(_: Any, carry: tuple[RunningAttention, Keys]) -> tuple[RunningAttention, Keys]:
        running, visiting = carry
        arriving = ring.rotate(visiting)  # before the work, so that the two may overlap
        return absorb(running, visiting), arriving

    shape = (*queries.q.shape[:3], keys.v.shape[-1])
    start = make_varying(RunningAttention.empty(shape, ring.call.dtype), queries)
    running, visiting = lax.fori_loop(0, ring.shards - 1, hop, (start, keys))
    running = absorb(running, visiting)
    return (running.out, running.lse()), (queries, keys, arrays, running)


def _backward(ring: Ring, residuals: Any, d_results: tuple[Array, LogSumExp]) -> tuple[Any, ...]:
    """Send keys round again. Their gradients follow one hop behind, and arrive at home."""
    queries, keys, arrays, running = residuals
    d_out, d_lse = d_results
    # The derivative of the whole log-sum-exp with respect to that of a part is the part's share.
    # Highest scores are constants.
    delta = jnp.sum(running.out * d_out, axis=-1) - d_lse.log_total

    def block_gradients(rows: slice, block: Any) -> Any:
        (out, lse), vjp = jax.vjp(ring.attend, *block)
        share = running.select(rows).share_of(lse)
        d_part = d_out[:, :, rows] * share[..., None]
        d_part_lse = jnp.sum(out * d_part, axis=-1) - share * delta[:, :, rows]
        # Of a kernel's log-sum-exp highest has the gradient, and of others log_total.
        d_block = vjp((d_part, LogSumExp(d_part_lse, d_part_lse)))
        return _cast_floats(d_block, block, ring.call.dtype)

    def add(sums: Any, visiting: Keys) -> Any:
        for rows, columns, any_visible in ring.block_pairs(queries.side, visiting.side):
            block = _select(queries, rows), _select(visiting, columns), arrays

            def compute(_: Any, rows: Any = rows, block: Any = block) -> Any:
                return block_gradients(rows, block)

            zeros = zero_gradients(block, ring.call.dtype)
            d_queries, d_keys, d_arrays = _cond(any_visible, compute, lambda zeros: zeros, zeros)
            sums = (
                _add_at(sums[0], d_queries, rows),
                _add_at(sums[1], d_keys, columns),
                jax.tree.map(jnp.add, sums[2], d_arrays),
            )
        return sums

    def step(sums: Any, visiting: Keys) -> Any:
        d_queries, d_keys, d_arrays = sums
        return add((d_queries, ring.rotate(d_keys), d_arrays), visiting)

    def hop(_: Any, carry: Any) -> Any:
        sums, visiting = carry
        arriving = ring.rotate(visiting)
        return step(sums, visiting), arriving

    start = zero_gradients((queries, keys, arrays), ring.call.dtype)
    sums, visiting = lax.fori_loop(0, ring.shards - 1, hop, (start, keys))
    d_queries, d_keys, d_arrays = step(sums, visiting)
    gradients: tuple[Any, ...] = gradients_as(
        (queries, keys, arrays), (d_queries, ring.rotate(d_keys), d_arrays)
    )
    return gradients


attend_ring.defvjp(_forward, _backward)


def without_arrays(call: Call) -> Call:
    """The static part of a call: traced arrays must not be kept in it."""
    nothing: Any = None
    names = ("q", "k", "v", "query", "key", "sink")
    return replace(call, aligned=False, arrays={}, **dict.fromkeys(names, nothing))


def _cond(condition: Array | bool, do: Callable[[Any], Any], otherwise: Any, operand: Any) -> Any:
    """``lax.cond``, or ``do`` alone if the condition is the constant True."""
    return do(operand) if condition is True else lax.cond(condition, do, otherwise, operand)


def _halves(length: int) -> list[slice]:
    """The two halves of a shard: in a zigzag layout one is early and the other late."""
    middle = length // 2
    return [slice(None)] if middle == 0 else [slice(0, middle), slice(middle, length)]


def _range(values: Array) -> Range:
    """The lowest and the highest integer, as the range of one block."""
    return jnp.min(values)[None, None], jnp.max(values)[None, None]


def _select(arrays: T, tokens: slice) -> T:
    """Some of the tokens of ``Queries`` or ``Keys``."""
    selected: T = jax.tree.map(lambda a: a[(*_before_tokens(a), tokens)], arrays)
    return selected


def _add_at(arrays: Any, part: Any, tokens: slice) -> Any:
    """The arrays, with a part added to some of their tokens."""
    return jax.tree.map(lambda a, b: a.at[(*_before_tokens(a), tokens)].add(b), arrays, part)


def _before_tokens(array: Array) -> tuple[slice, ...]:
    """Index of the axes before tokens: batch and heads, but integers have no heads."""
    return (slice(None),) * min(2, array.ndim - 1)


def _cast_floats(gradients: Any, arrays: Any, dtype: Any) -> Any:
    """Gradients in a dtype; None for integers."""
    return jax.tree.map(lambda a, g: g.astype(dtype) if is_float(a) else None, arrays, gradients)
