"""Log-position scaling: queries grow with the logarithm of their position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from posenc.contract.checks import check_count, check_flag, check_positive
from posenc.contract.protocol import Hook, PositionScheme
from posenc.contract.specs import Array, Arrays, Initializer, Namespace, ParamSpec, Role

Kind = Literal["llama4", "ministral3", "inkling", "mistral_large4", "ssmax", "rerope"]
_LEARNED: dict[str, dict[str, float]] = {
    "mistral_large4": {"a": 0.0, "b": 1.0},
    "ssmax": {"s": 0.43},
}
_WITH_BETA = ("llama4", "ministral3", "inkling")


@dataclass(frozen=True)
class LogScale(PositionScheme, paper="Nakanishi 2025, arXiv 2501.19399"):
    """Multiply the query at position ``p`` by a function of ``ln(p + 1)``; keys stay as they are.

    With more keys in a softmax, attention gets flatter. A query that sees ``n`` keys is therefore
    multiplied by a function of ``log n``.

    With ``L`` for ``train_len``:

    ==================  =========================================  =========================
    kind                factor                                     model or paper
    ==================  =========================================  =========================
    ``llama4``          ``1 + beta ln(1 + floor((p + 1) / L))``    Llama 4, in NoPE layers
    ``ministral3``      ``1 + beta ln(1 + floor(p / L))``          Ministral 3, Mistral 4
    ``inkling``         ``1 + beta ln(max(1, (p + 1) / L))``       Inkling
    ``mistral_large4``  ``a_h ln(p + 1) + b_h``, learned           Mistral Large 4
    ``ssmax``           ``s_h ln(p + 1)``, learned                 arXiv 2501.19399
    ``rerope``          ``max(1, ln(p + 1) / ln L)``               ReRoPE (Su 2023)
    ==================  =========================================  =========================

    ``p + 1`` keys are visible to a query under a causal mask, in its own document. Positions below
    0 count as 0. Factors are computed in float32 or better, whatever the dtype of queries.

    Parameters
    ----------
    kind
        Which function.
    train_len
        ``L``; needed by ``ministral3``, ``inkling`` and ``rerope``, and 8192 by default in
        ``llama4``. Learned kinds do not use it, and keep None.
    num_heads
        Number of heads of the learned arrays: ``a`` and ``b``, ``(H,)``, 0 and 1 at first, or
        ``s (H,)``, at first 0.43 as in the paper's figure 1 (with which value the paper begins to
        train is not verified). Other kinds do not use it, and keep None.
    beta
        Strength of ``llama4``, ``ministral3`` and ``inkling``; default 0.1.
    scales_bias
        Whether the factor multiplies the bias of all parts of a ``Sum`` too. Default: in
        ``inkling`` only. Learned kinds cannot.
    """

    kind: Kind = "llama4"
    train_len: int | None = None
    num_heads: int | None = None
    beta: float | None = None
    scales_bias: bool | None = None

    def __post_init__(self) -> None:
        if self.kind in _LEARNED:
            self._set(train_len=None)
            if self.num_heads is None:
                raise ValueError(f"num_heads: kind={self.kind!r} learns a number per head; give it")
            check_count("num_heads", self.num_heads)
        else:
            self._set(num_heads=None)
            if self.kind == "llama4" and self.train_len is None:
                self._set(train_len=8192)
            if self.train_len is None:
                raise ValueError(f"train_len: kind={self.kind!r} needs the length of training")
            check_count("train_len", self.train_len, least=2 if self.kind == "rerope" else 1)
        if self.kind in _WITH_BETA:
            self._set(beta=check_positive("beta", 0.1 if self.beta is None else self.beta))
        elif self.beta is not None:
            accepted = ", ".join(_WITH_BETA)
            raise ValueError(f"beta={self.beta}: kind={self.kind!r} has none; accepted: {accepted}")
        if self.scales_bias is None:
            self._set(scales_bias=self.kind == "inkling")
        if check_flag("scales_bias", self.scales_bias) and self.kind in _LEARNED:
            raise ValueError(
                f"scales_bias=True: the learned factor of kind={self.kind!r} may be 0 or negative, "
                "which a bias cannot be multiplied by"
            )
        if not self.scales_bias:
            self._leave_out(Hook.BIAS_FACTOR)

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        assert self.num_heads is not None or self.kind not in _LEARNED
        return {
            name: ParamSpec((self.num_heads or 0,), _constant(first))
            for name, first in _LEARNED.get(self.kind, {}).items()
        }

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        if role == "key":
            return x
        work = xp.float64 if x.dtype == xp.float64 else xp.float32
        factor = self._factor(pos[..., None], params, work, xp)
        return xp.astype(xp.astype(x, work) * factor, x.dtype)

    def bias_factor(self, q: Array, *, params: Arrays, xp: Namespace) -> Array:
        return self._factor(q, params, getattr(params, "dtype", xp.float32), xp)

    def _factor(self, pos: Array, params: Arrays, dtype: Any, xp: Namespace) -> Array:
        """The factor at each position, in the shape of ``pos``; per head for learned kinds."""
        pos = xp.maximum(pos, xp.zeros_like(pos))
        length = self.train_len or 1
        if self.kind in ("llama4", "ministral3"):
            periods = (pos + 1 if self.kind == "llama4" else pos) // length
            return 1 + (self.beta or 0.0) * xp.log1p(xp.astype(periods, dtype))
        log_keys = xp.log1p(xp.astype(pos, dtype))
        if self.kind == "ssmax":
            return params["s"] * log_keys
        if self.kind == "mistral_large4":
            return params["a"] * log_keys + params["b"]
        zero = xp.zeros_like(log_keys)
        if self.kind == "rerope":
            return xp.maximum(log_keys / math.log(length), zero + 1)
        keys = xp.astype(pos + 1, dtype)
        return 1 + (self.beta or 0.0) * xp.log(xp.maximum(keys / length, zero + 1))


def _constant(value: float) -> Initializer:
    return lambda rng, shape: np.full(shape, value)
