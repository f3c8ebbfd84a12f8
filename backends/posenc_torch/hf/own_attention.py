"""Models whose attention is code of their own: BLOOM, CodeGen, Falcon, GPT-J, GPT-Neo, MPT.

They do not call the attention function of their configuration. So ``forward`` of their attention
modules is replaced by ``forward`` of this file. It projects hidden states with the weights of the
module, updates the cache with keys before any position, and calls posenc.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from posenc.backend import LayerPlan, has_embedding
from posenc.presets import from_hf_config
from posenc.schemes import ALiBi
from posenc_torch.hf.embeddings import PositionTable
from posenc_torch.hf.family import Family
from posenc_torch.hf.layer import LAYER, attention_function, layer_of
from posenc_torch.hf.masks import as_existence


@dataclass(frozen=True)
class OwnAttention:
    """What differs among the attention modules of these families.

    Attributes
    ----------
    split
        Queries, keys and values ``(B, L, H, D)`` of hidden states ``(B, L, C)``.
    out
        The result of the module, from attention ``(B, L, C)`` and from what the module is called
        with after hidden states.
    dropout
        The part of attention weights that it drops in training.
    """

    split: Callable[[Any, Tensor], Any]
    out: Callable[..., Tensor]
    dropout: Callable[[Any], float]

    def prepare(self, model: nn.Module, applied: Any) -> None:
        """Replace ``forward`` of every attention module, as ``Family.prepare``."""
        config = model.config.get_text_config()  # type: ignore[operator, union-attr]
        for module in list(model.modules()):
            if not hasattr(module, LAYER):
                continue
            applied.replace(module, "forward", functools.partial(forward, module, self))
            layer = layer_of(module)
            if layer.own_params is None and isinstance(layer.scheme, ALiBi):
                applied.before(module, functools.partial(_one_way, config))


def forward(
    module: Any,
    own: OwnAttention,
    hidden_states: Tensor,
    *given: Any,
    attention_mask: Tensor | None = None,
    layer_past: Any = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a module; the cache has either name, and ``others`` concern its own code."""
    q, k, v = (x.transpose(1, 2) for x in own.split(module, hidden_states))
    cache = layer_past if past_key_values is None else past_key_values
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx)
    out, _ = attention_function(
        module, q, k, v, attention_mask, scaling=getattr(module, "softmax_scale", None),
        dropout=own.dropout(module) if module.training else 0.0,
    )  # fmt: skip
    return own.out(module, out.flatten(2), *given), None


