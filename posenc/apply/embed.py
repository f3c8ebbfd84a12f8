"""The embedding of a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.apply.shapes import cast, positions_as_places, prepare_params
from posenc.contract.checks import check_scheme
from posenc.contract.operations import device, own_dtypes, shared_namespace
from posenc.contract.params import Params
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme
from posenc.positions.integers import as_places, as_positions


def embedding(
    scheme: PositionScheme,
    pos: Array,
    params: Mapping[str, Array] | None = None,
    *,
    places: Array | None = None,
    dtype: Any = None,
    xp: Namespace | None = None,
) -> Array | None:
    """The term that a scheme adds to token embeddings; None if it has none.

    Parameters
    ----------
    pos
        Integer positions, ``(L,)`` or ``(B, L)``.
    places
        Coordinates to encode instead of positions, ``(L, axes)`` or ``(B, L, axes)``.
    dtype
        Dtype of the result. Default: float64 if a param is float64, else float32.

    Returns
    -------
    ``(L, dim)`` or ``(B, L, dim)``.
    """
    check_scheme(scheme)
    xp = xp or shared_namespace(pos=pos)
    at = as_positions("pos", pos, xp=xp)
    if places is not None:
        at = as_places("places", places, scheme.axes, at.shape[-1], device=device(at), xp=xp)
    elif scheme.axes > 1:
        at = positions_as_places(at, scheme.axes, xp=xp)
    arrays, work = prepare_params(scheme, params, like=at, dtype=dtype, xp=xp)
    with own_dtypes(xp):
        value = scheme.embedding(at, params=Params(arrays, work), xp=xp)
    return None if value is None else cast(value, dtype, xp)


def has_embedding(scheme: PositionScheme) -> bool:
    """Whether a scheme acts on token embeddings."""
    return Hook.EMBEDDING in scheme.hooks()
