"""Functions of one number: softplus, sigmoid and its logarithm, leaky ReLU.

The Array API has none of them. A backend's own take a half to an eighth of the time, and its
sigmoid has a quarter of the rounding errors (``posenc.contract.operations``).
"""

from __future__ import annotations

from posenc.contract.operations import operations_of
from posenc.contract.specs import Array, Namespace


def softplus(z: Array, xp: Namespace) -> Array:
    """``ln(1 + exp(z))``, without overflow, and with its derivative at 0."""
    of_framework = operations_of(xp).softplus
    return xp.logaddexp(xp.zeros_like(z), z) if of_framework is None else of_framework(z)


def log_sigmoid(z: Array, xp: Namespace) -> Array:
    """``ln(1 / (1 + exp(-z)))``, likewise."""
    return -softplus(-z, xp)


def sigmoid(z: Array, xp: Namespace) -> Array:
    """``1 / (1 + exp(-z))``, likewise; small values keep their digits."""
    of_framework = operations_of(xp).sigmoid
    return xp.exp(log_sigmoid(z, xp)) if of_framework is None else of_framework(z)


def leaky_relu(z: Array, slope: float, xp: Namespace) -> Array:
    """``z`` above 0, else ``slope * z``, whose derivative at 0 is the slope."""
    of_framework = operations_of(xp).leaky_relu
    return xp.where(z > 0, z, slope * z) if of_framework is None else of_framework(z, slope)
