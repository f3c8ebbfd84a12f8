"""tokamax: the window of its attention. It has no positions of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np
import tokamax
from absl import flags
from jax import Array

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc_jax.audit import runs

WINDOW = 33


def candidates(grid: str) -> Iterator[Candidate]:
    """The window, by each implementation that runs on a CPU."""
    if not flags.FLAGS.is_parsed():  # it would read the options of this command as its own
        flags.FLAGS.mark_as_parsed()
    for name in ("xla", "xla_chunked"):
        yield runs.candidate(
            "tokamax", f"dot_product_attention(local_window_size=({WINDOW - 1}, 0))",
            f"nope@{WINDOW}", "attention", partial(_attention, name), path=name,
            dtypes=("float32", "bfloat16"),
        )  # fmt: skip


def _attention(name: str, sizes: Sizes) -> Callable[..., Array]:
    def f(
        q: Array, k: Array, v: Array,
        causal: bool, q_pos: Array, k_pos: Array, window: int,
    ) -> Array:  # fmt: skip
        at = np.asarray(k_pos)
        if not np.array_equal(np.asarray(q_pos), at) or np.any(np.diff(at) != 1):
            raise CannotExpressError("it takes no positions; queries count from the first key")
        swapped = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
        found = tokamax.dot_product_attention(
            *swapped, is_causal=causal, implementation=name,
            local_window_size=(window - 1, 0 if causal else window - 1),
        )  # fmt: skip
        return jnp.swapaxes(found, 1, 2)

    return f
