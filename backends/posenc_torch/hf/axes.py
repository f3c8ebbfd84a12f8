"""Models of text and images: M-RoPE, whose coordinates the rotary module gets."""

from __future__ import annotations

from torch import Tensor

from posenc.hf import FAMILIES
from posenc_torch.hf.family import Family


def _axes_last(position_ids: Tensor) -> Tensor:
    """From ``(3, B, L)``; text has one coordinate, ``(B, L)``, which all axes have."""
    if position_ids.ndim == 2:
        position_ids = position_ids[None].expand(3, -1, -1)
    return position_ids.movedim(0, -1)


_AXES = Family(places=_axes_last, rotary_positions=True)
AXES = {kind: _AXES for kind, known in FAMILIES.items() if known.sections is not None}
"""The families of this file, by ``model_type``."""
