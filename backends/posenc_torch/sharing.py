"""When values may be shared between calls, and in which mode they were made."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from posenc.backend import Made, Shared
from posenc_torch.tracing import autocast_dtype, is_traced, is_transformed


def is_alone() -> bool:
    """Whether each layer makes everything itself: a program is traced or transformed."""
    return torch.compiler.is_compiling() or is_traced() or is_transformed()


def new_shared() -> Shared:
    """What layers share of a pass that has made nothing yet."""
    made = Made(mode, making)
    return Shared(made, made)


def of_vectors(q: Tensor, k: Tensor, v: Tensor) -> Hashable | None:
    """What one function of vectors needs to have in common with others; None: it is like no other.

    Plain tensors alone: a subclass may compute in its own way.
    """
    now = mode()
    if now is NotImplemented or not type(q) is type(k) is type(v) is Tensor:
        return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device,
        q.requires_grad or k.requires_grad or v.requires_grad, autocast_dtype(q), now,
    )  # fmt: skip


def mode() -> Any:
    """Gradients, inference; and in a backward pass, where checkpoints compute again: nothing."""
    if torch._C._current_graph_task_id() != -1:
        return NotImplemented
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def making() -> AbstractContextManager[Any]:
    """Tensors that are kept for gradients of what layers share belong to none of them.

    A checkpoint counts what its layer keeps, and another layer may make what is shared when it
    computes again.
    """
    if torch.compiler.is_compiling() or is_traced() or is_transformed():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
