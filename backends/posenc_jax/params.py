"""Initial values of a scheme's learned arrays, from a JAX key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from posenc import PositionScheme, init_params


def init(scheme: PositionScheme, key: Array) -> dict[str, Array]:
    """Initial values of a scheme's learned arrays: a pytree for an optimizer.

    Parameters
    ----------
    key
        One key, typed or raw uint32. Its data is the seed of ``posenc.init_params``, so the numbers
        are the same inside and outside of ``jit``, ``vmap`` and ``eval_shape``.

    Returns
    -------
    ``{}`` or float32 arrays by name.

    Raises
    ------
    TypeError, ValueError
        ``key`` is not a key, or is several keys.
    """
    check_key(key)
    data = jax.random.key_data(key)
    if data.ndim != 1:
        raise ValueError(f"key must be one key, got {data.shape[:-1]} of them")
    if not isinstance(data, jax.core.Tracer):
        return {name: jnp.asarray(array) for name, array in _draw(scheme, data).items()}
    structure: Any = jax.ShapeDtypeStruct  # Any: JAX has no types for it
    shapes = {
        name: structure(spec.shape, jnp.float32) for name, spec in scheme.param_specs().items()
    }
    if not shapes:
        return {}
    arrays: dict[str, Array] = jax.pure_callback(
        lambda seed: _draw(scheme, seed), shapes, data, vmap_method="sequential"
    )
    return arrays


def check_key(key: Any) -> None:
    """Check that ``key`` is an array, as keys are, and not a seed."""
    if key is None:
        raise TypeError("key is missing; give a jax.random.key(seed)")
    if not hasattr(key, "dtype") or not hasattr(key, "shape"):
        raise TypeError(f"key must be a JAX key, got {key!r}; give a jax.random.key(seed)")


def _draw(scheme: PositionScheme, seed: Array) -> dict[str, Any]:
    return init_params(scheme, seed=[int(word) for word in np.asarray(seed)])
