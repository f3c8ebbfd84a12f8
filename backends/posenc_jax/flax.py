"""Schemes in Flax: a module of NNX that owns learned arrays, and an ``attention_fn``.

In Linen ``posenc_jax.Positions`` is a param as it is::

    positions = self.param("positions", lambda key: posenc_jax.Positions.init(scheme, layers, key))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import posenc_jax
from posenc import Tokens
from posenc.backend import LayerPlan, PositionScheme, Window
from posenc_jax.modules import OfPositions

__all__ = ["Positions", "attention_fn"]


class Positions(OfPositions, nnx.Module):  # type: ignore[misc]
    """The positional encodings of a model as a module: each learned array is an ``nnx.Param``.

    ``positions = Positions(scheme, layers, rngs=nnx.Rngs(0))`` in the model's ``__init__``; in its
    ``__call__`` ``for block, attend in zip(self.blocks, self.positions.bind(causal=True))``, as
    ``posenc_jax.Positions.bind`` says. ``nnx.Optimizer(model, tx, wrt=nnx.Param)`` moves the
    arrays. For their own learning rate: ``posenc_jax.param_labels(state, names="positions")``.

    Attributes
    ----------
    plan
        Which scheme and which window serve each layer, and which layers share; static.
    params
        ``params["0"]["table"]``: the ``nnx.Param`` of a layer, under the first layer that reads it.
    """

    def __init__(
        self,
        scheme: PositionScheme | Sequence[PositionScheme] | LayerPlan,
        layers: int | None = None,
        *,
        rngs: nnx.Rngs,
        windows: int | Sequence[int | None] | None = None,
    ) -> None:
        """As ``posenc_jax.Positions.init``; the key is the next of ``rngs.params``."""
        made = posenc_jax.Positions.init(scheme, layers, rngs.params(), windows)
        self.plan = made.plan
        self.params = nnx.data(
            jax.tree.map(nnx.Param, {n: dict(p) for n, p in made.params.items()})
        )

    @property
    def pure(self) -> posenc_jax.Positions:
        """The same as a ``posenc_jax.Positions``, of arrays."""
        return posenc_jax.Positions(self.plan, nnx.as_pure(self.params))


def attention_fn(
    scheme: PositionScheme,
    *,
    causal: bool = False,
    window: int | Window | None = None,
    implementation: str = "auto",
) -> Callable[..., Array]:
    """Attention for ``MultiHeadAttention(attention_fn=...)`` of Flax, of NNX and of Linen.

    The function takes what ``flax.nnx.dot_product_attention`` takes: ``(*batch, L, H, D)``, a
    ``bias`` and a boolean ``mask`` ``(*batch, 1 or H, Q, K)``, ``is_causal``. With
    ``input_positions (*batch, Q)`` queries are there; keys too, or at ``0 .. K - 1`` if there are
    more of them, as in a cache.

    Parameters
    ----------
    scheme
        A scheme without learned arrays: what a function holds never trains.
    causal, window, implementation
        As in ``posenc_jax.attention``; ``is_causal`` of a call also makes it causal.

    Raises
    ------
    ValueError
        The scheme has learned arrays; or a call has fewer queries than keys and no
        ``input_positions``: their places in a cache are unknown.
    NotImplementedError
        A call asks for dropout of weights, for the weights, or for a ``precision``.
    """
    if learned := sorted(scheme.param_specs()):
        raise ValueError(
            f"scheme {type(scheme).__name__} learns {', '.join(learned)}, and what a function "
            "holds never trains: keep posenc_jax.flax.Positions in the model, and call its attend"
        )

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        input_positions: Array | None = None,
    ) -> Array:
        refused = {
            f"dropout_rate={dropout_rate}": dropout_rate > 0 and not deterministic,
            "module, to sow weights": module is not None,
            f"precision={precision}": precision is not None,
        }
        for what, asked in refused.items():
            if asked:
                raise NotImplementedError(f"attention of posenc has no {what}")
        batch, (q_len, k_len) = query.shape[:-3], (query.shape[-3], key.shape[-3])
        q, k, v = (
            a.reshape(-1, *a.shape[-3:]).astype(dtype or a.dtype) for a in (query, key, value)
        )
        tokens, queries = _where(input_positions, q_len, k_len)
        if mask is not None:  # Flax makes masks of numbers
            mask = mask.astype(bool)
        bias, mask = (
            None
            if a is None
            else jnp.broadcast_to(a, (*batch, *a.shape[-3:])).reshape(-1, *a.shape[-3:])
            for a in (bias, mask)
        )
        out = posenc_jax.attention(
            q, k, v, scheme, causal=causal or is_causal, window=window, mask=mask, bias=bias,
            tokens=tokens, queries=queries, implementation=implementation,
        )  # fmt: skip
        result: Array = out.reshape(*batch, *out.shape[1:])
        return result

    return attend


def _where(pos: Array | None, q_len: int, k_len: int) -> tuple[Tokens | None, Tokens | None]:
    """Tokens of keys, and of queries where they differ."""
    if pos is None:
        if q_len != k_len:
            raise ValueError(
                f"{q_len} queries attend to {k_len} keys: give input_positions, the queries' places"
            )
        return None, None
    pos = pos.reshape(-1, q_len)
    if q_len == k_len:
        return Tokens(pos=pos), None
    return Tokens(pos=jnp.arange(k_len)), Tokens(pos=pos)
