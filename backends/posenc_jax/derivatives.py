"""One clear error for each derivative that a hand-written backward pass does not have.

A ``custom_vjp`` cannot tell forward mode from reverse mode, because both begin with its forward
pass. An operation on tangents can: forward mode computes it, reverse mode transposes it. So the
functions here add an operation that changes no tangent, and that refuses one of the two.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from posenc_jax.trees import T, is_float, make_varying

_INSTEAD = "attention with implementation='reference' or 'xla' has all derivatives"


def forbid_forward_mode(arrays: T, what: str) -> T:
    """The same arrays; their derivatives in forward mode raise."""
    return _guard_tangents(
        arrays, forward_error=f"{what} has no derivatives in forward mode: {_INSTEAD}"
    )


def forbid_reverse_over_reverse(arrays: T, what: str) -> T:
    """The same results of a forward or a backward pass; reverse mode through that pass raises."""
    return _guard_tangents(
        arrays,
        reverse_error=f"{what} has second derivatives in forward over reverse mode only, as "
        f"jax.hessian takes them: {_INSTEAD}",
    )


def forbid_second_derivatives(arrays: T, what: str) -> T:
    """The same arguments of a forward or a backward pass; derivatives of that pass raise."""
    message = f"{what} has first derivatives only: {_INSTEAD}"

    @jax.custom_jvp
    def same(array: Array) -> Array:
        return array

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(message)

    guarded: T = jax.tree.map(same, arrays)
    return guarded


def _guard_tangents(arrays: T, *, forward_error: str = "", reverse_error: str = "") -> T:
    """The same arrays; a mode that has an error here raises it."""
    leaves, structure = jax.tree.flatten(arrays)
    floats = [leaf for leaf in leaves if is_float(leaf)]

    # All arrays at once: those that one derivative holds constant may vary in a second one.
    @jax.custom_jvp
    def same(*arrays: Array) -> tuple[Array, ...]:
        return arrays

    def rule(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return primals, tuple(
            make_varying(jnp.zeros_like(array), array)
            if isinstance(tangent, SymbolicZero)
            else _bind(tangent, forward_error=forward_error, reverse_error=reverse_error)
            for array, tangent in zip(primals, tangents, strict=True)
        )

    same.defjvp(rule, symbolic_zeros=True)
    of_floats = iter(same(*floats))
    guarded: T = jax.tree.unflatten(
        structure, [next(of_floats) if is_float(leaf) else leaf for leaf in leaves]
    )
    return guarded


def _compute(tangent: Array, *, forward_error: str, reverse_error: str) -> Array:
    if forward_error:
        raise NotImplementedError(forward_error)
    return tangent


def _transpose(gradient: Any, tangent: Any, *, forward_error: str, reverse_error: str) -> list[Any]:
    if reverse_error:
        raise NotImplementedError(reverse_error)
    return [gradient]


def _batch(arrays: Any, axes: Any, **errors: str) -> tuple[Any, Any]:
    # No error yet: the gradient of a vmap gets here too, and is transposed later. Forward mode
    # within a vmap ends in an error of JAX about ``custom_vjp``.
    return _bind(arrays[0], **errors), axes[0]


# Under jit the error of forward mode comes at lowering: reverse mode removes the operation before.
_guard: Any = Primitive("posenc_guard")  # Any: JAX has no types for it
_bind = _guard.bind
_guard.def_impl(_compute)
_guard.def_abstract_eval(lambda tangent, **_: tangent)
ad.deflinear2(_guard, _transpose)  # type: ignore[no-untyped-call] # untyped in JAX
batching.primitive_batchers[_guard] = _batch
mlir.register_lowering(_guard, mlir.lower_fun(_compute, multiple_results=False))
