"""The schemes and calls whose kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import posenc
import posenc.positions
from posenc.backend import Arguments, prepare
from posenc.schemes import FIRE, DeBERTa, DualChunk, Inkling, LogScale, PoPE, Shaw, Sink, Sum

HEADS, LENGTH = 8, 1024


@dataclass(frozen=True)
class Case:
    """One call: a forward and a backward pass, or one decoding step.

    ``packed`` is whether each row holds two documents, with positions of their own. ``graph`` is
    whether the call is part of a program that the user compiles.
    """

    scheme: str
    dtype: str
    dim: int
    length: int = LENGTH
    dynamic: bool = False
    decoding: bool = False
    packed: bool = False
    graph: bool = False
    kernel_options: tuple[tuple[str, Any], ...] = ()


class Gated(posenc.PositionScheme):
    """Forget gates, read from hidden states as they are."""

    def __init__(self, num_heads: int) -> None:
        object.__setattr__(self, "num_heads", num_heads)

    def feature_specs(self) -> dict[str, posenc.FeatureSpec]:
        return {"c": posenc.FeatureSpec(self.gates, of="key", cumulative=True)}

    def gates(self, x: Any, *, params: Any, xp: Any) -> Any:
        return xp.matrix_transpose(x[..., : self.num_heads])

    def bias(self, q: Any, k: Any, *, params: Any, xp: Any) -> Any:
        return params.query["c"] - params.key["c"]


SCHEMES: dict[str, Callable[[int, int], Any]] = {
    "alibi": lambda heads, dim: posenc.ALiBi(heads),
    # In the interpreter the even heads skip blocks.
    "alibi-steep": lambda heads, dim: posenc.ALiBi(heads, slopes=[4.0, 0.05] * (heads // 2)),
    "alibi-learned": lambda heads, dim: posenc.ALiBi(heads, learned=True),
    "t5": lambda heads, dim: posenc.T5Bias(heads),
    "gated": lambda heads, dim: Gated(heads),
    "nope": lambda heads, dim: posenc.NoPE(),
    "rope": lambda heads, dim: posenc.RoPE(dim),
    "dual-chunk": lambda heads, dim: DualChunk(dim, 128),
    # Tables of tokens: 33 numbers of a query; 1025 of a query and of a key; 1024 of a query.
    "shaw": lambda heads, dim: Shaw(dim),
    "deberta": lambda heads, dim: DeBERTa(heads, dim),
    "inkling": lambda heads, dim: Inkling(heads, heads),
    "gated+alibi": lambda heads, dim: Sum(Gated(heads), posenc.ALiBi(heads)),
    "sink": lambda heads, dim: Sink(posenc.ALiBi(heads)),
    "pope": lambda heads, dim: PoPE(heads, dim),  # queries and keys wider than values
    "alibi+inkling": lambda heads, dim: Sum(posenc.ALiBi(heads), LogScale("inkling", 64)),
    "extra-bias": lambda heads, dim: posenc.NoPE(),
    # Queries beyond the threshold, so that units change sign: else b1 has no gradient.
    "fire": lambda heads, dim: FIRE(heads, hidden=8, init_len=60),
}
"""By name, a scheme for a number of heads and a head dimension."""


def make_scheme(case: Case, heads: int) -> Any:
    """The scheme of a case."""
    return SCHEMES[case.scheme](heads, case.dim)


def caller_options(case: Case, make_bias: Callable[[], Any]) -> dict[str, Any]:
    """The caller's bias, mask function and softcap, for ``"extra-bias"``."""
    if case.scheme != "extra-bias":
        return {}
    return {"bias": make_bias(), "softcap": 3.0, "mask": _prefix_mask}


def tokens_of(case: Case, length: int, x: Any, make: Callable[[Any], Any]) -> posenc.Tokens:
    """Hidden states, if there are any, and two documents, if the case has them.

    ``make`` makes tensors of positions and of segments.
    """
    if not case.packed:
        return posenc.Tokens(x=x)
    documents = posenc.positions.packed([length // 3, length - length // 3])
    return replace(documents.map(make), x=x)


def _prefix_mask(q: Any, k: Any) -> Any:
    return (k <= q) | (k < 40)


def prepare_call(q: Any, k: Any, v: Any, scheme: Any, params: Any, options: Any) -> Any:
    """The ``Call`` of a case: causal, unless the caller brings a mask."""
    import array_api_compat.torch as xp  # imports torch

    return prepare(q, k, v, scheme, params, "mask" not in options, Arguments(**options), xp=xp)
