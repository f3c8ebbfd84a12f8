"""posenc for Keras 3: layers that own learned arrays, on Keras' backends torch and jax.

Keras' backend decides whether ``posenc_torch`` or ``posenc_jax`` computes; a file that one of them
saved loads on the other.
"""

from posenc_keras.layers import Attention, PositionEmbedding

__all__ = ["Attention", "PositionEmbedding"]