def _one_way(config: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Hook before attention with ALiBi: transformers' bias grows with keys after the query."""
    if not getattr(config, "is_causal", True):
        raise NotImplementedError(
            "is_causal=False: after the query, ALiBi of transformers grows and that of posenc "
            "falls; give apply a scheme, as posenc.ALiBi(num_heads)"
        )


def _heads(module: Any, x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, module.head_dim)


def _gptj(module: Any, x: Tensor) -> Any:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    return (_heads(module, project(x)) for project in projections)


def _codegen(module: Any, x: Tensor) -> Any:
    """The weights are in four parts, each with queries, values and keys of a quarter of heads."""
    parts = module.qkv_proj(x)
    q, v, k = parts.view(*x.shape[:-1], 4, 3, -1).unbind(-2)
    return (_heads(module, part.flatten(-2)) for part in (q, k, v))


def _bloom(module: Any, x: Tensor) -> Any:
    """The weights have queries, keys and values of the first head, then those of the second."""
    every = module.query_key_value(x)
    return every.view(*x.shape[:-1], -1, 3, module.head_dim).unbind(-2)


def _mpt(module: Any, x: Tensor) -> Any:
    every = module.Wqkv(x)
    if module.clip_qkv:
        every = every.clamp(-module.clip_qkv, module.clip_qkv)
    return (_heads(module, part) for part in every.chunk(3, dim=-1))


def _residual(module: Any, out: Tensor, residual: Tensor) -> Tensor:
    return residual + functional.dropout(module.dense(out), module.hidden_dropout, module.training)


def _falcon(module: Any, x: Tensor) -> Any:
    return module._split_heads(module.query_key_value(x))


def _falcon_dropout(module: Any) -> Any:
    """Its eager code drops weights under ALiBi alone."""
    return module.attention_dropout.p if module.config.alibi else 0.0


def _dropped(module: Any, out: Tensor) -> Any:
    return module.resid_dropout(module.out_proj(out))


def _dense(module: Any, out: Tensor) -> Any:
    return module.dense(out)


def _out_proj(module: Any, out: Tensor) -> Any:
    return module.out_proj(out)


# Functions with names, so that a model can be pickled.
_BLOOM = OwnAttention(_bloom, _residual, attrgetter("attention_dropout.p"))
_FALCON = OwnAttention(_falcon, _dense, _falcon_dropout)
_GPTJ = OwnAttention(_gptj, _dropped, attrgetter("attn_dropout.p"))
_CODEGEN = replace(_GPTJ, split=_codegen)
_MPT = OwnAttention(_mpt, _out_proj, attrgetter("attn_dropout_p"))


def _prepare_falcon(model: nn.Module, applied: Any) -> None:
    """Beside the modules: the model adds ALiBi to its mask."""
    _FALCON.prepare(model, applied)
    for module in model.modules():
        if hasattr(module, "use_alibi"):
            applied.replace(module, "use_alibi", False)


def _prepare_mpt(model: nn.Module, applied: Any) -> None:
    """Beside the modules: the model cannot take None for a mask."""
    _MPT.prepare(model, applied)
    for module in model.modules():
        if hasattr(module, "build_mpt_alibi_tensor"):
            applied.before(module, _with_mask)
        if hasattr(module, LAYER):
            applied.before(module, _with_existence)


def _prepare_gpt_neo(model: nn.Module, applied: Any) -> None:
    """Beside the modules: scores are not scaled, and positions are those of a table."""
    PositionTable("wpe").prepare(model, applied)
    _GPTJ.prepare(model, applied)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, LAYER):
            applied.replace(module, "softmax_scale", 1.0)
            applied.replace(module, "layer_idx", module.layer_id)


def _with_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before an MPT model: a mask of tokens that all exist, if none is given.

    The model makes booleans of a whole mask. True is then a term below 0, and here a visible pair.
    """
    call = inspect.signature(module.forward).bind(*args, **kwargs)
    given = call.arguments
    mask = given.get("attention_mask")
    tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    if mask is None:
        cache = given.get("past_key_values")
        length = tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
        given["attention_mask"] = tokens.new_ones((len(tokens), length), dtype=torch.bool)
    elif mask.ndim == 4:
        seen = mask >= 0 if mask.is_floating_point() else mask
        given["attention_mask"] = seen.expand(-1, -1, tokens.shape[1], -1)
    return call.args, call.kwargs


def _with_existence(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before attention of MPT: what the model made booleans says again which keys exist."""
    mask = kwargs["attention_mask"]
    return args, {**kwargs, "attention_mask": as_existence(mask) if mask.shape[2] == 1 else mask}


def _mpt_plan(config: Any) -> LayerPlan:
    plan = from_hf_config(config)
    if any(map(has_embedding, plan.schemes)):
        raise ValueError(
            "attn_config.alibi=False, learned_pos_emb=True: MPT has no such table here"
        )
    return plan


_OWN = {
    "bloom": Family(attention="self_attention", rotary=None, prepare=_BLOOM.prepare),
    "codegen": Family(attention="attn", rotary=None, prepare=_CODEGEN.prepare),
    "falcon": Family(attention="self_attention", rotary=None, prepare=_prepare_falcon),
    "gpt_neo": Family(
        attention="attention",
        rotary=None,
        always_causal=True,
        table_positions=True,
        prepare=_prepare_gpt_neo,
    ),
    "gptj": Family(attention="attn", rotary=None, prepare=_GPTJ.prepare),
    "mpt": Family(attention="attn", rotary=None, plan=_mpt_plan, prepare=_prepare_mpt),
}
OWN_ATTENTION = {kind: replace(family, own_attention=True) for kind, family in _OWN.items()}
"""The families of this file, by ``model_type``."""
