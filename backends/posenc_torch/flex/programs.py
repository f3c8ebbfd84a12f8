"""What of an attention is compiled, and how often: the kernel, and what is computed before it.

Each kind of call has its own compiled entry, so its recompilations do not count towards the user's
limit.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from posenc.backend import Call
from posenc_torch.flex import target
from posenc_torch.tracing import constant_in_programs

_T = TypeVar("_T")
# Recompilations allowed per scheme, head count and dtype; they do not count towards the user's.
_RECOMPILE_LIMIT = 256
COMPILER: dict[str, Any] = {
    "fullgraph": True, "recompile_limit": _RECOMPILE_LIMIT, "isolate_recompiles": True,
}  # fmt: skip
ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # since 2.13
# The function that replaces the compiled kernel, inside replace_kernel.
_kernel: ContextVar[Callable[..., Any] | None] = ContextVar("kernel", default=None)


def kernel(query: Tensor, key: Tensor, value: Tensor, *, scale: str, **options: Any) -> Any:
    """FlexAttention with the scale as a string, which torch's compiler never makes a symbol."""
    return flex_attention(query, key, value, scale=float(scale), **options)


@lru_cache(None)
def compiled(kind: Hashable) -> Callable[..., Any]:
    """The compiled ``kernel`` for a kind of call.

    Torch limits recompilations per code object. Each kind has a new code object, so the number of
    kinds in a process has no limit.
    """
    return compile_with_limit(
        FunctionType(kernel.__code__.replace(), kernel.__globals__, kernel.__name__)
    )


def compile_with_limit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, with a high limit of recompilations."""
    if ISOLATES:
        return torch.compile(function, **COMPILER)
    run = torch.compile(function, fullgraph=True)

    def with_limit(*args: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            return run(*args, **options)

    return with_limit


def in_one_program(function: Callable[..., _T], call: Call, *args: Any, **options: Any) -> _T:
    """``function(call, ...)``; on a GPU compiled, instead of a kernel for each operation."""
    if target.is_cpu(call.q) or torch.compiler.is_compiling() or _kernel.get() is not None:
        return function(call, *args, **options)
    with warnings.catch_warnings():
        # Dynamo asks every array for its gradient.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        result: _T = compiled_once(function)(call, *args, **options)
        return result


@lru_cache(None)
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function, the same at each call."""
    return compile_with_limit(function)


def uncompiled() -> AbstractContextManager[None]:
    """Inside, calls run FlexAttention's eager definition, without a compiler."""
    return replace_kernel(kernel)


@contextmanager
def replace_kernel(function: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls run ``function``, with the arguments of ``kernel``, instead of compiling."""
    token = _kernel.set(function)
    try:
        yield
    finally:
        _kernel.reset(token)


def replaced_kernel() -> Callable[..., Any] | None:
    """The function of ``replace_kernel``; None outside."""
    return _kernel.get()


@constant_in_programs
def is_replaced() -> bool:
    """Whether ``replace_kernel`` is active."""
    # A constant for the compiler, because not every Dynamo traces a ContextVar.
    return _kernel.get() is not None
