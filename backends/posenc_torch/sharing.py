"""When values may be shared between calls, and in which mode they were made."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from posenc import Rotary, Tokens
from posenc.backend import Made, Shared
from posenc_torch.tracing import autocast_dtype, is_traced, is_transformed

T = TypeVar("T")


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
    if q.is_nested or k.is_nested or v.is_nested:  # which have no shape
        return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device,
        q.requires_grad or k.requires_grad or v.requires_grad, autocast_dtype(q), now,
    )  # fmt: skip


class Latest:
    """The latest values by a key, of which vectors decide: at most two, or they would never end."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, or what it gave for an equal key."""
        found: T | None = self._kept.get(key)
        if found is None:
            found = make()
            if len(self._kept) > 1:
                self._kept.clear()
            self._kept[key] = found  # another thread may clear it again
        return found

    def most(self) -> int:
        """How many numbers there may be in time, by those of now."""
        return 2 * max(map(_numbers, self._kept.values()), default=0)


def numbers_in(shared: Shared) -> int:
    """How many numbers the tensors hold that are kept for other layers."""
    return sum(map(_numbers, _values(shared)))


def angles_in(shared: Shared) -> int:
    """How many of them are of angles."""
    return sum(_numbers(value) for value in _values(shared) if isinstance(value, Rotary))


def _values(shared: Shared) -> list[Any]:
    made = shared.made.values()
    return made if shared.of_pass is shared.made else made + shared.of_pass.values()


def _numbers(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Latest):
        return value.most()
    if isinstance(value, Rotary | Tokens):
        found: list[Any] = []
        value.map(found.append)
        return sum(map(_numbers, found))
    return sum(map(_numbers, value)) if isinstance(value, tuple) else 0


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
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
