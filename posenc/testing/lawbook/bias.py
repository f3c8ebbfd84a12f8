"""Laws of a bias: a pure function of one query position and one key position."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np

from posenc.testing.law import law, require, require_equal
from posenc.testing.subject import Subject
from posenc.testing.tolerances import SCALARS, assert_near

_TRIALS = 12


@law("scheme")
def bias_is_elementwise(subject: Subject) -> None:
    """The bias of a pair of positions is the same in a row and among all others, and alone."""
    rng = np.random.default_rng(0)
    for _ in range(_TRIALS):
        q, k = subject.places(rng), subject.places(rng)
        dense = subject.tile(q, k)
        if dense is None:
            return
        for head in {0, subject.heads - 1}:
            params = subject.of_head(head)

            def of(q: object, k: object, params: object = params) -> object:
                return subject.scheme.bias(q, k, params=params, xp=xp)  # type: ignore[arg-type]

            for i, j in {(0, 0), (q.size - 1, 0), (0, k.size - 1), (q.size - 1, k.size - 1)}:
                pair = f"head {head}, q {q[i]}, k {k[j]}"
                alone = of(np.asarray(q[i]), np.asarray(k[j]))
                assert_near(alone, dense[head, i, j], SCALARS, pair)
                row = np.broadcast_to(np.asarray(of(np.asarray(q[i]), k)), k.shape)
                require_equal(row, dense[head, i], f"row of {pair}")
            block = np.broadcast_to(np.asarray(of(q[:, None], k[None, :])), dense[head].shape)
            require_equal(block, dense[head], f"head {head} alone, q {q}, k {k}")


@law("scheme")
def tile_is_slice(subject: Subject) -> None:
    """The bias of some queries and some keys is that part of the whole, bit by bit."""
    rng = np.random.default_rng(1)
    for _ in range(_TRIALS):
        q, k = subject.places(rng), subject.places(rng)
        dense = subject.tile(q, k)
        if dense is None:
            return
        some, other = rng.permutation(q.size)[:2], slice(int(rng.integers(k.size)), None)
        part = subject.tile(q[some], k[other])
        require_equal(part, dense[:, some, other], f"q {q[some]}, k {k[other]}")


@law("scheme")
def bias_is_finite_or_hides(subject: Subject) -> None:
    """The bias at any pair of positions is finite, or -inf, which hides the key."""
    low, high = subject.reach
    ends = [low, low + 1, 0, 1, 2, 7, 8, high - 1, high]
    pos = np.asarray([p for p in ends if low <= p <= high])
    for dtype in ("float32", "float64"):
        places = (pos / 1024).astype(dtype) if subject.gated else pos
        dense = subject.tile(places, places, dtype)
        if dense is None:
            return
        require(dense.dtype == dtype, f"params of {dtype} give a bias of {dense.dtype}")
        require(np.all(np.isfinite(dense) | (dense == -np.inf)), f"NaN or inf at {places}")
