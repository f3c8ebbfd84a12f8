"""RoPE with learned frequencies: each is multiplied by a learned factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.contract.operations import constant_array, device
from posenc.contract.protocol import Array, Arrays, Namespace, ParamSpec
from posenc.schemes.rope import RoPE


@dataclass(frozen=True)
class LearnedRoPE(RoPE, shared=True, paper="Karypis et al. 2026, arXiv 2607.10134"):
    """Rotation by ``pos * f_k * exp(log_scale[k])``, with ``f_k`` the frequencies of ``RoPE``.

    ``log_scale`` is ``(R/2,)`` and 0 at first. All heads and layers share it, as in the paper and
    in Mistral Large 4, which has it over YaRN. A frequency of 0 stays 0.

    Angles are as exact as RoPE's while ``log_scale`` is 0. A learned frequency has only the digits
    of its dtype, so an angle is off by up to ``2**-21 |pos f_k expm1(log_scale[k])|`` in float32
    (``2**-50`` in float64) besides: a frequency learned to be 1 % higher is off by 5e-4 rad at
    position 10**5 for ``f_k = 1``. The product of RoPE's frequency with ``pos`` stays exact.
    """

    def param_specs(self) -> Mapping[str, ParamSpec]:
        shape = (len(self.frequencies()),)
        return {"log_scale": ParamSpec(shape, lambda rng, shape: np.zeros(shape), per_head=False)}

    def sincos(
        self, pos: Array, params: Arrays, *, dtype: Any, xp: Namespace
    ) -> tuple[Array, Array]:
        sin, cos = super().sincos(pos, params, dtype=dtype, xp=xp)
        f = constant_array(self.frequencies(), dtype=dtype, device=device(pos), xp=xp)
        more = f * xp.expm1(xp.astype(params["log_scale"], dtype))
        angle = xp.astype(pos, dtype) * more
        sin_more, cos_more = xp.sin(angle), xp.cos(angle)
        return sin * cos_more + cos * sin_more, cos * cos_more - sin * sin_more
