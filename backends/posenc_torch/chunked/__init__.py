"""Attention in blocks of queries, in linear memory."""
