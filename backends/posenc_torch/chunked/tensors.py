"""The tensors that parts slice, by what their axes are."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from torch import Tensor

from posenc.backend import Call, has_bias, has_channel_decay
from posenc_torch.chunked.parts import Part
from posenc_torch.sdpa import promoted


class Axes(StrEnum):
    """What the axes of a tensor are."""

    QUERIES = "B H Q D"
    KEYS = "B Hk K D"
    OF_QUERIES = "B H Q ..."
    OF_KEYS = "B H K ..."
    PAIRS = "B H Q K"
    DISTANCES = "H Q+K-1"
    HEADS = "H ..."
    NONE = "..."
    UNCUT = "whole"


class Slot(NamedTuple):
    """Which tensor it is: its axes, and its name among those with the same axes."""

    axes: Axes
    name: str


Tensors: TypeAlias = Mapping[Slot, Tensor]

Q, K, V = Slot(Axes.QUERIES, "q"), Slot(Axes.KEYS, "k"), Slot(Axes.KEYS, "v")
EXTRA_BIAS = Slot(Axes.PAIRS, "bias")
"""The caller's bias."""
TABLE = Slot(Axes.DISTANCES, "table")
"""The scheme's bias by distance."""


def tensors_of(call: Call, table: Tensor | None) -> dict[Slot, Tensor]:
    """q, k, v, and what the bias is computed from: ``table``, or else the scheme's arrays."""
    tensors = dict(zip((Q, K, V), promoted(call), strict=True))
    if call.extra_bias is not None:
        tensors[EXTRA_BIAS] = call.extra_bias
    if table is not None:
        tensors[TABLE] = table
    elif has_bias(call.scheme) or has_channel_decay(call.scheme):
        specs = call.scheme.param_specs()
        tensors |= {Slot(Axes.OF_QUERIES, n): a for n, a in call.query.features.items()}
        tensors |= {Slot(Axes.OF_KEYS, n): a for n, a in call.key.features.items()}
        for name, array in call.arrays.items():
            per_head = name not in specs or specs[name].per_head
            tensors[Slot(Axes.HEADS if per_head else Axes.NONE, name)] = array
    return tensors


def named(tensors: Tensors, *axes: Axes) -> dict[str, Tensor]:
    """The tensors with these axes, by their names."""
    return {slot.name: tensor for slot, tensor in tensors.items() if slot.axes in axes}


def views(
    axes: Axes, part: Part, tensor: Tensor, heads: int, q_len: int
) -> tuple[list[Tensor], int]:
    """The views of a tensor that a part reads, and the axis along which they follow.

    There are several where the part's keys are two ranges. ``heads`` are those of queries.
    """
    if axes in (Axes.NONE, Axes.UNCUT):
        return [tensor], 0
    if axes is Axes.HEADS:
        return [_heads(part, tensor, 0)], 0
    if axes is Axes.DISTANCES:
        rows = _heads(part, tensor, 0)
        return [rows[:, distances(part.queries, keys, q_len)] for keys in part.ranges], 1
    if axes is Axes.KEYS:
        group = heads // tensor.shape[1]
        first, last = part.heads.start // group, -(-part.heads.stop // group)
        return [tensor[:, first:last, keys] for keys in part.ranges], 2
    own = _heads(part, tensor, 1)
    if axes is Axes.OF_KEYS:
        return [own[:, :, keys] for keys in part.ranges], 2
    own = own[:, :, part.queries]
    return ([own[..., keys] for keys in part.ranges], 3) if axes is Axes.PAIRS else ([own], 2)


def distances(queries: slice, keys: slice, q_len: int) -> slice:
    """The columns of a table that hold the distances of some queries and keys."""
    first = keys.start - queries.stop + q_len
    return slice(first, first + queries.stop - queries.start + keys.stop - keys.start - 1)


def _heads(part: Part, tensor: Tensor, axis: int) -> Tensor:
    """The heads of a part, from an axis ``H or 1``."""
    if tensor.shape[axis] == 1:
        return tensor
    return tensor[part.heads] if axis == 0 else tensor[:, part.heads]
