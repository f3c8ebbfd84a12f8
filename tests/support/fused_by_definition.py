"""What fused kernels must compute, by formula and whole: ``Kernels`` to put real ones beside."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from posenc_jax.fused.gradients import Kernels
from posenc_jax.fused.plan import FLOOR, Tokens


def scores(plan, operands, places, numbers, table, q_feature, k_feature):
    """Scores and which count, ``(B, H, Q, K)`` with padding."""
    q, k = (operands[n].astype(jnp.float32) for n in (0, 1))
    (batch, heads, q_size, _), k_size = q.shape, k.shape[2]
    k = jnp.repeat(k, heads // k.shape[1], axis=1)
    found = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") * plan.scale
    i, j = jnp.arange(q_size)[:, None], jnp.arange(k_size)[None, :]
    q_pos, k_pos, segments = i + plan.k_len - plan.q_len, j, ()
    if places.q_pos is not None:
        q_pos, k_pos = places.q_pos[:, None, :, None], places.k_pos[:, None, None, :]
    if places.q_seg is not None:
        segments = places.q_seg[:, None, :, None], places.k_seg[:, None, None, :]
    if plan.form == "pairs":
        query = None if q_feature is None else q_feature[..., :, None]
        key = None if k_feature is None else k_feature[..., None, :]
        at = Tokens(q_pos, query), Tokens(k_pos, key)
        each = [numbers[:, n, None, None] for n in range(numbers.shape[1])]
        found = found + plan.bias(each[: len(plan.learned + plan.fixed)], *at)
    if plan.form == "table":
        flat = table.reshape(heads, -1)
        found = found + flat[:, j - i + plan.q_blocks * plan.block - 1]
    seen = plan.seen(q_pos, k_pos, j, *segments)
    seen = jnp.ones(found.shape, bool) if seen is None else jnp.broadcast_to(seen, found.shape)
    of_queries, of_keys = i // plan.block, j // plan.block
    first, end = (bound[..., of_queries] for bound in places.keys.reshape(2, batch, heads, -1))
    first, end = first[..., :, 0, None], end[..., :, 0, None]
    return found, seen & (first <= of_keys) & (of_keys < end)


def _weights(plan, operands, places, logsumexp, *leaves):
    found, seen = scores(plan, operands, places, *leaves)
    return jnp.where(seen, jnp.exp(found - logsumexp[..., None]), 0.0)


def _leaves(operands):
    return operands.numbers, operands.table, operands.q_feature, operands.k_feature


def _values(operands):
    v = operands.v.astype(jnp.float32)
    return jnp.repeat(v, operands.q.shape[1] // v.shape[1], axis=1)


def forward(plan, operands, places):
    found, seen = scores(plan, operands, places, *_leaves(operands))
    highest = jnp.maximum(jnp.max(jnp.where(seen, found, FLOOR), axis=-1), FLOOR)
    weights = jnp.where(seen, jnp.exp(found - highest[..., None]), 0.0)
    total = jnp.sum(weights, axis=-1)
    some = jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("bhqk,bhkd->bhqd", weights / some[..., None], _values(operands))
    logsumexp = jnp.where(total == 0, FLOOR, highest + jnp.log(some))
    return out.astype(operands.q.dtype), logsumexp


def _d_scores(plan, operands, places, rows):
    weights = _weights(plan, operands, places, rows.logsumexp, *_leaves(operands))
    d_out = rows.d_out.astype(jnp.float32)
    d_weights = jnp.einsum("bhqd,bhkd->bhqk", d_out, _values(operands))
    return weights, weights * (d_weights - rows.delta[..., None])


def d_queries(plan, operands, places, rows):
    _, d_scores = _d_scores(plan, operands, places, rows)
    heads = operands.q.shape[1]
    k = jnp.repeat(operands.k.astype(jnp.float32), heads // operands.k.shape[1], axis=1)
    d_q = jnp.einsum("bhqk,bhkd->bhqd", d_scores, k) * plan.scale

    def of_row(numbers, q_feature):
        """Scores, every row with numbers of its own."""
        leaves = numbers, operands.table, q_feature, operands.k_feature
        return scores(plan, operands, places, *leaves)[0]

    if plan.form != "pairs":
        return d_q.astype(operands.q.dtype), None, None
    d_rows = None
    if plan.learned:
        d_rows = jnp.stack(
            [
                jnp.sum(
                    d_scores
                    * jax.jvp(
                        lambda n: of_row(n, operands.q_feature),
                        (operands.numbers,),
                        (jnp.zeros_like(operands.numbers).at[:, p].set(1.0),),
                    )[1],
                    axis=-1,
                )
                for p in range(len(plan.learned))
            ],
            axis=2,
        )
    d_feature = None
    if operands.q_feature is not None:
        pull = jax.vjp(lambda c: of_row(operands.numbers, c), operands.q_feature)[1]
        (d_feature,) = pull(d_scores)
    return d_q.astype(operands.q.dtype), d_rows, d_feature


def d_keys(plan, operands, places, rows):
    weights, d_scores = _d_scores(plan, operands, places, rows)
    q, d_out = (a.astype(jnp.float32) for a in (operands.q, rows.d_out))
    d_k = jnp.einsum("bhqk,bhqd->bhkd", d_scores, q) * plan.scale
    d_v = jnp.einsum("bhqk,bhqd->bhkd", weights, d_out)
    d_feature = None
    if operands.k_feature is not None:
        leaves = operands.numbers, operands.table, operands.q_feature
        pull = jax.vjp(lambda c: scores(plan, operands, places, *leaves, c)[0], operands.k_feature)[
            1
        ]
        (d_feature,) = pull(d_scores)
    return d_k.astype(operands.k.dtype), d_v.astype(operands.v.dtype), d_feature


def d_table(plan, operands, places, rows):
    _, d_scores = _d_scores(plan, operands, places, rows)
    leaves = operands.q_feature, operands.k_feature
    pull = jax.vjp(
        lambda t: scores(plan, operands, places, operands.numbers, t, *leaves)[0], operands.table
    )[1]
    return pull(d_scores)[0]


KERNELS = Kernels(forward, d_queries, d_keys, d_table)


def why_not_here(here):
    return None


def refuses(call):
    return None


def why_not_lowered(call, here):
    return None


def block(call, form):
    return 8


def kernels(here):
    return KERNELS
