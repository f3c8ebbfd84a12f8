"""Attention with a scheme, and embeddings of positions, as layers of Keras 3."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

import posenc
from posenc import Tokens
from posenc.backend import (
    PositionScheme,
    add_embedding,
    attention_part,
    check_flag,
    check_implementation,
    check_scale,
    check_scheme,
    check_softcap,
    check_window,
    concrete_values,
    has_embedding,
    needs_own_hidden,
    reads_hidden,
)
from posenc.schemes import NoPE
from posenc_keras.saved import from_json, to_json

# Keras' backend -> what computes there, and its arrays' namespace.
_BACKENDS = {
    "jax": ("posenc_jax", "jax.numpy"),
    "torch": ("posenc_torch", "array_api_compat.torch"),
}
Tensor = Any  # of Keras' backend, or a KerasTensor


@functools.cache
def _modules() -> tuple[Any, Any]:
    """What computes on Keras' backend, and the namespace of its arrays."""
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise RuntimeError(
            f"posenc_keras runs on Keras' backends jax and torch, got {backend!r}: set "
            "KERAS_BACKEND=jax or KERAS_BACKEND=torch before keras is imported"
        )
    package, namespace = _BACKENDS[backend]
    return importlib.import_module(package), importlib.import_module(namespace)


class _OfScheme(keras.layers.Layer):  # type: ignore[misc]
    """A layer whose weights are the learned arrays of a scheme."""

    def __init__(self, scheme: PositionScheme, *, seed: int | None = None, **keywords: Any) -> None:
        _modules()  # an error on another backend
        check_scheme(scheme)
        super().__init__(**keywords)
        self.supports_masking = True
        self.scheme, self.seed = scheme, seed
        # As keras.utils.set_random_seed decides.
        drawn = posenc.init_params(scheme, random.randint(0, 2**31) if seed is None else seed)
        self._learned = {
            name: self.add_weight(
                shape=first.shape, name=name, dtype="float32", autocast=False,
                initializer=lambda shape, dtype, first=first: ops.convert_to_tensor(first, dtype),
            )
            for name, first in drawn.items()
        }  # fmt: skip

    @property
    def params(self) -> Mapping[str, Tensor]:
        """The learned arrays by name, float32 whatever the dtype policy is."""
        return {name: ops.convert_to_tensor(each) for name, each in self._learned.items()}

    def get_config(self) -> dict[str, Any]:
        """The arguments of the layer, for ``.keras`` files."""
        own = {"scheme": to_json(self.scheme), "seed": self.seed}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The layer of a configuration."""
        return cls(**{**config, "scheme": from_json(config["scheme"])})


@keras.saving.register_keras_serializable(package="posenc")
class PositionEmbedding(_OfScheme):
    """Token embeddings ``(B, L, dim)`` plus the scheme's embedding of their positions.

    Parameters
    ----------
    scheme
        A scheme that embeds alone: ``Sinusoidal``, ``Learned``.
    seed
        Of first values of learned arrays. None: ``keras.utils.set_random_seed`` decides.
    keywords
        ``name``, ``dtype``, ``trainable`` of ``keras.layers.Layer``.

    Raises
    ------
    ValueError
        The scheme has no embedding, or acts in attention too.
    RuntimeError
        Keras' backend is not torch or jax.
    """

    def __init__(self, scheme: PositionScheme, *, seed: int | None = None, **keywords: Any) -> None:
        super().__init__(scheme, seed=seed, **keywords)
        if not has_embedding(scheme) or attention_part(scheme, None)[0] != NoPE():
            raise ValueError(
                f"scheme must act on embeddings alone, got {scheme}; what acts in attention is of "
                "posenc_keras.Attention"
            )

    def call(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """``x (B, L, dim)`` plus the embedding of ``positions (L,)`` or ``(B, L)``.

        Default: ``0 .. L - 1``. Give them while decoding.
        """
        at = ops.arange(x.shape[1]) if positions is None else _as_tensor("positions", positions)
        xp = _modules()[1]
        term = posenc.embedding(self.scheme, at, self.params, xp=xp)
        return add_embedding(x, term, xp=xp)

    def compute_output_spec(self, x: Any, positions: Any = None) -> Any:
        """Shape and dtype of ``x``."""
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def compute_output_shape(self, x_shape: Any) -> Any:
        """The shape of ``x``."""
        return tuple(x_shape)


@keras.saving.register_keras_serializable(package="posenc")
class Attention(_OfScheme):
    """Attention of queries, keys and values ``(B, L, H, D)`` with a positional encoding.

    ``attend = Attention(posenc.ALiBi(8), causal=True)``, and ``attend(query, key, value)`` in a
    functional model or in a layer. Projections are the caller's, as with
    ``keras.ops.dot_product_attention``. Layers of a model that share learned arrays, as T5 does,
    call one ``Attention``.

    Parameters
    ----------
    scheme
        Any ``PositionScheme`` without an embedding, which ``PositionEmbedding`` adds.
    causal, window, scale, softcap, implementation
        As in ``posenc_torch.attention`` and ``posenc_jax.attention``.
    seed
        Of first values of learned arrays. None: ``keras.utils.set_random_seed`` decides.
    keywords
        ``name``, ``dtype``, ``trainable`` of ``keras.layers.Layer``.

    Raises
    ------
    ValueError
        The scheme has an embedding.
    RuntimeError
        Keras' backend is not torch or jax.
    """

    def __init__(
        self,
        scheme: PositionScheme,
        *,
        causal: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        implementation: str = "auto",
        seed: int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(scheme, seed=seed, **keywords)
        if has_embedding(scheme):
            raise ValueError(
                f"scheme adds an embedding, which is of posenc_keras.PositionEmbedding, got "
                f"{scheme}; give the rest of it, or posenc.NoPE()"
            )
        self.causal = check_flag("causal", causal)
        check_window(window)
        if scale is not None:
            check_scale(scale, 64)  # a call knows in which dtype it computes, and checks it again
        if softcap is not None:
            check_softcap(softcap, 64)
        check_implementation(implementation, _modules()[0].IMPLEMENTATIONS)
        self.options = {
            "window": window, "scale": scale, "softcap": softcap, "implementation": implementation,
        }  # fmt: skip

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        x: Tensor | None = None,
        cache: tuple[Tensor, ...] | None = None,
        key_mask: Tensor | None = None,
    ) -> Any:
        """Attention ``(B, Q, H, Dv)``; with a cache, also the cache that holds these tokens.

        Parameters
        ----------
        query, key, value
            ``(B, Q, H, D)``, ``(B, K, Hk, D)``, ``(B, K, Hk, Dv)``; ``Hk`` divides ``H``.
        positions
            Integers ``(L,)`` or ``(B, L)`` of queries, and of keys if there are as many; otherwise
            keys are at ``0 .. K - 1``. Of a scheme with several axes: coordinates ``(B, L, axes)``.
            Default: the ends of queries and keys coincide.
        key_positions
            Those of keys, if they are others.
        attention_mask
            Booleans or integers ``(B, Q, K)`` or ``(B, 1 or H, Q, K)``: what a query sees.
        x
            Hidden states ``(B, K, C)`` of the keys' tokens, for a scheme that reads them (FoX).
            Those of the queries' tokens are the last ``Q`` of them; where positions can be read,
            others are refused if the scheme reads them (RePo).
        cache
            Keys ``(B, slots, Hk, D)`` and values ``(B, slots, Hk, Dv)``; and hidden states
            ``(B, slots, C)`` for a scheme that reads them, which are then ``x`` of new tokens
            alone. First zeros, then what the last call returned. Slot ``p`` holds the token at
            position ``p``; needs ``positions (B, Q)``, which differ in a row, and ``causal=True``.
        key_mask
            Booleans or integers ``(B, K)``: which keys exist. Default: the mask that Keras says
            ``key`` carries, which most of its layers that reshape drop. With a cache, keys that do
            not exist must be at later positions than the others of their row: nobody sees them, and
            the next tokens take their slots. Checked where values can be read.

        Raises
        ------
        TypeError, ValueError
            As those of ``attention``; an argument that a cache needs is missing or is given beside
            it.
        """
        at, of_keys = _as_tensor("positions", positions), _as_tensor("key_positions", key_positions)
        if cache is not None:
            self._check_cache(cache, query, at, of_keys)
            _check_slots(at, _as_tensor("key_mask", key_mask))
            key_mask = None
            new = self._check_parts(cache, key, value, x)
            cache = tuple(_written(old, at, each) for old, each in zip(cache, new, strict=True))
            key, value, of_keys = *cache[:2], ops.arange(cache[0].shape[1])
        elif at is not None and of_keys is None and query.shape[1] != key.shape[1]:
            of_keys = ops.arange(key.shape[1])
        elif at is None and of_keys is not None:
            raise ValueError("key_positions are given without positions, those of queries")
        every_x = x if cache is None or x is None else cache[2]
        tokens, queries = Tokens(x=every_x, exists=_as_bool("key_mask", key_mask)), None
        if of_keys is None:
            tokens = _at(tokens, at)
        else:
            newest = None if x is None else x[:, x.shape[1] - query.shape[1] :]
            tokens, queries = _at(tokens, of_keys), _at(Tokens(x=newest), at)
            if cache is None and needs_own_hidden(self.scheme, queries, tokens, _modules()[1]):
                raise ValueError(
                    f"x: {type(self.scheme).__name__} reads hidden states of the queries' tokens "
                    "too, and positions are not the last of key_positions: give queries of the "
                    "last tokens, in the order of the keys"
                )
        mask = _as_bool("attention_mask", attention_mask)
        out = self._attention(query, key, value, tokens, queries, mask)
        return out if cache is None else (out, cache)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, queries: Any, mask: Any
    ) -> Tensor:
        """Attention of the backend; that of ``posenc_torch`` has heads before tokens."""
        heads_first = keras.backend.backend() == "torch"
        if heads_first:
            q, k, v = (ops.swapaxes(each, 1, 2) for each in (q, k, v))
        if mask is not None and mask.ndim == 3:
            mask = mask[:, None]
        out = _modules()[0].attention(
            q, k, v, self.scheme, self.params, self.causal, tokens=tokens, queries=queries,
            mask=mask, **self.options,
        )  # fmt: skip
        return ops.swapaxes(out, 1, 2) if heads_first else out

    def _check_cache(self, cache: Any, query: Any, positions: Any, key_positions: Any) -> None:
        """Check the slots of the new tokens."""
        if key_positions is not None:
            raise ValueError("key_positions are those of the cache, if there is one; leave it out")
        wanted = tuple(query.shape[:2])
        if positions is None or tuple(positions.shape) != wanted:
            got = "none" if positions is None else f"shape {tuple(positions.shape)}"
            raise ValueError(
                f"cache needs positions (B, Q) = {wanted}, which are the slots of the new tokens, "
                f"got {got}"
            )
        if not self.causal:
            raise ValueError("cache needs causal=True: slots after a query hold no token yet")
        known, slots = concrete_values(positions, _modules()[1]), cache[0].shape[1]
        if known is not None and known.size and not 0 <= known.min() <= known.max() < slots:
            raise ValueError(
                f"positions must be 0 .. {slots - 1}, the slots of the cache, got {known.min()} .. "
                f"{known.max()}"
            )

    def _check_parts(self, cache: Any, key: Any, value: Any, x: Any) -> tuple[Tensor, ...]:
        """What the arrays of a cache get, which must be as many and of their shapes."""
        if reads_hidden(self.scheme) and x is None:
            raise ValueError(f"x is missing: {type(self.scheme).__name__} reads hidden states")
        new = {"keys": key, "values": value} | ({} if x is None else {"x": x})
        if len(cache) != len(new):
            raise ValueError(
                f"cache must have {len(new)} arrays: {', '.join(new)}; got {len(cache)}"
            )
        slots = cache[0].shape[1]
        for n, (name, each) in enumerate(new.items()):
            wanted = (each.shape[0], slots, *each.shape[2:])
            if tuple(cache[n].shape) != wanted:
                raise ValueError(
                    f"cache[{n}], which holds {name}, must be {wanted}, got {tuple(cache[n].shape)}"
                )
        return tuple(new.values())

    def compute_output_spec(
        self, query: Any, key: Any, value: Any, *, cache: Any = None, **keywords: Any
    ) -> Any:
        """Queries' shape with values' channels, and the cache's own shapes."""
        for name, each in (("query", query), ("key", key), ("value", value)):
            if len(each.shape) != 4:
                raise ValueError(f"{name} must be (B, L, H, D), got shape {tuple(each.shape)}")
        out = keras.KerasTensor((*query.shape[:3], value.shape[3]), self.compute_dtype)
        if cache is None:
            return out
        return out, tuple(keras.KerasTensor(each.shape, each.dtype) for each in cache)

    def compute_output_shape(self, query_shape: Any, key_shape: Any, value_shape: Any) -> Any:
        """Queries' shape with values' channels; of a call without a cache."""
        return (*query_shape[:3], value_shape[3])

    def get_config(self) -> dict[str, Any]:
        """The arguments of the layer, for ``.keras`` files."""
        return {**super().get_config(), "causal": self.causal, **self.options}


