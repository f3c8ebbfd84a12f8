"""Learned arrays as the weights of a module."""

from __future__ import annotations

from torch.nn import Parameter

from harness.peers.side import Leaf


def weight(leaf: Leaf) -> Parameter:
    """A module's own weight, with the numbers of a leaf."""
    return Parameter(leaf.array.detach())
