"""Attention sink: a logit in the softmax denominator that belongs to no key, around any scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count, Finite
from posenc.contract.params import float_dtype
from posenc.contract.protocol import Hook, PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.nope import NoPE
from posenc.schemes.wrapper import Wrapper, heads_around


@dataclass(frozen=True)
class Sink(Wrapper, paper="OpenAI 2025, arXiv 2508.10925"):
    """A scheme with a sink: one more logit in every softmax, after scaling and bias.

    The weight of key ``j`` is ``exp(s_j) / (exp(sink) + sum_k exp(s_k))`` for scores ``s``, so that
    a head can attend to nothing. gpt-oss learns one logit per head. The constant 0 gives the
    off-by-one softmax (Miller 2023, "Attention Is Off By One").

    Parameters
    ----------
    scheme
        The scheme that the sink is added to. Its learned arrays keep their names.
    num_heads
        Number of heads ``H``. Default: that of the scheme.
    learned
        Whether the logits are a learned array ``sink (H,)``. If not, every logit is ``value``.
    value
        The logit, or its first value if it is learned.
    per_query
        Whether the logit of a query with hidden state ``x (C,)`` is ``sink_w[h] . x``, with a
        learned ``sink_w (H, hidden_dim)`` (Inkling 2).
    hidden_dim
        Width ``C`` of hidden states, for ``per_query``.
    """

    scheme: PositionScheme
    num_heads: Count | None = None
    learned: bool = True
    value: Finite = 0.0
    per_query: bool = False
    hidden_dim: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if Hook.SINK in self.scheme.hooks():
            raise ValueError(f"scheme has a sink already: {self.scheme}")
        for part, window in self.scheme.regions():
            if Hook.SINK in part.hooks():
                raise ValueError(f"scheme has a sink already, in the region {window}: {part}")
        param = "sink_w" if self.per_query else "sink"
        learns = self.learned or self.per_query
        if learns and param in self.scheme.param_specs():
            name = type(self.scheme).__name__
            raise ValueError(f"{param!r} is a param of {name} already, and Sink needs that name")
        advice = "give it, for one sink per head" if learns else ""
        heads = heads_around(self.scheme, self.num_heads, advice=advice)
        object.__setattr__(self, "num_heads", heads)
        if not self.per_query:
            if self.hidden_dim is not None:
                raise ValueError(f"hidden_dim={self.hidden_dim} needs per_query=True")
        elif self.hidden_dim is None:
            raise ValueError("per_query needs hidden_dim, the width of hidden states")
        elif not self.learned or self.value != 0:
            given = f"learned={self.learned}, value={self.value}"
            raise ValueError(f"per_query computes logits from hidden states; leave out {given}")

    def param_specs(self) -> Mapping[str, ParamSpec]:
        specs, heads = dict(self.scheme.param_specs()), self.num_heads or 0
        if self.per_query:
            specs["sink_w"] = ParamSpec((heads, self.hidden_dim or 0))
        elif self.learned:
            specs["sink"] = ParamSpec((heads,), lambda rng, shape: np.full(shape, self.value))
        return specs

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        features = self.scheme.feature_specs()
        own = {"sink": FeatureSpec(self._logits, of="query")} if self.per_query else {}
        return {**features, **own}

    def _logits(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        w = xp.matrix_transpose(params["sink_w"])
        return xp.matrix_transpose(xp.matmul(x, w))

    def sink(self, q: Array, *, params: Arrays, xp: Namespace) -> Array:
        if self.per_query:
            return params.query["sink"]  # type: ignore[attr-defined]
        if self.learned:
            return params["sink"]
        return xp.zeros_like(q, dtype=float_dtype(params, xp)) + self.value


def sink_alone(
    num_heads: int,
    hidden_dim: int | None = None,
    *,
    learned: bool = True,
    value: float = 0.0,
    per_query: bool = False,
) -> Sink:
    """A sink without a position scheme, for sums as ``rope+sink``: ``Sink(NoPE(), num_heads)``.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    hidden_dim
        Width ``C`` of hidden states; only ``per_query`` uses it.
    learned
        Whether the logits are a learned array ``sink (H,)``. If not, every logit is ``value``.
    value
        The logit, or its first value if it is learned.
    per_query
        Whether the logit is computed from hidden states, with a learned ``sink_w (H, C)``.
    """
    width = hidden_dim if per_query else None
    return Sink(NoPE(), num_heads, learned, value, per_query, width)
