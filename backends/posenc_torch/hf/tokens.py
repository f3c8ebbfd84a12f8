"""The tokens of one call: their index in the row, what the scheme encodes, their hidden states.

A cache of transformers holds keys and values of earlier tokens. What else is needed of them is kept
in further layers of the same cache, of the same kind: behind the layers of the model there is one
per layer for indices and positions, and one for hidden states if a scheme reads them. So they are
cropped, reordered and dropped together with the keys.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc import Tokens
from posenc.positions import MAX_POSITION

_OURS = "_posenc"  # marks further layers of a cache


class Sides(NamedTuple):
    """The tokens of a call: of the keys, and of the queries, or None if they are the same ones.

    ``pos`` is the index in the row. ``places`` is what the scheme encodes; None for the index. Both
    are ``(B or 1, L)``, places of several axes ``(B or 1, L, axes)``. ``x`` are hidden states, if
    the scheme reads them.
    """

    keys: Tokens
    queries: Tokens | None = None

    def of_last_queries(self, hidden: Tensor) -> Sides:
        """The same keys, and the last queries, whose hidden states are others, ``(B, Q, C)``."""
        queries = self.keys if self.queries is None else self.queries
        pos, places = (
            None if at is None else at[:, -hidden.shape[1] :]
            for at in (queries.pos, queries.places)
        )
        x = None if self.keys.x is None else hidden
        return Sides(self.keys, Tokens(pos, places=places, x=x))


def tokens_of_call(
    hidden: Tensor, places: Tensor | None, cache: Any, layer: int, layers: int, reads_hidden: bool
) -> Sides:
    """The tokens of a call with hidden states ``(B, Q, C)``; a cache keeps what they need later.

    ``layer`` of ``layers`` is the layer of the cache that holds the keys.
    """
    x = hidden if reads_hidden else None
    if cache is None:
        return Sides(Tokens(places=places, x=x))
    (batch, length), before = hidden.shape[:2], cache.get_seq_length(layer)
    index = torch.arange(length, device=hidden.device)[None] + before
    encoded = index if places is None else places
    columns = encoded if encoded.ndim == 3 else encoded[..., None]
    columns = torch.cat([t.expand(batch, -1, -1) for t in (index[..., None] + 1, columns)], -1)
    record = _append(_further(cache, layers, 0, layer), columns)
    every_x = None if x is None else _append(_further(cache, layers, 1, layer), x)
    if isinstance(before, int) and before == 0 and record.shape[1] == length:
        return Sides(Tokens(places=places, x=x))
    # 0 is the end of a static cache, which holds no token yet: after every query, so not visible.
    k_pos = torch.where(record[..., 0] == 0, MAX_POSITION, record[..., 0] - 1)
    k_places = record[..., 1:] if encoded.ndim == 3 else record[..., 1]
    keys = Tokens(k_pos, places=k_places, x=every_x)
    return Sides(keys, Tokens(index, places=encoded, x=x))


def _append(layer: Any, new: Tensor) -> Tensor:
    """What a further layer of a cache holds with ``new (B, L, C)``."""
    heads = new[:, None]
    whole: Tensor = layer.update(heads, heads[..., :0])[0]
    return whole[:, 0]


def _further(cache: Any, layers: int, group: int, layer: int) -> Any:
    """A layer of a group of further layers of a cache, which the first that needs it makes."""
    if getattr(cache, "offloading", False):
        raise NotImplementedError(
            "past_key_values offloads its layers, and would fetch the next one as that of keys; "
            "give a cache without offloading=True"
        )
    if len(cache.layers) < layers and cache.layer_class_to_replicate is None:
        raise NotImplementedError(
            f"past_key_values has {len(cache.layers)} layers, and the model {layers} "
            "(assistant_early_exit?); give one for all layers, such as "
            "transformers.DynamicCache()"
        )
    while len(cache.layers) < layers:  # a cache that adds layers when they are needed
        cache.layers.append(cache.layer_class_to_replicate())
    # An encoder with more layers than its decoder gives the cache as many as it has itself.
    while len(cache.layers) > layers and not hasattr(cache.layers[layers], _OURS):
        del cache.layers[layers]
    first = (group + 1) * layers
    if len(cache.layers) == first:
        if cache.get_seq_length(layer) != 0:
            raise ValueError(
                "past_key_values holds tokens from before apply(): their positions are not known, "
                "and their keys may be rotated; start with an empty cache"
            )
        new = [copy.copy(each) for each in cache.layers[:layers]]
        for each in new:
            if hasattr(each, "_quantize"):
                raise NotImplementedError(
                    f"past_key_values has a {type(each).__name__}, which would round positions"
                )
            # A layer may hold keys: made early, or before the first that needs the group.
            each.is_initialized, each.keys, each.values = False, None, None
            for name in {"cumulative_length", "cumulative_length_int"} & vars(each).keys():
                setattr(each, name, getattr(each, name) * 0)
            # Layers that hold states of convolutions too (Inkling) are here layers of keys alone.
            each.__class__ = next(
                kind for kind in type(each).__mro__
                if hasattr(kind, "update") and not hasattr(kind, "update_conv_state")
            )  # fmt: skip
            setattr(each, _OURS, True)
        cache.layers.extend(new)
    return cache.layers[first + layer]
