"""FoPE: RoPE whose sines and cosines are mixtures of all frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from posenc.angles.fixed import Turns
from posenc.contract.checks import check_channels, check_count
from posenc.contract.fields import Count, Positive
from posenc.contract.operations import constant_array, device
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, Namespace, ParamSpec, Role
from posenc.schemes.rope import check_heads, rotate
from posenc.schemes.scalings import ClipPeriod

_Matrices = tuple[tuple[float, ...], ...]  # row j of all heads, (H, m) in one tuple


@dataclass(frozen=True)
class FoPE(
    PositionScheme,
    mixes_heads="its matrices are drawn for all heads at once",
    paper="Hua et al. 2024, arXiv 2412.17739",
):
    """RoPE with ``sin'_k(p) = sum_j sin(p f_j) sin_coef[h, j, k]``, and cosines likewise.

    Only frequencies of RoPE with a whole turn in training count, ``f_j >= 2 pi / train_len``:
    ``n`` of them. Each head ``h`` mixes them for the channel pairs ``(k, k + D/2)``, ``k < m``,
    ``m = min(n, D/4)``. Pair ``(a, b)`` becomes ``(a cos' - b sin', a sin' + b cos')``, which is no
    rotation: scores depend on both positions, not on the difference alone.

    The matrices ``sin_coef`` and ``cos_coef (H, n, m)`` are an identity plus normal values. Its
    ones are in rows ``k ceil(n / m)``. The normal values have the standard deviation
    ``gain sqrt(2 / (n m + H m))``. All are drawn by ``numpy.random.default_rng(seed)``, first
    ``sin_coef``, and stay fixed as in the paper. With ``learned`` they are learned arrays that
    start from these values. Layers with the same ``seed`` have the same matrices.

    Attention needs as many heads of keys as of queries. Fixed matrices are constants of a compiled
    program: on a CPU, PyTorch compiles attention with 8 heads of 64 channels in 23 s, and with RoPE
    in 8 s.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    head_dim
        Channels per head, ``D``, even and at least 4.
    train_len
        The length that the model is trained at, at least 7: no frequency is above 1.
    base
        Base of the frequencies.
    gain
        Size of the random part: the authors' 0.3 for 60 million weights, 0.4 for 180 million, 0.6
        for 1.2 billion.
    seed
        Seed of the matrices, from 0.
    learned
        Whether the matrices are learned.
    rest
        What happens to the pairs from ``m`` on. ``"kept"``: they stay, as in the paper.
        ``"released"``: sine and cosine are 1, as in the authors' code. Then they are turned by 45
        degrees, which no score shows, and their part of each score is doubled.

    Section 4.
    """

    num_heads: Count
    head_dim: Count
    train_len: Count
    base: Positive = 10_000.0
    gain: Positive = 0.3
    seed: int = 0
    learned: bool = False
    rest: Literal["kept", "released"] = "kept"
    _turns: Turns = field(init=False, repr=False, compare=False)
    _shape: tuple[int, int, int] = field(init=False, repr=False, compare=False)
    _matrices: Mapping[str, _Matrices] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.head_dim < 4:
            raise ValueError(f"head_dim must be even and at least 4, got {self.head_dim}")
        check_count("seed", self.seed, least=0)
        clipped = ClipPeriod(self.train_len).frequencies(self.base, self.head_dim)
        kept = [f for f in clipped if f]
        if not kept:
            raise ValueError(
                f"train_len must be at least 7, got {self.train_len}: no frequency has a whole turn"
            )
        shape = self.num_heads, len(kept), min(len(kept), self.head_dim // 4)
        object.__setattr__(self, "_turns", Turns(kept))
        object.__setattr__(self, "_shape", shape)
        drawn = self._draw()
        # Not arrays, because torch.export(strict=True) loses the numbers of a NumPy array.
        rows = {
            name: tuple(tuple(coef[:, j].ravel().tolist()) for j in range(len(kept)))
            for name, coef in drawn.items()
        }
        object.__setattr__(self, "_matrices", rows)

    def _draw(self) -> dict[str, np.ndarray[Any, Any]]:
        """``sin_coef`` and ``cos_coef``, ``(H, n, m)``."""
        heads, n, m = self._shape
        rng, identity = np.random.default_rng(self.seed), np.zeros((n, m))
        step = math.ceil(n / m)
        for k in range(math.ceil(n / step)):
            identity[k * step, k] = 1
        deviation = self.gain * math.sqrt(2 / (n * m + heads * m))
        names = ("sin_coef", "cos_coef")
        return {name: identity + deviation * rng.standard_normal(self._shape) for name in names}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        if not self.learned:
            return {}

        def spec(name: str) -> ParamSpec:
            return ParamSpec(self._shape, lambda rng, shape: self._draw()[name])

        return {name: spec(name) for name in self._matrices}

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        check_heads(x, self.num_heads, type(self).__name__)
        tables = self.tables(x, pos, params=params, xp=xp)
        return rotate(x, tables["sin"], tables["cos"], layout="half", xp=xp)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        sin, cos = self._turns.sincos(pos, dtype=dtype, xp=xp)
        mixed = {
            name: self._mixed(waves, f"{name}_coef", params, xp)
            for name, waves in (("sin", sin), ("cos", cos))
        }
        one = xp.ones_like(mixed["cos"][..., :1])
        values = {"sin": one if self.rest == "released" else one - one, "cos": one}

        def padded(name: str) -> Array:
            shape = (*one.shape[:-1], self.head_dim // 2 - self._shape[2])
            return xp.concat([mixed[name], xp.broadcast_to(values[name], shape)], axis=-1)

        return {name: padded(name) for name in mixed}

    def _mixed(self, waves: Array, name: str, params: Arrays, xp: Namespace) -> Array:
        """``waves (..., L, n)`` times the matrices: ``(..., H, L, m)``.

        A sum, because a GPU or TPU may multiply matrices with few digits.
        """
        heads, n, m = self._shape
        if self.learned:
            coef = xp.astype(params[name][:], waves.dtype)  # (H, 1, n, m)
            return sum(waves[..., j, None] * coef[..., j, :] for j in range(n))
        own = {"dtype": waves.dtype, "device": device(waves), "xp": xp}
        rows = (constant_array(row, **own) for row in self._matrices[name])
        return sum(
            waves[..., j, None] * xp.reshape(row, (heads, 1, m)) for j, row in enumerate(rows)
        )
