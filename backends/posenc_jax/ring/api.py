"""The public function ``ring_attention``: its defaults, checks and choice of implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import jax.numpy as jnp
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
    check_pair,
    choose,
    merge_parts,
    public_lse,
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
    implementation: str = "auto",
    **options: Unpack[Options],
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
        Segments of this shard's tokens; a number means the same segment on every shard.
    implementation
        Computes attention to the keys of one shard: ``"pallas"``, ``"chunked"``, or ``"auto"``, the
        first of them that serves the call well. First derivatives in reverse mode only.
    bias, mask
        ``bias`` is not accepted. ``mask`` must be a function of positions and segments.
    x, q_x
        For a scheme with ``hidden_features``: of this shard's tokens. Cumulative features, and a
        ``lookback``, need the default positions, no segments, no ``k_valid`` and ``Q = K``. In any
        other layout give features.
    q_features, k_features
        This shard's part ``(B, H, L)`` of the features of the whole sequence, which
        ``posenc.features`` computes outside of ``shard_map``.

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
    given = _with_defaults(q, k, scheme, params, options, axis_name, shards)
    call = prepare_call(q, k, v, scheme, params, causal, implementation, **given)
    chosen = choose(_IMPLEMENTATIONS, call, implementation)
    parts = [_attend(part, chosen, axis_name, shards) for part in call.regions or (call,)]
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
        call.causal or call.window is not None or call.query.seg is not None,
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
    options: Options,
    axis_name: str | tuple[str, ...],
    shards: int,
) -> Any:
    """The options with this shard's positions, cumulative features and hidden states."""
    given: dict[str, Any] = dict(options)
    use_default_positions = check_pair("q_pos", given.get("q_pos"), "k_pos", given.get("k_pos"))
    across_shards = _needs_other_shards(scheme, given)
    if across_shards:
        _check_in_order(scheme, q, k, given)
    if use_default_positions and hasattr(q, "shape") and hasattr(k, "shape"):
        given["q_pos"], given["k_pos"] = consecutive_positions(
            q.shape[1], k.shape[1], axis_name, shards
        )
    if across_shards:
        given["q_features"], given["k_features"] = _features(scheme, q, k, params, given, axis_name)
        given["x"] = None
    needs_q_x = given.get("x") is not None and given.get("q_x") is None
    if use_default_positions and needs_q_x and q.shape[1] == k.shape[1]:
        given["q_x"] = given["x"]  # the same tokens; traced positions cannot prove it
    return given


def _needs_other_shards(scheme: PositionScheme, given: Mapping[str, Any]) -> bool:
    """Whether features of tokens of other shards must be computed here: the caller gives none."""
    if not (scheme.cumulative or scheme.lookback()) or given.get("q_features") is not None:
        return False
    return given.get("x") is not None or "hidden_features" not in scheme.hooks()


def _check_in_order(scheme: PositionScheme, q: Array, k: Array, given: Mapping[str, Any]) -> None:
    """Refuse other layouts: sums need tokens in order, and keys of the same tokens as queries."""
    pairs = {"q_pos": "q_pos and k_pos", "q_seg": "q_seg and k_seg", "k_valid": "k_valid"}
    problem = next((words for name, words in pairs.items() if given.get(name) is not None), None)
    if problem is None and q.shape[1] != k.shape[1]:
        problem = f"q of length {q.shape[1]} and k of length {k.shape[1]}"
    if problem is not None:
        raise ValueError(
            f"{problem} without features: those of {type(scheme).__name__} depend on tokens of "
            "other shards; give q_features and k_features, this shard's part of posenc.features "
            "of the whole sequence"
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
    hooks, shard = scheme.hooks(), lax.axis_index(axis_name)
    inputs: dict[str, Any] = {
        name: jnp.swapaxes(a, 1, 2)
        for name, a, hook in (("q", q, "query_features"), ("k", k, "key_features"))
        if hook in hooks
    }
    # Positions do not change sums here: all tokens are in order.
    options = {"pos": "k_pos", "axes": "k_axes", "scale": "scale"} if inputs else {}
    inputs |= {name: given.get(option) for name, option in options.items()}
    if given.get("x") is not None:
        x = inputs["x"] = jnp.asarray(given["x"])
        if count := scheme.lookback():
            inputs["x_before"] = _last_of_shard_before(x, count, axis_name)
    arrays = {name: jnp.asarray(array) for name, array in as_mapping(params).items()}
    query, key = features(scheme, arrays, **inputs, xp=jnp)
    for name in scheme.cumulative:
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
            "give q_features and k_features"
        )
    shards = axis_size(axis_name)
    to_next = [(i, i + 1) for i in range(shards - 1)]
    received: Array = lax.ppermute(  # type: ignore[no-untyped-call] # untyped in JAX
        make_varying(x[:, -count:], lax.axis_index(axis_name)), axis_name, to_next
    )
    return received


def _with_batch_axis(side: Side) -> Side:
    """Integers as ``(B or 1, L)``."""
    pos, seg, places = (None if a is None else jnp.atleast_2d(a) for a in side[:3])
    return Side(pos, seg, places, side.features)


def _fused_unsupported(call: Call) -> str | None:
    """Why no kernel serves a shard. Merging needs a log-sum-exp, which some calls lack."""
    return fused.unsupported(call) or fused.without_lse(call)


_IMPLEMENTATIONS = (
    Implementation(
        "pallas", fused.fused, unsupported=_fused_unsupported, not_preferred=fused.not_preferred
    ),
    Implementation("chunked", chunked.chunked, unsupported=chunked.unsupported),
)
