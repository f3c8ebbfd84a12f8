"""Schemes in Equinox: a module that owns learned arrays, and ``process_heads``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
from jax import Array

import posenc_jax
from posenc import transform
from posenc.backend import Hook, LayerPlan, PositionScheme, Role, check_scheme
from posenc_jax.modules import OfPositions

__all__ = ["Positions", "process_heads"]

_OF_QUERIES_AND_KEYS = {Hook.TRANSFORM, Hook.ROTARY, Hook.SCALE, Hook.AT_LENGTH}


class Positions(OfPositions, eqx.Module):  # type: ignore[misc]
    """The positional encodings of a model as a module, with its learned arrays as leaves.

    ``positions: Positions`` is a field of the model. ``posenc_jax.param_labels(params)`` finds it.
    ``posenc_jax.Positions`` itself may be a field too; this one is made like other modules.

    Attributes
    ----------
    positions
        The ``posenc_jax.Positions``.
    """

    positions: posenc_jax.Positions

    def __init__(
        self,
        scheme: PositionScheme | Sequence[PositionScheme] | LayerPlan,
        layers: int | None = None,
        *,
        key: Array,
        windows: int | Sequence[int | None] | None = None,
    ) -> None:
        """As ``posenc_jax.Positions.init``."""
        self.positions = posenc_jax.Positions.init(scheme, layers, key, windows)

    @property
    def pure(self) -> posenc_jax.Positions:
        """The same as a ``posenc_jax.Positions``."""
        return self.positions


def process_heads(
    scheme: PositionScheme, pos: Array | None = None
) -> Callable[[Array, Array, Array], tuple[Array, Array, Array]]:
    """``process_heads`` of ``eqx.nn.MultiheadAttention``: queries and keys ``(L, H, D)`` turned.

    Parameters
    ----------
    scheme
        A scheme that acts on queries and keys alone, without learned arrays, such as RoPE.
    pos
        ``(L,)``, of queries and keys; default ``0 .. L - 1``.

    Raises
    ------
    ValueError
        The scheme does more, such as a bias, a sink or regions, which that module has no place for,
        or it has learned arrays.
    """
    check_scheme(scheme)
    name = type(scheme).__name__
    if more := scheme.hooks() - _OF_QUERIES_AND_KEYS:
        raise ValueError(
            f"scheme {name} does more than turn queries and keys ({', '.join(sorted(more))}), and "
            "eqx.nn.MultiheadAttention has no place for it: call posenc_jax.equinox.Positions in a "
            "module of your own"
        )
    if learned := sorted(scheme.param_specs()):
        raise ValueError(
            f"scheme {name} learns {', '.join(learned)}, and what a function holds never trains: "
            "keep posenc_jax.equinox.Positions in the model"
        )

    def process(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        def turned(heads: Array, role: Role) -> Array:
            at = jnp.arange(heads.shape[0]) if pos is None else pos
            made: Array = transform(scheme, jnp.moveaxis(heads, 1, 0)[None], at, role=role)
            return jnp.moveaxis(made[0], 0, 1)

        dim = query.shape[-1]
        scaled = scheme.scale(dim) * dim**0.5  # the module has a scale of its own
        turned_query = turned(query, "query")
        return turned_query if scaled == 1 else turned_query * scaled, turned(key, "key"), value

    return process
