"""Equinox: its rotation, which has a cache of cosines for all layers of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc_jax.audit import runs

_candidate = partial(runs.candidate, "equinox", kind="rotation", dtypes=runs.HALF)


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate."""
    subject = "vmap(vmap(RotaryPositionalEmbedding(D)))(x)"
    yield _candidate(subject, "rope", make=partial(_rotation, 10_000.0, False))
    subject = "vmap(vmap(RotaryPositionalEmbedding(D, theta=500000.)))(x)"
    label = "rope:base=500000"
    yield _candidate(subject, label, make=partial(_rotation, 500_000.0, False))
    yield _candidate(
        subject, label, make=partial(_rotation, 500_000.0, True),
        path="after a layer with theta=10000.",
    )  # fmt: skip
    yield _candidate("RotaryPositionalEmbedding(D)", "rope:layout=interleaved", make=_no_layout)
    yield _candidate("RotaryPositionalEmbedding(D)", "rope:rotary_dim=32", make=_no_part)
    for label in ("alibi", "t5", "sinusoidal"):
        yield runs.lacking("equinox", "equinox.nn", "it has rotary positions alone", label)


def _rotation(theta: float, after: bool, sizes: Sizes) -> Callable[..., Array]:
    """The module as in a new program, or after a call of one with the default ``theta``."""
    cache = getattr(eqx.nn._embedding, "internal_rope_embedding_cache", {})
    cache.clear()

    def rotate(x: Array) -> Array:
        if after:
            eqx.nn.RotaryPositionalEmbedding(sizes.head_dim, dtype=x.dtype)(jnp.zeros(x.shape[2:]))
        rope = eqx.nn.RotaryPositionalEmbedding(sizes.head_dim, theta=theta, dtype=x.dtype)
        found: Array = jax.vmap(jax.vmap(rope))(x)
        return found

    return runs.in_a_prefill(rotate)


def _no_layout(sizes: Sizes) -> Callable[..., Array]:
    raise CannotExpressError("it pairs channels D/2 apart, and has no option for adjacent ones")


def _no_part(sizes: Sizes) -> Callable[..., Array]:
    raise CannotExpressError("it rotates every channel; the caller would have to split them")
