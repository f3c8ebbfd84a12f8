"""CARoPE: RoPE whose frequencies each token chooses, by its hidden state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posenc.contract.checks import check_channels, check_count, check_finite
from posenc.contract.fields import Count, Positive
from posenc.contract.operations import constant_array, device
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec, Role
from posenc.schemes.rope import Layout, check_heads, rotate


@dataclass(frozen=True)
class CARoPE(PositionScheme, paper="Veisi, Fartoot, Amirzadeh 2025, arXiv 2507.23083"):
    """Rotation of channel pair ``k`` by ``phi_k(i) = sum_{t <= i} f(x_t)**k``, ``k`` from 1 to D/2.

    ``f(x_t) = 1 / (softplus(w_h . x_t + b_h) + 1)`` is between 0 and 1, one number per head, with
    the hidden state ``x_t (C,)``. Where all ``f(x_t)`` are ``base**(-2/D)`` it is RoPE with the
    frequencies ``base**(-2k/D)``: without RoPE's highest, 1. The sum follows positions, and starts
    again in each segment.

    Learned arrays: ``w (H, C)``, at first 0, and ``b (H,)``, at first such that it is that RoPE.
    The paper starts from RoPE but its formula has no ``b``, without which no ``w`` makes it RoPE.

    Sums are float32, or float64 if an argument is, and not reduced modulo a turn. With 64 channels,
    the fastest pair turns by 49,000 in 65536 tokens, and is off by 3e-3 in PyTorch and 1.1e-2 in
    JAX; in 4096 tokens by 2e-4 and 6e-4.

    Parameters
    ----------
    num_heads
        Number of heads ``H``. Attention needs as many heads of keys as of queries.
    head_dim
        Channels per head, ``D``, even.
    hidden_dim
        Width ``C`` of hidden states. Default: ``H D``.
    base
        Base of the RoPE that it starts as, above 1. None: there is no ``b``, as the formula is
        printed. With ``w = 0`` it is then RoPE with the frequencies ``(1 + ln 2)**-k``.
    init_std
        Standard deviation of the first values of ``w``.
    layout
        Which channels pair up, as in ``RoPE``.

    Section 2.
    """

    num_heads: Count
    head_dim: Count
    hidden_dim: int | None = None
    base: Positive | None = 10_000.0
    init_std: float = 0.0
    layout: Layout = "half"

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.base is not None and self.base <= 1:
            raise ValueError(f"base must be above 1, got {self.base}")
        if check_finite("init_std", self.init_std) < 0:
            raise ValueError(f"init_std must be 0 or more, got {self.init_std}")
        default = self.num_heads * self.head_dim
        width = default if self.hidden_dim is None else check_count("hidden_dim", self.hidden_dim)
        object.__setattr__(self, "hidden_dim", width)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        assert self.hidden_dim is not None
        shape, std = (self.num_heads, self.hidden_dim), self.init_std
        specs = {"w": ParamSpec(shape, lambda rng, shape: std * rng.standard_normal(shape))}
        if self.base is not None:
            softplus = self.base ** (2 / self.head_dim) - 1
            b = softplus + math.log(-math.expm1(-softplus))
            specs["b"] = ParamSpec.of_values((b,) * self.num_heads)
        return specs

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"phi": FeatureSpec(self._frequencies, of="key", cumulative=True)}

    def _frequencies(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        """``f(x_t)**k``, ``(B, H, L, D/2)``, of hidden states ``x (B, L, C)``."""
        z = xp.matmul(x, xp.matrix_transpose(params["w"]))
        z = xp.matrix_transpose(z if self.base is None else z + params["b"])
        log_f = -xp.log1p(xp.logaddexp(xp.zeros_like(z), z))
        powers = tuple(range(1, self.head_dim // 2 + 1))
        k = constant_array(powers, dtype=z.dtype, device=device(z), xp=xp)
        return xp.exp(log_f[..., None] * k)

    def transform(self, x: Array, pos: Array, *, role: Role, params: Any, xp: Namespace) -> Array:
        check_channels("x", x, self.head_dim)
        phi = params.of(role)["phi"]
        check_heads(x, phi.shape[1], type(self).__name__)
        return rotate(x, xp.sin(phi), xp.cos(phi), layout=self.layout, xp=xp)
