"""Where tokens stand: checked integer positions, who may see whom, packing and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import is_numpy_namespace

from posenc.checks import check_count
from posenc.protocol import Array, Namespace, Window

# Positions are MIN_POSITION .. MAX_POSITION: then every difference fits 32 bits.
MIN_POSITION, MAX_POSITION = -(2**30), 2**30 - 1


def concrete_values(array: Array, xp: Namespace) -> np.ndarray[Any, Any] | None:
    """The values of ``array`` as NumPy, or None where they cannot be seen without waiting.

    They cannot while a program is traced or compiled, on a device other than the host, and for
    arrays without data.
    """
    compiler = getattr(xp, "compiler", None)
    if compiler is not None and compiler.is_compiling():
        return None
    try:
        return np.asarray(array)
    except (TypeError, RuntimeError, ValueError, NotImplementedError):
        return None


def as_positions(name: str, pos: Array, *, xp: Namespace, device: Any = None) -> Array:
    """``pos (L,)`` or ``(B, L)`` as int32 or int64; differences cannot overflow.

    Raises
    ------
    TypeError
        If ``pos`` is no array of integers. Half-precision positions cannot tell 256 from 257.
    ValueError
        If it has another number of axes, or a value outside of ``MIN_POSITION .. MAX_POSITION``
        where values can be seen.
    """
    check_range(name, pos, xp)
    return as_integers(name, pos, xp=xp, device=device)


def as_places(
    name: str, places: Array, axes: int, length: int, *, xp: Namespace, device: Any = None
) -> Array:
    """Places of ``length`` tokens: ``(L, axes)`` or ``(B, L, axes)``, and ``(L,)`` or ``(B, L)`` if
    ``axes`` is 1.

    Raises
    ------
    TypeError, ValueError
        As ``as_positions``, and for another number of axes.
    """
    check_range(name, places, xp)
    if not hasattr(places, "shape"):
        raise TypeError(f"{name} must be an array of integers, got {type(places).__name__}")
    shape = tuple(places.shape)
    accepted = f"(L, axes) = ({length}, {axes}) or (B, {length}, {axes})"
    if len(shape) in (2, 3) and shape[-2:] == (length, axes):
        flat = _integers(name, places, xp=xp, device=device)
        return flat[..., 0] if axes == 1 else flat
    if axes == 1 and len(shape) in (1, 2) and shape[-1] == length:
        return _integers(name, places, xp=xp, device=device)
    raise ValueError(f"{name} must have shape {accepted}, got {shape}")


def check_range(name: str, pos: Array, xp: Namespace) -> None:
    """No position is so far away that 32-bit differences overflow, where values can be seen."""
    seen = concrete_values(pos, xp)
    if seen is None or not np.issubdtype(seen.dtype, np.integer) or not seen.size:
        return
    low, high = int(seen.min()), int(seen.max())
    if low < MIN_POSITION or high > MAX_POSITION:
        wrong = low if low < MIN_POSITION else high
        raise ValueError(f"{name} holds {wrong}, accepted: -2**30 .. 2**30 - 1")


def as_integers(name: str, values: Array, *, xp: Namespace, device: Any = None) -> Array:
    """Integers ``(L,)`` or ``(B, L)`` as int32 or int64; a NumPy array may stand for any."""
    if hasattr(values, "dtype") and len(values.shape) not in (1, 2):
        _integers(name, values, xp=xp, device=device)  # another dtype is the first thing to say
        raise ValueError(f"{name} must have shape (L,) or (B, L), got {tuple(values.shape)}")
    return _integers(name, values, xp=xp, device=device)


def from_numpy(array: Any, *, xp: Namespace, device: Any) -> Any:
    """A NumPy array as one of the library of a call; all else as it is."""
    if isinstance(array, np.ndarray) and not is_numpy_namespace(xp):
        # A copy: torch warns of a view on an array that it may not write to.
        return xp.asarray(array, device=device, copy=True)
    return array


def _integers(name: str, values: Array, *, xp: Namespace, device: Any) -> Array:
    """Integers of any shape as int32 or int64."""
    if not hasattr(values, "dtype"):
        raise TypeError(f"{name} must be an array of integers, got {type(values).__name__}")
    values = from_numpy(values, xp=xp, device=device)
    dtype = values.dtype
    if not xp.isdtype(dtype, "integral"):
        raise TypeError(f"{name} must have an integer dtype, got {dtype}")
    if dtype in (xp.int32, xp.int64):
        return values
    if dtype in (xp.int8, xp.int16, xp.uint8, getattr(xp, "uint16", None)):
        return xp.astype(values, xp.int32)
    return xp.astype(values, xp.arange(1).dtype)  # the widest: JAX may have 32 bits only


def visible(
    q_pos: Array,
    k_pos: Array,
    q_seg: Array | None = None,
    k_seg: Array | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    sink_tokens: int = 0,
) -> Array | None:
    """Whether a query may see a key; elementwise in its broadcast arguments. None: always.

    ``causal``: ``k_pos <= q_pos``. ``window=(left, right)``: ``-right <= q_pos - k_pos <= left``,
    None for no bound; keys at positions ``0 .. sink_tokens - 1`` are inside of any window. Segments
    must be equal.
    """
    terms = []
    if causal:
        terms.append(k_pos <= q_pos)
    if window is not None and (near := _inside(q_pos - k_pos, window, causal)) is not None:
        terms.append(near | ((k_pos >= 0) & (k_pos < sink_tokens)) if sink_tokens else near)
    if q_seg is not None:
        terms.append(q_seg == k_seg)
    seen = None
    for term in terms:
        seen = term if seen is None else seen & term
    return seen


def _inside(distance: Array, window: Window, causal: bool) -> Array | None:
    """Whether ``q_pos - k_pos`` is inside of a window; what a causal mask hides may be either."""
    left, right = window
    near = None if left is None else distance <= left
    if right is None or (causal and right >= 0):
        return near
    ahead = distance >= -right
    return ahead if near is None else near & ahead


def packed(lengths: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Positions and segments ``(sum(lengths),)`` of documents packed one after another.

    >>> packed([2, 3])
    (array([0, 1, 0, 1, 2]), array([0, 0, 1, 1, 1]))
    """
    sizes = [check_count("lengths", n) for n in lengths]
    if not sizes:
        raise ValueError("lengths is empty; give the length of at least one document")
    pos = np.concatenate([np.arange(n) for n in sizes])
    return pos, np.repeat(np.arange(len(sizes)), sizes)


def left_padded(
    lengths: Sequence[int], total: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Positions, query segments and key segments ``(B, total)`` of left-padded sequences.

    Position 0 is the first token that is no padding, and that of every pad, so that any scheme
    takes them. Padded keys have a segment that no query has, and padded queries one that no key
    has: their rows give 0.

    >>> left_padded([1, 3], 3)[0]
    array([[0, 0, 0],
           [0, 1, 2]])
    """
    total = check_count("total", total)
    sizes = np.asarray([check_count("lengths", n) for n in lengths])
    if sizes.size == 0 or sizes.max() > total:
        raise ValueError(f"lengths must be 1 .. total={total}, got {list(lengths)}")
    pos = np.arange(total)[None, :] - (total - sizes)[:, None]
    return np.maximum(pos, 0), np.where(pos < 0, -1, 0), np.where(pos < 0, -2, 0)
