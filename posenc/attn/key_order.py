"""Keys in the order of their positions, for schemes that go along the path from key to query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from posenc.attn.call import Call
from posenc.attn.segment_sums import in_order_of_positions
from posenc.contract.operations import device
from posenc.contract.specs import Array
from posenc.contract.tokens import Tokens
from posenc.positions.integers import concrete_values


def with_ordered_keys(call: Call) -> Call:
    """The same call, its keys in the order of positions (or places) within each segment.

    Keys of one position stay in the order of memory. Softmax does not depend on the order of keys,
    so results are the same but for rounding.
    """
    if call.in_order or _are_in_order(call):
        return call
    xp, batch = call.xp, call.k.shape[0]
    own = (call.key.encoded_pos, call.key.seg)
    of_each = any(a is not None and len(a.shape) == 2 for a in own)
    rows = in_order_of_positions(Tokens(*own), batch if of_each else 1, xp)

    # Rows of all sequences one after the other: an exported program may have any length.
    first = xp.arange(rows.shape[0], dtype=rows.dtype, device=device(rows)) * rows.shape[1]
    index = xp.reshape(rows + first[:, None], (-1,))

    def take(array: Array, axis: int) -> Array:
        axis %= len(array.shape)
        if not of_each:
            return xp.take(array, index, axis=axis)
        if len(array.shape) == 1:
            array, axis = array[None, :], 1
        array = xp.broadcast_to(array, (batch, *array.shape[1:]))
        axes = [n for n in range(len(array.shape)) if n not in (0, axis)]
        array = xp.permute_dims(array, (0, axis, *axes))
        found = xp.take(xp.reshape(array, (-1, *array.shape[2:])), index, axis=0)
        found = xp.reshape(found, array.shape)
        back = [0, *range(2, axis + 1), 1, *range(axis + 1, len(array.shape))]
        return xp.permute_dims(found, tuple(back))

    key, mask, bias = call.key, call.mask, call.extra_bias
    if mask.array is not None:
        mask = replace(mask, array=take(mask.array, -1))
    return replace(
        call, k=take(call.k, 2), v=take(call.v, 2), key=_tokens(key, take), mask=mask,
        extra_bias=None if bias is None else take(bias, -1), aligned=False,
    )  # fmt: skip


def _tokens(key: Tokens, take: Callable[[Array, int], Array]) -> Tokens:
    seg, places = (None if a is None else take(a, -1) for a in (key.seg, key.places))
    features = {name: take(array, 2) for name, array in (key.features or {}).items()}
    return Tokens(take(key.pos, -1), seg, places, features=features)


def _are_in_order(call: Call) -> bool:
    """Whether keys are known to be in order already."""
    values = [
        None if a is None else concrete_values(a, call.xp)
        for a in (call.key.encoded_pos, call.key.seg)
    ]
    pos, seg = values
    if pos is None or (seg is None) != (call.key.seg is None):
        return False
    if seg is None:
        return bool(np.all(pos[..., 1:] >= pos[..., :-1]))
    pos, seg = np.broadcast_arrays(pos, seg)
    by_seg = np.argsort(seg, axis=-1, kind="stable")
    pos, seg = (np.take_along_axis(a, by_seg, axis=-1) for a in (pos, seg))
    return bool(np.all((pos[..., 1:] >= pos[..., :-1]) | (seg[..., 1:] != seg[..., :-1])))
