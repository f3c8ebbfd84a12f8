"""The optimiser that every backend implements: AdamW with warm-up and linear decay.

With gradient ``g`` (all gradients scaled together to a norm of at most ``clip``), at step ``t``:
``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g**2``,
``w -= rate * (decay * w + m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + EPSILON))``.

Loshchilov and Hutter 2019, arXiv 1711.05101.
"""

from __future__ import annotations

from posenc.study.study import Recipe

BETAS = (0.9, 0.95)
ADAM_EPSILON = 1e-8


def rate(recipe: Recipe, step: int) -> float:
    """Learning rate of step ``0 .. steps - 1``."""
    warm = (step + 1) / max(1, recipe.warmup)
    cold = (recipe.steps - step) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * min(1.0, warm, cold)
