"""The public function ``ring_attention``: its defaults, checks and choice of implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from posenc import PositionScheme, features
from posenc.backend import (
    Arguments,
    Call,
    Implementation,
    Mask,
    PartialAttention,
    Planned,
    Refusal,
    Tokens,
    Window,
    add_sink,
    advise_unknown,
    as_mapping,
    check_pair,
    choose,
    lookback,
    merge_parts,
    public_lse,
    reads_hidden,
    reads_vectors,
    summed_features,
)
from posenc_jax.api import prepare_call
from posenc_jax.chunked import implementation as chunked
from posenc_jax.derivatives import forbid_forward_mode
from posenc_jax.fused import implementation as fused
from posenc_jax.ring.exchange import Ring, attend_ring, without_arrays
from posenc_jax.ring.layout import axis_size, consecutive_positions
from posenc_jax.tokens import Keys, Queries
from posenc_jax.trees import Arrays, make_varying


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
    window: int | Window | None = None,
    mask: Mask | Callable[..., Array] | None = None,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    k_transformed: bool = False,
    implementation: str = "auto",
    skip_blocks: bool = True,
    return_lse: bool = False,
) -> Any:
    """``attention`` over a sequence whose tokens are spread over a mesh axis, in ``shard_map``.

    A shard's keys, already transformed, visit every shard with their positions, segments, places
    and features. Row by row, ``out = sum_s exp(l_s - l) out_s`` with ``l = logsumexp_s l_s`` over
    the shards ``s``, where ``out_s`` and ``l_s`` are attention to keys of ``s`` and its
    log-sum-exp. Values and gradients are those of one device, up to the order of sums.

    Each half of a shard's queries attends to each half of the visiting keys. A pair of halves is
    skipped, forward and backward, where ranges of positions and segments show no visible key.
    Memory is that of a few shards. In the backward pass keys go round again, and attention is
    computed once more. Gradients of keys travel home with them. For each of a scheme's regions
    (ReRoPE) keys go round once.

    Parameters
    ----------
    q, k, v, scheme, params, causal, window, softcap, scale, k_transformed, return_lse
        As in ``attention``, of this shard: ``(B, Q, H, D)``, ``(B, K, Hk, D)``, ``(B, K, Hk, Dv)``.
        All shards have the same ``Q`` and the same ``K``.
    axis_name
        The axis of the mesh, or axes, over which tokens are spread.
    mask
        As in ``attention``, but no array: a ``Mask`` or a function of positions and segments.
    tokens, queries
        Those of this shard. Positions are those in the whole sequence, in any layout (see
        ``zigzag``); by default shards hold consecutive tokens, in the order of the axis, and the
        ends of the whole q and k align. A number of a segment means the same segment on every
        shard. ``queries`` may be left out if a shard has as many as keys. Features are this
        shard's part of those of the whole sequence, which ``posenc.features`` computes outside of
        ``shard_map``; cumulative ones, and a ``lookback``, are computed here from hidden states if
        positions are the default, without segments or padding, and ``Q = K``.
    implementation
        Computes attention to the keys of one shard: ``"pallas"``, ``"chunked"``, or ``"auto"``, the
        first of them that serves the call well. First derivatives in reverse mode only.
    skip_blocks
        As in ``attention``.

    Returns
    -------
    ``(B, Q, H, Dv)`` in q's dtype. A fully masked row is 0, with zero gradients. With
    ``return_lse`` also the log-sum-exp ``(B, Q, H)``.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted; ``axis_name`` is not bound.
    NotImplementedError
        The named implementation cannot serve the call; says why.
    """
    shards = axis_size(axis_name)
    given = Arguments(
        window, mask, tokens, queries, None, softcap, scale, k_transformed, return_lse
    ).check()
    given = _with_defaults(q, k, scheme, params, given, axis_name, shards)
    call = prepare_call(
        q, k, v, scheme, params, causal, implementation, given,
        skip_blocks=skip_blocks, gather=partial(_of_all_shards, axis_name=axis_name),
    )  # fmt: skip
    chosen, _ = choose(tuple(_IMPLEMENTATIONS.values()), call, implementation)
    own = _IMPLEMENTATIONS[chosen]
    parts = [_attend(part, own, axis_name, shards) for part in call.regions or (call,)]
    result = merge_parts(parts, call) if call.regions else parts[0]
    if call.sink is not None:
        result = add_sink(result, call)
    out = jnp.swapaxes(result.out, 1, 2).astype(q.dtype)
    if not call.wants_lse:
        return out
    return out, jnp.swapaxes(public_lse(result.lse, call), 1, 2)


def _attend(
    call: Call, implementation: Implementation, axis_name: str | tuple[str, ...], shards: int
) -> PartialAttention:
    """Attention of this shard's queries to all keys, which go round the ring once."""
    ring = Ring(
        implementation,
        without_arrays(call),
        call.mask != Mask() or call.query.seg is not None,
        axis_name,
        shards,
    )
    operands = (
        Queries(call.q, _with_batch_axis(call.query)),
        Keys(call.k, call.v, _with_batch_axis(call.key)),
        dict(call.arrays),
    )
    # Operands must vary over the axis, as the index of the shard does: after one hop even
    # replicated arrays differ per shard.
    operands = forbid_forward_mode(
        make_varying(operands, lax.axis_index(axis_name)), "ring_attention"
    )
    return PartialAttention(*attend_ring(ring, *operands))


