"""transformers: tables of positions that are added to embeddings, by classes of its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.bart import modeling_bart
from transformers.models.m2m_100 import modeling_m2m_100
from transformers.models.marian import modeling_marian
from transformers.models.musicgen import modeling_musicgen
from transformers.models.opt import modeling_opt
from transformers.models.whisper import modeling_whisper
from transformers.models.xlm import modeling_xlm

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc.audit.adapters import row_of
from posenc_torch.audit.runs import candidate, lacking

NAME = "transformers"
ROWS = 256  # of a table that is filled number by number
_FAIRSEQ = "sinusoidal:layout=tensor2tensor"
# Half of their functions have no types.
bart: Any = modeling_bart
m2m: Any = modeling_m2m_100
marian: Any = modeling_marian
musicgen: Any = modeling_musicgen
opt: Any = modeling_opt
whisper: Any = modeling_whisper
xlm: Any = modeling_xlm
Table = Callable[[int, int], Tensor]


def candidates() -> Iterator[Candidate]:
    """Every table."""
    tables: dict[str, tuple[str, Table, int | None]] = {
        "whisper: sinusoids(L, D)": (_FAIRSEQ, whisper.sinusoids, None),
        "m2m_100: M2M100SinusoidalPositionalEmbedding.get_embedding(L, D)": (
            _FAIRSEQ, m2m.M2M100SinusoidalPositionalEmbedding.get_embedding, None,
        ),
        "musicgen: get_embedding(L, D), its halves swapped": (_FAIRSEQ, _musicgen, None),
        "marian: MarianSinusoidalPositionalEmbedding(L, D).create_weight()": (
            "sinusoidal:layout=concatenated",
            lambda n, d: marian.MarianSinusoidalPositionalEmbedding(n, d).create_weight(), ROWS,
        ),
        "xlm: create_sinusoidal_embeddings(L, D, out)": ("sinusoidal", _xlm, ROWS),
    }  # fmt: skip
    for subject, (label, table, rows) in tables.items():
        yield candidate(
            NAME, subject, label, "embedding", partial(_rows, table, rows), differentiable=False
        )
    for name, kind in (
        ("opt", opt.OPTLearnedPositionalEmbedding), ("bart", bart.BartLearnedPositionalEmbedding),
    ):  # fmt: skip
        yield candidate(
            NAME, f"{name}: {kind.__name__}(L, D)(..., position_ids=pos)",
            "learned:max_len=512,offset=2", "embedding", partial(_learned, kind),
        )  # fmt: skip
    yield lacking(NAME, "detr: DetrSinePositionEmbedding", "posenc has no sinusoids of two axes")
    yield lacking(
        NAME, "swin, beit: relative_position_bias_table",
        "posenc has no table of distances on two axes; relative_table has one axis",
    )  # fmt: skip


def _rows(table: Table, rows: int | None, sizes: Sizes) -> Callable[[Tensor], Tensor]:
    made = table(rows or sizes.max_len, sizes.num_heads * sizes.head_dim)

    def f(pos: Tensor) -> Tensor:
        if int(pos.max()) >= len(made):
            raise CannotExpressError(f"its table is filled number by number; here it has {rows}")
        return made[pos]

    return f


def _musicgen(rows: int, width: int) -> Tensor:
    """Cosines come first in it."""
    kind = musicgen.MusicgenSinusoidalPositionalEmbedding
    found: Tensor = kind.get_embedding(rows, width)
    return found.roll(width // 2, dims=-1)


def _xlm(rows: int, width: int) -> Tensor:
    out = torch.empty(rows, width)
    found = xlm.create_sinusoidal_embeddings(rows, width, out)
    return out if found is None else found


def _learned(kind: Any, sizes: Sizes) -> Callable[..., Tensor]:
    layer = kind(1, 1)
    del layer._parameters["weight"]  # it is no leaf of the audit's gradient

    def f(pos: Tensor, table: Tensor) -> Tensor:
        layer.__dict__["weight"] = table
        if kind is opt.OPTLearnedPositionalEmbedding:
            found: Tensor = layer(torch.ones_like(pos), position_ids=pos)
            return found
        row = torch.as_tensor(row_of(pos, in_order=False))  # BART adds an axis for the batch
        one: Tensor = layer(row, position_ids=row)[0]
        return one

    return f
