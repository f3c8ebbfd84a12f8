"""KERPLE: a penalty that grows with the logarithm, or with a power, of distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from posenc.contract.fields import Count
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, Initializer, Namespace, ParamSpec

_LEAST, _LARGEST_POWER = 0.01, 2.0  # the authors' code


@dataclass(frozen=True)
class Kerple(PositionScheme, relative=True, paper="Chi et al. 2022, arXiv 2205.09921"):
    """A learned penalty: ``-p ln(1 + a |i - j|)``, or ``-a |i - j|**p``.

    Both forms are conditionally positive definite kernels.

    Learned arrays: ``p (H,)``, which starts uniform in [0.01, 2), and ``a (H,)``, uniform in
    [0.01, 1). As in the authors' code, a value below 0.01 counts as 0.01, and with
    ``kind="power"`` a ``p`` above 2 as 2. It has no gradient there; the authors' code, which
    changes the value itself, lets it return.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    kind
        ``"log"``: ``-p ln(1 + a |i - j|)``, which the paper found better. ``"power"``:
        ``-a |i - j|**p``; with ``p = 1`` it is ALiBi.

    Equation 8 is the logarithmic form.
    """

    num_heads: Count
    kind: Literal["log", "power"] = "log"

    def param_specs(self) -> Mapping[str, ParamSpec]:
        heads = (self.num_heads,)
        return {"p": ParamSpec(heads, _uniform_to(2)), "a": ParamSpec(heads, _uniform_to(1))}

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        p, a = (xp.clip(params[name], _LEAST) for name in ("p", "a"))
        distance = xp.astype(xp.abs(q - k), a.dtype)
        if self.kind == "log":
            return -p * xp.log1p(a * distance)
        return -a * distance ** xp.clip(p, max=_LARGEST_POWER)


def _uniform_to(high: float) -> Initializer:
    return lambda rng, shape: rng.uniform(_LEAST, high, shape)
