"""torchtune: the rotations of its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RotaryPositionalEmbeddings

from posenc.audit import Candidate, Sizes
from posenc_torch.audit import runs

_candidate = partial(runs.candidate, "torchtune", kind="rotation", dtypes=runs.HALF)


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
    ):  # fmt: skip
        yield _candidate(f"{subject}(x, input_pos=pos)", label, make=partial(_at_pos, kind))
    yield _candidate(
        "RotaryPositionalEmbeddings(D, L)(x)", f"rope:{inner}",
        make=partial(_prefill, RotaryPositionalEmbeddings),
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
