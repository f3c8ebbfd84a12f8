"""Schemes with their learned arrays as pytrees: of one layer, and of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from posenc import Mask, Rotary, Tokens, rotary
from posenc.backend import (
    LayerPlan,
    PositionScheme,
    Window,
    add_embedding,
    advise_unknown,
    arguments_of_pass,
    attention_part,
    check_layer,
    embedding,
)
from posenc_jax.api import attention
from posenc_jax.bound import Bound
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

    def rotary(self, tokens: Tokens | Array, *, dtype: Any = None) -> Rotary | None:
        """``posenc.rotary`` of this scheme, for ``Tokens(rotary=...)``."""
        return rotary(self.scheme, tokens, self.params, dtype=dtype, xp=jnp)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        causal: bool = False,
        *,
        window: int | Window | EllipsisType | None = ...,
        mask: Mask | Array | Callable[..., Array] | None = None,
        tokens: Tokens | None = None,
        queries: Tokens | None = None,
        bias: Array | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        k_transformed: bool = False,
        implementation: str = "auto",
        skip_blocks: bool = True,
        return_lse: bool = False,
    ) -> Any:
        """``posenc_jax.attention`` with this scheme, these params and window, ``q (B, Q, H, D)``.

        ``window=`` in a call replaces the layer's; ``window=None`` is no window. This does not add
        an embedding: call ``embed`` once, before the first layer.
        """
        scheme, params = attention_part(self.scheme, self.params)
        return attention(
            q, k, v, scheme, params, causal,
            window=self.window if window is ... else window, mask=mask, tokens=tokens,
            queries=queries, bias=bias, softcap=softcap, scale=scale,
            k_transformed=k_transformed, implementation=implementation, skip_blocks=skip_blocks,
            return_lse=return_lse,
        )  # fmt: skip


@partial(_pytree, meta_fields=("plan",))
@dataclass(frozen=True)
class Positions:
    """The positional encodings of a model: a pytree whose leaves are the learned arrays.

    ``bound = positions.bind(causal=True)`` once in a forward pass; then ``bound.embed(x)``, and
    ``attend(q, k, v)`` in each block of ``for block, attend in zip(blocks, bound)``. Single calls
    are ``positions.embed(x)`` and ``positions[layer].attend(q, k, v)``. Layers with an equal scheme
    that is ``shared`` (T5) or has an embedding read the same arrays, which are leaves once.

    It may be part of any tree of params: an argument of ``jit`` and ``grad``, a field of an Equinox
    module, a param of Flax Linen. ``plan`` is static and hashable. Libraries that take dicts only
    can have ``params``, dicts of arrays; ``Positions(plan, params)`` makes a model of them.

    A module of Flax NNX trains only what is an ``nnx.Param``: there ``posenc_jax.flax.Positions``
    is the same as a module. ``posenc_jax.equinox.Positions`` is one of Equinox.

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

    @advise_unknown
    def bind(
        self,
        tokens: Tokens | None = None,
        queries: Tokens | None = None,
        causal: bool = False,
        *,
        window: int | Window | EllipsisType | None = ...,
        mask: Mask | Array | Callable[..., Array] | None = None,
        implementation: str = "auto",
        skip_blocks: bool = True,
    ) -> Bound:
        """One forward pass over the layers: what tokens and mask alone decide is made once.

        ``bound = positions.bind(causal=True)``, ``x = bound.embed(x)``, then ``for block, attend in
        zip(blocks, bound)``: in a block ``out = attend(q, k, v)``, or ``attend(q, k, v, x=hidden)``
        for a scheme that reads hidden states.

        Parameters
        ----------
        tokens, queries, causal, mask, implementation, skip_blocks
            As in ``posenc_jax.attention``, for every layer.
        window
            Likewise, in place of the layers' own; None for no window.

        Raises
        ------
        TypeError, ValueError
            ``tokens`` or ``queries`` is no ``Tokens``. A layer raises for everything else.
        """
        given = arguments_of_pass(tokens, queries, window, mask)
        return Bound(self, given, causal, implementation, skip_blocks)

    def rotary(self, tokens: Tokens | Array, *, dtype: Any = None) -> tuple[Rotary | None, ...]:
        """``posenc.rotary`` for each layer, computed once for all layers that can share it.

        For ``Tokens(rotary=...)`` of calls outside a pass; ``bind`` does it for a pass. None for a
        layer whose scheme has none.
        """
        layers = self.plan.rotary_layers
        made = {n: self[n].rotary(tokens, dtype=dtype) for n in dict.fromkeys(layers)}
        return tuple(made[layer] for layer in layers)

    def embed(self, x: Array, pos: Array | None = None) -> Array:
        """Token embeddings ``x (B, L, dim)`` plus the embedding of each scheme, as in ``Position``.

        Adds each embedding once, even if several layers have its scheme.
        """
        for layer in self.plan.first_layers:
            x = self[layer].embed(x, pos)
        return x
