"""Integer positions of tokens: checks, the visibility of keys, packing, padding, grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posenc.contract.checks import check_count
from posenc.contract.operations import check_library, is_compiling, is_numpy, operations_of
from posenc.contract.protocol import Array, Namespace, Window
from posenc.contract.tokens import Tokens

# Within these bounds every difference of positions fits 32 bits.
MIN_POSITION, MAX_POSITION = -(2**30), 2**30 - 1


def concrete_values(array: Array, xp: Namespace) -> np.ndarray[Any, Any] | None:
    """The values of ``array`` as NumPy; None if reading them is impossible or would wait.

    That is so while a program is traced or compiled, on a device other than the host, and for
    arrays without data.
    """
    if is_compiling(xp):
        return None
    has_values = operations_of(xp).has_values
    if has_values is not None and not has_values(array):
        return None
    try:
        return np.asarray(array)
    except (TypeError, RuntimeError, ValueError, NotImplementedError):
        return None


def as_positions(name: str, pos: Array, *, xp: Namespace, device: Any = None) -> Array:
    """Positions ``(L,)`` or ``(B, L)`` as int32 or int64, whose differences cannot overflow.

    Raises
    ------
    TypeError
        ``pos`` is not an array of integers. In bfloat16, positions 256 and 257 are equal.
    ValueError
        ``pos`` has another number of axes, or a value outside ``MIN_POSITION .. MAX_POSITION``.
        Values are checked if they are concrete.
    """
    check_range(name, pos, xp)
    return as_integers(name, pos, xp=xp, device=device)


def as_places(
    name: str, places: Array, axes: int, length: int, *, xp: Namespace, device: Any = None
) -> Array:
    """Coordinates ("places") of ``length`` tokens, ``(L, axes)`` or ``(B, L, axes)``.

    For ``axes=1`` the result, and optionally the argument, has no last axis.

    Raises
    ------
    TypeError, ValueError
        As ``as_positions``, or ``places`` has another number of axes.
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


def check_range(name: str, pos: Array, xp: Namespace) -> tuple[int, int] | None:
    """Check that 32-bit differences of positions cannot overflow, if values are concrete.

    Returns the lowest and the highest position; None if they are not known.
    """
    values = concrete_values(pos, xp)
    if values is None or not np.issubdtype(values.dtype, np.integer) or not values.size:
        return None
    low, high = int(values.min()), int(values.max())
    if low < MIN_POSITION or high > MAX_POSITION:
        wrong = low if low < MIN_POSITION else high
        raise ValueError(f"{name} holds {wrong}, accepted: -2**30 .. 2**30 - 1")
    return low, high


def as_integers(name: str, values: Array, *, xp: Namespace, device: Any = None) -> Array:
    """Integers ``(L,)`` or ``(B, L)`` as int32 or int64; NumPy arrays are converted to ``xp``."""
    if hasattr(values, "dtype") and len(values.shape) not in (1, 2):
        _integers(name, values, xp=xp, device=device)  # reports a wrong dtype first
        raise ValueError(f"{name} must have shape (L,) or (B, L), got {tuple(values.shape)}")
    return _integers(name, values, xp=xp, device=device)


def from_numpy(array: Any, *, xp: Namespace, device: Any) -> Any:
    """``array`` as an array of ``xp`` if it is a NumPy array; otherwise unchanged."""
    if isinstance(array, np.ndarray) and not is_numpy(xp):
        # A copy, because torch warns about a view of a read-only array.
        return xp.asarray(array, device=device, copy=True)
    return array


def _integers(name: str, values: Array, *, xp: Namespace, device: Any) -> Array:
    """Integers of any shape as int32 or int64."""
    if not hasattr(values, "dtype"):
        raise TypeError(f"{name} must be an array of integers, got {type(values).__name__}")
    check_library(name, values, xp)
    values = from_numpy(values, xp=xp, device=device)
    dtype = values.dtype
    if not xp.isdtype(dtype, "integral"):
        raise TypeError(f"{name} must have an integer dtype, got {dtype}")
    if dtype in (xp.int32, xp.int64):
        return values
    if dtype in (xp.int8, xp.int16, xp.uint8, getattr(xp, "uint16", None)):
        return xp.astype(values, xp.int32)
    return xp.astype(values, xp.arange(1).dtype)  # the default integer: JAX may have 32 bits only


def visible(
    q_pos: Array,
    k_pos: Array,
    q_seg: Array | None = None,
    k_seg: Array | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    first_tokens: int = 0,
) -> Array | None:
    """Whether a key is visible to a query, elementwise over broadcast positions; None if all are.

    ``causal``: ``k_pos <= q_pos``. ``window=(left, right)``: ``-left <= k_pos - q_pos <= right``,
    None for no bound; keys at positions ``0 .. first_tokens - 1`` are inside every window.
    Segments: ``q_seg == k_seg``.
    """
    terms = []
    if causal:
        terms.append(k_pos <= q_pos)
    if window is not None and (near := _inside(q_pos - k_pos, window, causal)) is not None:
        terms.append(near | ((k_pos >= 0) & (k_pos < first_tokens)) if first_tokens else near)
    if q_seg is not None:
        terms.append(q_seg == k_seg)
    mask = None
    for term in terms:
        mask = term if mask is None else mask & term
    return mask


def _inside(distance: Array, window: Window, causal: bool) -> Array | None:
    """Whether ``distance = q_pos - k_pos`` is inside a window; None if every distance is.

    With ``causal``, the result does not matter for keys after the query.
    """
    left, right = window
    near = None if left is None else distance <= left
    if right is None or (causal and right >= 0):
        return near
    ahead = distance >= -right
    return ahead if near is None else near & ahead


