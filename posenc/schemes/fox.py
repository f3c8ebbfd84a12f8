"""FoX, the Forgetting Transformer: each token forgets part of all that came before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from posenc.contract.checks import check_positive
from posenc.contract.fields import Finite
from posenc.contract.protocol import Array, Arrays, Namespace, ParamSpec
from posenc.schemes.activations import log_sigmoid
from posenc.schemes.gates import SummedGates, logits


@dataclass(frozen=True)
class FoX(SummedGates, paper="Lin, Nikishin, He, Courville 2025, arXiv 2503.02130"):
    """``bias = log f_{j+1} + ... + log f_i``, with forget gates ``f_t = sigmoid(w_h . x_t + b_h)``.

    Hidden states ``x (B, L, C)`` of the attention layer are given as ``x=``. Learned arrays are
    ``w (H, C)``, from normal values of standard deviation 0.02, and ``b (H,)``. The sums count
    tokens of a segment in the order of positions; the positions themselves have no effect. Blocks
    of keys that a head has forgotten are skipped (``posenc.attn.negligible``).

    Parameters
    ----------
    num_heads
        Number of query heads ``H``.
    hidden_dim
        Width ``C`` of the hidden states.
    bias_init
        First value of ``b``. A head remembers about ``1 / ln(1 + exp(-b))`` tokens: 1.4 with the
        authors' 0, and 149 with 5, which x-transformers takes. It changes short trainings.
    fgate_type
        ``"full"``: as above. ``"bias_only"``: without ``w``, so all tokens have one learned gate
        per head. ``"fixed"``: that, with nothing learned.
    decay_time
        ``(T_min, T_max)``, for ``"bias_only"`` and ``"fixed"``: head ``h`` remembers ``T_h``
        tokens, from ``T_min`` in the first head to ``T_max`` in the last one, evenly in the
        logarithm. ``b_h = -ln(expm1(1 / T_h))`` replaces ``bias_init``. The fixed form is ALiBi
        with slopes ``1 / T_h``.

    Section 3.
    """

    bias_init: Finite = 0.0
    fgate_type: Literal["full", "bias_only", "fixed"] = "full"
    decay_time: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.decay_time is None:
            if self.fgate_type == "fixed":
                raise ValueError("fgate_type='fixed' needs decay_time=(T_min, T_max), got None")
        elif self.fgate_type == "full":
            raise ValueError(
                f"decay_time={self.decay_time} is for fgate_type='bias_only' or 'fixed', "
                "got 'full', whose gates start from bias_init"
            )
        else:
            object.__setattr__(self, "decay_time", _check_decay_time(self.decay_time))

    def param_specs(self) -> Mapping[str, ParamSpec]:
        if self.fgate_type == "fixed":
            return {}
        b = ParamSpec.of_values(self._first_b())
        return {"b": b} if self.fgate_type == "bias_only" else {**super().param_specs(), "b": b}

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return {"b": self._first_b()} if self.fgate_type == "fixed" else {}

    def log_gates(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        if self.fgate_type == "full":
            return log_sigmoid(logits(x, params, xp), xp)
        return log_sigmoid(xp.zeros_like(x[..., :1]) + params["b"], xp)

    def _first_b(self) -> tuple[float, ...]:
        """``b`` of each head: fixed, or its first value."""
        if self.decay_time is None:
            return (self.bias_init,) * self.num_heads
        low, high = map(math.log, self.decay_time)
        step = (high - low) / max(1, self.num_heads - 1)
        times = (math.exp(low + h * step) for h in range(self.num_heads))
        # -ln(expm1(1 / T)), for short times without overflow.
        return tuple(-1 / t - math.log(-math.expm1(-1 / t)) for t in times)


def _check_decay_time(given: Any) -> tuple[float, float]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"decay_time must be (T_min, T_max) in tokens, got {given!r}")
    low, high = (check_positive("decay_time", time) for time in given)
    if low > high:
        raise ValueError(f"decay_time must be (T_min, T_max) with T_min <= T_max, got {given!r}")
    return low, high
