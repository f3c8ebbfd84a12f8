"""transformers: relative positions that meet the content of queries and keys, by its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DebertaConfig, DebertaV2Config, Wav2Vec2ConformerConfig
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc.audit.adapters import params_of, row_of
from posenc_torch.audit.runs import added_mask, candidate, check_heads

NAME = "transformers"
_BUCKETS, _FAR = 32, 128
_TRANSFORMER_XL = "transformer_xl:max_distance=256,bidirectional=True"
# Half of their functions have no types.
v1: Any = modeling_deberta
v2: Any = modeling_deberta_v2
conformer: Any = modeling_wav2vec2_conformer


def candidates() -> Iterator[Candidate]:
    """Every attention."""
    yield candidate(
        NAME, "deberta_v2: DisentangledSelfAttention(...)(x, relative_pos=...)",
        f"deberta:buckets={_BUCKETS},max_distance={_FAR}", "attention",
        partial(_deberta, v2, DebertaV2Config),
    )  # fmt: skip
    yield candidate(
        NAME, "deberta: DisentangledSelfAttention(...)(x, relative_pos=...)",
        f"deberta:buckets=None,max_distance={_FAR}", "attention",
        partial(_deberta, v1, DebertaConfig),
    )  # fmt: skip
    yield candidate(
        NAME, "wav2vec2_conformer: _apply_relative_position_encoding",
        _TRANSFORMER_XL, "attention", _conformer, differentiable=False,
    )  # fmt: skip


def _deberta(module: Any, kind: Any, sizes: Sizes) -> Callable[..., Tensor]:
    width = sizes.num_heads * sizes.head_dim
    layer = module.DisentangledSelfAttention(
        kind(
            hidden_size=width, num_attention_heads=sizes.num_heads, relative_attention=True,
            pos_att_type=["c2p", "p2c"], max_relative_positions=_FAR, position_buckets=_BUCKETS,
            share_att_key=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            talking_head=False,
        )
    ).eval()  # fmt: skip

    def f(
        q: Tensor, k: Tensor, v: Tensor, p_k: Tensor, p_q: Tensor,
        mask: Tensor, q_pos: Tensor, k_pos: Tensor,
    ) -> Tensor:  # fmt: skip
        check_heads(q, k)
        row = torch.as_tensor(row_of(k_pos, in_order=False))
        if q.shape[2] != len(row):
            raise CannotExpressError("its p2c term takes as many queries as keys")
        if module is v2:
            distance = v2.make_log_bucket_position(row[:, None] - row, _BUCKETS, _FAR).long()
            made = {"query_proj": q, "key_proj": k, "value_proj": v}
            tables = {"pos_key_proj": p_k, "pos_query_proj": p_q}
        else:
            _check_in_order(row)
            distance = v1.build_relative_position(q, k)
            made = {"in_proj": torch.cat([q, k, v], -1)}
            tables = {"pos_proj": p_k, "pos_q_proj": p_q}
        projections = {name: _always(_flat(vectors)) for name, vectors in made.items()}
        projections |= {name: partial(_rows, _flat(table)) for name, table in tables.items()}
        for name, project in projections.items():
            layer._modules.pop(name, None)
            layer.__dict__[name] = project
        rows = torch.arange(p_k.shape[1])[:, None]
        found: Tensor = layer(q, mask, relative_pos=distance, rel_embeddings=rows)[0]
        return found.view(*q.transpose(1, 2).shape).transpose(1, 2)

    return f


def _check_in_order(row: Tensor) -> None:
    if not torch.equal(row, torch.arange(len(row)) + row[0]):
        raise CannotExpressError("it counts tokens, and takes no positions")


def _rows(table: Tensor, rows: Tensor) -> Tensor:
    """The rows of a table that the layer has chosen."""
    return table[rows[..., 0]]


def _flat(vectors: Tensor) -> Tensor:
    """``(B, H, L, D)``, or a table ``(H, L, D)``, as the layer's projections give it."""
    return vectors.movedim(-3, -2).flatten(-2)


def _always(value: Tensor) -> Callable[[Tensor], Tensor]:
    """A projection that gives ``value``, whatever it is given."""
    return lambda x: value


def _conformer(sizes: Sizes) -> Callable[..., Tensor]:
    width = sizes.num_heads * sizes.head_dim
    config = Wav2Vec2ConformerConfig(
        hidden_size=width, num_attention_heads=sizes.num_heads, max_source_positions=256,
        position_embeddings_type="relative", attention_dropout=0.0,
    )  # fmt: skip
    layer = conformer.Wav2Vec2ConformerSelfAttention(config).eval()
    table = conformer.Wav2Vec2ConformerRelPositionalEmbedding(config)
    given = params_of(_TRANSFORMER_XL, sizes)
    drawn = {name: torch.as_tensor(value) for name, value in given.items()}
    sines, cosines = drawn["w"].flatten(0, 1).chunk(2, dim=-1)
    loaded = {
        "linear_pos.weight": torch.stack([sines, cosines], -1).flatten(-2),  # here they alternate
        "pos_bias_u": drawn["u"], "pos_bias_v": drawn["v"],
    }  # fmt: skip
    layer.load_state_dict({**layer.state_dict(), **loaded})

    def f(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        check_heads(q, k)
        row = torch.as_tensor(row_of(k_pos))
        if q.shape[2] != len(row):
            raise CannotExpressError("it takes as many queries as keys")
        _check_in_order(row)
        turned, bias = conformer._apply_relative_position_encoding(
            layer, q, k, table(q.new_zeros(1, len(row), width))
        )
        found: Tensor = conformer.eager_attention_forward(
            SimpleNamespace(training=False),
            turned,
            k,
            v,
            added_mask(mask, q.dtype),
            layer.scaling,
            position_bias=bias,
        )[0]
        return found.transpose(1, 2)

    return f
