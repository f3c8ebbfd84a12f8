"""x-transformers: rotations, ALiBi and T5's bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from x_transformers.x_transformers import (
    AlibiPositionalBias,
    RelativePositionBias,
    RotaryEmbedding,
    apply_rotary_pos_emb,
)

from posenc.audit import Candidate, Sizes
from posenc.audit.adapters import square_of
from posenc_torch.audit import runs

_NAME = "x-transformers"
_candidate = partial(runs.candidate, _NAME)
_INNER = "layout=interleaved"
_ROPE: dict[str, dict[str, Any]] = {
    f"rope:{_INNER}": {},
    f"rope:{_INNER},base=500000": {"base": 500_000},
    f"rope:{_INNER},rotary_dim=32": {"dim": 32},
    f"rope_pi:{_INNER},factor=4": {"interpolation_factor": 4.0},
    f"rope_ntk:{_INNER},factor=4": {"base_rescale_factor": 4.0},
}


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate; compiled ones in the full grid alone."""
    for label, options in _ROPE.items():
        said = ", ".join(f"{name}={value}" for name, value in options.items() if name != "dim")
        subject = f"apply_rotary_pos_emb(x, *RotaryEmbedding(D{', ' if said else ''}{said})(pos))"
        yield _candidate(
            subject, label, "rotation", partial(_rotary, options), dtypes=runs.HALF,
        )  # fmt: skip
    yield _candidate("apply_rotary_pos_emb(x, *RotaryEmbedding(D)(pos))", "rope", "rotation", _half)
    alibi = "AlibiPositionalBias(H).forward_custom_pos(q_pos, k_pos)"
    yield _candidate(alibi, "alibi", "bias", _alibi, differentiable=False)
    yield _candidate(
        "AlibiPositionalBias(H)(Q, K)", "alibi", "bias", _alibi_of_lengths, differentiable=False,
    )  # fmt: skip
    for causal in (False, True):
        label = f"t5:num_buckets=32,max_distance=128,causal={causal}"
        yield _candidate(
            f"RelativePositionBias(1, causal={causal})(Q, K)", label, "bias", partial(_t5, causal),
        )  # fmt: skip


def _rotary(options: dict[str, Any], sizes: Sizes) -> Callable[..., Tensor]:
    rotary = RotaryEmbedding(**{"dim": sizes.head_dim, **options})

    def f(x: Tensor, pos: Tensor) -> Tensor:
        found: Tensor = apply_rotary_pos_emb(x, *rotary(pos))
        return found

    return f


def _half(sizes: Sizes) -> Callable[..., Tensor]:
    raise runs.CannotExpressError("it pairs adjacent channels, and has no option for halves")


def _alibi(sizes: Sizes) -> Callable[..., Tensor]:
    bias = AlibiPositionalBias(sizes.num_heads)

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        found: Tensor = bias.forward_custom_pos(q_pos, k_pos)
        return found

    return f


def _alibi_of_lengths(sizes: Sizes) -> Callable[..., Tensor]:
    bias = AlibiPositionalBias(sizes.num_heads)

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        found: Tensor = bias(*square_of(q_pos, k_pos))
        return found

    return f


def _t5(causal: bool, sizes: Sizes) -> Callable[..., Tensor]:
    bias = RelativePositionBias(1.0, causal, 32, 128, sizes.num_heads)
    del bias._modules["relative_attention_bias"]  # its weight is no leaf of the audit's gradient

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor, table: Tensor) -> Tensor:
        bias.register_parameter("unused", torch.nn.Parameter(torch.zeros(())))  # tells the device
        read = partial(torch.nn.functional.embedding, weight=table.T)
        bias.__dict__["relative_attention_bias"] = read
        found: Tensor = bias(*square_of(q_pos, k_pos))
        return found

    return f
