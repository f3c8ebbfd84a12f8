"""CABLE: context-aware biases for length extrapolation."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.contract.protocol import Array, Arrays, Namespace
from posenc.schemes.activations import log_sigmoid
from posenc.schemes.gates import SummedGates, logits


@dataclass(frozen=True)
class CABLE(SummedGates, paper="Veisi, Amirzadeh, Mansourian 2025, arXiv 2503.08067"):
    """``bias = -(s_{j+1} + ... + s_i)``, with ``s_t = softplus(w_h . x_t + b_h)`` of each token.

    Because ``-softplus(z) = log sigmoid(-z)``, this is ``FoX`` with the opposite ``w`` and ``b``.
    Hidden states ``x (B, L, C)`` of the attention layer are given as ``x=``. Learned arrays are
    ``w (H, C)``, from normal values of standard deviation 0.02, and ``b (H,)``, from 0.

    Parameters
    ----------
    num_heads
        Number of query heads ``H``.
    hidden_dim
        Width ``C`` of the hidden states.
    scaled
        Whether scores are multiplied by ``1/sqrt(D)``. The authors' code does not scale them
        (False), so a comparison with it also compares scales.
    """

    scaled: bool = True

    def scale(self, head_dim: int) -> float:
        return super().scale(head_dim) if self.scaled else 1.0

    def log_gates(self, x: Array, *, params: Arrays, xp: Namespace) -> Array:
        return log_sigmoid(-logits(x, params, xp), xp)
