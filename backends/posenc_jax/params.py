"""First values of a scheme's learned arrays, from a JAX key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from posenc import PositionScheme, init_params


def init(scheme: PositionScheme, key: Array) -> dict[str, Array]:
    """First values of a scheme's learned arrays, a pytree ready for an optimizer.

    Parameters
    ----------
    key
        One key, typed or raw uint32. ``posenc.init_params`` draws from its data as a seed, so the
        numbers are the same inside and outside of ``jit``, ``vmap`` and ``eval_shape``.

    Returns
    -------
    ``{}`` or float32 arrays by name.

    Raises
    ------
    TypeError, ValueError
        ``key`` is no key, or is several.
    """
    data = jax.random.key_data(key)
    if data.ndim != 1:
        raise ValueError(f"key must be one key, got {data.shape[:-1]} of them")
    if not isinstance(data, jax.core.Tracer):
        return {name: jnp.asarray(array) for name, array in _drawn(scheme, data).items()}
    shapes = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        for name, spec in scheme.param_specs().items()
    }
    if not shapes:
        return {}
    return jax.pure_callback(
        lambda seed: _drawn(scheme, seed), shapes, data, vmap_method="sequential"
    )


def _drawn(scheme: PositionScheme, seed: Array) -> dict[str, np.ndarray]:
    return init_params(scheme, seed=[int(word) for word in np.asarray(seed)])
