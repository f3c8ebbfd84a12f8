"""The numbers of a picture: a scheme's bias, embedding and scores at given positions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import posenc
from posenc.apply.bias import bias_tile
from posenc.apply.feature_needs import has_features, reads_features
from posenc.apply.shapes import as_column, as_row
from posenc.apply.transform import has_transform
from posenc.attn.arguments import Arguments
from posenc.attn.call import Call
from posenc.attn.features import features
from posenc.attn.hidden_width import hidden_width
from posenc.attn.prepare import prepare
from posenc.contract.params import head_count, key_head_count
from posenc.contract.protocol import Array, PositionScheme
from posenc.contract.tokens import Tokens
from posenc.positions.integers import visible
from posenc.schemes.sum import Combination
from posenc.study import picture


@dataclass(frozen=True)
class Drawing:
    """A scheme with its params, on the positions ``0 .. length - 1``."""

    scheme: PositionScheme
    params: Mapping[str, Array]
    length: int
    causal: bool
    window: int | None = None
    random: bool = False  # whether equal values alone have a meaning

    def limited(self) -> Drawing:
        """The same up to the first position that raises an ``IndexError``."""
        allowed = bisect_left(range(self.length), True, key=self._fails)
        if not allowed:
            self._evaluate(0)
        return replace(self, scheme=self.scheme.at_length(allowed), length=allowed)

    def _fails(self, position: int) -> bool:
        try:
            self._evaluate(position)
        except IndexError:
            return True
        return False

    def _evaluate(self, position: int) -> None:
        at = np.asarray([position])
        self.embedding(at)
        self.bias(at, np.asarray([0]))
        self.scores(0, at)

    @property
    def sampled(self) -> np.ndarray[Any, Any]:
        """All positions, or evenly spaced ones if the picture cannot show all."""
        count = min(self.length, picture.MOST_CELLS)
        return np.unique(np.linspace(0, self.length - 1, count).round().astype(np.int64))

    @property
    def reach(self) -> tuple[int, int] | None:
        return None if self.window is None else (self.window - 1, self.window - 1)

    def bias(self, q: Array, k: Array) -> Array | None:
        """``(H, Q, K)`` or None, minus infinity outside the window."""
        value = self._bias_of_scheme(q, k)
        inside = visible(q[:, None], k[None, :], window=self.reach)
        if inside is None:
            return value
        return np.where(inside, 0.0 if value is None else value, -np.inf).reshape(
            -1, len(q), len(k)
        )

    def _bias_of_scheme(self, q: Array, k: Array) -> Array | None:
        """The bias alone; for random tokens if it reads features."""
        if not reads_features(self.scheme):
            return posenc.bias(self.scheme, q, k, self.params, dtype=np.float64)
        call = self._call_of_random_tokens(1 + int(max(q.max(), k.max())))
        query, key = call.query.select(q), call.key.select(k)
        value = bias_tile(
            self.scheme, as_column(query.encoded_pos), as_row(key.encoded_pos),
            call.arrays, query=query.features, key=key.features, dtype=call.dtype, xp=call.xp,
        )  # fmt: skip
        shape = 1, call.q.shape[1], len(q), len(k)
        return None if value is None else np.broadcast_to(value, shape)[0]

    @property
    def _heads(self) -> int:
        return head_count(self.scheme) or key_head_count(self.scheme) or 1

    def _call_of_random_tokens(self, length: int) -> Call:
        """A call of attention with normal vectors and hidden states, the same each time."""
        q, k, x = self._random_tokens(length)
        return prepare(q, k, k, self.scheme, self.params, given=Arguments(tokens=Tokens(x=x)))

    def _random_tokens(self, length: int) -> tuple[Array, Array, Array | None]:
        """Queries, keys and hidden states, or None for a scheme that reads none."""
        heads, width = self._heads, head_dim(self.scheme)
        rng = np.random.default_rng(0)
        # Drawn token by token, so that a longer picture starts with the same tokens.
        q, k = rng.standard_normal((length, 2, heads, width)).transpose(1, 2, 0, 3)[:, None]
        hidden = hidden_width(self.scheme, self.params)
        x = np.random.default_rng(1).standard_normal((1, length, hidden)) if hidden else None
        return q, k, x

    def _features(self, pos: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Features of random tokens: of queries at ``pos``, and of a key at 0."""
        if not has_features(self.scheme):
            return {}, {}
        q, k, x = self._random_tokens(1 + int(pos.max()))
        query, key = features(self.scheme, self.params, Tokens(x=x), q=q, k=k)
        of_queries = {n: a[:, :, pos] for n, a in query.features.items()}
        return of_queries, {n: a[:, :, :1] for n, a in key.features.items()}

    def embedding(self, pos: Array) -> Array | None:
        """``(L, dim)`` or None."""
        return posenc.embedding(self.scheme, pos, self.params, dtype=np.float64)

    def scores(self, channel: int | slice, pos: Array) -> Array | None:
        """Scores ``(H, L)`` of queries at ``pos`` and a key at 0, both 1 in these channels, else 0.

        None if the scheme transforms neither. If it has regions, each score is that of its region.
        """
        x = np.zeros((1, self._heads, len(pos), head_dim(self.scheme)))
        x[..., channel] = 1.0
        return self._through_regions(x, pos, lambda query, key: (query * key).sum(axis=-1))

    def scale(self, channel: int | slice, pos: Array) -> Array | None:
        """Products of lengths ``(H, L)`` where ``scores`` has dot products."""
        x = np.zeros((1, self._heads, len(pos), head_dim(self.scheme)))
        x[..., channel] = 1.0
        norm = partial(np.linalg.norm, axis=-1)
        return self._through_regions(x, pos, lambda query, key: norm(query) * norm(key))

    def _through_regions(
        self, x: Array, pos: Array, product: Callable[[Array, Array], Array]
    ) -> Array | None:
        of_queries, of_key = self._features(pos)
        regions = self.scheme.regions() or ((self.scheme, (None, None)),)
        total, transformed = np.zeros(x.shape[1:3]), False
        for scheme, window in regions:
            params = {name: a for name, a in self.params.items() if name in scheme.param_specs()}
            transform = partial(posenc.transform, scheme, params=params)
            query = transform(x, pos, role="query", features=of_queries)
            key = transform(x[:, :, :1], np.asarray([0]), role="key", features=of_key)
            inside = visible(pos, np.zeros_like(pos), window=window)
            inside = np.ones(len(pos), bool) if inside is None else inside
            if len(regions) > 1 and not reads_features(scheme):
                bias = posenc.bias(scheme, pos, np.asarray([0]), params)
                inside = inside if bias is None else inside & ~np.isneginf(bias[0, :, 0])
            total = np.where(inside, product(query, key)[0], total)
            transformed |= has_transform(scheme)
        return total if transformed else None


def head_dim(scheme: PositionScheme) -> int:
    """Channels per head: those of the scheme, or of a part of a sum; 64 where any will do."""
    parts = scheme.schemes if isinstance(scheme, Combination) else ()
    found = [*(getattr(one, "head_dim", None) for one in (scheme, *parts)), 64]
    return next(int(one) for one in found if one)
