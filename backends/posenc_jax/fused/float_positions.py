"""Whether a bias may read its positions as float32: kernels then convert none per pair.

Integers up to ``2**24`` are exact in float32, and so are their sums and products that stay below.
A bias is traced with integer positions. If no integer of the trace can exceed that, and each one is
only compared or converted to a float in the end, float32 positions give the same bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

EXACT = 2**24  # float32 has all integers up to this

# The bound of a result's magnitude, from those of its arguments.
_BOUNDS: Mapping[str, Callable[[Sequence[float]], float]] = {
    **dict.fromkeys(("add", "sub"), sum),
    "mul": math.prod,
    "square": lambda bounds: bounds[0] ** 2,
    **dict.fromkeys(("max", "min", "clamp", "select_n"), max),
    **dict.fromkeys(("neg", "abs", "broadcast_in_dim", "reshape", "squeeze", "copy"), max),
    "sign": lambda bounds: 1,
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")


def exact_in_float32(jaxpr: Any, bounds: Sequence[float | None]) -> bool:
    """Whether a traced function computes the same from float32 in place of its integers.

    ``bounds`` has the greatest magnitude of each argument; None for one that is not replaced.
    """
    results = _bounds_of_results(jaxpr, bounds)
    return results is not None and all(bound is None or bound <= EXACT for bound in results)


def _bounds_of_results(closed: Any, bounds: Sequence[float | None]) -> list[float | None] | None:
    """The greatest magnitude of each result, None for what is no integer; None if not exact."""
    jaxpr = getattr(closed, "jaxpr", closed)
    known = {
        variable: bound
        for variable, bound in zip(jaxpr.invars, bounds, strict=True)
        if bound is not None
    }

    def bound_of(atom: Any) -> float | None:
        if not _is_integer(atom):
            return None
        if hasattr(atom, "val"):
            return float(abs(atom.val))
        return known.get(atom, math.inf)

    for equation in jaxpr.eqns:
        given = [bound_of(atom) for atom in equation.invars]
        results = _bounds_after(equation, given)
        if results is None:
            return None
        for variable, bound in zip(equation.outvars, results, strict=True):
            if bound is not None:
                known[variable] = bound
    return [bound_of(atom) for atom in jaxpr.outvars]


def _bounds_after(equation: Any, given: list[float | None]) -> list[float | None] | None:
    """As ``_bounds_of_results``, of one equation."""
    name, outvars = equation.primitive.name, equation.outvars
    integers = [bound for bound in given if bound is not None]
    nothing: list[float | None] = [None] * len(outvars)
    if not integers and not any(map(_is_integer, outvars)):
        return nothing
    if name in _CALLS:
        called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        return _bounds_of_results(called, given)
    if max(integers, default=math.inf) > EXACT:
        return None
    if name in _COMPARISONS:
        return nothing
    if name == "convert_element_type":
        return _bounds_after_conversion(integers[0], outvars[0])
    return [_BOUNDS[name](integers)] if name in _BOUNDS else None


def _bounds_after_conversion(bound: float, result: Any) -> list[float | None] | None:
    """As ``_bounds_after``: an integer that does not fit wraps, and a float does not."""
    if not _is_integer(result):
        return [None]
    limits = jnp.iinfo(result.aval.dtype)  # type: ignore[no-untyped-call] # untyped in JAX
    return [bound] if limits.min <= -bound and bound <= limits.max else None


def _is_integer(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.integer)
