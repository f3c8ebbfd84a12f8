"""Attention in tiles of queries and keys, in linear memory."""
