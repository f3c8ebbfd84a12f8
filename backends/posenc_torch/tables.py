"""How tables of tokens, features ``(B, H, L, M)``, are read: by pair, or by distance.

Where an index depends on the distance alone, the values of a tile are columns of the table: one for
each distance, and each row of the tile has them shifted by one. So a selection of columns and a
strided view replace the gather, and the gradient adds columns instead of scattering pairs. That is
the relative shift of Dai et al. 2019, "Transformer-XL", arXiv 1901.02860, appendix B, for any index
of distances.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor

from posenc.backend import broadcast_index, concrete_values
from posenc_torch.tracing import may_read

_FEWEST_COLUMNS = 8


def take_along_axis(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """As ``posenc.contract.operations`` has it."""
    return torch.gather(x, axis, _from_start(index, x.shape[axis]))


def gather_pairs(table: Tensor, index: Tensor, *, by_distance: bool) -> Tensor:
    """A ``ReadTable`` that gathers a number for each pair.

    In a third of the time of ``take_along_dim``, which divides every index by the table's size.
    """
    index = _from_start(index, table.shape[3])
    table, index = broadcast_index(table, index.long(), xp)
    return torch.gather(table, -1, index)


def _from_start(index: Tensor, size: int) -> Tensor:
    """An index whose numbers below 0 count from the end, as one from the start.

    To look whether there are any takes a fifth of the time of counting.
    """
    if may_read(index) and index.numel() and bool(index.amin() >= 0):
        return index
    return torch.where(index < 0, index + size, index)


def read_by_distance(table: Tensor, index: Tensor, *, by_distance: bool) -> Tensor:
    """A ``ReadTable`` that selects columns and shifts rows, where the index allows it.

    First derivatives only.
    """
    rows, columns = table.shape[2], index.shape[3]
    # For few queries, as in decoding, the table of each key has few numbers to give.
    by_distance = by_distance and columns >= _FEWEST_COLUMNS
    at = _by_distance(index[0, 0].expand(rows, columns)) if by_distance else None
    if at is None:
        return gather_pairs(table, index, by_distance=by_distance)
    sheared: Tensor = _Sheared.apply(  # type: ignore[no-untyped-call]  # torch annotates no apply
        table, columns, tuple(_runs(at % table.shape[3]))
    )
    return sheared


def _by_distance(index: Tensor) -> np.ndarray[Any, Any] | None:
    """The index at each distance, from the lower left corner to the upper right one.

    None on a GPU, where reading it would wait.
    """
    return concrete_values(torch.cat([index[:, 0].flip(0), index[0, 1:]]), xp)


class _Run(NamedTuple):
    """Consecutive distances whose columns have a constant step, from ``first``."""

    length: int
    first: int
    step: int

    def of(self, table: Tensor) -> Tensor:
        """A view of the columns from the lowest to the highest; one if all are the same."""
        last = self.first + self.step * (self.length - 1)
        low, high = min(self.first, last), max(self.first, last)
        return table[..., low : high + 1 : abs(self.step) or 1]

    def in_order(self, columns: Tensor, out: Tensor | None = None) -> Tensor:
        """Columns of ``of`` in the order of distances, or the reverse, written to ``out``."""
        if self.step >= 0:
            return columns if out is None else out.copy_(columns)
        # In half of the time of flip.
        back = torch.arange(self.length - 1, -1, -1, device=columns.device)
        return torch.gather(columns, -1, back.expand(columns.shape), out=out)


def _runs(at: np.ndarray[Any, Any]) -> Iterator[_Run]:
    """The columns at each distance, as runs: an index that clips has three."""
    steps = np.diff(at)
    changes = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))
    start = 0
    while start < len(at):
        if start == len(at) - 1:
            yield _Run(1, int(at[start]), 0)
            return
        end = int(changes[np.searchsorted(changes, start, side="right")])
        yield _Run(end + 1 - start, int(at[start]), int(steps[start]))
        start = end + 1


def _part_of(runs: tuple[_Run, ...], start: int, stop: int) -> Iterator[_Run]:
    """The runs of the distances ``start .. stop - 1``."""
    at = 0
    for length, first, step in runs:
        skip, end = max(start - at, 0), min(stop - at, length)
        if skip < end:
            yield _Run(end - skip, first + skip * step, step)
        at += length


class _Sheared(torch.autograd.Function):
    """``(B, H, L, M)`` to ``(B, H, L, N)``: element ``(i, j)`` is that of distance ``j - i``."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, columns: int, runs: tuple[_Run, ...]) -> Tensor:
        ctx.shape, ctx.columns, ctx.runs = table.shape, columns, runs
        tiles = [
            _shear(_select(table[:, :, rows], own), columns)
            for rows, own in _tiles(table.shape[2], columns, runs)
        ]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)

    @staticmethod
    def backward(ctx: Any, d_values: Tensor) -> tuple[Tensor, None, None]:
        d_table = d_values.new_zeros(ctx.shape)
        for rows, runs in _tiles(ctx.shape[2], ctx.columns, ctx.runs):
            _add_selected(d_table[:, :, rows], runs, d_values[:, :, rows])
        return d_table, None, None


def _tiles(
    rows: int, columns: int, runs: tuple[_Run, ...]
) -> Iterator[tuple[slice, tuple[_Run, ...]]]:
    """Rows, no more than columns, with the runs of their distances.

    Of a higher tile, most selected columns would lie outside.
    """
    for first in range(0, rows, columns):
        stop = min(rows, first + columns)
        yield slice(first, stop), tuple(_part_of(runs, rows - stop, rows - first + columns - 1))


def _select(table: Tensor, runs: tuple[_Run, ...]) -> Tensor:
    """The columns of a table at each distance."""
    lengths = [run.length for run in runs]
    selected = table.new_empty((*table.shape[:3], sum(lengths)))
    for run, part in zip(runs, torch.split(selected, lengths, dim=-1), strict=True):
        run.in_order(run.of(table), out=part)
    return selected


def _add_selected(d_table: Tensor, runs: tuple[_Run, ...], d_values: Tensor) -> None:
    """Add the gradient of sheared columns to that of the table."""
    lengths = [run.length for run in runs]
    d_selected = d_values.new_zeros((*d_values.shape[:3], sum(lengths)))
    _shear(d_selected, d_values.shape[3]).copy_(d_values)
    for run, part in zip(runs, torch.split(d_selected, lengths, dim=-1), strict=True):
        columns = run.in_order(part) if run.step else part.sum(dim=-1, keepdim=True)
        run.of(d_table).add_(columns)


def _shear(selected: Tensor, columns: int) -> Tensor:
    """A view ``(B, H, L, N)`` of ``(B, H, L, L + N - 1)``: each row starts one column earlier."""
    rows, (*outer, row, column) = selected.shape[2], selected.stride()
    size, step = (*selected.shape[:3], columns), (*outer, row - column, column)
    return selected.as_strided(size, step, (rows - 1) * column)
