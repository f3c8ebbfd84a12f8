"""Peers in PyTorch, by what they compute. Modules are imported when a call is made ready."""

from __future__ import annotations

from harness.peers import torch_attention, torch_biases, torch_embeddings, torch_rotations
from harness.peers.side import Peer

_IDEAS = torch_rotations, torch_biases, torch_embeddings, torch_attention


def peers() -> list[Peer]:
    """Every peer in PyTorch."""
    return [peer for idea in _IDEAS for peer in idea.peers()]
