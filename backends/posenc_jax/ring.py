"""Ring attention: a sequence spread over the devices of a mesh axis, keys passed round.

Liu et al. 2023, arXiv 2310.01889. Every device attends from its own queries to the keys that it
holds, and passes those on, until they have been everywhere. Parts of a row are put together by
their log-sum-exp. A scheme needs nothing of its own, because positions travel with the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from posenc import PositionScheme, features
from posenc.backend import (
    Call,
    Implementation,
    Options,
    PartialAttention,
    Side,
    add_sink,
    advise_unknown,
    as_mapping,
    check_count,
    check_pair,
    choose,
    public_lse,
    visible_between,
)
from posenc_jax.api import call_of
from posenc_jax.chunked.implementation import chunked, refuses
from posenc_jax.chunked.loops import varying
from posenc_jax.derivatives import reverse_only
from posenc_jax.fused import implementation as fused


def zigzag(length: int, shards: int) -> np.ndarray[Any, Any]:
    """Positions ``(length,)`` in the order of shards, each an early and as late a part.

    Of ``2 n`` equal parts, shard ``r`` of ``n`` holds parts ``r`` and ``2 n - 1 - r``: under a
    causal mask all shards then have the same work at every hop. Tokens ``x[order]`` are laid out
    so, and ``y[numpy.argsort(order)]`` brings results back into the order of positions.

    Raises
    ------
    TypeError, ValueError
        ``length`` is no positive multiple of ``2 * shards``.

    >>> zigzag(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    count = 2 * check_count("shards", shards)
    length = check_count("length", length)
    if length % count:
        raise ValueError(f"length must be a multiple of 2 * shards = {count}, got {length}")
    parts = np.arange(length).reshape(count, -1)
    return np.concatenate([parts[[r, -1 - r]].ravel() for r in range(shards)])


@advise_unknown
def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    causal: bool = False,
    *,
    axis_name: str | tuple[str, ...],
    implementation: str = "auto",
    **options: Unpack[Options],
) -> Any:
    """``attention`` over a sequence whose tokens are spread over a mesh axis, in ``shard_map``.

    A shard's keys, already transformed, visit every shard with their positions, segments, places
    and features; row by row, ``out = sum_s exp(l_s - l) out_s`` with ``l = logsumexp_s l_s`` over
    the shards ``s``, where ``out_s`` and ``l_s`` are attention to keys of ``s`` and its
    log-sum-exp. Values and gradients are those of one device, up to the order of sums.

    Each half of a shard's queries meets each half of a visiting shard's keys; where no query can
    see a key, by ranges of positions and segments, neither values nor gradients are computed.
    Memory is that of a few shards, forward and backward: keys go round again in the backward pass,
    which computes attention once more, and their gradients come home with them.

    Parameters
    ----------
    q, k, v, scheme, params, causal, options
        As in ``attention``, of this shard: ``(B, Q, H, D)``, ``(B, K, Hk, D)``, ``(B, K, Hk, Dv)``.
        All shards have the same ``Q`` and the same ``K``.
    axis_name
        The axis of the mesh, or axes, over which tokens are spread.
    q_pos, k_pos
        Positions of this shard's tokens in the whole sequence, ``(L,)`` or ``(B, L)``, in any
        layout (see ``zigzag``); both or neither. Default: shards hold consecutive tokens, in the
        order of the axis, and the ends of the whole q and k align.
    q_seg, k_seg
        Segments of this shard's tokens; their numbers hold across shards.
    implementation
        What attends to the keys of one shard: ``"pallas"``, ``"chunked"``, or ``"auto"``, the
        first of them that serves the call well. First derivatives in reverse mode only.
    bias, mask
        No ``bias``, and a ``mask`` only as a function of positions and segments.
    x, q_x
        For a scheme with ``hidden_features``: of this shard's tokens. Features that are summed need
        the default positions, no segments, no ``k_valid`` and ``Q = K``; in any other layout give
        features.
    q_features, k_features
        This shard's part ``(B, H, L)`` of the features of the whole sequence, which
        ``posenc.features`` gives outside of ``shard_map``.

    Returns
    -------
    ``(B, Q, H, Dv)`` in q's dtype. A row that may see nothing on any shard is 0, with zero
    gradients.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted; ``axis_name`` is not bound.
    NotImplementedError
        The named implementation cannot serve the call; says why.
    """
    shards = _axis_size(axis_name)
    default = check_pair("q_pos", options.get("q_pos"), "k_pos", options.get("k_pos"))
    given: Any = dict(options)
    summed = bool(scheme.cumulative) and given.get("q_features") is None
    summed = summed and (given.get("x") is not None or "hidden_features" not in scheme.hooks())
    if summed:
        _check_in_order(scheme, q, k, given)
    if default and hasattr(q, "shape") and hasattr(k, "shape"):
        given["q_pos"], given["k_pos"] = _consecutive(q.shape[1], k.shape[1], shards, axis_name)
    if summed:
        given["q_features"], given["k_features"] = _features(scheme, q, k, params, given, axis_name)
        given["x"] = None
    hidden = given.get("x") is not None and given.get("q_x") is None
    if default and hidden and q.shape[1] == k.shape[1]:
        given["q_x"] = given["x"]  # the same tokens, which no tracer can tell
    call = call_of(q, k, v, scheme, params, causal, implementation, **given)
    if call.regions:
        raise NotImplementedError(
            f"ring_attention serves one region of distances, {type(scheme).__name__} has "
            f"{len(call.regions)}"
        )
    operands = (
        Queries(call.q, _by_batch(call.query)),
        Keys(call.k, call.v, _by_batch(call.key)),
        dict(call.arrays),
    )
    # The shard's own index, because what is alike everywhere varies once it has gone round.
    operands = reverse_only(varying(operands, lax.axis_index(axis_name)), "ring_attention")
    bounded = call.causal or call.window is not None or call.query.seg is not None
    ring = Ring(
        choose(_IMPLEMENTATIONS, call, implementation),
        _without_arrays(call),
        bounded,
        axis_name,
        shards,
    )
    found = PartialAttention(*_attend(ring, *operands))
    if call.sink is not None:
        found = add_sink(found, call)
    out = jnp.swapaxes(found.out, 1, 2).astype(q.dtype)
    if not call.wants_lse:
        return out
    return out, jnp.swapaxes(public_lse(found.lse, call), 1, 2)


