"""Attention: calls and their arguments, masks, features, and the choice of an implementation."""
