"""Weights of projections: either layout of RoPE, and queries, keys and values apart.

A checkpoint's projections order the channels of a head for one layout: ``half`` pairs channels
``(k, k + R/2)``, ``interleaved`` pairs ``(2k, 2k + 1)``. To run it with the other layout, convert
the weights and biases of its query and key projections, and nothing else.
"""

from __future__ import annotations

from typing import Literal

from array_api_compat import array_namespace

from posenc.contract.checks import check_choice, check_count
from posenc.contract.protocol import Array


def half_to_interleaved(weight: Array, num_heads: int, rotary_dim: int | None = None) -> Array:
    """Rows of a projection that was made for ``layout="half"``, in the order of ``"interleaved"``.

    Row ``k`` of each head becomes row ``2k``, and row ``k + R/2`` becomes row ``2k + 1``.

    Parameters
    ----------
    weight
        A weight ``(H * D, inputs)`` or a bias ``(H * D,)`` of the projection that makes queries or
        keys, of NumPy, PyTorch, JAX or another Array API library.
    num_heads
        Heads ``H`` of this projection: those of keys and values for keys.
    rotary_dim
        Channels per head that rotate, ``R``, the first ones; even. Default: all.

    Returns
    -------
    An array of the same shape and library.

    Raises
    ------
    TypeError, ValueError
        The rows are no multiple of ``num_heads``, or ``rotary_dim`` is odd or more than a head has.
    """
    return _reorder(weight, num_heads, rotary_dim, groups=2)


def interleaved_to_half(weight: Array, num_heads: int, rotary_dim: int | None = None) -> Array:
    """The inverse of ``half_to_interleaved``: row ``2k`` becomes row ``k`` again."""
    return _reorder(weight, num_heads, rotary_dim, groups=None)


def split_qkv(
    weight: Array,
    num_heads: int,
    order: Literal["by_head", "by_role"] = "by_head",
    *,
    num_kv_heads: int | None = None,
) -> tuple[Array, Array, Array]:
    """Rows of one projection for queries, keys and values, apart.

    ``(H * D, ...)`` of queries, and ``(Hk * D, ...)`` each of keys and values.

    Parameters
    ----------
    weight
        A weight ``((H + 2 Hk) D, inputs)``, or a bias ``((H + 2 Hk) D,)``.
    num_heads
        Heads ``H``.
    order
        ``"by_head"``: each head of keys has its rows, for its queries, its key and its value
        (BLOOM, GPT-NeoX, Falcon). ``"by_role"``: all queries, then all keys, then all values (MPT,
        Phi-3, GLM-4).
    num_kv_heads
        Heads ``Hk`` of keys and values. Needed where a weight does not have ``3 * inputs`` rows,
        which is so where query heads share keys (Falcon-40B, Phi-3-medium, GLM-4). Default: ``H``.

    Raises
    ------
    TypeError, ValueError
        The rows are no multiple of ``H + 2 Hk``, ``Hk`` does not divide ``H``, or it is needed.
    """
    check_choice("order", order, ("by_head", "by_role"))
    xp, shape = array_namespace(weight), tuple(weight.shape)
    heads = check_count("num_heads", num_heads)
    if num_kv_heads is None and len(shape) == 2 and shape[0] != 3 * shape[1]:
        raise ValueError(
            f"num_kv_heads is missing: weight has {shape[0]} rows, not 3 * {shape[1]} inputs, so "
            "query heads may share keys"
        )
    kv_heads = heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
    if heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads={heads}, got {kv_heads}")
    if not shape or shape[0] % (heads + 2 * kv_heads):
        rows = heads + 2 * kv_heads
        raise ValueError(f"weight must have a multiple of {rows} rows, got shape {shape}")
    groups = kv_heads if order == "by_head" else 1
    ends = heads // groups, (heads + kv_heads) // groups
    dim = shape[0] // (heads + 2 * kv_heads)
    parts = xp.reshape(weight, (groups, -1, dim, *shape[1:]))
    own = parts[:, : ends[0], ...], parts[:, ends[0] : ends[1], ...], parts[:, ends[1] :, ...]
    q, k, v = (xp.reshape(part, (-1, *shape[1:])) for part in own)
    return q, k, v


def _reorder(weight: Array, num_heads: int, rotary_dim: int | None, *, groups: int | None) -> Array:
    """Rotated rows of each head as a matrix with ``groups`` rows, or columns of 2, transposed."""
    xp = array_namespace(weight)
    heads, rows = check_count("num_heads", num_heads), weight.shape[0] if weight.ndim else 1
    if not weight.ndim or rows % heads:
        raise ValueError(
            f"weight must have a multiple of num_heads={heads} rows, got shape "
            f"{tuple(weight.shape)}"
        )
    head_dim = rows // heads
    dim = head_dim if rotary_dim is None else check_count("rotary_dim", rotary_dim)
    if dim % 2 or dim > head_dim:
        name = "head_dim" if rotary_dim is None else "rotary_dim"
        raise ValueError(
            f"{name} must be even and at most {head_dim}, the rows per head, got {dim}"
        )
    inputs = tuple(weight.shape[1:])
    by_head = xp.reshape(weight, (heads, head_dim, *inputs))
    pairs = (2, dim // 2) if groups else (dim // 2, 2)
    rotated = xp.reshape(by_head[:, :dim, ...], (heads, *pairs, *inputs))
    axes = (0, 2, 1, *range(3, 3 + len(inputs)))
    rotated = xp.reshape(xp.permute_dims(rotated, axes), (heads, dim, *inputs))
    return xp.reshape(xp.concat([rotated, by_head[:, dim:, ...]], axis=1), tuple(weight.shape))
