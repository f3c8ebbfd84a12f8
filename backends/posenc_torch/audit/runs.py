"""Ways to ask a function of whole sequences for some positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posenc.audit import CannotExpressError, adapters
from posenc.audit.adapters import row_of

HALF = ("float32", "bfloat16", "float16")


candidate = partial(adapters.candidate, framework="torch")
lacking = partial(adapters.lacking, framework="torch")


def in_a_prefill(rotate: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """``f(x, pos)`` of a function that rotates a whole sequence from position 0.

    Its tokens stand among others that are zero. One head after another, as some positions are far.
    """

    def f(x: Tensor, pos: Tensor) -> Tensor:
        row = torch.as_tensor(row_of(pos))
        length = int(row[-1]) + 1
        if length == x.shape[2]:
            return rotate(x)
        heads = []
        for head in torch.split(x, 1, dim=1):
            whole = x.new_zeros(*head.shape[:2], length, x.shape[-1]).index_copy(2, row, head)
            heads.append(rotate(whole)[:, :, row])
        return torch.cat(heads, dim=1)

    return f


def in_decoding(rotate: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """``f(x, pos)`` of ``rotate(x, offset)``, token by token, as a decoder with a cache does."""

    def f(x: Tensor, pos: Tensor) -> Tensor:
        row = row_of(pos, in_order=False)
        tokens = torch.split(x, 1, dim=2)
        turned = [rotate(token, int(at)) for token, at in zip(tokens, row, strict=True)]
        return torch.cat(turned, dim=2)

    return f


def compiled(make: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """The same functions through ``torch.compile``."""

    def made(sizes: Any) -> Callable[..., Any]:
        torch._dynamo.reset()  # its limit of recompilations counts those of other sizes
        run = torch.compile(make(sizes), dynamic=True)

        def f(x: Tensor, pos: Tensor) -> Tensor:
            found: Tensor = run(x, pos)
            return found

        return f

    return made


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Booleans, True where a query sees a key, as eager attention adds them to its scores."""
    zero = torch.zeros(mask.shape, dtype=dtype)
    return zero.masked_fill(~mask, torch.finfo(dtype).min)


def groups(q: Tensor, k: Tensor) -> int:
    """How many query heads share a key head."""
    return q.shape[1] // k.shape[1]


def check_heads(q: Tensor, k: Tensor) -> None:
    """Raise for an attention that has as many key heads as query heads."""
    if groups(q, k) != 1:
        raise CannotExpressError("it has as many heads of keys as of queries")