Arrays: TypeAlias = dict[str, Array]


class Queries(NamedTuple):
    """``(B, H, Q, D)``, and what is known of the tokens: integers ``(B or 1, Q)``, features."""

    vectors: Array
    side: Side


class Keys(NamedTuple):
    """``(B, Hk, K, D)`` and ``(B, Hk, K, Dv)``, and what is known of the tokens."""

    vectors: Array
    values: Array
    side: Side


class Part(NamedTuple):
    """Attention to some keys, ``(B, H, Q, Dv)``, and its log-sum-exp ``(B, H, Q)``."""

    out: Array
    logsumexp: Array


class Result(NamedTuple):
    """Attention to the parts so far: their mean, its weights ``exp(logsumexp - highest)``.

    ``total`` is the sum of these. One log-sum-exp for both has no digits left where it is large.
    """

    out: Array
    highest: Array
    total: Array

    @classmethod
    def of_nothing(cls, shape: tuple[int, ...], dtype: Any) -> Result:
        """To no key: a low log-sum-exp, but finite, so that two of them have a difference."""
        lowest = jnp.full(shape[:-1], jnp.finfo(dtype).min, dtype)
        return cls(jnp.zeros(shape, dtype), lowest, jnp.zeros(shape[:-1], dtype))

    def of(self, rows: slice) -> Result:
        """Of some queries."""
        return Result(*(a[:, :, rows] for a in self))

    def merged(self, part: Part) -> Result:
        """To more keys."""
        highest = jnp.maximum(self.highest, part.logsumexp)
        own = self.total * jnp.exp(self.highest - highest)
        others = jnp.exp(part.logsumexp - highest)
        total = own + others
        own, others = ((share / total)[..., None] for share in (own, others))
        return Result(self.out * own + part.out * others, highest, total)

    def logsumexp(self) -> Array:
        """The log of the sum over all parts, ``(B, H, Q)``."""
        return self.highest + jnp.log(self.total)

    def share(self, part: Part) -> Array:
        """How much of the weight is that of a part, ``(B, H, Q)``."""
        return jnp.exp(part.logsumexp - self.highest) / self.total


