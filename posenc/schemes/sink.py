"""Attention sink: a logit in the softmax denominator that belongs to no key, around any scheme.

``w_ij = exp(s_ij) / (exp(sink) + sum_j exp(s_ij))``, so that a head can attend to nothing. gpt-oss
learns one logit per head (OpenAI 2025, arXiv 2508.10925). The constant 0 gives the off-by-one
softmax (Miller 2023, "Attention Is Off By One").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.checks import check_count, check_finite, check_flag, check_scheme
from posenc.params import float_dtype, head_count
from posenc.protocol import Array, Namespace, ParamSpec, PositionScheme, Role, Window
from posenc.schemes.nope import NoPE


@dataclass(frozen=True)
class Sink(PositionScheme):
    """A scheme with a sink: one more logit in every softmax, after scaling and bias.

    The weight of key ``j`` is ``exp(s_j) / (exp(sink) + sum_k exp(s_k))`` for scores ``s``.

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

    OpenAI 2025, arXiv 2508.10925 (gpt-oss); the constant 0: Miller 2023.
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
        for part, window in self.scheme.regions():
            if "sink" in part.hooks():
                raise ValueError(f"scheme has a sink already, in the region {window}: {part}")
        param = "sink_w" if self.per_query else "sink"
        if (self.learned or self.per_query) and param in self.scheme.param_specs():
            name = type(self.scheme).__name__
            raise ValueError(f"{param!r} is a param of {name} already, and Sink needs that name")
        heads = head_count(self.scheme) if self.num_heads is None else self.num_heads
        if heads is None and (self.learned or self.per_query):
            name = type(self.scheme).__name__
            raise ValueError(f"num_heads: {name} does not have it; give it, for one sink per head")
        if heads is not None:
            check_count("num_heads", heads)
        scheme_heads = head_count(self.scheme)
        if scheme_heads is not None and scheme_heads != heads:
            raise ValueError(f"num_heads={heads}: the scheme has {scheme_heads}: {self.scheme}")
        object.__setattr__(self, "num_heads", heads)
        if not self.per_query:
            if self.hidden_dim is not None:
                raise ValueError(f"hidden_dim={self.hidden_dim} needs per_query=True")
        elif self.hidden_dim is None:
            raise ValueError("per_query needs hidden_dim, the width of hidden states")
        else:
            check_count("hidden_dim", self.hidden_dim)
            if not self.learned or self.value != 0:
                given = f"learned={self.learned}, value={self.value}"
                raise ValueError(f"per_query computes logits from hidden states; leave out {given}")

    @property
    def relative(self) -> bool:  # type: ignore[override]
        """As the scheme."""
        return self.scheme.relative

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """As the scheme."""
        return self.scheme.shared

    @property
    def axes(self) -> int:  # type: ignore[override]
        """As the scheme."""
        return self.scheme.axes

    @property
    def whole_rows(self) -> str:  # type: ignore[override]
        """As the scheme."""
        return self.scheme.whole_rows

    @property
    def paper(self) -> str:  # type: ignore[override]
        """That of the sink, after that of the scheme."""
        own = "OpenAI 2025, arXiv 2508.10925"
        return f"{self.scheme.paper}; {own}" if self.scheme.hooks() else own

    @property
    def cumulative(self) -> tuple[str, ...]:  # type: ignore[override]
        """As the scheme."""
        return self.scheme.cumulative

    def hooks(self) -> frozenset[str]:
        added = {"sink", "hidden_features"} if self.per_query else {"sink"}
        return self.scheme.hooks() | added

    def reads_features(self) -> bool:
        return self.scheme.reads_features()

    def bias_terms(self) -> tuple[tuple[str, PositionScheme], ...]:
        return self.scheme.bias_terms()

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

    def rotary(self, pos: Array, **keywords: Any) -> Mapping[str, Array]:
        return self.scheme.rotary(pos, **keywords)

    def rotary_params(self) -> frozenset[str]:
        return self.scheme.rotary_params()

    def hidden_features(
        self, x: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        features = dict(self.scheme.hidden_features(x, role=role, params=params, xp=xp))
        if self.per_query and role == "query":
            w = xp.matrix_transpose(params["sink_w"])
            features["sink"] = xp.matrix_transpose(xp.matmul(x, w))
        return features

    def lookback(self) -> int:
        return self.scheme.lookback()

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

    def bias_factor(self, q: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        return self.scheme.bias_factor(q, params=params, xp=xp)

    def constant_beyond(self) -> Window:
        return self.scheme.constant_beyond()

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
