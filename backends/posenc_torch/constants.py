"""Constant tensors, copied to a device once.

To make a tensor of Python numbers on a GPU, torch copies them from the host and waits until the
GPU has finished all earlier work. A model would wait at every call of attention.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from posenc_torch.tracing import is_traced, is_transformed

# Full, it takes no more and loses none: a CUDA graph reads a tensor by its address.
_LIMIT = 4096
_kept: dict[Hashable, Tensor] = {}


def constant(values: tuple[float, ...], *, dtype: torch.dtype, device: Any) -> Tensor:
    """``values`` as a tensor: the same one each time, unless a program is traced or transformed.

    Threads may share it. If somebody writes to it, later calls get a new one.
    """
    # What a traced program makes is part of it, and a kept tensor may be unknown to it.
    if torch.compiler.is_compiling() or is_traced() or is_transformed():
        return torch.asarray(values, dtype=dtype, device=device)
    place = torch.device(device)
    if place.type != "cpu" and place.index is None:  # the current GPU, which may change
        return torch.asarray(values, dtype=dtype, device=place)
    key = values, dtype, place
    kept = _kept.get(key)
    if kept is not None and kept._version == 0:
        return kept
    with torch.inference_mode(False):  # a training step cannot use inference tensors
        made = torch.asarray(values, dtype=dtype, device=place)
    # A dispatch mode may make something else of it.
    if type(made) is Tensor and (kept is not None or len(_kept) < _LIMIT):
        _kept[key] = made
    return made