@dataclass(frozen=True, eq=False)
class Ring:
    """What is static.

    Attributes
    ----------
    implementation, call
        What computes attention to the keys of a shard; the call, without its arrays.
    bounded
        Whether a query may see some keys only.
    axis_name, shards
        The axis and its size.
    """

    implementation: Implementation
    call: Call
    bounded: bool
    axis_name: str | tuple[str, ...]
    shards: int

    def passed_on(self, arrays: Any) -> Any:
        """What the shard before this one holds."""
        to = [(i, (i + 1) % self.shards) for i in range(self.shards)]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axis_name, to), arrays)

    def attend(self, queries: Queries, keys: Keys, arrays: Arrays) -> Part:
        """To the keys of one shard or of a part of it."""
        call = replace(
            self.call,
            q=queries.vectors, query=queries.side,
            k=keys.vectors, v=keys.values, key=keys.side, arrays=arrays,
        )  # fmt: skip
        run: Any = self.implementation.run
        return Part(*(a.astype(call.dtype) for a in run(call)))

    def pairs(self, query: Side, key: Side) -> list[tuple[slice, slice, Array | bool]]:
        """Parts of queries and of keys, and whether any of the one may see any of the other."""
        if not self.bounded:
            return [(slice(None), slice(None), True)]
        halves = (_halves(side.pos.shape[-1]) for side in (query, key))
        return [
            (rows, columns, self._meet(query.select(rows), key.select(columns)))
            for rows, columns in product(*halves)
        ]

    def _meet(self, query: Side, key: Side) -> Array:
        """By the ranges of positions and segments, in every sequence of the batch together."""
        ranges = (
            None if a is None else (jnp.min(a)[None, None], jnp.max(a)[None, None])
            for a in (query.pos, key.pos, query.seg, key.seg)
        )
        call = self.call
        some, _ = visible_between(
            *ranges,
            causal=call.causal, window=call.window, sink_tokens=call.sink_tokens, xp=jnp,
        )  # fmt: skip
        return jnp.all(some)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, queries: Queries, keys: Keys, arrays: Arrays) -> tuple[Array, Array]:
    """``(B, H, Q, Dv)`` in the working float, of this shard's queries to all keys; log-sum-exp."""
    return _forward(ring, queries, keys, arrays)[0]


def _forward(
    ring: Ring, queries: Queries, keys: Keys, arrays: Arrays
) -> tuple[tuple[Array, Array], Any]:
    """Attention, and what its gradients are computed from: nothing of another shard."""

    def absorb(result: Result, held: Keys) -> Result:
        for rows, columns, meet in ring.pairs(queries.side, held.side):
            some = _part(queries, rows), _part(held, columns)

            def with_part(own: Result, some: Any = some) -> Result:
                return own.merged(ring.attend(*some, arrays))

            own = _if(meet, with_part, lambda own: own, result.of(rows))
            result = Result(*(a.at[:, :, rows].set(b) for a, b in zip(result, own, strict=True)))
        return result

    def hop(_: Any, carry: tuple[Result, Any]) -> tuple[Result, Any]:
        result, held = carry
        arriving = ring.passed_on(held)  # before the work that it may overlap with
        return absorb(result, held), arriving

    shape = (*queries.vectors.shape[:3], keys.values.shape[-1])
    start = varying(Result.of_nothing(shape, ring.call.dtype), queries)
    result, held = lax.fori_loop(0, ring.shards - 1, hop, (start, keys))
    result = absorb(result, held)
    return (result.out, result.logsumexp()), (queries, keys, arrays, result)


