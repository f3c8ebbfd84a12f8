"""A sink: a logit in the denominator of the softmax that belongs to no key, around any scheme.

``w_ij = exp(s_ij) / (exp(sink) + sum_j exp(s_ij))``, so that a head may attend to nothing. gpt-oss
learns one number per head (OpenAI 2025, arXiv 2508.10925); a constant 0 is the softmax off by one
(Miller 2023, "Attention Is Off By One").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.checks import check_count, check_finite, check_flag, check_scheme
from posenc.params import float_dtype, head_count
from posenc.protocol import Array, Namespace, ParamSpec, PositionScheme, Role, Window


@dataclass(frozen=True)
class Sink(PositionScheme):
    """A scheme, and a logit of no key in every softmax, after scaling and bias.

    Parameters
    ----------
    scheme
        What it stands around; its learned arrays keep their names.
    num_heads
        Number of heads ``H``. Default: that of the scheme.
    learned
        Whether the logits are a learned array ``sink (H,)``; else all are ``value``.
    value
        The logit, or its first value.
    per_query
        Whether a query's logit is ``sink_w[h] . x`` of its hidden state ``x (C,)``, with a learned
        ``sink_w (H, hidden_dim)`` (Inkling 2).
    hidden_dim
        Width ``C`` of hidden states, for ``per_query``.
    """

    scheme: PositionScheme
    num_heads: int | None = None
    learned: bool = True
    value: float = 0.0
    per_query: bool = False
    hidden_dim: int | None = None

    def __post_init__(self) -> None:
        check_scheme(self.scheme)
        check_flag("learned", self.learned)
        check_flag("per_query", self.per_query)
        check_finite("value", self.value)
        if "sink" in self.scheme.hooks():
            raise ValueError(f"scheme has a sink already: {self.scheme}")
        own_name = "sink_w" if self.per_query else "sink"
        if (self.learned or self.per_query) and own_name in self.scheme.param_specs():
            name = type(self.scheme).__name__
            raise ValueError(f"{own_name!r} is a param of {name} already, and that of Sink")
        heads = head_count(self.scheme) if self.num_heads is None else self.num_heads
        if heads is None and (self.learned or self.per_query):
            name = type(self.scheme).__name__
            raise ValueError(f"num_heads: {name} has none of its own; give it, one sink per head")
        if heads is not None:
            check_count("num_heads", heads)
        own = head_count(self.scheme)
        if own is not None and own != heads:
            raise ValueError(f"num_heads={heads}: the scheme has {own} of its own: {self.scheme}")
        object.__setattr__(self, "num_heads", heads)
        if not self.per_query:
            if self.hidden_dim is not None:
                raise ValueError(f"hidden_dim={self.hidden_dim} is for per_query=True alone")
        elif self.hidden_dim is None:
            raise ValueError("per_query needs hidden_dim, the width of hidden states")
        else:
            check_count("hidden_dim", self.hidden_dim)
            if not self.learned or self.value != 0:
                given = f"learned={self.learned}, value={self.value}"
                raise ValueError(
                    f"per_query: logits are learned of hidden states; leave out {given}"
                )

    @property
    def relative(self) -> bool:  # type: ignore[override]
        """That of the scheme."""
        return self.scheme.relative

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """That of the scheme."""
        return self.scheme.shared

    @property
    def axes(self) -> int:  # type: ignore[override]
        """That of the scheme."""
        return self.scheme.axes

    @property
    def paper(self) -> str:  # type: ignore[override]
        """That of the scheme."""
        return self.scheme.paper

    @property
    def cumulative(self) -> tuple[str, ...]:  # type: ignore[override]
        """That of the scheme."""
        return self.scheme.cumulative

    def hooks(self) -> frozenset[str]:
        own = {"sink", "hidden_features"} if self.per_query else {"sink"}
        return self.scheme.hooks() | own

    def reads_features(self) -> bool:
        return self.scheme.reads_features()

    def param_specs(self) -> Mapping[str, ParamSpec]:
        specs = dict(self.scheme.param_specs())
        if self.per_query:
            assert self.num_heads is not None
            assert self.hidden_dim is not None
            specs["sink_w"] = ParamSpec((self.num_heads, self.hidden_dim))
        elif self.learned:
            assert self.num_heads is not None
            value = self.value
            specs["sink"] = ParamSpec(
                (self.num_heads,), init=lambda rng, shape: np.full(shape, value)
            )
        return specs

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return self.scheme.constants()

    def embedding(self, pos: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        return self.scheme.embedding(pos, params=params, xp=xp)

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Array:
        return self.scheme.transform(x, pos, role=role, params=params, xp=xp)

    def hidden_features(
        self, x: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        found = dict(self.scheme.hidden_features(x, role=role, params=params, xp=xp))
        if self.per_query and role == "query":
            w = xp.matrix_transpose(params["sink_w"])
            found["sink"] = xp.matrix_transpose(xp.matmul(x, w))
        return found

    def query_features(self, q: Array, pos: Array, **keywords: Any) -> Mapping[str, Array]:
        return self.scheme.query_features(q, pos, **keywords)

    def key_features(self, k: Array, pos: Array, **keywords: Any) -> Mapping[str, Array]:
        return self.scheme.key_features(k, pos, **keywords)

    def bias(
        self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace
    ) -> Array | None:
        return self.scheme.bias(q, k, params=params, xp=xp)

    def key_bias(self, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        return self.scheme.key_bias(k, params=params, xp=xp)

    def adjust_scores(self, scores: Array, q: Array, k: Array, **keywords: Any) -> Array:
        return self.scheme.adjust_scores(scores, q, k, **keywords)

    def sink(self, q: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        if self.per_query:
            return params.query["sink"]  # type: ignore[attr-defined]
        if self.learned:
            return params["sink"]
        return xp.zeros_like(q, dtype=float_dtype(params, xp)) + self.value

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        return self.scheme.regions()

    def scale(self, head_dim: int) -> float:
        return self.scheme.scale(head_dim)

    def at_length(self, length: int) -> PositionScheme:
        longer = self.scheme.at_length(length)
        return self if longer is self.scheme else _with_scheme(self, longer)

    def caution(self, *, causal: bool) -> str | None:
        return self.scheme.caution(causal=causal)


def _with_scheme(sink: Sink, scheme: PositionScheme) -> Sink:
    return Sink(scheme, sink.num_heads, sink.learned, sink.value, sink.per_query, sink.hidden_dim)
