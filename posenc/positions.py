"""Where tokens stand: checked integer positions, who may see whom, packing and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posenc.checks import check_count
from posenc.protocol import Array, Namespace


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


def as_positions(name: str, pos: Array, *, xp: Namespace) -> Array:
    """``pos (L,)`` or ``(B, L)`` as int32 or int64, wide enough for differences.

    Raises
    ------
    TypeError
        If ``pos`` is no array of integers. Half-precision positions cannot tell 256 from 257.
    ValueError
        If it has another number of axes.
    """
    dtype = getattr(pos, "dtype", None)
    if dtype is None:
        raise TypeError(f"{name} must be an array of integers, got {type(pos).__name__}")
    if not xp.isdtype(dtype, "integral"):
        raise TypeError(f"{name} must have an integer dtype, got {dtype}")
    if len(pos.shape) not in (1, 2):
        raise ValueError(f"{name} must have shape (L,) or (B, L), got {tuple(pos.shape)}")
    if dtype in (xp.int32, xp.int64):
        return pos
    if dtype in (xp.int8, xp.int16, xp.uint8, getattr(xp, "uint16", None)):
        return xp.astype(pos, xp.int32)
    return xp.astype(pos, xp.arange(1).dtype)  # the library's widest: JAX may have 32 bits only


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

    Position 0 is the first token that is no padding. Padded keys have a segment that no query has,
    and padded queries one that no key has: their rows give 0.

    >>> left_padded([1, 2], 2)[0]
    array([[-1,  0],
           [ 0,  1]])
    """
    check_count("total", total)
    sizes = np.asarray([check_count("lengths", n) for n in lengths])
    if sizes.size == 0 or sizes.max() > total:
        raise ValueError(f"lengths must be 1 .. total={total}, got {list(lengths)}")
    pos = np.arange(total)[None, :] - (total - sizes)[:, None]
    return pos, np.where(pos < 0, -1, 0), np.where(pos < 0, -2, 0)