def _with_defaults(
    q: Array,
    k: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None,
    given: Arguments,
    axis_name: str | tuple[str, ...],
    shards: int,
) -> Arguments:
    """The arguments with this shard's positions, cumulative features and hidden states."""
    keys, same = given.of_keys, given.queries is None
    queries = keys if same else given.of_queries
    default = check_pair("queries.pos", queries.pos, "tokens.pos", keys.pos)
    across_shards = _needs_other_shards(scheme, given)
    if across_shards:
        _check_in_order(scheme, q, k, given)
    if default and hasattr(q, "shape") and hasattr(k, "shape"):
        q_pos, k_pos = consecutive_positions(q.shape[1], k.shape[1], axis_name, shards)
        if same and q.shape[1] != k.shape[1]:
            if any(a is not None for a in (keys.seg, keys.places, keys.exists)):
                raise ValueError("tokens are given without queries, but q and k differ in length")
            queries = Tokens()
        queries, keys = replace(queries, pos=q_pos), replace(keys, pos=k_pos)
    if same:  # features of queries are others than those of keys
        queries = replace(queries, features=None)
    if across_shards:
        query, key = _features(
            scheme, q, k, params, replace(given.of_keys, pos=keys.pos), given.scale, axis_name
        )
        queries, keys = replace(queries, features=query), replace(keys, features=key, x=None)
    if default and keys.x is not None and queries.x is None and q.shape[1] == k.shape[1]:
        queries = replace(queries, x=keys.x)  # the same tokens; traced positions cannot prove it
    return given._replace(tokens=keys, queries=queries)


def _needs_other_shards(scheme: PositionScheme, given: Arguments) -> bool:
    """Whether features of tokens of other shards must be computed here: the caller gives none."""
    if not (summed_features(scheme) or lookback(scheme)) or given.of_queries.features is not None:
        return False
    return given.of_keys.x is not None or not reads_hidden(scheme)


def _check_in_order(scheme: PositionScheme, q: Array, k: Array, given: Arguments) -> None:
    """Refuse other layouts: sums need tokens in order, and keys of the same tokens as queries."""
    named = {"pos": "positions", "seg": "segments", "exists": "padding"}
    problem = next(
        (words for name, words in named.items() if getattr(given.of_keys, name) is not None), None
    )
    if problem is None and q.shape[1] != k.shape[1]:
        problem = f"q of length {q.shape[1]} and k of length {k.shape[1]}"
    if problem is not None:
        raise ValueError(
            f"{problem} without features: those of {type(scheme).__name__} depend on tokens of "
            "other shards; give tokens and queries with features, this shard's part of "
            "posenc.features of the whole sequence"
        )


