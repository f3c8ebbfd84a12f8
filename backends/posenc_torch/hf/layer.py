"""What an attention module of transformers calls instead of its own function."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from posenc import Tokens
from posenc.backend import Arguments, Hook, PositionScheme, Shared, attention_part, reads_hidden
from posenc.positions import MAX_POSITION
from posenc.schemes import Chunk, NoPE, Sink, Sum
from posenc_torch.api import attention
from posenc_torch.bound import AfterVectors, attend_shared
from posenc_torch.hf.family import Family
from posenc_torch.hf.masks import given_mask
from posenc_torch.hf.tokens import Sides, tokens_of_call
from posenc_torch.sharing import is_alone, new_shared

# Names of attributes of attention modules: of one with positions, and of one without.
LAYER, CROSS = "_posenc_layer", "_posenc_cross"
IDS = "_posenc_ids"  # of cosines: the positions from which the rotary module made them


@dataclass
class ForwardPositions:
    """The positions of a forward pass, read once for all layers.

    Attributes
    ----------
    ids
        ``position_ids`` as the model gives them to its layers.
    places
        What schemes encode.
    default
        Whether they are 0, 1, 2, ... in every row.
    length
        Their highest and 1, when it was asked for.
    text
        ``position_ids`` of text, ``(B or 1, L)``, beside ``ids`` of several axes; None: none.
    made
        What layers have in common in this forward pass, and of which objects it was made.
    """

    ids: Tensor | None = None
    places: Tensor | None = None
    default: bool = False
    length: int | None = None
    text: Tensor | None = None
    made: dict[Hashable, tuple[Shared, tuple[Any, ...]]] = field(default_factory=dict)

    def read(self, ids: Tensor, family: Family) -> None:
        """Take the positions of a forward pass, unless they are those already taken."""
        if ids is self.ids:
            return
        self.ids, self.places, self.length = ids, family.places(ids), None
        self.default = self.places.ndim == 2 and not torch.compiler.is_compiling()
        if self.default:
            expected = torch.arange(ids.shape[-1], device=ids.device).expand_as(self.places)
            self.default = torch.equal(self.places, expected)

    def forget(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Hook before a model: the same tensor may hold other positions now."""
        self.ids = self.places = self.length = self.text = None
        self.made = {}

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook after a model: what its layers shared is not kept."""
        self.made = {}

    def shared(self, key: Hashable, *same: Any) -> Shared:
        """What layers with an equal key share, if they are called with the same objects too."""
        found, of = self.made.get(key, (None, ()))
        if found is None or any(a is not b for a, b in zip(of, same, strict=True)):
            found = new_shared()
            self.made[key] = found, same
        return found

    def on_one_axis(self) -> Tensor | None:
        """Places ``(B or 1, L)``: those of text, or the largest of the coordinates, as in text."""
        if self.places is None or self.places.ndim == 2:
            return self.places
        return self.places.amax(-1) if self.text is None else self.text

    def context(self, keys: int) -> int:
        """The length of the context: the highest position and 1, or the number of keys."""
        if self.ids is None:
            return keys
        if self.length is None:
            self.length = int(self.ids.max()) + 1
        return self.length


@dataclass
class Layer:
    """Scheme, window and tokens of one attention module.

    Attributes
    ----------
    index, layers
        Which layer of how many this is, in its stack.
    scheme, window
        Those of the plan.
    family
        The family of the model.
    implementation
        That of ``posenc_torch.attention``.
    positions
        The positions of the forward pass, which layers share.
    source
        The attention module whose weights hold the learned arrays of the family's plan: another
        layer's, if layers share them.
    first
        The first layer of the model with the same learned arrays.
    own_params
        Returns the learned arrays of a scheme that the caller gave; None for the
        family's own plan.
    embed
        Adds the embeddings of such schemes; None after the first layer.
    reads_more
        Whether it reads keys that the model's own layer does not, so that caches may drop them.
    tokens
        The tokens of the present call.
    grows
        Whether the scheme depends on the length of the context, which a GPU waits for.
    unchunked
        The scheme beside a whole mask, which has the chunks of the model.
    """

    index: int
    layers: int
    scheme: PositionScheme
    window: int | None
    family: Family
    implementation: str
    positions: ForwardPositions
    source: nn.Module
    first: int = 0
    own_params: Callable[[], Mapping[str, Tensor]] | None = None
    embed: Callable[..., Tensor] | None = None
    reads_more: bool = False
    tokens: Sides | None = field(default=None, init=False)
    grows: bool = field(init=False)
    unchunked: PositionScheme = field(init=False)

    def __post_init__(self) -> None:
        self.grows = self.scheme.at_length(MAX_POSITION) != self.scheme
        self.unchunked = _without_chunks(self.scheme)

    def before_layer(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Hook before a layer: read positions, and before the first layer add embeddings."""
        self._read(kwargs)
        if self.embed is None:
            return None
        if self.positions.ids is None:
            raise NotImplementedError(
                f"{type(self.scheme).__name__} adds an embedding of positions, but layers of this "
                "model get no position_ids; give a scheme that acts on attention"
            )
        hidden, *others = args or (kwargs.pop("hidden_states"),)
        return (self.embed(hidden, self.positions.on_one_axis()), *others), kwargs

    def _read(self, kwargs: dict[str, Any]) -> None:
        """Read the positions that a layer or its attention module is called with, if any."""
        if self.family.rotary_positions:
            self.positions.text = kwargs.get("position_ids")
        ids = None if self.family.rotary_positions else kwargs.get("position_ids")
        if ids is None:
            angles = kwargs.get("position_embeddings")
            ids = getattr(angles[0] if isinstance(angles, tuple) else angles, IDS, None)
        if ids is not None:
            self.positions.read(ids, self.family)

    def before_attention(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Hook before an attention module: note its tokens.

        It reads positions again: checkpointing of gradients repeats a layer without its hook, and
        there may have been another forward pass in the meantime.
        """
        from transformers.cache_utils import Cache

        self._read(kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        if getattr(module, "is_kv_shared_layer", False):  # keys are those of an earlier layer
            tokens = kwargs["shared_kv_states"].posenc_tokens[_kind(module)]
            self.tokens = tokens.of_last_queries(hidden)
        else:
            caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
            cache = caches[0] if caches else None
            # With an encoder's tokens in the cache: those of the decoder.
            self.tokens = self.tokens_of(hidden, getattr(cache, "self_attention_cache", cache))
        if getattr(module, "store_full_length_kv", False):
            shared = vars(kwargs["shared_kv_states"]).setdefault("posenc_tokens", {})
            shared[_kind(module)] = self.tokens
        if self.family.hides_positions:
            kwargs["position_ids"] = torch.zeros_like(kwargs["position_ids"])
        return args, kwargs

    def tokens_of(self, hidden: Tensor, cache: Any) -> Sides:
        """The tokens of a call with these hidden states and this cache or None."""
        of_hidden = reads_hidden(self.scheme)
        places = self._places()
        seen = 0 if cache is None else cache.get_seq_length(self.index) + hidden.shape[1]
        tokens = tokens_of_call(hidden, places, cache, self.index, self.layers, of_hidden)
        keys, queries = tokens
        if places is None and self.scheme.axes > 1 and queries is not None:
            keys, queries = (self._on_every_axis(side) for side in (keys, queries))
        if self.reads_more and keys.pos is not None and keys.pos.shape[1] < seen:
            raise ValueError(
                f"past_key_values dropped keys that layer {self.index} reads with another scheme "
                "or window than the model's; give past_key_values=transformers.DynamicCache(), "
                "which keeps all"
            )
        if queries is None and self.positions.default:
            keys = replace(keys, places=None)
        return Sides(keys, queries)

    def _on_every_axis(self, side: Tokens) -> Tokens:
        """The same tokens, whose places ``(B or 1, L)`` are on as many axes as the scheme has."""
        assert side.places is not None
        return replace(side, places=side.places[..., None].expand(-1, -1, self.scheme.axes))

    def _places(self) -> Tensor | None:
        """What the scheme encodes, on as many axes as it has; the index if the model has others."""
        places, axes = self.positions.places, self.scheme.axes
        if axes == 1:
            return self.positions.on_one_axis()
        if places is None or (places.ndim == 3 and axes == places.shape[-1]):
            return places
        return places[..., None].expand(-1, -1, axes) if places.ndim == 2 else None

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Attention ``(B, H, Q, Dv)`` of the module's queries, keys and values.

        Parameters
        ----------
        mask
            As transformers passed it on. A whole mask stands instead of ``causal`` and the window
            and chunks, if the family is not ``always_causal``.
        scaling, softcap, sink
            The factor and the cap of the scores, and the logits ``(H,)`` of the model.
        """
        tokens, self.tokens = self.tokens, None  # hidden states, which are not kept longer
        if tokens is None:
            raise RuntimeError(f"{type(module).__name__} was called without its hooks")
        shared = None
        if tokens.queries is None and tokens.keys.pos is None and not is_alone():
            # Without earlier tokens in a cache, of which each layer has its own record.
            always = self.family.always_causal
            of_layer = self.scheme, self._arrays(sink), self.window, always, causal
            of_call = q.shape[0], q.shape[2], k.shape[2], q.dtype, q.device
            shared = self.positions.shared((of_layer, of_call), mask, tokens.keys.places)
        also = (scaling, softcap) if tokens.keys.x is None else ...

        def arguments() -> AfterVectors:
            return self._arguments(tokens, q, k, mask, scaling, softcap, sink, causal)

        q, k = (self.family.channels(module, x) for x in (q, k))
        out: Tensor = attend_shared(shared, q, k, v, also, arguments)
        return out

    def _arguments(
        self,
        tokens: Sides,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        softcap: float | None,
        sink: Tensor | None,
        causal: bool,
    ) -> AfterVectors:
        """The arguments of attention after the vectors, as ``attend`` is called with them."""
        exists, whole = given_mask(mask)
        plain = whole is None
        scheme, params = attention_part(
            self.scheme if plain else self.unchunked, self._params(sink)
        )
        if self.grows:
            scheme = scheme.at_length(self.positions.context(k.shape[2]))
        options: dict[str, Any] = {}
        keys, queries = tokens
        causal = causal and (plain or self.family.always_causal)
        if plain or self.family.always_causal:
            options["window"] = self.window
        if exists is not None:
            queries = self._queries(tokens, q.shape[2])
            keys = replace(keys, exists=exists)
        elif whole is not None:
            whole = whole.expand(-1, -1, q.shape[2], -1)
            options["mask" if whole.dtype == torch.bool else "bias"] = whole
            if queries is None and keys.x is not None:
                keys = replace(keys, seg=self._documents())
        arguments = Arguments(
            tokens=keys, queries=queries, softcap=softcap, scale=self._scale(scaling, q.shape[-1]),
            **options,
        )  # fmt: skip
        return scheme, params, causal, arguments, self.implementation, True

    def _queries(self, tokens: Sides, length: int) -> Tokens:
        """The queries, also those of padding, which the model computes like any other."""
        keys, queries = tokens
        if queries is not None:
            return queries
        cut = slice(-length, None)
        pos, places = (None if a is None else a[:, cut] for a in (keys.pos, keys.places))
        return Tokens(pos, places=places, x=None if keys.x is None else keys.x[:, cut])

    def _documents(self) -> Tensor | None:
        """Segments of packed documents: one begins where positions do not go up by 1."""
        at = self.positions.ids
        if at is None or at.ndim != 2:
            return None
        return (at.diff(prepend=at[:, :1] - 1) != 1).cumsum(-1)

    def _arrays(self, sink: Tensor | None) -> Hashable:
        """What tells learned arrays of one layer from those of another; None without any."""
        if not self.scheme.param_specs() and sink is None:
            return None
        of_model = self.own_params is None or Hook.SINK in self.scheme.hooks()
        return id(self.source) if of_model else -1 - self.first

    def _params(self, sink: Tensor | None) -> Mapping[str, Tensor]:
        own = self.family.params(self.source)
        if self.own_params is not None:  # the sinks are those of the model
            sinks = {name: array for name, array in own.items() if name.startswith("sink")}
            own = {**sinks, **self.own_params()}
        return own if sink is None else {**own, "sink": sink}

    def _scale(self, scaling: float | None, head_dim: int) -> float | None:
        """The model's factor; times what a scheme that the caller gave has beside ``D**-0.5``."""
        if scaling is None or self.own_params is None or Hook.SCALE not in self.scheme.hooks():
            return scaling
        return scaling * self.scheme.scale(head_dim) * math.sqrt(head_dim)


def _without_chunks(scheme: PositionScheme) -> PositionScheme:
    """``scheme`` without a ``Chunk``, and with the names that its learned arrays have."""
    if isinstance(scheme, Sink):
        return replace(scheme, scheme=_without_chunks(scheme.scheme))
    if isinstance(scheme, Sum) and any(isinstance(part, Chunk) for part in scheme.schemes):
        return Sum(*map(_without_chunks, scheme.schemes))
    return NoPE() if isinstance(scheme, Chunk) else scheme


def dropout_name(module: Any) -> str:
    """What the configuration of a module calls the dropout of attention weights."""
    names = "attention_dropout", "attn_pdrop", "dropout_rate"
    config = getattr(module, "config", None)
    return next((name for name in names if getattr(config, name, None)), names[0])


def _kind(module: Any) -> Any:
    """What layers have in common that share keys: their type, or in Mistral Large 4 rotation."""
    return getattr(module, "layer_type", None) or module.use_rope


def layer_of(module: nn.Module) -> Layer:
    """The ``Layer`` of an attention module."""
    layer: Layer = getattr(module, LAYER)
    return layer


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls, as its own ``sdpa_attention_forward``.

    ``indices (B, Q, n)`` are the only keys that each query sees, with a whole mask.
    """
    if indices is not None and attention_mask is not None:
        chosen = torch.zeros_like(attention_mask).scatter(-1, indices[:, None].long(), True)
        attention_mask = attention_mask & chosen
    if dropout:
        raise NotImplementedError(
            f"dropout={dropout}: posenc drops no attention weights; set {dropout_name(module)} of "
            "the configuration to 0 before the model is made, or call model.eval()"
        )
    if hasattr(module, LAYER):
        out = layer_of(module).attend(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, sink=s_aux,
            causal=getattr(module, "is_causal", True),
        )  # fmt: skip
    elif not hasattr(module, CROSS):
        raise RuntimeError(
            f"{type(module).__name__} is of no model that was given to posenc_torch.hf.apply, but "
            "has the configuration of one; give apply(model) this model too, or make it from the "
            "configuration of a model before apply"
        )
    else:
        # Either text may be longer; by default, their ends are aligned.
        queries, keys = (Tokens(torch.arange(x.shape[2], device=x.device)) for x in (query, key))
        options: dict[str, Any] = {}
        exists, whole = given_mask(attention_mask)
        if exists is not None:
            keys = replace(keys, exists=exists)
        elif whole is not None:
            whole = whole.expand(-1, -1, query.shape[2], -1)
            options["mask" if whole.dtype == torch.bool else "bias"] = whole
        options |= {"tokens": keys, "queries": queries}
        out = attention(query, key, value, NoPE(), scale=scaling, **options)
    return out.transpose(1, 2).contiguous(), None