def _at(tokens: Tokens, positions: Tensor | None) -> Tokens:
    """``tokens`` at positions, or at coordinates ``(B, L, axes)``."""
    name = "places" if positions is not None and positions.ndim == 3 else "pos"
    return Tokens(**{name: positions}, x=tokens.x, exists=tokens.exists)


def _as_tensor(name: str, values: Any) -> Any:
    """An array as it is, a list of numbers as an array of Keras' backend; None for None."""
    if values is None or hasattr(values, "dtype"):
        return values
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be an array, got {type(values).__name__}")
    return ops.convert_to_tensor(np.asarray(values))


def _check_slots(positions: Any, key_mask: Any) -> None:
    """Check that each new token has a slot, and that those that do not exist have the last ones."""
    if key_mask is not None and tuple(key_mask.shape) != tuple(positions.shape):
        raise ValueError(
            f"key_mask beside a cache is of the new tokens, (B, Q) = {tuple(positions.shape)}, got "
            f"shape {tuple(key_mask.shape)}"
        )
    at = concrete_values(positions, _modules()[1])
    if at is None:
        return
    every = ops.ones_like(positions) if key_mask is None else key_mask
    mask = concrete_values(every, _modules()[1])
    if mask is None:
        return
    for own, real in zip(at, mask != 0, strict=True):
        if len(np.unique(own[real])) != real.sum():
            raise ValueError(
                f"positions must differ, because each is the slot of one new token, got {own[real]}"
            )
    last = np.max(np.where(mask, at, -1), axis=1, keepdims=True)
    if np.any((mask == 0) & (at <= last)):
        raise ValueError(
            "key_mask hides keys that are not after all others of their row; with a cache, keys "
            "that do not exist must be at later positions"
        )


def _as_bool(name: str, mask: Any) -> Any:
    """A mask as booleans; a floating one may be a term of the scores, which is another thing."""
    mask = _as_tensor(name, mask)
    if mask is None:
        return None
    if keras.backend.is_float_dtype(keras.backend.standardize_dtype(mask.dtype)):
        raise TypeError(f"{name} must be boolean or integer, got {mask.dtype}")
    return ops.cast(mask, "bool")


def _written(old: Tensor, positions: Tensor, new: Tensor) -> Tensor:
    """``old (B, slots, ...)`` with ``new (B, L, ...)`` in the slots ``positions (B, L)``."""
    rows = ops.broadcast_to(ops.arange(old.shape[0])[:, None], positions.shape)
    at = ops.stack([ops.cast(rows, "int32"), ops.cast(positions, "int32")], axis=-1)
    every = ops.reshape(ops.cast(new, old.dtype), (-1, *new.shape[2:]))
    return ops.scatter_update(old, ops.reshape(at, (-1, 2)), every)
