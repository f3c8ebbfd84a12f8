"""Learned absolute positions: one trained vector per position, added to token embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posenc.contract.checks import check_count
from posenc.contract.fields import Count
from posenc.contract.protocol import Array, Arrays, Namespace, ParamSpec, PositionScheme
from posenc.positions.integers import concrete_values


class OutsideTableError(ValueError, IndexError):
    """A position is outside a learned table."""


@dataclass(frozen=True)
class Learned(PositionScheme, paper="Gehring et al. 2017, arXiv 1705.03122"):
    """Row ``pos + offset`` of a table ``(max_len + offset, dim)``.

    A position outside ``0 .. max_len - 1`` raises ``OutsideTableError``, a ``ValueError``. Under
    tracing and on accelerators its value cannot be checked, and the result is a row of NaN.

    Parameters
    ----------
    max_len
        Number of positions.
    dim
        Width of the embedding.
    offset
        Rows before the first position: 2 in OPT, ``padding_idx + 1`` in the RoBERTa family.

    Section 3.1.
    """

    max_len: Count
    dim: Count
    offset: int = 0

    def __post_init__(self) -> None:
        check_count("offset", self.offset, least=0)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"table": ParamSpec((self.max_len + self.offset, self.dim), per_head=False)}

    def embedding(self, pos: Array, *, params: Arrays, xp: Namespace) -> Array:
        values, row = concrete_values(pos, xp), xp.reshape(pos, (-1,)) + self.offset
        if values is not None and values.size:
            low, high = values.min(), values.max()
            if low < 0 or high >= self.max_len:
                wrong = low if low < 0 else high
                raise OutsideTableError(
                    f"pos holds {wrong}, accepted: 0 .. max_len - 1 = {self.max_len - 1}"
                )
            vectors = xp.take(params["table"], row, axis=0)
        else:
            in_table = (row >= self.offset) & (row < self.max_len + self.offset)
            vectors = xp.take(params["table"], xp.where(in_table, row, 0), axis=0)
            vectors = xp.where(in_table[:, None], vectors, xp.nan)
        return xp.reshape(vectors, (*pos.shape, self.dim))
