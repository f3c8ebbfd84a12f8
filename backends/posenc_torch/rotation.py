"""Rotation of channel pairs in PyTorch, and tables that its compiler computes once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.backend import is_exporting
from posenc_torch.tracing import is_traced, is_transformed


def hold(table: Tensor) -> Tensor:
    """``table``; a compiler does not compute it within the loops that read it.

    ``as_strided`` reads memory, so the compiler must write the table to it first.
    """
    # Not in an exported program: runtimes other than PyTorch may lack the operation. DTensor does.
    if not torch.compiler.is_compiling() or is_exporting(torch) or type(table) is not Tensor:
        return table
    return torch.as_strided(table, table.shape, table.stride())


def rotate(x: Tensor, sin: Tensor, cos: Tensor, *, interleaved: bool) -> Tensor | None:
    """``x (..., 2n)`` with its pairs rotated; None where the definition serves as well.

    One or three passes over ``x``, where the definition takes seven and as many temporary arrays.
    """
    if torch.compiler.is_compiling() or is_traced() or is_transformed():
        return None
    learned = torch.is_grad_enabled() and (sin.requires_grad or cos.requires_grad)
    if learned or type(x) is not Tensor or x.device.type not in ("cpu", "cuda"):
        return None
    if not interleaved:
        if torch.is_grad_enabled() and x.requires_grad:
            rotated: Tensor = _Halves.apply(x, sin, cos)  # type: ignore[no-untyped-call]
            return rotated
        return _rotate_halves(x, sin, cos)
    if x.stride(-1) != 1 or any(n % 2 for n in (*x.stride()[:-1], x.storage_offset())):
        return None
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


def _rotate_halves(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * torch.cat([cos, cos], dim=-1)
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


class _Halves(torch.autograd.Function):
    """Pairs ``(k, k + n)`` rotated: its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        ctx.save_for_backward(sin, cos)
        return _rotate_halves(x, sin, cos)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        sin, cos = ctx.saved_tensors
        if is_transformed():  # torch.func has no rules for this class and for addcmul_
            first, second = d_out.chunk(2, dim=-1)
            back = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
            return back, None, None
        return _Halves.apply(d_out, -sin, cos), None, None  # type: ignore[no-untyped-call]
