"""What decides which pairs of tokens are visible, when a backward pass reads it again.

Autograd keeps the arrays, and notices what has changed in place. It cannot see what a function of
the caller reads, so a sum over the pairs that it showed is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posenc.backend import Call, Mask, Tokens

_SIDES = ("pos", "seg", "places")


def decides(call: Call) -> dict[str, Tensor]:
    """The positions, segments and booleans of a call, as autograd can keep them, by name."""
    sides = {"query": call.query, "key": call.key}
    found = {f"{of} {name}": getattr(side, name) for of, side in sides.items() for name in _SIDES}
    found["mask"] = call.mask.array
    return {
        name: array.clone() if array.is_inference() else array
        for name, array in found.items()
        if isinstance(array, Tensor)
    }


def with_decided(call: Call, kept: Mapping[str, Tensor]) -> Call:
    """The call with what autograd kept of it."""
    if not kept:
        return call

    def side(of: str, tokens: Tokens) -> Tokens:
        own: dict[str, Any] = {n: kept[f"{of} {n}"] for n in _SIDES if f"{of} {n}" in kept}
        return replace(tokens, **own)

    mask = replace(call.mask, array=kept["mask"]) if "mask" in kept else call.mask
    return replace(call, query=side("query", call.query), key=side("key", call.key), mask=mask)


class Shown:
    """The pairs that masks of the caller's own showed first, as one number for each query."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], Tensor] = {}

    @classmethod
    def of(cls, call: Call) -> Shown | None:
        """Nothing yet; None for a call without such masks, and for one without a backward pass."""
        own = any(type(part) is not Mask for part in call.mask.parts)
        return cls() if own and torch.is_grad_enabled() else None

    def check(self, at: tuple[int, ...], pairs: Tensor | None) -> None:
        """``RuntimeError`` if the part of a call ``at`` this place showed other pairs before."""
        if pairs is None:
            return
        # Sums of different keys seldom agree: odd multiples, modulo 2**31, of the numbers of keys.
        numbers = torch.arange(1, pairs.shape[-1] + 1, device=pairs.device) * 0x9E3779B1 % 2**31
        sums = torch.where(pairs, numbers, 0).sum(-1)
        if not torch.equal(self._sums.setdefault(at, sums), sums):
            raise RuntimeError(
                "mask: its function shows other pairs in the backward pass than in the forward "
                "pass, because what it reads has changed (a variable of a loop?) or is random; "
                "accepted: a function of its arguments and of what stays the same, or an array"
            )
