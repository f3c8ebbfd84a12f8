"""What fused kernels must compute, by formula on whole arrays, to compare real kernels with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from posenc_jax.fused.devices import Device
from posenc_jax.fused.gradients import Kernels
from posenc_jax.fused.plan import MIN_SCORE, Tokens


def far_tiles(plan, q_size, k_size):
    """Which pairs lie in far tiles, ``(2, Q, K)``: before the near ones, and after."""
    diagonal = jnp.arange(k_size)[None, :] // plan.block - jnp.arange(q_size)[:, None] // plan.block
    first, end = plan.near
    return jnp.stack([diagonal < first, diagonal >= end])


def scores_and_mask(plan, operands, integers, head_scalars, table, q_feature, k_feature):
    """Scores, and which pairs are computed and visible, ``(B, H, Q, K)`` with padding."""
    q, k = (operands[n].astype(jnp.float32) for n in (0, 1))
    (batch, heads, q_size, _), k_size = q.shape, k.shape[2]
    k = jnp.repeat(k, heads // k.shape[1], axis=1)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") * plan.scale
    i, j = jnp.arange(q_size)[:, None], jnp.arange(k_size)[None, :]
    q_pos, k_pos, segments = i + plan.k_len - plan.q_len, j, ()
    if integers.q_pos is not None:
        q_pos, k_pos = integers.q_pos[:, None, :, None], integers.k_pos[:, None, None, :]
    if integers.q_seg is not None:
        segments = integers.q_seg[:, None, :, None], integers.k_seg[:, None, None, :]
    if plan.form == "elementwise":
        query = None if q_feature is None else q_feature[..., :, None]
        key = None if k_feature is None else k_feature[..., None, :]
        columns = [head_scalars[:, n, None, None] for n in range(len(plan.reads.scalars))]
        scores = scores + plan.bias(columns, Tokens(q_pos, query), Tokens(k_pos, key))
    if plan.form == "by distance":
        flat = table.reshape(heads, -1)
        entry = j - i - (plan.near[0] - 1) * plan.block - 1
        bias = flat[:, jnp.clip(entry, 0, flat.shape[1] - 1)]
        if operands.far is not None:
            before, after = far_tiles(plan, q_size, k_size)
            bias = jnp.where(before, operands.far[:, 0, None, None], bias)
            bias = jnp.where(after, operands.far[:, 1, None, None], bias)
        scores = scores + bias
    mask = plan.mask(q_pos, k_pos, j, *segments)
    mask = jnp.ones(scores.shape, bool) if mask is None else jnp.broadcast_to(mask, scores.shape)
    q_block, k_block = i // plan.block, j // plan.block
    ranges = integers.key_ranges.reshape(2, batch, heads, -1)
    first, end = (bound[..., q_block] for bound in ranges)
    first, end = first[..., :, 0, None], end[..., :, 0, None]
    return scores, mask & (first <= k_block) & (k_block < end)


def _inputs_of_bias(operands):
    return operands.head_scalars, operands.table, operands.q_feature, operands.k_feature


def _values(operands):
    v = operands.v.astype(jnp.float32)
    return jnp.repeat(v, operands.q.shape[1] // v.shape[1], axis=1)


def forward(plan, operands, integers):
    scores, mask = scores_and_mask(plan, operands, integers, *_inputs_of_bias(operands))
    highest = jnp.max(jnp.where(mask, scores, MIN_SCORE), axis=-1)
    highest = jnp.maximum(highest, MIN_SCORE)
    weights = jnp.where(mask, jnp.exp(scores - highest[..., None]), 0.0)
    total = jnp.sum(weights, axis=-1)
    positive = jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("bhqk,bhkd->bhqd", weights / positive[..., None], _values(operands))
    logsumexp = jnp.where(total == 0, MIN_SCORE, highest + jnp.log(positive))
    return out.astype(operands.q.dtype), logsumexp


def _weights_and_gradient(plan, operands, integers, residuals):
    scores, mask = scores_and_mask(plan, operands, integers, *_inputs_of_bias(operands))
    weights = jnp.where(mask, jnp.exp(scores - residuals.logsumexp[..., None]), 0.0)
    d_out = residuals.d_out.astype(jnp.float32)
    d_weights = jnp.einsum("bhqd,bhkd->bhqk", d_out, _values(operands))
    return weights, weights * (d_weights - residuals.delta[..., None])


def d_queries(plan, operands, integers, residuals):
    _, d_scores = _weights_and_gradient(plan, operands, integers, residuals)
    heads = operands.q.shape[1]
    k = jnp.repeat(operands.k.astype(jnp.float32), heads // operands.k.shape[1], axis=1)
    d_q = jnp.einsum("bhqk,bhkd->bhqd", d_scores, k) * plan.scale

    def scores(head_scalars, q_feature):
        inputs = head_scalars, operands.table, q_feature, operands.k_feature
        return scores_and_mask(plan, operands, integers, *inputs)[0]

    def per_query(n):
        """The gradient of the n-th scalar, per query."""
        one = jnp.zeros_like(operands.head_scalars).at[:, n].set(1.0)
        derivative = jax.jvp(
            lambda scalars: scores(scalars, operands.q_feature), (operands.head_scalars,), (one,)
        )[1]
        return jnp.sum(d_scores * derivative, axis=-1)

    d_far = None
    if operands.far is not None:
        far = far_tiles(plan, *d_scores.shape[2:])
        d_far = jnp.einsum("bhqk,cqk->bhcq", d_scores, far.astype(jnp.float32))
    if plan.form != "elementwise":
        return d_q.astype(operands.q.dtype), None, None, d_far
    d_scalars = None
    if plan.reads.trainable:
        d_scalars = jnp.stack([per_query(n) for n in range(len(plan.reads.trainable))], axis=2)
    d_feature = None
    if operands.q_feature is not None:
        pull = jax.vjp(lambda feature: scores(operands.head_scalars, feature), operands.q_feature)
        (d_feature,) = pull[1](d_scores)
    return d_q.astype(operands.q.dtype), d_scalars, d_feature, None


def d_keys(plan, operands, integers, residuals):
    weights, d_scores = _weights_and_gradient(plan, operands, integers, residuals)
    q, d_out = (a.astype(jnp.float32) for a in (operands.q, residuals.d_out))
    d_k = jnp.einsum("bhqk,bhqd->bhkd", d_scores, q) * plan.scale
    d_v = jnp.einsum("bhqk,bhqd->bhkd", weights, d_out)

    def scores(k_feature):
        inputs = operands.head_scalars, operands.table, operands.q_feature, k_feature
        return scores_and_mask(plan, operands, integers, *inputs)[0]

    d_feature = None
    if operands.k_feature is not None:
        (d_feature,) = jax.vjp(scores, operands.k_feature)[1](d_scores)
    return d_k.astype(operands.k.dtype), d_v.astype(operands.v.dtype), d_feature


def d_table(plan, operands, integers, residuals):
    _, d_scores = _weights_and_gradient(plan, operands, integers, residuals)

    def scores(table):
        inputs = operands.head_scalars, table, operands.q_feature, operands.k_feature
        return scores_and_mask(plan, operands, integers, *inputs)[0]

    return jax.vjp(scores, operands.table)[1](d_scores)[0]


KERNELS = Kernels(forward, d_queries, d_keys, d_table)


class Definition(Device):
    """These kernels as those of a device, in blocks of 8."""

    reads_far = True

    def unsupported(self, target):
        return None

    def unsupported_call(self, call):
        return None

    def unsupported_bias(self, scheme, reads):
        return None

    def block(self, call):
        return 8

    def kernels(self, *, interpreted):
        return KERNELS


DEVICE = Definition()
