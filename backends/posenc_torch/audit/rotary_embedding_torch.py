"""rotary-embedding-torch: rotations of whole sequences, at an offset, and at any positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from torch import Tensor

from posenc.audit import Candidate, Sizes
from posenc_torch.audit import runs

_candidate = partial(runs.candidate, "rotary-embedding-torch", kind="rotation")
_INNER = "layout=interleaved"
_SCALED: dict[str, dict[str, Any]] = {
    f"rope:{_INNER}": {},
    f"rope:{_INNER},base=500000": {"theta": 500_000},
    f"rope:{_INNER},rotary_dim=32": {"dim": 32},
    f"rope_pi:{_INNER},factor=4": {"interpolate_factor": 4.0},
    f"rope_ntk:{_INNER},factor=4": {"theta_rescale_factor": 4.0},
}


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate."""
    for label, options in _SCALED.items():
        said = "".join(f", {name}={value}" for name, value in options.items() if name != "dim")
        made = f"RotaryEmbedding(D{said})"
        yield _candidate(
            f"{made}.rotate_queries_or_keys(x, offset=n)", label, path="cached",
            make=partial(_decoding, options), dtypes=runs.HALF,
        )  # fmt: skip
    yield _candidate(
        "RotaryEmbedding(D).rotate_queries_or_keys(x)", f"rope:{_INNER}", make=_prefill,
        dtypes=runs.HALF,
    )  # fmt: skip
    yield _candidate(
        "apply_rotary_emb(RotaryEmbedding(D)(pos), x)", f"rope:{_INNER}", make=_at_positions,
        dtypes=runs.HALF,
    )  # fmt: skip
    yield _candidate("RotaryEmbedding(D)", "rope", make=_half)


def _rotary(options: dict[str, Any], sizes: Sizes) -> RotaryEmbedding:
    return RotaryEmbedding(**{"dim": sizes.head_dim, **options})


def _prefill(sizes: Sizes) -> Callable[..., Tensor]:
    return runs.in_a_prefill(_rotary({}, sizes).rotate_queries_or_keys)


def _decoding(options: dict[str, Any], sizes: Sizes) -> Callable[..., Tensor]:
    rotary = _rotary(options, sizes)
    return runs.in_decoding(lambda x, n: rotary.rotate_queries_or_keys(x, offset=n))


def _at_positions(sizes: Sizes) -> Callable[..., Tensor]:
    rotary = _rotary({}, sizes)

    def f(x: Tensor, pos: Tensor) -> Tensor:
        found: Tensor = apply_rotary_emb(rotary(pos.to(torch.float32))[:, None], x)
        return found

    return f


def _half(sizes: Sizes) -> Callable[..., Tensor]:
    raise runs.CannotExpressError("it pairs adjacent channels, and has no option for halves")
