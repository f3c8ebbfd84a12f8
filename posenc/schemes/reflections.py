"""Reflections of a query on its path to a key, some tokens at a time (PaTH).

A query ``q`` meets tokens from the last to the first: ``q <- q - beta_t (q . w_t) w_t``. After a
block of them it is ``q - c W``, with ``c_t = beta_t w_t . (q - sum of c_s w_s)`` over the later
tokens ``s`` of the block. So ``c`` is linear in the products of ``q`` with the tokens: ``c =
(q W^T) M``, with a triangular ``M`` that no query changes. Yang et al. 2025, arXiv 2505.16381,
section 3.
"""

from __future__ import annotations

from typing import Any

from posenc.contract.operations import device, is_compiling
from posenc.contract.scan import scan_back
from posenc.contract.specs import Array, Namespace

# Tokens, powers of 2: of a block, and of a part of it whose matrix is inverted.
_BLOCK, _INVERTED = 64, 16


def changes_of_scores(
    queries: Array, keys: Array, w: Array, beta: Array, up_to: Array, seg: Array | None, *,
    xp: Namespace,
) -> Array:  # fmt: skip
    """What reflections add to ``queries @ keys.T``, ``(B, H, Q, K)``.

    Parameters
    ----------
    queries, keys, w
        ``(B, H, Q, D)`` and twice ``(B, H, K, D)``; tokens of a segment in the order of positions.
    beta
        ``(B, H, 1, K)``.
    up_to
        Whether a token reflects a query, on its way to the keys before: ``(B or 1, 1, Q, K)``.
        If a token does, so do all tokens of its segment before it.
    seg
        Segments of the tokens, ``(B or 1, 1, 1, K)``; None for one.
    """
    transposed, length = xp.matrix_transpose, keys.shape[2]
    # A program for any length has no loop over blocks, and inverts one matrix of all keys.
    cut = isinstance(length, int) and not is_compiling(xp)
    size = min(_BLOCK, 2 ** (length - 1).bit_length()) if cut else length

    def blocks(array: Array, axis: int) -> Array:
        return _blocks(array, axis, size, xp) if cut else array[None, ...]

    w, k, up_to = blocks(w, 2), blocks(keys, 2), blocks(up_to, -1)
    seg = None if seg is None else blocks(seg, -1)
    width = min(_INVERTED, size) if cut else size
    multiples = _multiples(w, transposed(blocks(beta, -1)), seg, width, xp)
    # A key meets the queries that the tokens after it have changed.
    products = xp.where(_later(seg, size, device(w), xp), xp.matmul(w, transposed(k)), 0.0)
    changes = xp.matmul(multiples, xp.concat([products, w], axis=-1))

    found = scan_back(_reflect, queries, (w, k, changes, up_to), (queries,), xp=xp)
    n, batch, heads, rows, _ = found.shape
    found = xp.reshape(xp.permute_dims(found, (1, 2, 3, 0, 4)), (batch, heads, rows, n * size))
    return found[..., :length]


def _reflect(
    moved: Array, block: tuple[Array, ...], fixed: tuple[Array], *, xp: Namespace
) -> tuple[Array, Array]:
    """Queries after the tokens of a block, and what changes in their products with its keys."""
    (w, k, changes, up_to), (queries,) = block, fixed
    size, transposed = w.shape[2], xp.matrix_transpose
    met = xp.where(up_to, xp.matmul(moved, transposed(w)), 0.0)
    change = xp.matmul(met, changes)
    by_later_blocks = xp.matmul(moved - queries, transposed(k))
    return moved - change[..., size:], by_later_blocks - change[..., :size]


def _multiples(w: Array, beta: Array, seg: Array | None, width: int, xp: Namespace) -> Array:
    """``M (n, B, H, size, size)`` of each block: an inverse for ``width`` tokens, then doubled.

    Its entries are at most 4: ``w`` and all products of reflections have a norm of at most 1.
    """
    size, transposed = w.shape[3], xp.matrix_transpose

    def parts(array: Array, axis: int) -> Array:
        """``(n, B, H, size, M)`` with ``width`` tokens on the axis, -2 or -1, in each part."""
        tokens, others = array.shape[axis], array.shape[-3 - axis]
        array = array if axis == -2 else transposed(array)
        array = xp.reshape(array, (*array.shape[:3], tokens // width, width, others))
        return array if axis == -2 else transposed(array)

    own_w, own_beta = parts(w, -2), parts(beta, -2)
    later = _later(None if seg is None else parts(seg, -1), width, device(w), xp)
    overlaps = xp.where(later, xp.matmul(own_w, transposed(own_w)), 0.0)
    one = xp.eye(width, dtype=w.dtype, device=device(w))
    found = own_beta * xp.linalg.inv(one + transposed(own_beta) * overlaps)
    while width < size:
        halves = slice(None, None, 2), slice(1, None, 2)
        own_w = parts(w, -2)
        w_first, w_last, first, last = (
            array[:, :, :, half, ...] for array in (own_w, found) for half in halves
        )
        overlaps = xp.matmul(w_last, transposed(w_first))
        if seg is not None:
            of_first, of_last = (parts(seg, -1)[:, :, :, half, ...] for half in halves)
            overlaps = xp.where(transposed(of_last) == of_first, overlaps, 0.0)
        # The first tokens meet what the last ones leave of a query.
        both = -xp.matmul(last, xp.matmul(overlaps, first))
        upper = xp.concat([first, xp.zeros_like(both)], axis=-1)
        found = xp.concat([upper, xp.concat([both, last], axis=-1)], axis=-2)
        width *= 2
    return xp.reshape(found, (*w.shape[:3], size, size))


def _later(seg: Array | None, size: int, here: Any, xp: Namespace) -> Array:
    """Whether a token comes after another of its segment, ``seg (..., 1, size)``."""
    index = xp.arange(size, device=here)
    later: Array = index[:, None] > index
    return later if seg is None else later & (xp.matrix_transpose(seg) == seg)


def _blocks(array: Array, axis: int, size: int, xp: Namespace) -> Array:
    """``size`` tokens of an axis in each block of a new first axis; zeros after the last one."""
    axis %= len(array.shape)
    *before, length = array.shape[: axis + 1]
    after = array.shape[axis + 1 :]
    count = max(1, -(-length // size))
    if missing := count * size - length:
        none = xp.zeros((*before, missing, *after), dtype=array.dtype, device=device(array))
        array = xp.concat([array, none], axis=axis)
    array = xp.reshape(array, (*before, count, size, *after))
    axes = list(range(len(array.shape)))
    return xp.permute_dims(array, (axes.pop(axis), *axes))
