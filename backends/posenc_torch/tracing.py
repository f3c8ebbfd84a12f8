"""Whether PyTorch runs a program or makes another one of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_programs(function: Function) -> Function:
    """As ``torch.compiler.assume_constant_result``, which imports PyTorch's compiler for 2 s."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_traced() -> bool:
    """Whether operations are recorded, or tensors may have no values; not for ``torch.compile``.

    So it is in ``torch.jit.trace``, ``torch.export`` (not strict), ``make_fx`` and
    ``FakeTensorMode``.
    """
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # untyped
    if tracing or not torch._C._len_torch_dispatch_stack():
        return tracing
    return any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation transforms the program."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return inside or is_forward_mode()


def is_forward_mode() -> bool:
    """Whether tangents may accompany tensors, as in ``torch.func.jvp`` and ``hessian``."""
    level: int = forward_ad._current_level
    return level >= 0


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """The dtype to which autocast rounds q, k and v; None if autocast is off.

    ``attention`` computes with autocast switched off. Otherwise autocast would also round biases,
    cumulative sums and bounds of scores.
    """
    kind = q.device.type if isinstance(q, Tensor) else "none"
    enabled = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else None


def own_dtypes() -> AbstractContextManager[Any]:
    """A context without autocast, which rounds what products of matrices are given."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if len(kinds) < 2:
        return torch.autocast(kinds[0], enabled=False) if kinds else nullcontext()
    both = ExitStack()
    for kind in kinds:
        both.enter_context(torch.autocast(kind, enabled=False))
    return both


def has_values(array: object) -> bool:
    """False for what stands for a tensor in ``torch.func.functionalize``.

    It has ``numpy()``, which shows memory that is not the tensor's.
    """
    return not (isinstance(array, Tensor) and torch._is_functional_tensor(array))


def may_read(tensor: Tensor) -> bool:
    """Whether Python may read values: those of a plain tensor on a CPU, which nobody traces."""
    if torch.compiler.is_compiling() or type(tensor) not in (Tensor, Parameter):
        return False
    return tensor.device.type == "cpu" and not is_traced() and not is_transformed()