def _backward(ring: Ring, saved: Any, d_results: tuple[Array, Array]) -> tuple[Any, ...]:
    """Keys go round again, and their gradients with them, one hop behind and then home."""
    queries, keys, arrays, result = saved
    d_out, d_whole = d_results
    # The gradient of the whole log-sum-exp by that of a part is the share of the part.
    delta = jnp.sum(result.out * d_out, axis=-1) - d_whole

    def of_part(rows: slice, some: Any) -> Any:
        found, transpose = jax.vjp(ring.attend, *some)
        share = result.of(rows).share(found)
        weighted = d_out[:, :, rows] * share[..., None]
        d_logsumexp = jnp.sum(found.out * weighted, axis=-1) - share * delta[:, :, rows]
        d_some = transpose(Part(weighted, d_logsumexp))
        return _floating(d_some, some, ring.call.dtype)

    def add(sums: Any, held: Keys) -> Any:
        for rows, columns, meet in ring.pairs(queries.side, held.side):
            some = _part(queries, rows), _part(held, columns), arrays

            def found(_: Any, rows: Any = rows, some: Any = some) -> Any:
                return of_part(rows, some)

            nothing = _zeros(some, ring.call.dtype)
            d_queries, d_keys, d_arrays = _if(meet, found, lambda nothing: nothing, nothing)
            sums = (
                _with_part(sums[0], d_queries, rows),
                _with_part(sums[1], d_keys, columns),
                jax.tree.map(jnp.add, sums[2], d_arrays),
            )
        return sums

    def step(sums: Any, held: Keys) -> Any:
        d_queries, d_keys, d_arrays = sums
        return add((d_queries, ring.passed_on(d_keys), d_arrays), held)

    def hop(_: Any, carry: Any) -> Any:
        sums, held = carry
        arriving = ring.passed_on(held)
        return step(sums, held), arriving

    start = _zeros((queries, keys, arrays), ring.call.dtype)
    sums, held = lax.fori_loop(0, ring.shards - 1, hop, (start, keys))
    d_queries, d_keys, d_arrays = step(sums, held)
    found = d_queries, ring.passed_on(d_keys), d_arrays
    like = queries, keys, arrays
    return jax.tree.map(
        lambda g, a: None if g is None else g.astype(a.dtype), found, like,
        is_leaf=lambda g: g is None,
    )  # fmt: skip


_attend.defvjp(_forward, _backward)


def _if(condition: Array | bool, do: Callable[[Any], Any], otherwise: Any, operand: Any) -> Any:
    """``lax.cond``, unless it is known."""
    return do(operand) if condition is True else lax.cond(condition, do, otherwise, operand)


def _halves(length: int) -> list[slice]:
    """Of zig-zag shards the one half is early and the other late."""
    middle = length // 2
    return [slice(None)] if middle == 0 else [slice(0, middle), slice(middle, length)]


def _part(arrays: Any, tokens: slice) -> Any:
    """Some of the tokens of ``Queries`` or ``Keys``."""
    return jax.tree.map(lambda a: a[(*_token_axis(a), tokens)], arrays)


def _with_part(arrays: Any, part: Any, tokens: slice) -> Any:
    """The arrays, a part added to some of their tokens."""
    return jax.tree.map(lambda a, b: a.at[(*_token_axis(a), tokens)].add(b), arrays, part)


def _token_axis(array: Array) -> tuple[slice, ...]:
    """What comes before tokens in an index: batch and heads, but integers have no heads."""
    return (slice(None),) * min(2, array.ndim - 1)


def _zeros(arrays: Any, dtype: Any) -> Any:
    """Where gradients are summed; None for integers, which have none."""
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, dtype) if _is_float(a) else None, arrays)
    return varying(zeros, arrays)


def _floating(gradients: Any, like: Any, dtype: Any) -> Any:
    """Gradients in a dtype; None for integers."""
    return jax.tree.map(lambda a, g: g.astype(dtype) if _is_float(a) else None, like, gradients)


