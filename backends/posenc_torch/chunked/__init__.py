"""Attention in parts of queries and keys, in linear memory."""