def packed(lengths: Sequence[int]) -> Tokens:
    """The tokens of documents packed one after another: positions and segments.

    ``attention(q, k, v, scheme, causal=True, tokens=packed([2, 3]))``. Both are
    ``(sum(lengths),)``.

    >>> tokens = packed([2, 3])
    >>> tokens.pos, tokens.seg
    (array([0, 1, 0, 1, 2]), array([0, 0, 1, 1, 1]))
    """
    sizes = _lengths(lengths)
    if not sizes:
        raise ValueError("lengths is empty; give the length of at least one document")
    pos = np.concatenate([np.arange(n) for n in sizes])
    return Tokens(pos, np.repeat(np.arange(len(sizes)), sizes))


def left_padded(lengths: Sequence[int], total: int) -> Tokens:
    """The tokens of left-padded sequences: positions, and which exist, both ``(B, total)``.

    The first real token has position 0. Padding has position 0 too, which every scheme accepts. No
    query sees it, and its own result is 0.

    >>> tokens = left_padded([1, 3], 3)
    >>> tokens.pos
    array([[0, 0, 0],
           [0, 1, 2]])
    >>> tokens.exists
    array([[False, False,  True],
           [ True,  True,  True]])
    """
    total = check_count("total", total)
    sizes = np.asarray(_lengths(lengths))
    if sizes.size == 0 or sizes.max() > total:
        raise ValueError(f"lengths must be 1 .. total={total}, got {list(lengths)}")
    pos = np.arange(total)[None, :] - (total - sizes)[:, None]
    return Tokens(np.maximum(pos, 0), exists=pos >= 0)


def _lengths(lengths: Sequence[int]) -> list[int]:
    """One length for each sequence, checked."""
    if not hasattr(lengths, "__iter__") or isinstance(lengths, str):
        raise TypeError(f"lengths must be a list of integers, got {lengths!r}")
    return [check_count("lengths", n) for n in lengths]


def grid(*sizes: int) -> np.ndarray[Any, Any]:
    """Places ``(height * width, 2)`` of the patches of an image, ``(row, column)``, row by row.

    Any number of sizes: ``grid(frames, height, width)`` has three axes.

    >>> grid(2, 3).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """
    if not sizes:
        raise ValueError("sizes is empty; give height and width")
    counts = [check_count("sizes", size) for size in sizes]
    return np.indices(counts).reshape(len(counts), -1).T.copy()


def fractional(advances: Any, denominator: int = 256) -> np.ndarray[Any, Any]:
    """Places of tokens that advance by fractions of a position, in units of ``1 / denominator``.

    For ``RoPE(head_dim, scaling=posenc.schemes.Fractional(denominator))``. The first token of a
    sequence is at 0, and each other one its own advance after the one before. In V2PE (Ge et al.
    2024, arXiv 2412.09616) a token of text advances by 1, and a token of an image by 1/256, say.

    >>> fractional([1, 1, 1 / 256, 1 / 256, 1])
    array([  0, 256, 257, 258, 514])

    Parameters
    ----------
    advances
        Multiples of ``1 / denominator``, ``(L,)`` or ``(B, L)``. Those of first tokens are not
        read. For packed documents, call it for each.
    denominator
        The number of units in a position.

    Raises
    ------
    TypeError, ValueError
        An advance is no such multiple, or a place is beyond 2**30, with its value.
    """
    units = np.asarray(advances, np.float64) * check_count("denominator", denominator)
    if units.ndim not in (1, 2):
        raise ValueError(f"advances must be (L,) or (B, L), got shape {units.shape}")
    units[..., :1] = 0
    # 29/100 is no float: two roundings, each of at most half of the last digit.
    nearest, rounding = np.round(units), np.finfo(np.float64).eps * np.abs(units)
    with np.errstate(invalid="ignore"):  # inf - inf, which is wrong anyway
        wrong = np.argwhere(~(np.abs(units - nearest) <= rounding) | ~np.isfinite(units))
    if wrong.size:
        at = tuple(int(n) for n in wrong[0])
        value = units[at] / denominator
        raise ValueError(f"advances[{at}] = {value} must be a multiple of 1/{denominator}")
    places = np.cumsum(nearest, axis=-1)
    if places.size and np.abs(places).max() > MAX_POSITION:
        raise ValueError(f"advances reach {np.abs(places).max()} units; at most 2**30 - 1")
    return places.astype(np.int64)


def randomised(
    rng: np.random.Generator, length: int, max_len: int, batch: int | None = None
) -> np.ndarray[Any, Any]:
    """Positions for training: ``length`` different ones out of ``0 .. max_len - 1``, in order.

    Every set of positions is equally probable, so training on short sequences sees the distances
    of long ones. ``max_len`` is the longest length that the model will be used at. Ruoss et al.
    2023, "Randomized Positional Encodings Boost Length Generalization of Transformers", arXiv
    2305.16843, section 3.1.

    Parameters
    ----------
    rng
        The generator; the result depends on nothing else.
    length, max_len
        ``1 <= length <= max_len <= 2**30``.
    batch
        Number of sequences, each with positions of its own. Default: one, without an axis.

    Returns
    -------
    Increasing integers ``(length,)`` or ``(batch, length)``.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a numpy.random.Generator, got {rng!r}")
    length, max_len = check_count("length", length), check_count("max_len", max_len)
    if not length <= max_len <= MAX_POSITION + 1:
        raise ValueError(f"max_len must be length={length} .. 2**30, got {max_len}")
    rows = 1 if batch is None else check_count("batch", batch)
    # Sorted afterwards, so the order of the draw does not matter.
    drawn = [rng.choice(max_len, length, replace=False, shuffle=False) for _ in range(rows)]
    pos = np.sort(np.stack(drawn), axis=-1)
    return pos[0] if batch is None else pos
