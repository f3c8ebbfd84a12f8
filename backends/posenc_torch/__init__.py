"""posenc for PyTorch: attention with any scheme, and modules that hold the learned params."""

from typing import Any

from posenc_torch.api import IMPLEMENTATIONS, attention, explain
from posenc_torch.flex.api import block_mask, score_mod
from posenc_torch.groups import param_groups
from posenc_torch.position import Position, Positions

__all__ = [
    "IMPLEMENTATIONS",
    "Position",
    "Positions",
    "attention",
    "block_mask",
    "explain",
    "param_groups",
    "score_mod",
]


def __getattr__(name: str) -> Any:
    """``posenc_torch.hf``, when it is first read: it needs transformers."""
    if name == "hf":
        import importlib

        return importlib.import_module("posenc_torch.hf")
    raise AttributeError(f"module 'posenc_torch' has no attribute {name!r}")
