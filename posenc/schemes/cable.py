"""CABLE: context-aware biases for length extrapolation.

``bias = c_i - c_j``, ``c_t = sum_{s <= t} -softplus(w_h . x_s + b_h)``.

Veisi, Amirzadeh and Mansourian 2025, "Context-aware Biases for Length Extrapolation", arXiv
2503.08067.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posenc.checks import check_flag
from posenc.protocol import Array, Namespace
from posenc.schemes.gates import SummedGates, log_sigmoid, logits


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

    Raises
    ------
    TypeError, ValueError
        An argument is not as described; the message has its name, its value and what is accepted.

    Veisi, Amirzadeh and Mansourian 2025, arXiv 2503.08067.
    """

    scaled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("scaled", self.scaled)

    def scale(self, head_dim: int) -> float:
        return super().scale(head_dim) if self.scaled else 1.0

    def log_gates(self, x: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array:
        return log_sigmoid(-logits(x, params, xp), xp)
