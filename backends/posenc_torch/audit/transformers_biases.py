"""transformers: ALiBi and T5's bias, by the functions of its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import MptConfig, T5Config
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.mpt import modeling_mpt as mpt
from transformers.models.t5.modeling_t5 import T5Attention

from posenc.audit import Candidate, Sizes
from posenc.audit.adapters import bias_of_keys, causal_alibi, square_of
from posenc_torch.audit.runs import candidate

NAME = "transformers"
Bias = Callable[[int, Tensor, Tensor], Tensor]


def candidates() -> Iterator[Candidate]:
    """Every bias."""
    for module in (bloom, falcon):
        name = module.__name__.rpartition("_")[2]
        yield candidate(
            NAME, f"{name}: build_alibi_tensor(mask, H, dtype)", "alibi", "bias",
            lambda sizes, module=module: _of_keys(partial(_by_mask, module)),
            causal_alibi, differentiable=False,
        )  # fmt: skip
    yield candidate(
        NAME, "mpt: build_mpt_alibi_tensor(H, L)", "alibi", "bias",
        lambda sizes: _of_keys(_mpt_tensor), causal_alibi, differentiable=False,
    )  # fmt: skip
    yield candidate(
        NAME, "mpt: MptModel with alibi_bias_max=4", "alibi:max_bias=4", "bias",
        lambda sizes: _of_keys(_mpt_model), partial(causal_alibi, max_bias=4.0),
        differentiable=False,
    )  # fmt: skip
    for causal in (False, True):
        label = f"t5:num_buckets=32,max_distance=128,causal={causal}"
        yield candidate(
            NAME, f"t5: T5Attention(is_decoder={causal}).compute_bias", label, "bias",
            partial(_t5, causal),
        )  # fmt: skip
        yield candidate(
            NAME, f"t5: T5Attention(is_decoder={causal})._relative_position_bucket", label, "bias",
            partial(_t5_of_pairs, causal),
        )  # fmt: skip


def _of_keys(build: Callable[[int, int], Tensor]) -> Bias:
    f = bias_of_keys(lambda heads, length: build(heads, length)[:, 0])
    return lambda num_heads, q_pos, k_pos: torch.as_tensor(f(num_heads, q_pos, k_pos))


def _by_mask(module: Any, num_heads: int, length: int) -> Tensor:
    mask = torch.ones(1, length, dtype=torch.int64)
    found: Tensor = module.build_alibi_tensor(mask, num_heads, torch.float32)
    return found


def _mpt_tensor(num_heads: int, length: int) -> Tensor:
    found: Tensor = mpt.build_mpt_alibi_tensor(num_heads, length)
    return found


def _mpt_model(num_heads: int, length: int) -> Tensor:
    """The bias that a layer of the model is given, for this configuration."""
    config = MptConfig(
        d_model=8 * num_heads, n_heads=num_heads, n_layers=1, vocab_size=8, max_seq_len=length,
        expansion_ratio=1, attn_config={"alibi_bias_max": 4}, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = mpt.MptModel(config).eval()
    seen: list[Tensor] = []

    def keep(*given: Any, position_bias: Tensor, **rest: Any) -> Any:
        seen.append(position_bias)
        raise _SeenError

    for block in model.blocks:
        block.forward = keep
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    except _SeenError:
        return seen[0]
    raise RuntimeError("MptModel gave its layers no position_bias")


class _SeenError(Exception):
    """The model has made its bias."""


def _attention(causal: bool, sizes: Sizes) -> T5Attention:
    config = T5Config(
        d_model=sizes.num_heads, num_heads=sizes.num_heads, d_kv=1, is_decoder=causal,
        relative_attention_num_buckets=32, relative_attention_max_distance=128,
    )  # fmt: skip
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()


def _t5(causal: bool, sizes: Sizes) -> Callable[..., Tensor]:
    layer = _attention(causal, sizes)
    del layer._modules["relative_attention_bias"]  # its weight is no leaf of the audit's gradient

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor, table: Tensor) -> Tensor:
        queries, keys = square_of(q_pos, k_pos)
        layer.__dict__["relative_attention_bias"] = lambda index: _rows(table, index)
        found: Tensor = layer.compute_bias(
            queries, keys, device=table.device, past_seen_tokens=keys - queries
        )[0]
        return found

    return f


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Entries ``(..., H)`` of a table ``(H, buckets)``, as the layer's embedding reads them."""
    return torch.nn.functional.embedding(index, table.T)


def _t5_of_pairs(causal: bool, sizes: Sizes) -> Callable[..., Tensor]:
    layer = _attention(causal, sizes)

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor, table: Tensor) -> Tensor:
        buckets = layer._relative_position_bucket(
            k_pos[None, :] - q_pos[:, None], bidirectional=not causal, num_buckets=32,
            max_distance=128,
        )  # fmt: skip
        return _rows(table, buckets).movedim(-1, 0)

    return f
