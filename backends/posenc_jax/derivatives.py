"""One clear error for each derivative that a hand-written backward pass does not have.

A ``custom_vjp`` cannot tell forward mode from reverse mode, because both begin with its forward
pass. An operation on tangents can: forward mode computes it, reverse mode transposes it. So the
functions here add an operation that changes no tangent, and that refuses one of the two.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from posenc_jax.trees import T, is_float

_INSTEAD = "attention with implementation='reference' or 'xla' has all derivatives"


def forbid_forward_mode(arrays: T, what: str) -> T:
    """The same arrays; their derivatives in forward mode raise."""
    return _guarded(arrays, computed=f"{what} has no derivatives in forward mode: {_INSTEAD}")


def forbid_reverse_over_reverse(arrays: T, what: str) -> T:
    """The same results of a forward or a backward pass; reverse mode through that pass raises."""
    return _guarded(
        arrays,
        transposed=f"{what} has second derivatives in forward over reverse mode only, as "
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


def _guarded(arrays: T, *, computed: str = "", transposed: str = "") -> T:
    @jax.custom_jvp
    def same(array: Array) -> Array:
        return array

    @same.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        (array,), (tangent,) = primals, tangents
        return array, _bind(tangent, computed=computed, transposed=transposed)

    guarded: T = jax.tree.map(lambda a: same(a) if is_float(a) else a, arrays)
    return guarded


def _computed(tangent: Array, *, computed: str, transposed: str) -> Array:
    if computed:
        raise NotImplementedError(computed)
    return tangent


def _transposed(gradient: Any, tangent: Any, *, computed: str, transposed: str) -> list[Any]:
    if transposed:
        raise NotImplementedError(transposed)
    return [gradient]


def _batched(arrays: Any, axes: Any, *, computed: str, transposed: str) -> tuple[Any, Any]:
    # Only forward mode gets here: reverse mode has transposed the operation before.
    tangent = _computed(arrays[0], computed=computed, transposed=transposed)
    return _bind(tangent, computed=computed, transposed=transposed), axes[0]


# Under jit the error of forward mode comes at lowering: reverse mode removes the operation before.
_guard: Any = Primitive("posenc_guard")  # Any: JAX has no types for it
_bind = _guard.bind
_guard.def_impl(_computed)
_guard.def_abstract_eval(lambda tangent, **_: tangent)
ad.deflinear2(_guard, _transposed)  # type: ignore[no-untyped-call] # JAX's
batching.primitive_batchers[_guard] = _batched
mlir.register_lowering(_guard, mlir.lower_fun(_computed, multiple_results=False))
