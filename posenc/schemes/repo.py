"""RePo: RoPE at positions that each token chooses, by its hidden state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posenc.contract.checks import check_channels, check_count
from posenc.contract.fields import Count, Positive
from posenc.contract.operations import constant_array, device
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec, Role
from posenc.schemes.activations import sigmoid
from posenc.schemes.rope import Layout, RoPE, check_heads, rotate


@dataclass(frozen=True)
class RePo(PositionScheme, paper="Li, Zhao, Sproat 2025, arXiv 2512.14391"):
    """Rotation of channel pairs by ``z_i base**(-2k/D)`` at a learned real position ``z_i``.

    ``r_i = swish(gate_map x_i) * (content_map x_i)``, and ``z_i = final_map r_i``, one number per
    head, with the hidden state ``x_i (C,)``. Positions do not add up over tokens, and nothing
    orders them. A token's own place in the text enters only by the causal mask.

    Learned arrays: ``gate_map`` and ``content_map (mid, C)``, which all heads share, and
    ``final_map (H, mid)``. They start normal with standard deviation ``1 / sqrt(C)``; the authors'
    0.02 is that of ``C = 2500``. So positions start near 0, and attention near that without
    positions.

    The authors leave the first layers to RoPE, 5 of 16: in labels, ``rope/repo`` for layers in
    turn. An angle is computed in float32, or in float64 if an argument is, and rounds by
    ``2**-23`` of itself. Attention needs as many heads of keys as of queries.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    head_dim
        Channels per head, ``D``, even.
    hidden_dim
        Width ``C`` of hidden states. Default: ``H D``.
    mid
        Width of ``r``. Default: ``C // 8``, at least 1.
    base
        Base of the frequencies; 500,000 in OLMo 2, which the authors train further.
    layout
        Which channels pair up, as in ``RoPE``.

    Section 3.2.
    """

    num_heads: Count
    head_dim: Count
    hidden_dim: int | None = None
    mid: int | None = None
    base: Positive = 10_000.0
    layout: Layout = "half"
    _frequencies: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        frequencies = RoPE(self.head_dim, self.base, self.layout).frequencies()
        default = self.num_heads * self.head_dim
        width = default if self.hidden_dim is None else check_count("hidden_dim", self.hidden_dim)
        mid = max(1, width // 8) if self.mid is None else check_count("mid", self.mid)
        for name, value in {"hidden_dim": width, "mid": mid, "_frequencies": frequencies}.items():
            object.__setattr__(self, name, value)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        assert self.hidden_dim is not None
        assert self.mid is not None
        shape = self.mid, self.hidden_dim
        return {
            "gate_map": ParamSpec(shape, self._init, per_head=False),
            "content_map": ParamSpec(shape, self._init, per_head=False),
            "final_map": ParamSpec((self.num_heads, self.mid), self._init),
        }

    def _init(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return rng.normal(0, 1 / math.sqrt(self.hidden_dim or 1), shape)

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {
            "query_z": FeatureSpec(self._positions, of="query"),
            "key_z": FeatureSpec(self._positions, of="key"),
        }

    def _positions(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        """``z (B, H, L)`` of hidden states ``x (B, L, C)``."""
        gate, content = (
            xp.matmul(x, xp.matrix_transpose(params[name])) for name in ("gate_map", "content_map")
        )
        swish = gate * sigmoid(gate, xp)
        z = xp.matmul(swish * content, xp.matrix_transpose(params["final_map"]))
        return xp.matrix_transpose(z)

    def transform(self, x: Array, pos: Array, *, role: Role, params: Any, xp: Namespace) -> Array:
        check_channels("x", x, self.head_dim)
        z = params.of(role)[f"{role}_z"]
        check_heads(x, z.shape[-2], type(self).__name__)
        f = constant_array(self._frequencies, dtype=z.dtype, device=device(z), xp=xp)
        angle = z[..., None] * f
        return rotate(x, xp.sin(angle), xp.cos(angle), layout=self.layout, xp=xp)