def _is_float(array: Array) -> bool:
    return bool(jnp.isdtype(array.dtype, "real floating"))


def _by_batch(side: Side) -> Side:
    """Integers as ``(B or 1, L)``."""
    integers = (None if a is None else jnp.atleast_2d(a) for a in side[:3])
    return Side(*integers, side.features)


def _without_arrays(call: Call) -> Call:
    """Traced arrays must not be kept in what is static."""
    nothing: Any = None
    names = ("q", "k", "v", "query", "key", "sink")
    return replace(call, aligned=False, arrays={}, **dict.fromkeys(names, nothing))


def _axis_size(axis_name: Any) -> int:
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is no axis here: call ring_attention inside jax.shard_map, "
            "over a mesh that has the axis"
        ) from None


def _consecutive(
    q_len: int, k_len: int, shards: int, axis_name: str | tuple[str, ...]
) -> tuple[Array, Array]:
    """Positions of this shard's tokens, the ends of the whole q and k aligned."""
    if q_len > k_len:
        raise ValueError(
            f"q has length {q_len} a shard, k only {k_len}: give q_pos and k_pos, the default "
            "aligns ends"
        )
    shard = lax.axis_index(axis_name)
    first = shards * (k_len - q_len)
    return first + shard * q_len + jnp.arange(q_len), shard * k_len + jnp.arange(k_len)


def _check_in_order(scheme: PositionScheme, q: Array, k: Array, given: Mapping[str, Any]) -> None:
    """Hidden states of a shard are enough where tokens are in order and queries are keys'."""
    pairs = {"q_pos": "q_pos and k_pos", "q_seg": "q_seg and k_seg", "k_valid": "k_valid"}
    what = next((words for name, words in pairs.items() if given.get(name) is not None), None)
    if what is None and q.shape[1] != k.shape[1]:
        what = f"q of length {q.shape[1]} and k of length {k.shape[1]}"
    if what is not None:
        raise ValueError(
            f"{what} without features: {type(scheme).__name__} sums features over tokens of other "
            "shards; give q_features and k_features, this shard's part of posenc.features of the "
            "whole sequence"
        )


def _features(
    scheme: PositionScheme,
    q: Array,
    k: Array,
    params: Mapping[str, Array] | None,
    given: Mapping[str, Any],
    axis_name: str | tuple[str, ...],
) -> tuple[Arrays, Arrays]:
    """Features of this shard's tokens, summed over them and over all shards before it."""
    hooks, here = scheme.hooks(), lax.axis_index(axis_name)
    vectors: dict[str, Any] = {
        name: jnp.swapaxes(a, 1, 2)
        for name, a, hook in (("q", q, "query_features"), ("k", k, "key_features"))
        if hook in hooks
    }
    # Positions do not change sums here: all tokens are in order.
    names = {"pos": "k_pos", "axes": "k_axes", "scale": "scale"} if vectors else {}
    vectors |= {name: given.get(own) for name, own in names.items()}
    if given.get("x") is not None:
        vectors["x"] = jnp.asarray(given["x"])
    arrays = {name: jnp.asarray(array) for name, array in as_mapping(params).items()}
    query, key = features(scheme, arrays, **vectors, xp=jnp)
    for name in scheme.cumulative:
        own = key[name]
        totals = lax.all_gather(varying(own[:, :, -1], here), axis_name)
        earlier = jnp.arange(len(totals)) < here
        earlier = earlier.reshape(-1, *[1] * (totals.ndim - 1))
        before = jnp.sum(jnp.where(earlier, totals, 0), axis=0)[:, :, None]
        query[name], key[name] = query[name] + before, own + before
    return query, key


def _fused_refuses(call: Call) -> str | None:
    """Why no kernel serves a shard: parts of a row are put together by their log-sum-exp."""
    return fused.unsupported(call) or fused.without_lse(call)


_IMPLEMENTATIONS = (
    Implementation(
        "pallas", fused.fused, unsupported=_fused_refuses, not_preferred=fused.not_preferred
    ),
    Implementation("chunked", chunked, unsupported=refuses),
)
