"""Arrays on a mesh with explicit axes, which is what ``jax.make_mesh`` makes since JAX 0.9.

There, the type of an array says how it lies on the devices. An operation refuses arrays if it
cannot tell how its result would lie. Inside a call of attention the compiler chooses, as it does
on a mesh of automatic axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from posenc.backend import Arguments, Mask

T = TypeVar("T")
_ARRAYS = (Array, jax.ShapeDtypeStruct)


def on_any_mesh(
    attend: Callable[..., Any], q: Array, k: Array, v: Array, params: Any, given: Arguments
) -> Any:
    """``attend(q, k, v, params, given)``, whose result lies on the devices as ``q`` does.

    ``q (B, Q, H, D)``; channels of the result are not spread.
    """
    leaves, tree = jax.tree.flatten((q, k, v, params, _arrays(given)))
    mesh, eager = _explicit_mesh(leaves), _is_eager_on_many(leaves)
    if getattr(q, "ndim", 0) != 4 or (mesh is None and not eager):
        return attend(q, k, v, params, given)

    def inside(arrays: list[Array]) -> Any:
        *vectors, own, held = _put_back(arrays, leaves, tree)
        return attend(*vectors, own, _with_arrays(given, held))

    called = jax.jit(inside) if eager else inside
    if mesh is not None:
        spec = jax.typeof(q).sharding.spec[:3]
        out, lse = (NamedSharding(mesh, _spec(*each)) for each in ((*spec, None), spec))
        results = (out, lse) if given.return_lse else out
        called = jax.sharding.auto_axes(called, out_sharding=results)
    return called([a for a in leaves if isinstance(a, Array)])


def told_without_mesh(
    tell: Callable[..., T], q: Array, k: Array, v: Array, params: Any, given: Arguments
) -> T:
    """``tell(q, k, v, params, given)``, which is no array and does not depend on devices.

    Arrays may be shapes, ``jax.ShapeDtypeStruct``.
    """
    leaves, tree = jax.tree.flatten((q, k, v, params, _arrays(given)))
    if not is_spread(leaves) and not any(isinstance(a, jax.ShapeDtypeStruct) for a in leaves):
        return tell(q, k, v, params, given)
    told: list[T] = []

    def inside(arrays: list[Array]) -> list[Array]:
        *vectors, own, held = _put_back(arrays, leaves, tree)
        told.append(tell(*vectors, own, _with_arrays(given, held)))
        return []

    arrays = [a for a in leaves if isinstance(a, _ARRAYS)]
    jax.eval_shape(inside, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])  # type: ignore[no-untyped-call]  # untyped in JAX
    return told[0]


def _put_back(arrays: Iterable[Array], leaves: list[Any], tree: Any) -> Any:
    """The tree of ``leaves`` with ``arrays`` in place of its own."""
    remaining = iter(arrays)
    return jax.tree.unflatten(
        tree, [next(remaining) if isinstance(a, _ARRAYS) else a for a in leaves]
    )


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]  # untyped in JAX


def is_spread(*arrays: Any) -> bool:
    """Whether ``on_any_mesh`` makes a program of a call with these arrays, trees and arguments."""
    trees = [_arrays(a) if isinstance(a, Arguments) else a for a in arrays]
    leaves = jax.tree.leaves(trees)
    return _explicit_mesh(leaves) is not None or _is_eager_on_many(leaves)


def _explicit_mesh(arrays: Iterable[Any]) -> Any:
    """The mesh of the first array that is spread along an explicit axis; None if none is."""
    if not hasattr(jax.sharding, "auto_axes"):  # then operations have to tell, or refuse
        return None
    for array in arrays:
        if not isinstance(array, Array):
            continue
        sharding = getattr(jax.typeof(array), "sharding", None)  # of explicit axes alone
        if sharding is not None and any(axes is not None for axes in sharding.spec):
            return sharding.mesh
    return None


def _is_eager_on_many(arrays: Iterable[Any]) -> bool:
    """Whether arrays of several devices are computed with outside of any trace.

    New arrays, as of positions, would have to be placed one by one; a compiler places them.
    """
    own = [a for a in arrays if isinstance(a, Array)]
    if any(isinstance(a, jax.core.Tracer) for a in own):
        return False
    return any(len(a.sharding.device_set) > 1 for a in own)


def _arrays(given: Arguments) -> tuple[Any, ...]:
    """What may hold arrays, as a pytree."""
    mask = given.mask
    held = mask.array if isinstance(mask, Mask) else mask if isinstance(mask, _ARRAYS) else None
    return given.tokens, given.queries, given.bias, held


def _with_arrays(given: Arguments, arrays: tuple[Any, ...]) -> Arguments:
    tokens, queries, bias, held = arrays
    mask = held if isinstance(given.mask, _ARRAYS) else given.mask
    if isinstance(mask, Mask):
        mask = replace(mask, array=held)
    return given._replace(tokens=tokens, queries=queries, bias=bias, mask=mask)
