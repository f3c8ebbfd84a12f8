"""Which arrays a bias reads, and how often per score.

FlexAttention's backward pass allows one read of each learned array. An array that is read at fixed
indices only, as the layers of a network are, can be given as one array per index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc.backend import Features, Params, PositionScheme

Index: TypeAlias = tuple[int, ...]
_NO_FEATURES: Mapping[str, Tensor] = {}


def repeatedly_read_arrays(
    scheme: PositionScheme,
    arrays: Mapping[str, Tensor],
    query: Mapping[str, Tensor] = _NO_FEATURES,
    key: Mapping[str, Tensor] = _NO_FEATURES,
) -> list[str]:
    """Names of the arrays and features that a bias reads, or may read, several times per score.

    ``query`` and ``key`` are the features of each side. The result has their names from
    ``label_features``. Arrays in ``fixed_reads`` are not in it.
    """
    shared = shared_params(scheme)
    token_table = any(_is_table(a) for a in (*query.values(), *key.values()))
    if not (_may_read_repeatedly(scheme, arrays) or token_table):
        return []
    names, tables = _read(scheme, arrays, query, key)
    # A kernel loads a shared array once for each value that the bias takes from it.
    read = [name for name in shared if name in names]
    read += [name for name, table in tables.items() if table.reads > 1]
    fixed = fixed_reads(scheme, arrays, query, key) if read else {}
    return [name for name in read if name not in fixed]


def fixed_reads(
    scheme: PositionScheme,
    arrays: Mapping[str, Tensor],
    query: Mapping[str, Tensor] = _NO_FEATURES,
    key: Mapping[str, Tensor] = _NO_FEATURES,
) -> dict[str, list[Index]]:
    """The shared arrays and repeatedly read tables whose reads are all at fixed indices, and these.

    An index leaves out the axis of heads. That of a shared number is ``()``.
    """
    if not _may_read_repeatedly(scheme, arrays):
        return {}
    shared = shared_params(scheme)
    try:
        names, tables = _read(scheme, arrays, query, key, tables_of=shared)
    except (TypeError, AttributeError):  # an operation on a whole array
        return {}
    numbers: dict[str, list[Index]] = {n: [()] for n in shared if n in names and not arrays[n].ndim}
    own = {n: table for n, table in tables.items() if n in arrays and table.indices is not None}
    return numbers | {
        n: list(table.indices or ()) for n, table in own.items() if n in shared or table.reads > 1
    }


def _may_read_repeatedly(scheme: PositionScheme, arrays: Mapping[str, Tensor]) -> bool:
    """Whether the bias may read one of its learned arrays several times: it has a large one."""
    own = scheme.param_specs()
    table = any(a.ndim > 1 and n in own for n, a in arrays.items())
    return table or bool(shared_params(scheme))


def read_arrays(
    scheme: PositionScheme,
    arrays: Mapping[str, Tensor],
    query: Mapping[str, Tensor] = _NO_FEATURES,
    key: Mapping[str, Tensor] = _NO_FEATURES,
) -> set[str]:
    """Names of the params and constants that a bias reads."""
    return _read(scheme, arrays, query, key)[0]


def _read(
    scheme: PositionScheme,
    arrays: Mapping[str, Tensor],
    query: Mapping[str, Tensor],
    key: Mapping[str, Tensor],
    tables_of: Sequence[str] = (),
) -> tuple[set[str], dict[str, _CountingTable]]:
    """Names of the arrays that a bias reads, and its per-head tables and those of tokens.

    Shared arrays in ``tables_of`` count as tables, too.
    """
    shared = shared_params(scheme)
    per_head = {n: a for n, a in arrays.items() if n not in shared}
    tables = {n: _CountingTable(a, a.shape[1:]) for n, a in per_head.items() if a.ndim > 1}
    tables |= {n: _CountingTable(arrays[n], arrays[n].shape) for n in tables_of if arrays[n].ndim}
    features = label_features(query, key).items()
    token_tables = {n: _CountingTable(a, a.shape[3:]) for n, a in features if _is_table(a)}
    like = next(iter([*arrays.values(), *query.values(), *key.values()]))
    at = torch.zeros((), dtype=torch.int32, device=like.device)
    zero = at.to(torch.promote_types(like.dtype, torch.float32))
    zeros = {n: a.new_zeros(a.shape if n in shared else ()) for n, a in arrays.items()}
    sides = []
    for role, side in (("query", query), ("key", key)):
        values = {n: token_tables.get(_label(n, role), zero) for n in side}
        places = {n: _CountingTable(a, a.shape[3:]) for n, a in side.items() if n == "places"}
        sides.append(Features(values | places, role))
    arrays_read = dict.fromkeys(scheme.constants(), zero) | zeros | tables
    params = _RecordingParams(arrays_read, zero.dtype, *sides)
    scheme.bias(at, at, params=params, xp=xp)
    return params.names_read, tables | token_tables


def _is_table(feature: Tensor) -> bool:
    """Whether a feature of tokens is a table for each token."""
    return feature.ndim > 3 and feature.is_floating_point()


class _RecordingParams(Params):
    """Params that record which names were read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)


def label_features(query: Mapping[str, Tensor], key: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Features of both sides in one dict, by names that include the side."""
    sides = (("query", query), ("key", key))
    return {_label(name, role): array for role, side in sides for name, array in side.items()}


def _label(name: str, role: str) -> str:
    return f"feature {name} of the {role}"


class _CountingTable:
    """A table of zeros in place of that of one head or token; it counts its reads.

    Attributes
    ----------
    reads
        How many there were.
    indices
        Their indices, as keys; None if one was not of Python integers.
    """

    def __init__(self, array: Tensor, shape: tuple[int, ...]) -> None:
        self._zero, self.reads = array.new_zeros(()), 0
        self.indices: dict[Index, None] | None = {}
        self.shape, self.dtype = tuple(shape), array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Tensor:
        self.reads += 1
        where = index if isinstance(index, tuple) else (index,)
        if self.indices is not None and all(isinstance(i, int) for i in where):
            self.indices[where] = None
        else:
            self.indices = None
        return self._zero


def shared_params(scheme: PositionScheme) -> list[str]:
    """Names of the learned arrays that all heads share."""
    return [name for name, spec in scheme.param_specs().items() if not spec.per_head]
