"""FIRE: a small network of the distance, divided by the position of the query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.contract.fields import Count, Positive
from posenc.contract.network import network
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, Initializer, Namespace, ParamSpec

_EPS = 1e-6  # the authors' code adds it to the divisor


@dataclass(frozen=True)
class FIRE(PositionScheme, paper="Li et al. 2023, arXiv 2310.04418"):
    """``MLP(psi(|i - j|) / (psi(max(i, L)) + 1e-6))`` with ``psi(x) = ln(1 + |c| x)``.

    The quotient lies between 0 and 1 at every context length, so a longer context asks the network
    nothing new.

    ``L = |len_scale * init_len|``: all queries before ``L`` have one divisor. The network is
    ``w2 relu(w1 x + b1)``, with one hidden layer that all heads share.

    Learned arrays: ``c ()``, from ``init_c``; ``len_scale ()``, from 1; ``w1 (hidden,)`` and
    ``b1 (hidden,)``, uniform in [-1, 1); ``w2 (H, hidden)``, uniform in plus or minus
    ``1 / sqrt(hidden)``, as PyTorch starts linear layers. With ``offset``: ``b2 (H,)``, likewise.

    The bias depends on the query's position, so no table by distance replaces it: every score
    costs ``hidden`` units. On a CPU, PyTorch's ``chunked`` takes 2 to 7 times as long as with
    ALiBi, JAX's 2 times forward and 5 in training. ``flex`` trains it if asked for by name. Above
    16 learned numbers ``"auto"`` takes ``chunked``: a kernel of 8 units compiles in a minute, one
    of 32 did not in six. ``pallas`` does not serve it.

    ``posenc.make("fire", train_len=T)`` starts ``L`` at ``min(512, T / 4)``, because training has
    to see queries beyond ``L``.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    hidden
        Units of the hidden layer.
    init_c
        First value of ``c``.
    init_len
        First value of ``L``.
    offset
        Whether the network has its last offset ``b2``. The authors' has. Softmax does not see it,
        and its gradient is 0 or a rounding, unless there is a sink.

    Section 3.
    """

    num_heads: Count
    hidden: Count = 32
    init_c: Positive = 0.1
    init_len: Positive = 512.0
    offset: bool = False

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        """Default options for the sizes of a model: with ``train_len``, a threshold within it."""
        return {"init_len": min(512.0, sizes["train_len"] / 4)} if "train_len" in sizes else {}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        def shared(shape: tuple[int, ...], init: Initializer) -> ParamSpec:
            return ParamSpec(shape, init, per_head=False)

        last = _uniform(1 / math.sqrt(self.hidden))
        specs = {
            "c": shared((), _constant(self.init_c)),
            "len_scale": shared((), _constant(1.0)),
            "w1": shared((self.hidden,), _uniform(1.0)),
            "b1": shared((self.hidden,), _uniform(1.0)),
            "w2": ParamSpec((self.num_heads, self.hidden), last),
        }
        return {**specs, "b2": ParamSpec((self.num_heads,), last)} if self.offset else specs

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        c, w1, b1, w2 = (params[name] for name in ("c", "w1", "b1", "w2"))

        def psi(x: Array) -> Array:
            return xp.log1p(xp.abs(c) * x)

        length = xp.abs(params["len_scale"]) * self.init_len
        longest = xp.maximum(xp.astype(q, c.dtype), length)
        x = psi(xp.astype(xp.abs(q - k), c.dtype)) / (psi(longest) + _EPS)
        bias = network(x, w1, b1, w2, xp=xp)
        return bias + params["b2"] if self.offset else bias


def _uniform(most: float) -> Initializer:
    return lambda rng, shape: rng.uniform(-most, most, shape)


def _constant(value: float) -> Initializer:
    return lambda rng, shape: np.full(shape, value)
