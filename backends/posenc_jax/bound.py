"""One forward pass: what its layers have in common is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import Array

from posenc.backend import (
    Arguments,
    LayerFacts,
    PassState,
    Shared,
    attention_part,
    reads_hidden,
    tokens_to_embed,
    transformed_keys,
    with_hidden,
)
from posenc_jax.api import attend_in_pass

if TYPE_CHECKING:
    from posenc_jax.position import Position, Positions


@jax.tree_util.register_pytree_node_class
class Bound:
    """The positional encodings of a model in one forward pass, which ``Positions.bind`` returns.

    One callable per layer: ``out = attend(q, k, v)`` for ``attend`` in ``bound``, or
    ``bound[layer](q, k, v)``. What tokens and mask alone decide, such as angles, biases by distance
    and dense masks of short calls, is made when the first layer needs it; layers with an equal
    scheme and the same params share it, and gradients of learned arrays go through it. Results are
    those of ``positions[layer].attend``. Only where layers share learned arrays, their gradients
    add up in another order.

    All layers must have the batch, lengths and dtype of the first. Make one in each forward pass.
    It is a pytree of the positions and the tokens. A function that is traced on its own, such as
    the body of ``jax.checkpoint`` or ``lax.scan``, makes its own values.
    """

    def __init__(
        self,
        positions: Positions,
        given: Arguments,
        causal: bool,
        implementation: str = "auto",
        skip_blocks: bool = True,
    ) -> None:
        self.positions, self.given, self.causal = positions, given, causal
        self.implementation, self.skip_blocks = implementation, skip_blocks
        self.state = PassState(LayerFacts.of_plan(positions.plan), _mode)
        self._layers = [Attend(self, layer) for layer in range(len(positions))]

    def tree_flatten(self) -> tuple[Any, Any]:
        """Arrays are those of the positions and of the tokens; all else is static."""
        given = self.given
        arrays = self.positions, given.tokens, given.queries
        static = (
            given._replace(tokens=None, queries=None), self.causal, self.implementation,
            self.skip_blocks,
        )  # fmt: skip
        return arrays, static

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> Bound:
        """A pass that has made nothing yet."""
        (given, *others), (positions, tokens, queries) = static, arrays
        return cls(positions, given._replace(tokens=tokens, queries=queries), *others)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Attend]:
        return iter(self._layers)

    def __getitem__(self, layer: int) -> Attend:
        """The attention of a layer."""
        return self._layers[layer]

    def embed(self, x: Array) -> Array:
        """Token embeddings ``x (B, L, dim)`` plus the embedding of each scheme that has one.

        At the positions of the queries, or of the last ``L`` of ``tokens``.
        """
        return self.positions.embed(x, tokens_to_embed(self.given, x.shape[-2]).pos)


class Attend:
    """Attention of one layer in a forward pass."""

    def __init__(self, bound: Bound, layer: int) -> None:
        self._bound, self._layer = bound, layer

    @property
    def _position(self) -> Position:
        return self._bound.positions[self._layer]

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        x: Array | None = None,
        bias: Array | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        k_transformed: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """``posenc_jax.attention`` with the layer's scheme, params and window, in this pass.

        Parameters
        ----------
        q, k, v
            ``(B, Q, H, D)``, ``(B, K, Hk, D)``, ``(B, K, Hk, Dv)``.
        x
            Hidden states ``(B, K, C)`` of the keys' tokens, of which the queries' are the last;
            only a scheme whose features read them has a use for them. If it reads those of the
            queries, positions that say otherwise are an error where they can be read.
        bias, softcap, scale, k_transformed, return_lse
            As in ``posenc_jax.attention``.
        """
        bound, shared, position = self._bound, self._shared, self._position
        x = x if reads_hidden(position.scheme) else None
        of_arrays = all(hasattr(a, "shape") and len(a.shape) == 4 for a in (q, k))
        if of_arrays:
            bound.state.check(q.shape[0], q.shape[1], k.shape[1], q.dtype, None)
        plain = x is None and bias is None and softcap is None and scale is None
        at = None
        if of_arrays and plain and not return_lse:
            dtypes = (q.dtype, k.dtype, getattr(v, "dtype", None))
            at = "run", q.shape, k.shape, getattr(v, "shape", None), dtypes, k_transformed
            run: Callable[..., Array] | None = shared.made.find(at)
            if run is not None:
                return run(q, k, v)
        given = bound.given
        if x is not None:
            given = with_hidden(given, x, q.shape[1], position.scheme, jnp)
        given = given._replace(
            window=position.window if given.window is ... else given.window, bias=bias,
            softcap=softcap, scale=scale, k_transformed=k_transformed, return_lse=return_lse,
        )  # fmt: skip
        out, made = attend_in_pass(
            q, k, v, *attention_part(position.scheme, position.params), bound.causal, given,
            bound.implementation, bound.skip_blocks, shared,
        )  # fmt: skip
        if made is not None and at is not None:
            shared.made.keep(at, made)
        return out

    def transform_keys(self, k: Array) -> Array:
        """Keys ``(B, L, Hk, D)`` of the queries' tokens, transformed, for a cache.

        Then call with ``k_transformed=True``.
        """
        scheme, params = attention_part(self._position.scheme, self._position.params)
        k = jnp.swapaxes(k, 1, 2)
        turned = transformed_keys(k, scheme, params, self._bound.given, self._shared, jnp)
        return jnp.swapaxes(turned, 1, 2)

    @property
    def _shared(self) -> Shared:
        return self._bound.state.shared(self._layer)


def _mode() -> Any:
    """Which function is traced: its values mean nothing in another."""
    state = getattr(jax.extend.core, "get_opaque_trace_state", None)
    return NotImplemented if state is None else state(convention="flax")
