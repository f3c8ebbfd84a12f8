"""transformers: scores that grow with position or context, by attention modules of its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, Llama4TextConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama4 import modeling_llama4
from transformers.models.ministral3 import modeling_ministral3

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc_torch.audit.runs import HALF, added_mask, candidate, groups

NAME = "transformers"
LENGTH = 16  # a training length that the grid's near positions are beyond
# Half of their functions have no types.
deepseek: Any = modeling_deepseek_v3
llama4: Any = modeling_llama4
ministral3: Any = modeling_ministral3


def candidates() -> Iterator[Candidate]:
    """Every function."""
    yield candidate(
        NAME, "ministral3: x * get_llama_4_attn_scale(pos, 0.1, L)",
        f"log_scale:kind=ministral3,train_len={LENGTH}", "rotation", lambda sizes: _ministral,
        dtypes=HALF,
    )  # fmt: skip
    yield candidate(
        NAME, "llama4: Llama4TextAttention of a layer without rotation",
        f"log_scale:kind=llama4,train_len={LENGTH}", "attention", _llama4, differentiable=False,
    )  # fmt: skip
    yield candidate(
        NAME, "deepseek_v3: apply_rotary_pos_emb_interleave, DeepseekV3Attention.scaling",
        "rope_yarn:layout=interleaved,factor=40,train_len=4096,mscale=1,mscale_all_dim=1,apply_to=scale",
        "attention", _deepseek, dtypes=("float32", "bfloat16"),
    )  # fmt: skip


def _ministral(x: Tensor, pos: Tensor) -> Tensor:
    found: Tensor = x * ministral3.get_llama_4_attn_scale(pos, 0.1, LENGTH).to(x.dtype)
    return found


def _llama4(sizes: Sizes) -> Callable[..., Tensor]:
    config = Llama4TextConfig(
        hidden_size=sizes.num_heads * sizes.head_dim, head_dim=sizes.head_dim,
        num_attention_heads=sizes.num_heads, num_key_value_heads=sizes.num_heads,
        num_hidden_layers=1, no_rope_layers=[0], floor_scale=LENGTH, attn_scale=0.1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer = llama4.Llama4TextAttention(config, 0).eval()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        del layer._modules[name]
        layer.__dict__[name] = _as_it_is

    def f(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        layer.num_key_value_groups = groups(q, k)
        keys = torch.arange(k.shape[2])
        seen = k.shape[2] - q.shape[2]
        if bool((k_pos != keys).any()) or bool((q_pos != keys[seen:]).any()):
            raise CannotExpressError("it counts tokens from the first key, and takes no positions")
        cache = SimpleNamespace(get_seq_length=lambda layer: seen, update=lambda *new: (k, v))
        flat = q.transpose(1, 2).flatten(-2)
        found: Tensor = layer(flat, None, added_mask(mask, q.dtype), past_key_values=cache)[0]
        return found.view(*q.transpose(1, 2).shape).transpose(1, 2)

    return f


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _deepseek(sizes: Sizes) -> Callable[..., Tensor]:
    width = sizes.num_heads * sizes.head_dim
    config = DeepseekV3Config(
        hidden_size=width, num_attention_heads=sizes.num_heads, num_hidden_layers=1,
        num_key_value_heads=sizes.num_heads, qk_nope_head_dim=0, qk_rope_head_dim=sizes.head_dim,
        max_position_embeddings=163_840, rope_parameters={
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        },
    )  # fmt: skip
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)
    with torch.device("meta"):
        scaling = deepseek.DeepseekV3Attention(config, 0).scaling
    rotate = partial(_rotated, rotary)

    def f(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        layer = SimpleNamespace(num_key_value_groups=groups(q, k), training=False)
        found: Tensor = deepseek.eager_attention_forward(
            layer, rotate(q, q_pos), rotate(k, k_pos), v, added_mask(mask, q.dtype), scaling
        )[0]
        return found.transpose(1, 2)

    return f


def _rotated(rotary: Any, x: Tensor, pos: Tensor) -> Tensor:
    found: Tensor = deepseek.apply_rotary_pos_emb_interleave(x, x, *rotary(x, pos))[0]
    return found
