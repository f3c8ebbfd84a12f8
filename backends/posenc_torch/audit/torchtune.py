"""torchtune: the rotations of its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.phi3 import Phi3RotaryPositionalEmbeddings
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RotaryPositionalEmbeddings, VisionRotaryPositionalEmbeddings

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc_torch.audit import runs

_candidate = partial(runs.candidate, "torchtune", kind="rotation", dtypes=runs.HALF)
_PATCHES = 160  # of a tile's side


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate."""
    inner = "layout=interleaved"
    for subject, label, kind in (
        ("RotaryPositionalEmbeddings(D, L)", f"rope:{inner}", RotaryPositionalEmbeddings),
        ("Llama3ScaledRoPE(D, L)", f"rope_llama3:{inner}", Llama3ScaledRoPE),
        (
            "Qwen2RotaryPositionalEmbeddings(D, L)", "rope:base=1000000",
            Qwen2RotaryPositionalEmbeddings,
        ),
        ("Phi3RotaryPositionalEmbeddings(D, L)", "rope", Phi3RotaryPositionalEmbeddings),
    ):  # fmt: skip
        yield _candidate(f"{subject}(x, input_pos=pos)", label, make=partial(_at_pos, kind))
    yield _candidate(
        "RotaryPositionalEmbeddings(D, L)(x)", f"rope:{inner}",
        make=partial(_prefill, RotaryPositionalEmbeddings),
    )  # fmt: skip
    yield _candidate(
        "VisionRotaryPositionalEmbeddings(...)(x), rows of its table", "axial_rope:base=10000",
        make=_vision,
    )  # fmt: skip
    yield runs.lacking(
        "torchtune", "TiledTokenPositionalEmbedding(...)",
        "posenc has no tables of tiles and their patches",
    )  # fmt: skip


def _at_pos(kind: Any, sizes: Sizes) -> Callable[..., Tensor]:
    rotary = kind(sizes.head_dim, sizes.max_len)

    def f(x: Tensor, pos: Tensor) -> Tensor:
        found: Tensor = rotary(x.transpose(1, 2), input_pos=pos)
        return found.transpose(1, 2)

    return f


def _prefill(kind: Any, sizes: Sizes) -> Callable[..., Tensor]:
    rotary = kind(sizes.head_dim, sizes.max_len)
    return runs.in_a_prefill(lambda x: rotary(x.transpose(1, 2)).transpose(1, 2))


def _vision(sizes: Sizes) -> Callable[..., Tensor]:
    """The column is the first axis, and the first patch is at (1, 1)."""
    rotary = VisionRotaryPositionalEmbeddings(1, _PATCHES, 1, sizes.head_dim // 2)
    table = rotary.cache

    def f(x: Tensor, pos: Tensor) -> Tensor:
        at = pos - 1
        if bool((at < 0).any()) or bool((at >= _PATCHES).any()):
            raise CannotExpressError(f"its places are 1 to {_PATCHES} on each axis, here")
        turned = []
        for row, index in zip(x.transpose(1, 2), at[..., 1] * _PATCHES + at[..., 0], strict=True):
            rotary.cache = table[index]
            turned.append(rotary(row[None])[0])
        return torch.stack(turned).transpose(1, 2)

    return f
