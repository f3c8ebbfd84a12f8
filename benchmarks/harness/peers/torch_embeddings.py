"""PyTorch libraries' embeddings of positions, each in its own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.peers.side import FLOAT32_ANGLES, Inputs, Leaf, Peer, Side
from harness.peers.torch_weights import weight


def _sinusoidal_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.x_transformers import ScaledSinusoidalEmbedding

    dim = inputs.scheme.dim
    embedding = ScaledSinusoidalEmbedding(dim)
    embedding.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    x = inputs.constant(inputs.host["x"])
    return Side(lambda: embedding(x), {})


def _learned_by_x_transformers(inputs: Inputs) -> Side:
    from x_transformers.x_transformers import AbsolutePositionalEmbedding

    leaf, x = inputs.leaf("params.table"), inputs.constant(inputs.host["x"])
    embedding = AbsolutePositionalEmbedding(leaf.array.shape[1], leaf.array.shape[0])
    embedding.scale = 1.0
    return _with_table(embedding.emb, leaf, lambda: embedding(x))


def _learned_by_torch(inputs: Inputs) -> Side:
    leaf, at = inputs.leaf("params.table"), inputs.positions
    embedding = torch.nn.Embedding(*leaf.array.shape)
    return _with_table(embedding, leaf, lambda: embedding(at))


def _learned_by_transformers(inputs: Inputs) -> Side:
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

    leaf, at = inputs.leaf("params.table"), inputs.positions[None]
    rows, dim = leaf.array.shape
    embedding = OPTLearnedPositionalEmbedding(rows - 2, dim)
    return _with_table(embedding, leaf, lambda: embedding(None, position_ids=at))


def _with_table(module: Any, leaf: Any, call: Callable[[], Any], axes: Any = None) -> Side:
    """A module with this table as its weights."""
    module.weight = weight(leaf)
    return Side(lambda own: call(), {"params.table": Leaf(module.weight, leaf.axes)}, axes)


def peers() -> list[Peer]:
    """Every embedding."""
    x, eager = "x-transformers", ("eager",)
    return [
        Peer(x, "sinusoidal", "embedding", "ScaledSinusoidalEmbedding(dim)(x)",
             _sinusoidal_by_x_transformers, ("eager", "compile"), {"layout": "concatenated"},
             differs=FLOAT32_ANGLES),
        Peer("torch", "learned", "embedding", "nn.Embedding(L, dim)(at)", _learned_by_torch, eager),
        Peer(x, "learned", "embedding", "AbsolutePositionalEmbedding(dim, L)(x)",
             _learned_by_x_transformers, eager),
        Peer("transformers", "learned", "embedding", "OPTLearnedPositionalEmbedding(L, dim)(at)",
             _learned_by_transformers, eager, {"offset": 2}),
    ]  # fmt: skip
