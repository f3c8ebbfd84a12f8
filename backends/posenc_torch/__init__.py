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
    """``posenc_torch.hf`` and ``.drop_in``, when they are first read: hf needs transformers."""
    if name in ("hf", "drop_in"):
        import importlib

        return importlib.import_module(f"posenc_torch.{name}")
    raise AttributeError(f"module 'posenc_torch' has no attribute {name!r}")
