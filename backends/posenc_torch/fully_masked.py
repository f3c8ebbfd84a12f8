"""Fully masked rows and keys count as 0, at no cost where they are finite."""

from __future__ import annotations

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc.backend import (
    concrete_values,
    not_fully_masked,
    zero_unless,
)

Tensors = tuple[Tensor, Tensor, Tensor]


def zero_fully_masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensors:
    """q, k and v with 0 for what nobody sees; themselves where all are seen, or finite.

    Copies of keys and values take longer than a decoding step does, and sums of them a tenth. On a
    GPU, or while a program is traced, values are not read, and the copies are made.
    """
    queries, keys = not_fully_masked(seen, xp=xp)
    if _holds(queries.all() & keys.all()) or _holds(_finite(q) & _finite(k) & _finite(v)):
        return q, k, v
    return zero_unless(q, k, v, queries, keys, xp=xp)


def _finite(array: Tensor) -> Tensor:
    """Whether all are, and their sum; a sum that overflows is a copy too many."""
    return array.detach().sum(dtype=torch.promote_types(array.dtype, torch.float32)).isfinite()


def _holds(flag: Tensor) -> bool:
    known = concrete_values(flag, xp)
    return known is not None and bool(known)
