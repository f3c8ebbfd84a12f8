"""The kernels and their gradients: one ``custom_vjp`` for every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from posenc_jax.derivatives import forbid_second_derivatives
from posenc_jax.fused.plan import Integers, Operands, Plan

NAME = "implementation 'pallas'"


class Residuals(NamedTuple):
    """What the backward pass needs per query.

    Attributes
    ----------
    d_out
        ``(B, H, Q, Dv)``.
    logsumexp
        ``(B, H, Q)`` float32.
    delta
        ``(B, H, Q)`` float32: ``sum(out * d_out)`` minus the gradient of the log-sum-exp.
    """

    d_out: Array
    logsumexp: Array
    delta: Array


class Kernels(NamedTuple):
    """Attention on one kind of device: functions of ``(plan, operands, integers[, residuals])``.

    Attributes
    ----------
    forward
        The output ``(B, H, Q, Dv)`` in q's dtype, and the log-sum-exp ``(B, H, Q)`` float32. In a
        fully masked row they are 0 and ``MIN_SCORE``.
    d_queries
        Gradients of q, ``(B, H, Q, D)``; of each trainable per-head scalar, per query
        ``(B, H, P, Q)`` float32, or None; of ``q_feature``, or None; of ``far``, per query
        ``(B, H, 2, Q)`` float32, or None.
    d_keys
        Gradients of k ``(B, H, K, D)`` and v ``(B, H, K, Dv)``, per head of the queries; of
        ``k_feature``, or None.
    d_table
        The gradient of the table.
    """

    forward: Callable[..., tuple[Array, Array]]
    d_queries: Callable[..., tuple[Array, Array | None, Array | None, Array | None]]
    d_keys: Callable[..., tuple[Array, Array, Array | None]]
    d_table: Callable[..., Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    kernels: Kernels, plan: Plan, operands: Operands, integers: Integers
) -> tuple[Array, Array]:
    """Output and log-sum-exp, both padded; both have gradients."""
    return kernels.forward(plan, operands, integers)


def _forward(
    kernels: Kernels, plan: Plan, operands: Operands, integers: Integers
) -> tuple[tuple[Array, Array], Any]:
    out, logsumexp = kernels.forward(plan, forbid_second_derivatives(operands, NAME), integers)
    return (out, logsumexp), (operands, integers, out, logsumexp)


def _backward(kernels: Kernels, plan: Plan, saved: Any, d_results: Any) -> tuple[Any, None]:
    operands, integers, out, logsumexp = saved
    operands, out, logsumexp = forbid_second_derivatives((operands, out, logsumexp), NAME)
    d_out, d_logsumexp = forbid_second_derivatives(d_results, NAME)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1) - d_logsumexp
    arguments = plan, operands, integers, Residuals(d_out.astype(out.dtype), logsumexp, delta)
    d_q, d_scalars, d_q_feature, d_far = kernels.d_queries(*arguments)
    d_k, d_v, d_k_feature = kernels.d_keys(*arguments)
    d_operands = Operands(
        q=d_q,
        k=_sum_groups(d_k, operands.k),
        v=_sum_groups(d_v, operands.v),
        head_scalars=_sum_scalars(d_scalars, operands.head_scalars),
        table=kernels.d_table(*arguments) if plan.form == "by distance" else None,
        far=None if d_far is None else jnp.sum(d_far, axis=(0, 3)),
        q_feature=d_q_feature,
        k_feature=d_k_feature,
    )
    return d_operands, None


attend.defvjp(_forward, _backward)


def _sum_groups(gradient: Array, array: Array) -> Array:
    """The sum over the query heads that share a head of keys."""
    batch, kv_heads, *rest = array.shape
    grouped = gradient.reshape(batch, kv_heads, -1, *rest).astype(jnp.float32)
    return jnp.sum(grouped, axis=2).astype(array.dtype)


def _sum_scalars(d_scalars: Array | None, head_scalars: Array | None) -> Array | None:
    """The sum over batch and queries; 0 for scalars that are not trainable."""
    if head_scalars is None or d_scalars is None:
        return None if head_scalars is None else jnp.zeros_like(head_scalars)
    trainable = jnp.sum(d_scalars, axis=(0, 3))
    return jnp.pad(trainable, ((0, 0), (0, head_scalars.shape[1] - trainable.shape[1])))
