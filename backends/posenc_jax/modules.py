"""What the modules of Flax and Equinox have in common with ``posenc_jax.Positions``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax import Array

from posenc import Rotary, Tokens
from posenc_jax.bound import Bound
from posenc_jax.position import Position, Positions


class OfPositions:
    """The methods of ``posenc_jax.Positions`` on a module."""

    @property
    def pure(self) -> Positions:
        """The same as a ``posenc_jax.Positions``."""
        raise NotImplementedError

    def bind(self, *args: Any, **keywords: Any) -> Bound:
        """``posenc_jax.Positions.bind``: one forward pass over the layers."""
        return self.pure.bind(*args, **keywords)

    def embed(self, x: Array, pos: Array | None = None) -> Array:
        """``posenc_jax.Positions.embed``: token embeddings plus the schemes' embeddings."""
        return self.pure.embed(x, pos)

    def rotary(self, tokens: Tokens | Array, *, dtype: Any = None) -> tuple[Rotary | None, ...]:
        """``posenc_jax.Positions.rotary``: sines and cosines of each layer."""
        return self.pure.rotary(tokens, dtype=dtype)

    def __len__(self) -> int:
        return len(self.pure)

    def __getitem__(self, layer: int) -> Position:
        """Scheme, params and window of a layer."""
        return self.pure[layer]

    def __iter__(self) -> Iterator[Position]:
        return iter(self.pure)
