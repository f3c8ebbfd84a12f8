"""Which derivatives a backward pass that is written by hand has; for the others one clear error.

A ``custom_vjp`` cannot tell forward mode from reverse mode, which both begin with its forward pass.
What can is a tangent: forward mode computes with it, reverse mode transposes it. So an operation on
tangents that changes nothing may refuse either of them, wherever the derivative is asked for.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")

_INSTEAD = "attention with implementation='reference' or 'xla' has all derivatives"


def reverse_only(arrays: T, what: str) -> T:
    """The same arrays, whose derivatives in forward mode are refused."""
    return _guarded(arrays, computed=f"{what} has no derivatives in forward mode: {_INSTEAD}")


def no_reverse_twice(arrays: T, what: str) -> T:
    """The same results of a forward or a backward pass, which reverse mode may not go through."""
    return _guarded(
        arrays,
        transposed=f"{what} has second derivatives in forward over reverse mode only, as "
        f"jax.hessian takes them: {_INSTEAD}",
    )


def no_second(arrays: T, what: str) -> T:
    """The same arguments of a forward or a backward pass, which has no derivatives itself."""
    message = f"{what} has first derivatives only: {_INSTEAD}"

    @jax.custom_jvp
    def same(array: Array) -> Array:
        return array

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(message)

    return jax.tree.map(same, arrays)


def _guarded(arrays: T, *, computed: str = "", transposed: str = "") -> T:
    @jax.custom_jvp
    def same(array: Array) -> Array:
        return array

    @same.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        (array,), (tangent,) = primals, tangents
        return array, _guard.bind(tangent, computed=computed, transposed=transposed)

    return jax.tree.map(lambda a: same(a) if _is_float(a) else a, arrays)


def _is_float(array: Array) -> bool:
    return bool(jax.numpy.isdtype(array.dtype, "real floating"))


def _computed(tangent: Array, *, computed: str, transposed: str) -> Array:
    if computed:
        raise NotImplementedError(computed)
    return tangent


def _transposed(gradient: Any, tangent: Any, *, computed: str, transposed: str) -> list[Any]:
    if transposed:
        raise NotImplementedError(transposed)
    return [gradient]


def _batched(arrays: Any, axes: Any, *, computed: str, transposed: str) -> tuple[Any, Any]:
    # Only what is computed is batched: reverse mode has transposed it before.
    tangent = _computed(arrays[0], computed=computed, transposed=transposed)
    return _guard.bind(tangent, computed=computed, transposed=transposed), axes[0]


# Under jit errors come when a program is lowered: only then it is known that reverse mode is not.
_guard = Primitive("posenc_guard")
_guard.def_impl(_computed)
_guard.def_abstract_eval(lambda tangent, **_: tangent)
ad.deflinear2(_guard, _transposed)
batching.primitive_batchers[_guard] = _batched
mlir.register_lowering(_guard, mlir.lower_fun(_computed, multiple_results=False))
