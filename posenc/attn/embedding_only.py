"""Attention of a scheme whose embedding the model adds: without one that only embeds."""

from __future__ import annotations

from collections.abc import Mapping

from posenc.contract.protocol import Array, Hook, PositionScheme
from posenc.schemes.nope import NoPE


def embeds_only(scheme: PositionScheme) -> bool:
    """Whether a scheme acts on token embeddings only, and not in attention."""
    return Hook.EMBEDDING in scheme.hooks() and not scheme.hooks() & ATTENTION_HOOKS


ATTENTION_HOOKS = frozenset(Hook) - {Hook.EMBEDDING, Hook.AT_LENGTH}


def attention_part(
    scheme: PositionScheme, params: Mapping[str, Array] | None
) -> tuple[PositionScheme, Mapping[str, Array] | None]:
    """Scheme and params for attention, if the embedding is already added to the tokens.

    ``NoPE()`` without params if the scheme acts on embeddings only.
    """
    return (NoPE(), None) if embeds_only(scheme) else (scheme, params)
