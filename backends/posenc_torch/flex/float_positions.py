"""Biases that are the same function of float32 positions as of integers.

A kernel then converts each position once per row and column of a tile, not each difference once per
score. A scheme is promised integers, so the operations of its bias decide.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

LARGEST = 2**24  # float32 holds all integers up to it

_aten = torch.ops.aten
_SIGNS = {_aten.neg.default, _aten.abs.default}
_COMPARISONS = {
    getattr(getattr(_aten, name), kind)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("Tensor", "Scalar")
}
_PRODUCTS = {_aten.mul.Tensor, _aten.mul.Scalar}  # with a float: they convert the integer


def is_same_in_float32(bias: Callable[[Tensor, Tensor], Tensor | None], at: Tensor) -> bool:
    """Whether ``bias(q, k)`` takes float32 positions for integers, up to ``LARGEST``.

    It does if all that it does with integers is to subtract one position from the other, change
    signs, compare, multiply by a float, or convert to float32. It must not make other arrays of
    their dtype either: asked for ``q.dtype``, it would make floats. ``at`` holds any position, in a
    dtype that nothing else has.
    """
    with torch.no_grad():
        graph = make_fx(bias)(at.clone(), at.clone()).graph
    q, k = (node for node in graph.nodes if node.op == "placeholder")
    integers = {q, k}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        taken = [a for a in node.all_input_nodes if a in integers]
        difference = node.target == _aten.sub.Tensor and {*node.args} == {q, k} and not node.kwargs
        if difference or (taken and node.target in _SIGNS):
            integers.add(node)
        elif node.meta["val"].dtype == at.dtype or (taken and not _ends_in_float(node)):
            return False
    return True


def _ends_in_float(node: Node) -> bool:
    """Whether an operation on integers has the same result on float32 numbers, and no integer."""
    if node.target == _aten._to_copy.default:
        return node.kwargs.get("dtype") == torch.float32
    if node.target in _COMPARISONS:
        numbers = [a for a in node.args if isinstance(a, (int, float))]
        return all(abs(number) <= LARGEST for number in numbers)
    return node.target in _PRODUCTS and node.meta["val"].dtype == torch.float32
