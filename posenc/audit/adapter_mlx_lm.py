"""mlx-lm: the rotations that it makes of a configuration's RoPE dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import initialize_rope

from posenc.audit import adapters
from posenc.audit.adapter_mlx import from_offset
from posenc.audit.adapters import scheme_of
from posenc.audit.candidate import Candidate, CannotExpressError, Sizes
from posenc.testing.framework import Host

_candidate = partial(
    adapters.candidate, "mlx-lm", kind="rotation", framework="numpy", differentiable=False,
    dtypes=("float32", "float16"),
)  # fmt: skip
_YARN = "rope_yarn:factor=4,train_len=4096"
LABELS = (
    "rope",
    "rope_pi:factor=4",
    "rope_dynamic:factor=4,train_len=4096",
    _YARN,
    f"{_YARN},attention_factor=1",
    f"{_YARN},truncate=False",
    "rope_longrope:train_len=4096",
    "rope_llama3",
    "p_rope:p=0.25",
)


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate: a whole prompt, and a token after the other."""
    for label in LABELS:
        for path, ask in (("eager", from_offset), ("cached, token by token", _token_by_token)):
            yield _candidate(
                "initialize_rope(D, base, False, rope_parameters)(x, offset=n)", label,
                make=partial(_rotation, label, ask), path=path,
            )  # fmt: skip


def _rotation(
    label: str, ask: Callable[[Any], Callable[..., Host]], sizes: Sizes
) -> Callable[..., Host]:
    parameters = dict(scheme_of(label, sizes).to_hf())  # type: ignore[attr-defined]
    longest = sizes.max_len
    if parameters["rope_type"] == "dynamic":
        longest = parameters.pop("original_max_position_embeddings")
    base = parameters["rope_theta"]
    return ask(initialize_rope(sizes.head_dim, base, False, parameters, longest))


def _token_by_token(rope: Any) -> Callable[..., Host]:
    """As a decoder with a cache does."""

    def f(x: Host, pos: Host) -> Host:
        if np.any(pos != pos[0]):
            raise CannotExpressError("it has one offset for all rows")
        tokens = [
            np.array(rope(mx.array(x[:, :, i : i + 1]), offset=int(at)))
            for i, at in enumerate(pos[0])
        ]
        return np.concatenate(tokens, axis=2)

    return f
