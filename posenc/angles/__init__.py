"""Sines and cosines that are exact to rounding at every position."""

from posenc.angles.fixed import TURN, Turns, cosine, exact_arithmetic, frequencies

__all__ = ["TURN", "Turns", "cosine", "exact_arithmetic", "frequencies"]
