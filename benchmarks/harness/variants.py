"""Ways to compute attention that are timed: what is known of each, and posenc's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import posenc
from harness.run import Arrays, Function, Runner, named
from posenc.contract.protocol import PositionScheme
from posenc.testing import Host

DENSE = ("sdpa", "xla", "reference")  # implementations that hold the whole bias


@dataclass(frozen=True)
class Variant:
    """One way to compute attention.

    Attributes
    ----------
    name
        Begins with the scheme.
    ready
        From ``Inputs``, a function of arrays and what it gets beside tokens and params; does
        everything that a user does only once.
    role
        ``"ours"``: of this library. ``"baseline"``: what goals compare with. ``"peer"``: of another
        library. ``"trial"``: only for comparison with another trial.
    dense, compiles
        Whether it holds a number per pair, compiles on the first call.
    bytes_per_pair
        Memory per pair, if it is dense.
    learns
        Whether it has gradients of params. Then only a step is measured: the forward pass is the
        same as without them.
    exact
        Whether its results must be right; otherwise it is a yardstick of speed.
    lengths
        Sequence lengths at which it is measured; empty: all.
    """

    name: str
    ready: Callable[[Inputs], tuple[Function, Arrays]] = field(repr=False)
    role: str = "baseline"
    dense: bool = False
    bytes_per_pair: int = 20
    compiles: bool = False
    learns: bool = False
    exact: bool = True
    lengths: tuple[int, ...] = ()

    @property
    def scheme(self) -> str:
        """Its key in ``schemes``."""
        return self.name.split()[0]


class Inputs:
    """Normal q, k and v in a framework's layout, a gradient of the result, and params."""

    def __init__(
        self, runner: Runner, heads: int, length: int, dim: int, dtype: str, seed: int = 0
    ) -> None:
        self.runner, self.dtype, self.heads, self.length = runner, dtype, heads, length
        shape = 1, heads, length, dim
        q, k, v, self.d_out = (runner.tokens(4 * seed + n, shape, dtype) for n in range(4))
        self.tokens = {"q": q, "k": k, "v": v}
        self.schemes = schemes(heads)

    def params(self, scheme: str) -> dict[str, Any]:
        """Learned arrays by name."""
        first = first_params(scheme, self.schemes[scheme])
        return {name: self.runner.array(a) for name, a in named(first).items()}

    @cached_property
    def slopes(self) -> Any:
        """ALiBi's, in float32."""
        alibi: Any = self.schemes["alibi"]
        return self.runner.array(np.float32(alibi.head_slopes()))


def schemes(heads: int) -> dict[str, PositionScheme]:
    """Schemes that are measured; ``none`` is attention without positions."""
    return {
        "none": posenc.NoPE(),
        "alibi": posenc.ALiBi(heads),
        "slopes": posenc.ALiBi(heads, learned=True),
        "t5": posenc.T5Bias(heads, causal=True),
    }


def first_params(name: str, scheme: PositionScheme) -> dict[str, Host]:
    """Initial params; those of T5 are scaled to the size of trained ones."""
    larger = 25 if name == "t5" else 1
    return {n: np.float32(a * larger) for n, a in posenc.init_params(scheme, 0).items()}


def ours(
    scheme: str,
    implementation: str,
    *,
    compiles: bool,
    learns: bool = False,
    skip: bool | None = None,
    lengths: tuple[int, ...] = (),
) -> Variant:
    """Attention of posenc by name; ``skip=False`` also computes negligible blocks."""
    options = {} if skip is None else {"skip_blocks": skip}

    def ready(inputs: Inputs) -> tuple[Function, Arrays]:
        attend = inputs.runner.attend(
            inputs.schemes[scheme], implementation=implementation, **options
        )
        return attend, {}

    every = ", all blocks" if skip is False else ""
    name = f"{scheme} {implementation}{every}"
    if learns and scheme != "slopes":
        name += ", learned"
    dense = implementation in DENSE and scheme != "none"
    return Variant(
        name, ready, role="ours", dense=dense, compiles=compiles, learns=learns, lengths=lengths
    )
