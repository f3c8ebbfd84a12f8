"""posenc for PyTorch: attention with any scheme, and a module that owns a scheme's params."""

from posenc_torch.attention import PATHS, attention, explain
from posenc_torch.mods import block_mask, score_mod
from posenc_torch.position import Position

__all__ = ["PATHS", "Position", "attention", "block_mask", "explain", "score_mod"]
