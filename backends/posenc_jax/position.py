"""Schemes with their learned arrays as pytrees: of one layer, and of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from posenc import Rotary, rotary
from posenc.backend import (
    LayerPlan,
    PositionScheme,
    add_embedding,
    attention_part,
    check_layer,
    embedding,
)
from posenc_jax.api import attention
from posenc_jax.params import check_key, init

# Its tables are leaves; the scheme is static.
jax.tree_util.register_dataclass(Rotary, data_fields=("tables", "regions"), meta_fields=("scheme",))
_pytree = partial(jax.tree_util.register_dataclass, data_fields=("params",))


@partial(_pytree, meta_fields=("scheme", "window"))
@dataclass(frozen=True)
class Position:
    """The positional encoding of one layer: a static scheme, and its learned arrays by name.

    Attributes
    ----------
    scheme
        Any ``PositionScheme``.
    params
        Its learned arrays.
    window
        Of the layer's attention, static: a query sees keys at ``|q_pos - k_pos| < window``; None
        for all.
    """

    scheme: PositionScheme
    params: Mapping[str, Array]
    window: int | None = None

    def embed(self, x: Array, pos: Array | None = None) -> Array:
        """Token embeddings ``x (B, L, dim)`` plus the scheme's embedding of ``pos``.

        ``pos`` is ``(L,)`` or ``(B, L)``, default ``0 .. L - 1``. Give it in decoding, because
        this method does not know the length of a cache. Without an embedding, ``x`` itself.
        """
        if pos is None:
            pos = jnp.arange(x.shape[-2])
        term = embedding(self.scheme, pos, self.params, xp=jnp)
        return x if term is None else add_embedding(x, term, xp=jnp)

    def rotary(self, pos: Array, *, axes: Array | None = None, dtype: Any = None) -> Rotary | None:
        """``posenc.rotary`` of this scheme, for ``q_rotary`` and ``k_rotary`` of ``attend``."""
        return rotary(self.scheme, pos, self.params, axes=axes, dtype=dtype, xp=jnp)

    def attend(self, q: Array, k: Array, v: Array, **keywords: Any) -> Any:
        """``posenc_jax.attention`` with this scheme, these params and window, ``q (B, Q, H, D)``.

        ``window=`` in a call replaces the layer's; ``window=None`` is no window. This does not add
        an embedding: call ``embed`` once, before the first layer.
        """
        keywords = {"window": self.window, **keywords}
        return attention(q, k, v, *attention_part(self.scheme, self.params), **keywords)


@partial(_pytree, meta_fields=("plan",))
@dataclass(frozen=True)
class Positions:
    """The positional encodings of a model: a pytree whose leaves are the learned arrays.

    ``positions.embed(x)`` once, before the first layer; then ``positions[layer].attend(q, k, v)``,
    or ``for block, position in zip(blocks, positions)``. Layers with an equal scheme that is
    ``shared`` (T5) or has an embedding read the same arrays, which are leaves once.

    It may be part of any tree of params: an argument of ``jit`` and ``grad``, a field of an Equinox
    module, a param of Flax Linen. ``plan`` is static and hashable. Libraries that take dicts only
    can have ``params``, dicts of arrays; ``Positions(plan, params)`` makes a model of them.

    A module of Flax NNX trains only what is an ``nnx.Param``. ``nnx.data(positions)`` is kept as it
    is: its arrays never move, and nothing says so. Keep ``positions.plan`` in the module and
    ``nnx.data(jax.tree.map(nnx.Param, dict(positions.params)))``, and make ``Positions`` of both,
    the latter by ``nnx.as_pure``, in each call.

    Attributes
    ----------
    plan
        Which scheme and which window serve each layer, and which layers share.
    params
        ``params["0"]["table"]``: the arrays of a layer, under the first layer that reads them.
        Schemes without learned arrays have no entry.
    """

    plan: LayerPlan
    params: Mapping[str, Mapping[str, Array]]

    @classmethod
    def init(
        cls,
        scheme: PositionScheme | Sequence[PositionScheme] | LayerPlan,
        layers: int | None = None,
        key: Array | None = None,
        windows: int | Sequence[int | None] | None = None,
    ) -> Positions:
        """Initial values as ``posenc_jax.init`` draws them, each layer's from its own key.

        Parameters
        ----------
        scheme
            A ``PositionScheme`` for every layer, or a list or tuple of them, repeated over the
            layers, or a ``LayerPlan``, such as those of ``posenc.presets``.
        layers
            Number of layers; a plan has its own: ``Positions.init(plan, key=key)``.
        key
            One key, typed or raw uint32.
        windows
            None, one window for every layer, or a list or tuple of windows and Nones, repeated over
            the layers. Layers that share arrays may have different windows. A plan has its own.
        """
        check_key(key)
        assert key is not None  # check_key refuses it
        plan = LayerPlan.of(scheme, layers, windows)
        with_params = [layer for layer in plan.first_layers if plan.schemes[layer].param_specs()]
        return cls(
            plan,
            {
                str(layer): init(plan.schemes[layer], jax.random.fold_in(key, layer))
                for layer in with_params
            },
        )

    def __len__(self) -> int:
        return len(self.plan.schemes)

    def __getitem__(self, layer: int) -> Position:
        """Scheme, params and window of a layer."""
        index = check_layer(layer, len(self))
        params = self.params.get(str(self.plan.sources[index]), {})
        return Position(self.plan.schemes[index], params, self.plan.windows[index])

    def __iter__(self) -> Iterator[Position]:
        return iter([self[layer] for layer in range(len(self))])

    @property
    def attend(self) -> Any:
        """Not defined: each layer has its own."""
        raise AttributeError(
            "Positions are of all layers, and attend is of one: positions[layer].attend(q, k, v)"
        )

    def rotary(
        self, pos: Array, *, axes: Array | None = None, dtype: Any = None
    ) -> tuple[Rotary | None, ...]:
        """``posenc.rotary`` for each layer, computed once for all layers that can share it.

        Call it once in a forward pass: ``for position, rotary in zip(positions,
        positions.rotary(pos))``, then ``position.attend(q, k, v, q_rotary=rotary,
        k_rotary=rotary)``. None for a layer whose scheme has none.
        """
        layers = self.plan.rotary_layers
        made = {n: self[n].rotary(pos, axes=axes, dtype=dtype) for n in dict.fromkeys(layers)}
        return tuple(made[layer] for layer in layers)

    def embed(self, x: Array, pos: Array | None = None) -> Array:
        """Token embeddings ``x (B, L, dim)`` plus the embedding of each scheme, as in ``Position``.

        Adds each embedding once, even if several layers have its scheme.
        """
        for layer in self.plan.first_layers:
            x = self[layer].embed(x, pos)
        return x
