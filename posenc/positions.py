"""Where tokens stand: checked integer positions, who may see whom, packing and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import is_numpy_namespace

from posenc.checks import check_count
from posenc.protocol import Array, Namespace

# Positions are LOWEST .. FARTHEST: then every difference fits 32 bits.
LOWEST, FARTHEST = -(2**30), 2**30 - 1


def concrete(array: Array, xp: Namespace) -> np.ndarray[Any, Any] | None:
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
        If it has another number of axes, or a value outside of ``LOWEST .. FARTHEST`` where values
        can be seen.
    """
    check_range(name, pos, xp)
    return as_integers(name, pos, xp=xp, device=device)


def check_range(name: str, pos: Array, xp: Namespace) -> None:
    """No position is so far away that 32-bit differences overflow, where values can be seen."""
    seen = concrete(pos, xp)
    if seen is None or not np.issubdtype(seen.dtype, np.integer) or not seen.size:
        return
    low, high = int(seen.min()), int(seen.max())
    if low < LOWEST or high > FARTHEST:
        wrong = low if low < LOWEST else high
        raise ValueError(f"{name} holds {wrong}, accepted: -2**30 .. 2**30 - 1")


def as_integers(name: str, values: Array, *, xp: Namespace, device: Any = None) -> Array:
    """Integers ``(L,)`` or ``(B, L)`` as int32 or int64; a NumPy array may stand for any."""
    if not hasattr(values, "dtype"):
        raise TypeError(f"{name} must be an array of integers, got {type(values).__name__}")
    if isinstance(values, np.ndarray) and not is_numpy_namespace(xp):
        # A copy: torch warns of a view on an array that it may not write to.
        values = xp.asarray(values, device=device, copy=True)
    dtype = values.dtype
    if not xp.isdtype(dtype, "integral"):
        raise TypeError(f"{name} must have an integer dtype, got {dtype}")
    if len(values.shape) not in (1, 2):
        raise ValueError(f"{name} must have shape (L,) or (B, L), got {tuple(values.shape)}")
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
    window: int | None = None,
) -> Array | None:
    """Whether a query may see a key; elementwise in its broadcast arguments. None: always.

    ``causal``: ``k_pos <= q_pos``. ``window=W``: ``|q_pos - k_pos| < W``. Segments must be equal.
    """
    terms = []
    if causal:
        terms.append(k_pos <= q_pos)
    if window is not None:
        distance = q_pos - k_pos
        terms.append((distance < window) & (distance > -window))
    if q_seg is not None:
        terms.append(q_seg == k_seg)
    seen = None
    for term in terms:
        seen = term if seen is None else seen & term
    return seen


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
