"""Three kernels and their gradients: one ``custom_vjp`` for every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from posenc_jax.derivatives import forbid_second_derivatives
from posenc_jax.fused.plan import Operands, Places, Plan

NAME = "implementation 'pallas'"


class Rows(NamedTuple):
    """What the backward pass knows of every query: ``(B, H, Q, Dv)``, and ``(B, H, Q)`` float32.

    ``delta`` is the product of output and its gradient, less the gradient of the log-sum-exp.
    """

    d_out: Array
    logsumexp: Array
    delta: Array


class Kernels(NamedTuple):
    """Attention on one kind of device: functions of a plan, operands and places.

    Attributes
    ----------
    forward
        The output ``(B, H, Q, Dv)`` in q's dtype and log-sum-exp ``(B, H, Q)`` float32. A row that
        sees nothing is 0, its log-sum-exp ``FLOOR``.
    d_queries
        With ``Rows``: gradients of q ``(B, H, Q, D)``; of each learned number and each query,
        ``(B, H, P, Q)`` float32, None without any; of ``q_feature``, or None.
    d_keys
        With ``Rows``: gradients of k ``(B, H, K, D)`` and v ``(B, H, K, Dv)`` by heads of queries,
        and of ``k_feature``, or None.
    d_table
        With ``Rows``: the gradient of the table.
    """

    forward: Callable[..., tuple[Array, Array]]
    d_queries: Callable[..., tuple[Array, Array | None, Array | None]]
    d_keys: Callable[..., tuple[Array, Array, Array | None]]
    d_table: Callable[..., Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(kernels: Kernels, plan: Plan, operands: Operands, places: Places) -> tuple[Array, Array]:
    """Output and log-sum-exp, both padded; gradients of both."""
    return kernels.forward(plan, operands, places)


def _forward(
    kernels: Kernels, plan: Plan, operands: Operands, places: Places
) -> tuple[tuple[Array, Array], Any]:
    out, logsumexp = kernels.forward(plan, forbid_second_derivatives(operands, NAME), places)
    return (out, logsumexp), (operands, places, out, logsumexp)


def _backward(kernels: Kernels, plan: Plan, saved: Any, d_results: Any) -> tuple[Any, None]:
    operands, places, out, logsumexp = saved
    operands, out, logsumexp = forbid_second_derivatives((operands, out, logsumexp), NAME)
    d_out, d_logsumexp = forbid_second_derivatives(d_results, NAME)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1) - d_logsumexp
    rows = Rows(d_out.astype(out.dtype), logsumexp, delta)
    d_q, d_rows, d_q_feature = kernels.d_queries(plan, operands, places, rows)
    d_k, d_v, d_k_feature = kernels.d_keys(plan, operands, places, rows)
    found = Operands(
        q=d_q,
        k=_of_groups(d_k, operands.k),
        v=_of_groups(d_v, operands.v),
        numbers=_of_numbers(d_rows, operands.numbers),
        table=None if plan.form != "table" else kernels.d_table(plan, operands, places, rows),
        q_feature=d_q_feature,
        k_feature=d_k_feature,
    )
    return found, None


attend.defvjp(_forward, _backward)


def _of_groups(gradient: Array, array: Array) -> Array:
    """Summed over the heads of queries that share a head of keys."""
    batch, kv_heads, *rest = array.shape
    grouped = gradient.reshape(batch, kv_heads, -1, *rest).astype(jnp.float32)
    return jnp.sum(grouped, axis=2).astype(array.dtype)


def _of_numbers(d_rows: Array | None, numbers: Array | None) -> Array | None:
    """Summed over batch and queries; 0 for what does not learn."""
    if numbers is None or d_rows is None:
        return None if numbers is None else jnp.zeros_like(numbers)
    learned = jnp.sum(d_rows, axis=(0, 3))
    return jnp.pad(learned, ((0, 0), (0, numbers.shape[1] - learned.shape[1])))
