"""Mixed RoPE: each channel pair turns by a learned mixture of the coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.angles.learned import sincos_of_sum
from posenc.contract.checks import check_channels
from posenc.contract.fields import Count, Positive
from posenc.contract.protocol import Array, Arrays, Namespace, ParamSpec, PositionScheme, Role
from posenc.schemes.axial_rope import check_pairs
from posenc.schemes.rope import Layout, rotate


@dataclass(frozen=True)
class MixedRoPE(PositionScheme, paper="Heo et al. 2024, arXiv 2403.13298"):
    """RoPE by learned frequencies: pair ``k`` of head ``h`` turns by ``sum_a place[a] f[h, k, a]``.

    ``frequencies (H, D/2, A)`` are learned. At first they are those of ``AxialRoPE`` with ``A``
    axes that are turned at random for each head: with ``n = D/2A``, pair ``a n + k`` has the
    frequency ``base**(-k/n)`` along the head's axis ``a``. Text, with the same coordinate ``p`` on
    each axis, turns by ``p`` times the sum of a pair's frequencies.

    A learned frequency counts as exact. For frequencies below ``2**11``, sines and cosines are
    within 1.5e-7 in float32 at coordinates up to ``2**24``, and up to ``2**30`` within 1.4e-7 more
    per axis. In float64 they are within 4e-16.

    Tokens without a place, such as a class token, are not rotated in the authors' models; their
    place is 0 on each axis.

    Parameters
    ----------
    num_heads
        Number of query heads, ``H``. As many keys: heads may not share keys.
    head_dim
        Channels per head, ``D``, a multiple of ``2A``.
    axes
        Number of axes, ``A``.
    base
        Base of the first frequencies.
    layout
        Which channels pair up: ``"half"``, ``(k, k + D/2)``; ``"interleaved"``, ``(2k, 2k + 1)``
        (rope-vit).

    Section 3.2.
    """

    num_heads: Count
    head_dim: Count
    axes: Count = 2
    base: Positive = 10.0
    layout: Layout = "half"

    def __post_init__(self) -> None:
        check_pairs(self.head_dim, self.axes)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        shape = (self.num_heads, self.head_dim // 2, self.axes)
        return {"frequencies": ParamSpec(shape, self._init)}

    def _init(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        heads, pairs, axes = shape
        each = pairs // axes
        sizes = self.base ** (-np.arange(each) / each)
        frames = np.stack([_random_axes(rng, axes) for _ in range(heads)])
        # (H, A, n, A): along axis a of the head, n sizes.
        return np.reshape(frames[:, :, None, :] * sizes[:, None], shape)

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        tables = self.tables(x, pos, params=params, xp=xp)
        return rotate(x, tables["sin"], tables["cos"], layout=self.layout, xp=xp)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        frequencies = xp.astype(params["frequencies"][:], dtype)  # (H, 1, D/2, A)
        places = pos[..., None] if self.axes == 1 else pos
        terms = [(places[..., a, None], frequencies[..., a]) for a in range(self.axes)]
        sin, cos = sincos_of_sum(terms, dtype=dtype, xp=xp)
        return {"sin": sin, "cos": cos}


def _random_axes(rng: np.random.Generator, axes: int) -> np.ndarray[Any, Any]:
    """A random rotation ``(A, A)``: its rows are orthogonal directions, each equally probable."""
    rows, triangle = np.linalg.qr(rng.standard_normal((axes, axes)))
    rows = rows * np.sign(np.diagonal(triangle))
    if np.linalg.det(rows) < 0:
        rows[-1] *= -1
    return np.asarray(rows)
