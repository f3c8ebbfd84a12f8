"""MLX: its rotation, ALiBi and sinusoids, on NumPy arrays that are copied to its own and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from posenc.audit import adapters
from posenc.audit.adapters import square_of
from posenc.audit.candidate import Candidate, CannotExpressError, Sizes
from posenc.testing.framework import Host

_candidate = partial(
    adapters.candidate, "mlx", framework="numpy", differentiable=False,
    dtypes=("float32", "float16"),
)  # fmt: skip
_LABELS: dict[str, dict[str, Any]] = {
    "rope": {},
    "rope:layout=interleaved": {"traditional": True},
    "rope:rotary_dim=32": {"dims": 32},
    "rope:layout=interleaved,rotary_dim=32": {"dims": 32, "traditional": True},
    "rope:base=500000": {"base": 500_000.0},
    "rope_pi:factor=4": {"scale": 0.25},
}


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate."""
    for label, options in _LABELS.items():
        said = "".join(f", {name}={value}" for name, value in options.items() if name != "dims")
        dims = options.get("dims", "D")
        yield _candidate(
            f"nn.RoPE({dims}{said})(x, offset=n)", label, "rotation", partial(_rotation, options)
        )
        yield _candidate(
            f"nn.RoPE({dims}{said})(x, offset=array)", label, "rotation",
            partial(_one_token_each, options), path="cached, an offset per row",
        )  # fmt: skip
    yield _candidate("nn.ALiBi()(scores, offset=K - Q)", "alibi", "bias", _alibi)
    yield _candidate(
        "nn.SinusoidalPositionalEncoding(C, scale=1.0)(pos)", "sinusoidal:layout=tensor2tensor",
        "embedding", _sinusoidal, dtypes=("float32",),
    )  # fmt: skip


def _rotation(options: dict[str, Any], sizes: Sizes) -> Callable[..., Host]:
    return from_offset(nn.RoPE(**{"dims": sizes.head_dim, **options}))


def from_offset(rope: Any) -> Callable[..., Host]:
    """``f(x, pos)`` of a module that takes one run of positions, from ``offset`` on."""

    def f(x: Host, pos: Host) -> Host:
        if np.any(pos != pos[0]) or np.any(np.diff(pos[0]) != 1):
            raise CannotExpressError("its positions are one run, which starts at offset")
        return np.array(rope(mx.array(x), offset=int(pos[0, 0])))

    return f


def _one_token_each(options: dict[str, Any], sizes: Sizes) -> Callable[..., Host]:
    return one_token_each(nn.RoPE(**{"dims": sizes.head_dim, **options}))


def one_token_each(rope: Any) -> Callable[..., Host]:
    """Every row of a batch at its own offset, in steps of one token."""

    def f(x: Host, pos: Host) -> Host:
        steps = [
            np.array(rope(mx.array(x[:, :, i : i + 1]), offset=mx.array(pos[:, i])))
            for i in range(x.shape[2])
        ]
        return np.concatenate(steps, axis=2)

    return f


def _alibi(sizes: Sizes) -> Callable[..., Host]:
    def f(num_heads: int, q_pos: Host, k_pos: Host) -> Host:
        queries, keys = square_of(q_pos, k_pos)
        scores = mx.zeros((1, num_heads, queries, keys))
        found: Host = np.array(nn.ALiBi()(scores, offset=keys - queries))[0]
        return found

    return f


def _sinusoidal(sizes: Sizes) -> Callable[..., Host]:
    layer = nn.SinusoidalPositionalEncoding(sizes.num_heads * sizes.head_dim, scale=1.0)
    return lambda pos: np.array(layer(mx.array(pos)))
