"""Check the arguments of attention, with errors that name them, and fill in defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from posenc.attn.side import Side
from posenc.evaluate import positions_as_places
from posenc.params import head_count, is_floating
from posenc.positions import as_integers, as_places, check_range, concrete_values, from_numpy
from posenc.protocol import Array, Namespace, PositionScheme
from posenc.rotary_tables import Rotary

SWAPPED = (
    "are the axes of heads and tokens swapped? NumPy and PyTorch take (B, H, L, D), "
    "JAX (B, L, H, D)"
)


class Arguments(NamedTuple):
    """The ``Options`` as attributes, with their defaults."""

    q_pos: Array | None = None
    k_pos: Array | None = None
    q_seg: Array | None = None
    k_seg: Array | None = None
    q_axes: Array | None = None
    k_axes: Array | None = None
    k_valid: Array | None = None
    window: Any = None
    sink_tokens: int = 0
    bias: Array | None = None
    mask: Any = None
    softcap: float | None = None
    scale: float | None = None
    k_transformed: bool = False
    x: Array | None = None
    q_x: Array | None = None
    q_features: Mapping[str, Array] | None = None
    k_features: Mapping[str, Array] | None = None
    q_rotary: Rotary | None = None
    k_rotary: Rotary | None = None
    return_lse: bool = False


def check_heads(scheme: PositionScheme, q: Array) -> None:
    """Check that the scheme and the queries have the same number of heads."""
    heads, q_len = q.shape[1], q.shape[2]
    declared = head_count(scheme)
    # Compared one by one: torch's compiler answers "in" wrongly for symbols.
    if declared is not None and declared != 1 and declared != heads:
        hint = f"; {SWAPPED}" if declared == q_len else ""
        raise ValueError(f"q has {heads} heads, the scheme num_heads={declared}: {scheme}{hint}")


class Sides(NamedTuple):
    """Queries and keys with positions, segments and places.

    ``aligned``: positions are the default. ``in_the_past``: it is known from given positions that
    no key is after a query.
    """

    query: Side
    key: Side
    aligned: bool
    in_the_past: bool


def complete_sides(
    q: Array, k: Array, given: Arguments, scheme: PositionScheme, xp: Namespace
) -> Sides:
    """Both sides, with default positions if none are given."""
    q_len, k_len, here = q.shape[2], k.shape[2], device(q)
    aligned, in_the_past = check_pair("q_pos", given.q_pos, "k_pos", given.k_pos), False
    if aligned:
        q_pos, k_pos = _default_positions(q_len, k_len, here, xp)
    else:
        q_range, k_range = (
            check_range(n, a, xp) for n, a in (("q_pos", given.q_pos), ("k_pos", given.k_pos))
        )
        q_pos = as_integers("q_pos", given.q_pos, device=here, xp=xp)
        k_pos = as_integers("k_pos", given.k_pos, device=here, xp=xp)
        in_the_past = q_range is not None and k_range is not None and k_range[1] <= q_range[0]
    q_seg = k_seg = None
    if not check_pair("q_seg", given.q_seg, "k_seg", given.k_seg):
        q_seg = as_integers("q_seg", given.q_seg, device=here, xp=xp)
        k_seg = as_integers("k_seg", given.k_seg, device=here, xp=xp)
    if given.k_valid is not None:
        q_seg, k_seg = _hide_invalid_keys(given.k_valid, q_seg, k_seg, q, k, xp)
    places: list[Array | None] = [None, None]
    if not check_pair("q_axes", given.q_axes, "k_axes", given.k_axes):
        both = ("q_axes", given.q_axes, q_len), ("k_axes", given.k_axes, k_len)
        places = [as_places(n, a, scheme.axes, size, device=here, xp=xp) for n, a, size in both]
    elif scheme.axes > 1:
        places = [positions_as_places(pos, scheme.axes, xp=xp) for pos in (q_pos, k_pos)]
    if not aligned or q_seg is not None or places[0] is not None:
        arrays = {
            "q_pos": q_pos, "k_pos": k_pos, "q_seg": q_seg, "k_seg": k_seg,
            "q_axes": places[0], "k_axes": places[1],
        }  # fmt: skip
        _check_lengths(arrays, q, k, scheme.axes)
    query, key = Side(q_pos, q_seg, places[0], {}), Side(k_pos, k_seg, places[1], {})
    return Sides(query, key, aligned, in_the_past)


_INVALID = -(2**31)  # a segment that no query has


def _hide_invalid_keys(
    valid: Array, q_seg: Array | None, k_seg: Array | None, q: Array, k: Array, xp: Namespace
) -> tuple[Array, Array]:
    """Segments in which no query sees a key that is not valid."""
    batch, q_len, k_len = q.shape[0], q.shape[2], k.shape[2]
    valid = from_numpy(valid, xp=xp, device=device(q))
    if not hasattr(valid, "dtype") or not xp.isdtype(valid.dtype, "bool"):
        kind = getattr(valid, "dtype", type(valid).__name__)
        raise TypeError(f"k_valid must be an array of booleans, got {kind}")
    fits = len(valid.shape) == 2 and valid.shape[1] == k_len
    if not fits or (valid.shape[0] != 1 and valid.shape[0] != batch):
        raise ValueError(f"k_valid must be (B, K) = {(batch, k_len)}, got {tuple(valid.shape)}")
    if q_seg is None or k_seg is None:
        q_seg = xp.zeros((q_len,), dtype=xp.int32, device=device(q))
        k_seg = xp.zeros((k_len,), dtype=xp.int32, device=device(q))
    elif (values := concrete_values(q_seg, xp)) is not None and (values == _INVALID).any():
        raise ValueError(f"q_seg holds {_INVALID}, which is reserved for keys that k_valid hides")
    return q_seg, xp.where(valid, k_seg, xp.full_like(k_seg, _INVALID))


def as_pairs(
    name: str, given: Array | None, q: Array, k: Array, dtype: Any, xp: Namespace
) -> Array | None:
    """``given (B or 1, H or 1, Q, K)`` as an array of ``dtype``; None if it is None."""
    if given is None:
        return None
    given = from_numpy(given, xp=xp, device=device(q))
    if not hasattr(given, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(given).__name__}")
    kind = "bool" if dtype == xp.bool else "real floating"
    if not xp.isdtype(given.dtype, kind):
        raise TypeError(
            f"{name} must be {'boolean' if kind == 'bool' else 'floating'}, got {given.dtype}"
        )
    (batch, heads, q_len, _), k_len = q.shape, k.shape[2]
    wanted = (batch, heads, q_len, k_len)
    # Compared one by one: torch's compiler answers "in" wrongly for symbols.
    fits = len(given.shape) == 4 and all(
        have == want or (axis < 2 and have == 1)
        for axis, (have, want) in enumerate(zip(given.shape, wanted, strict=True))
    )
    if not fits:
        accepted = f"(B or 1, H or 1, Q, K) = ({batch} or 1, {heads} or 1, {q_len}, {k_len})"
        raise ValueError(f"{name} must be {accepted}, got {tuple(given.shape)}")
    return xp.astype(given, dtype, copy=False)


def namespace(**arrays: Array) -> Namespace:
    """The Array API namespace that the arrays share."""
    for name, array in arrays.items():
        if not hasattr(array, "shape"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
    return array_namespace(*arrays.values())


def check_shapes(q: Array, k: Array, v: Array, *, xp: Namespace) -> None:
    """Check that q, k and v are floating, have 4 axes each, and sizes that fit together.

    ``check_head_dims`` checks channels, because transformed keys may have more than queries.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not hasattr(array, "shape"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        if len(array.shape) != 4:
            raise ValueError(f"{name} must have 4 axes, got shape {tuple(array.shape)}")
        if 0 in array.shape:
            raise ValueError(f"{name} has an axis of length 0: {tuple(array.shape)}")
        if not is_floating(array, xp):
            kind = type(array)
            library = xp.__name__.removeprefix("array_api_compat.")
            raise TypeError(
                f"{name} must be a floating-point array of {library}, got {kind.__module__}."
                f"{kind.__name__} of {array.dtype}"
            )
    (q_batch, heads, q_len, _), (k_batch, k_heads, k_len, _) = q.shape, k.shape
    if not q_batch == k_batch == v.shape[0]:
        raise ValueError(f"q, k and v differ in batch size: {_sizes(q, k, v)}")
    if k_heads != v.shape[1] or k_len != v.shape[2]:
        raise ValueError(f"k and v differ in heads or length: {_sizes(q, k, v)}")
    if heads % k_heads:
        hint = f"; {SWAPPED}" if q_len % k_len == 0 else ""
        wrong = "the heads of q are not a multiple of those of k and v"
        raise ValueError(f"{wrong}: {_sizes(q, k, v)}{hint}")


def _sizes(q: Array, k: Array, v: Array) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as (B, H, L, D)"


def check_head_dims(q: Array, k: Array, *, transformed: bool = False) -> None:
    """Check that q and k have the same number of channels: as given, or ``transformed``."""
    if q.shape[3] == k.shape[3]:
        return
    if transformed:
        raise ValueError(
            f"transformed queries have {q.shape[3]} channels, transformed keys {k.shape[3]}"
        )
    raise ValueError(f"q and k differ in head_dim: q {tuple(q.shape)}, k {tuple(k.shape)}")


def _default_positions(q_len: int, k_len: int, device: Any, xp: Namespace) -> tuple[Array, Array]:
    if q_len > k_len:
        raise ValueError(
            f"q has length {q_len}, k only {k_len}: give q_pos and k_pos, the default aligns ends"
        )
    k_pos = xp.arange(k_len, dtype=xp.int32, device=device)
    return k_pos[k_len - q_len :], k_pos


def check_pair(q_name: str, q: Array | None, k_name: str, k: Array | None) -> bool:
    """Whether neither ``q`` nor ``k`` is given; a ``ValueError`` if only one of them is."""
    if (q is None) != (k is None):
        given, missing = (q_name, k_name) if k is None else (k_name, q_name)
        raise ValueError(f"{given} is given without {missing}; give both or neither")
    return q is None


def _check_lengths(arrays: Mapping[str, Array | None], q: Array, k: Array, axes: int) -> None:
    """Check that positions, segments and places fit q and k."""
    sizes = {"q": (q.shape[1], q.shape[2]), "k": (k.shape[1], k.shape[2])}
    for name, array in arrays.items():
        if array is None:
            continue
        heads, length = sizes[name[0]]
        several = axes > 1 and name.endswith("_axes")
        shape = tuple(array.shape[:-1] if several else array.shape)
        if shape[-1] != length:
            hint = f"; {SWAPPED}" if shape[-1] == heads else ""
            raise ValueError(f"{name} has length {shape[-1]}, {name[0]} has {length}{hint}")
        if len(shape) == 2 and shape[0] != 1 and shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {shape[0]}, {name[0]} has {q.shape[0]}")