def _features(
    scheme: PositionScheme,
    q: Array,
    k: Array,
    params: Mapping[str, Array] | None,
    tokens: Tokens,
    scale: float | None,
    axis_name: str | tuple[str, ...],
) -> tuple[Arrays, Arrays]:
    """Features of this shard's tokens, summed over them and over all shards before it."""
    shard = lax.axis_index(axis_name)
    inputs: dict[str, Any] = {}
    if reads_vectors(scheme, "query"):
        inputs["q"] = jnp.swapaxes(q, 1, 2)
    if reads_vectors(scheme, "key"):
        inputs["k"] = jnp.swapaxes(k, 1, 2)
    if inputs:
        inputs["scale"] = scale
    else:  # positions do not change sums here: all tokens are in order
        tokens = Tokens(x=tokens.x)
    if tokens.x is not None:
        tokens = replace(tokens, x=jnp.asarray(tokens.x))
        if count := lookback(scheme):
            inputs["x_before"] = _last_of_shard_before(tokens.x, count, axis_name)
    arrays = {name: jnp.asarray(array) for name, array in as_mapping(params).items()}
    both = features(scheme, arrays, tokens, **inputs, xp=jnp)
    query, key = (dict[str, Any](as_mapping(side.features)) for side in both)
    for name in summed_features(scheme):
        sums = key[name]
        totals = lax.all_gather(make_varying(sums[:, :, -1], shard), axis_name)
        earlier = jnp.arange(len(totals)) < shard
        earlier = earlier.reshape(-1, *[1] * (totals.ndim - 1))
        before = jnp.sum(jnp.where(earlier, totals, 0), axis=0)[:, :, None]
        query[name], key[name] = query[name] + before, sums + before
    return query, key


def _last_of_shard_before(x: Array, count: int, axis_name: str | tuple[str, ...]) -> Array:
    """Hidden states of the last ``count`` tokens of the shard before; zeros before the first."""
    if x.shape[1] < count:
        raise ValueError(
            f"x has {x.shape[1]} tokens on each shard, and features read {count} earlier ones; "
            "give tokens and queries with features"
        )
    shards = axis_size(axis_name)
    to_next = [(i, i + 1) for i in range(shards - 1)]
    received: Array = lax.ppermute(  # type: ignore[no-untyped-call] # untyped in JAX
        make_varying(x[:, -count:], lax.axis_index(axis_name)), axis_name, to_next
    )
    return received


def _of_all_shards(integers: Array, axis_name: str | tuple[str, ...]) -> Array:
    """``(B, L)`` of this shard as ``(B, n)`` of all of them, in any order."""
    own = make_varying(integers, lax.axis_index(axis_name))
    found: Array = lax.all_gather(own, axis_name, axis=1, tiled=True)
    return found


def _with_batch_axis(side: Tokens) -> Tokens:
    """Integers as ``(B or 1, L)``."""
    pos, seg, places = (
        None if a is None else jnp.atleast_2d(a) for a in (side.pos, side.seg, side.places)
    )
    return replace(side, pos=pos, seg=seg, places=places)


def _plan_fused(call: Call) -> Planned | Refusal:
    """A kernel for the keys of a shard. Merging needs a log-sum-exp, which some calls lack."""
    planned = fused.plan(call)
    why = planned.without_lse if isinstance(planned, Planned) else None
    return planned if why is None else Refusal(why)


_IMPLEMENTATIONS = {
    each.name: each
    for each in (
        Implementation("pallas", _plan_fused, fused.not_preferred, within="ring_attention"),
        Implementation("chunked", chunked.plan, decays=True, within="ring_attention"),
    )
}
