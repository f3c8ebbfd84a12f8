"""Positions, params and results in the shapes and dtypes that schemes read and callers get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.contract.operations import device
from posenc.contract.params import as_mapping, merge_constants, working_dtype
from posenc.contract.protocol import Array, Namespace, PositionScheme


def positions_as_places(pos: Array, axes: int, *, xp: Namespace) -> Array:
    """Positions ``(..., L)`` as places ``(..., L, axes)``: the position on every axis."""
    return xp.broadcast_to(pos[..., None], (*pos.shape, axes))


def common_size(*sizes: int) -> int:
    """The size that axes ``(n or 1)`` have together; 1 if all of them are 1.

    Nothing is compared by order, because a size may be a symbol of ``jax.export``.
    """
    return next((size for size in sizes if size != 1), 1)


def check_batches(**positions: Array) -> int:
    """The common batch size of arrays ``(L,)`` or ``(B, L)``; 1 if none has a batch axis."""
    sizes = {name: p.shape[0] for name, p in positions.items() if len(p.shape) == 2}
    batch = common_size(*sizes.values())
    for name, size in sizes.items():
        if size != 1 and size != batch:
            raise ValueError(f"{name} has batch {size}, others have {batch}: {sizes}")
    return batch


def prepare_params(
    scheme: PositionScheme,
    params: Mapping[str, Array] | None,
    *,
    like: Array,
    dtype: Any,
    xp: Namespace,
) -> tuple[dict[str, Array], Any]:
    """Params and constants on the device of ``like``, and the working dtype."""
    work = working_dtype(list(as_mapping(params).values()), xp=xp)
    work = xp.float64 if dtype == xp.float64 else work
    return merge_constants(scheme, params, dtype=work, device=device(like), xp=xp), work


def as_column(pos: Array) -> Array:
    """``(L,) -> (1, 1, L, 1)``, ``(B, L) -> (B, 1, L, 1)``."""
    return pos[None, None, :, None] if len(pos.shape) == 1 else pos[:, None, :, None]


def as_row(pos: Array) -> Array:
    """``(L,) -> (1, 1, 1, L)``, ``(B, L) -> (B, 1, 1, L)``."""
    return pos[None, None, None, :] if len(pos.shape) == 1 else pos[:, None, None, :]


def cast(array: Array, dtype: Any, xp: Namespace) -> Array:
    """``array`` in ``dtype``; as it is if that is None."""
    return array if dtype is None else xp.astype(array, dtype)
