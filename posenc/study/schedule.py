"""The optimizer of every backend: AdamW with linear warm-up and linear decay.

All gradients are first scaled together to a norm of at most ``clip``. With gradient ``g`` at step
``t = 1, 2, ...``:
``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g**2``,
``w -= rate * (decay * w + m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + EPSILON))``.

Loshchilov and Hutter 2019, arXiv 1711.05101.
"""

from __future__ import annotations

from posenc.study.recipe import Recipe

BETAS = (0.9, 0.95)
ADAM_EPSILON = 1e-8


def learning_rate(recipe: Recipe, step: int) -> float:
    """Learning rate of step ``0 .. steps - 1``."""
    warm = (step + 1) / max(1, recipe.warmup)
    cold = (recipe.steps - step) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * min(1.0, warm, cold)
