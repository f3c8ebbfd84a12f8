"""Coordinates of gated schemes: one gate a token, summed in the order of positions.

FoX (arXiv 2503.02130) and CABLE (arXiv 2503.08067) bias a score by the difference of such sums.
"""

from __future__ import annotations

from collections.abc import Mapping

from array_api_compat import array_namespace, device

from posenc.checks import check_scheme
from posenc.evaluate import arrays_for, column, row
from posenc.params import Params, is_floating, named, working_dtype
from posenc.positions import as_integers, as_positions
from posenc.protocol import Array, Namespace, PositionScheme


def coordinates(
    scheme: PositionScheme,
    x: Array,
    params: Mapping[str, Array] | None = None,
    *,
    pos: Array | None = None,
    seg: Array | None = None,
    at_pos: Array | None = None,
    at_seg: Array | None = None,
    carry: Array | None = None,
    xp: Namespace | None = None,
) -> Array | None:
    """Coordinates of a gated scheme: gates summed in the order of positions.

    Parameters
    ----------
    x
        Hidden states ``(B, L, C)``.
    pos, seg
        Integer positions and segments of the tokens, ``(L,)`` or ``(B, L)``. A coordinate is the
        sum over all tokens of its segment up to its position. Default: in order, one segment.
    at_pos, at_seg
        Where to read coordinates, if not at the tokens themselves; only together with ``pos``.
    carry
        The last coordinate ``(B, H)`` of tokens that came before these (decoding).

    Returns
    -------
    ``(B, H, L)`` in float32, or in float64 if ``x`` or a param is; None for a scheme without gates.
    Explicit positions or segments take memory ``O(B L**2)``.
    """
    check_scheme(scheme)
    xp = xp or array_namespace(x)
    if len(x.shape) != 3 or not is_floating(x, xp):
        raise ValueError(f"x must be floating, (B, L, C), got {tuple(x.shape)} of {x.dtype}")
    if pos is None and (at_pos is not None or at_seg is not None):
        raise ValueError("at_pos or at_seg is given without pos; give pos too")
    if seg is None and at_seg is not None:
        raise ValueError("at_seg is given without seg; give seg too")
    work = working_dtype([x, *named(params).values()], xp=xp)
    arrays, work = arrays_for(scheme, params, like=x, dtype=work, xp=xp)
    gates = scheme.gate(xp.astype(x, work), params=Params(arrays, work), xp=xp)
    if gates is None:
        return None
    gates = xp.permute_dims(xp.astype(gates, work), (0, 2, 1))
    if pos is None and seg is None:
        sums = xp.cumulative_sum(gates, axis=-1)
    else:
        counted = _counted(x, pos, seg, at_pos, at_seg, xp)
        sums = xp.matmul(xp.astype(counted, work), gates[..., None])[..., 0]
    if carry is not None and tuple(carry.shape) != tuple(sums.shape[:2]):
        raise ValueError(f"carry must be (B, H) = {sums.shape[:2]}, got {tuple(carry.shape)}")
    return sums if carry is None else sums + xp.astype(carry, work)[..., None]


def _counted(
    x: Array,
    pos: Array | None,
    seg: Array | None,
    at_pos: Array | None,
    at_seg: Array | None,
    xp: Namespace,
) -> Array:
    """Whose gates a coordinate sums, ``(B or 1, 1, readers, tokens)``."""
    here = device(x)
    tokens = xp.arange(x.shape[1], device=here) if pos is None else pos
    tokens = as_positions("pos", tokens, device=here, xp=xp)
    _check_fits(x, pos=tokens)
    readers = tokens if at_pos is None else as_positions("at_pos", at_pos, device=here, xp=xp)
    counted = row(tokens) <= column(readers)
    if seg is None:
        return counted
    own = as_integers("seg", seg, device=here, xp=xp)
    _check_fits(x, seg=own)
    theirs = own if at_seg is None else as_integers("at_seg", at_seg, device=here, xp=xp)
    return counted & (row(own) == column(theirs))


def _check_fits(x: Array, **places: Array) -> None:
    """Positions or segments ``(L,)`` or ``(B, L)`` fit hidden states ``(B, L, C)``."""
    for name, place in places.items():
        batched = len(place.shape) == 2 and place.shape[0] != 1
        if place.shape[-1] != x.shape[1] or (batched and place.shape[0] != x.shape[0]):
            raise ValueError(f"{name} {tuple(place.shape)} does not fit x {tuple(x.shape)}")
