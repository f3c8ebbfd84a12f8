"""Attention by FlexAttention: ``score_mod``, ``block_mask``, and the implementation on both."""
