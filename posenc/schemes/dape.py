"""DAPE: a network of the scores and biases of all heads adapts the bias."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from posenc.contract.fields import Count
from posenc.contract.protocol import Array, Arrays, Hook, Namespace, ParamSpec, PositionScheme
from posenc.schemes.activations import leaky_relu
from posenc.schemes.alibi import ALiBi
from posenc.schemes.gates import uniform_by_inputs
from posenc.schemes.sum import Combination
from posenc.schemes.wrapper import heads_around

_LEAK = 0.01
_NOT_TAKEN = {Hook.ADJUST_SCORES: "adjusts scores", Hook.REGIONS: "has regions"}


@dataclass(frozen=True)
class DAPE(
    Combination,
    whole_rows="the score of a head depends on those of all heads",
    mixes_heads="the score of a head depends on those of all heads",
    paper="Zheng et al. 2024, arXiv 2405.14722",
):
    """``s + b + f([s; b])`` with the scaled scores ``s`` and the bias ``b`` of a scheme.

    ``f`` is computed for each query and key, from the numbers of all heads:
    ``f(z) = w2 LeakyReLU(w1 z + b1) + b2`` with slope 0.01. A scheme without a bias, as RoPE, gives
    ``s + f(s)``. Where the bias is ``-inf``, which masks, ``f`` sees 0.

    Learned arrays: ``w1 (hidden, 2H)``, ``b1 (hidden,)``, ``w2 (H, hidden)``, ``b2 (H,)``, at first
    uniform up to ``1 / sqrt(n)`` with ``n`` the inputs of a layer; ``w1 (hidden, H)`` without a
    bias. A learned array ``name`` of the scheme is called ``"0_{name}"``, as in a ``Sum``.

    ``chunked`` and the reference compute it, in whole rows. The score of a head needs those of all
    other heads, but a fused kernel computes one head at a time.

    Parameters
    ----------
    scheme
        The scheme whose bias is adapted. It has no regions and does not adjust scores itself.
    hidden
        Width of the hidden layer.
    num_heads
        Number of heads ``H``. Default: that of the scheme.

    Equations 3 and 4.
    """

    scheme: PositionScheme
    hidden: Count = 32
    num_heads: Count | None = None

    def __post_init__(self) -> None:
        for hook, does in _NOT_TAKEN.items():
            if hook in self.scheme.hooks():
                name = type(self.scheme).__name__
                raise ValueError(f"DAPE takes a scheme that only adds a bias, and {name} {does}")
        heads = heads_around(self.scheme, self.num_heads, advice="give it")
        object.__setattr__(self, "num_heads", heads)
        object.__setattr__(self, "schemes", (self.scheme,))
        super().__post_init__()

    def hooks(self) -> frozenset[Hook]:
        return super().hooks() | {Hook.ADJUST_SCORES}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        assert self.num_heads is not None
        inputs = self.num_heads * (2 if Hook.BIAS in self.scheme.hooks() else 1)
        first, last = uniform_by_inputs(inputs), uniform_by_inputs(self.hidden)
        return {
            **super().param_specs(),
            "w1": ParamSpec((self.hidden, inputs), first, per_head=False),
            "b1": ParamSpec((self.hidden,), first, per_head=False),
            "w2": ParamSpec((self.num_heads, self.hidden), last),
            "b2": ParamSpec((self.num_heads,), last),
        }

    def adjust_scores(
        self, scores: Array, q: Array, k: Array, *, visible: Array | None,
        params: Arrays, xp: Namespace,
    ) -> Array:  # fmt: skip
        inputs = scores
        if Hook.BIAS in self.scheme.hooks():
            bias = self.bias(q, k, params=params, xp=xp)
            bias = xp.zeros_like(scores) if bias is None else bias
            finite = xp.broadcast_to(xp.where(bias == -math.inf, 0.0, bias), scores.shape)
            inputs = xp.concat([scores, finite], axis=1)
        units = _mix_heads(params["w1"], inputs, xp) + params["b1"][:, None, None]
        units = leaky_relu(units, _LEAK, xp)
        return scores + _mix_heads(params["w2"][:][:, 0, :], units, xp) + params["b2"]

    def _with_schemes(self, schemes: tuple[PositionScheme, ...]) -> PositionScheme:
        return replace(self, scheme=schemes[0])


def _mix_heads(weights: Array, heads: Array, xp: Namespace) -> Array:
    """``weights (N, H)`` times ``heads (B, H, Q, K)``: ``(B, N, Q, K)``."""
    flat = xp.reshape(heads, (*heads.shape[:2], -1))
    return xp.reshape(xp.matmul(weights, flat), (heads.shape[0], -1, *heads.shape[2:]))


def dape_on_alibi(num_heads: int, *, hidden: int = 32) -> DAPE:
    """DAPE on ALiBi: ``DAPE(ALiBi(num_heads), hidden)``.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    hidden
        Width of the hidden layer.
    """
    return DAPE(ALiBi(num_heads), hidden)
