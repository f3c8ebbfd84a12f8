"""Known mistakes in reading a configuration, which explain what a reader made of one.

Each is a rotation that a reader would build by that mistake. The first one that a reader's
frequencies equal is told. A mistake is added as one line of ``_rotations``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from posenc.audit.rotation_difference import frequency_bound
from posenc.schemes.rope import RoPE
from posenc.schemes.scalings import PI, YaRN

_Fault = tuple[str, Callable[[], Sequence[float]]]


def explain_frequencies(rope: RoPE, found: Sequence[float], length: int, longest: int) -> str:
    """The mistake by which a reader would find these frequencies; ``""``: none that is known."""
    for words, make in _rotations(rope, length, longest):
        try:
            wrong = make()
        except ValueError:  # a part that is no whole number of pairs, or lists of another length
            continue
        if len(wrong) == len(found) and bool(
            np.all(np.abs(np.subtract(wrong, found)) <= frequency_bound(wrong, rope.base))
        ):
            return words
    return ""


def _rotations(rope: RoPE, length: int, longest: int) -> Iterator[_Fault]:
    whole, turning = rope.head_dim, rope.rotary_dim or rope.head_dim
    scaling = rope.scaling

    def of(**changed: Any) -> Callable[[], Sequence[float]]:
        return lambda: replace(rope, **changed).at_length(length).frequencies()

    name = type(scaling).__name__ if scaling is not None else ""
    if scaling is not None:
        yield f"{name} is declared, and plain RoPE is built", of(scaling=None)
        if scaling.at_length(length) is not scaling:
            short = rope.frequencies()
            yield f"{name} does not change with the length of the text", lambda: short
    if rope.base != 10_000:
        unread = "rope_theta is not read: the base is 10000"
        yield f"{unread}, not {rope.base:.15g}", of(base=10_000.0)
        if scaling is not None:
            yield f"{unread}, and {name} is not read either", of(base=10_000.0, scaling=None)
    if turning < whole:
        part = turning / whole
        again = f"the partial factor {part:g} is applied"
        yield (
            f"the partial factor is ignored: {whole} channels rotate, not {turning}",
            of(rotary_dim=None),
        )
        if scaling is not None:
            yield (
                f"the partial factor and {name} are ignored",
                of(rotary_dim=None, scaling=None),
            )
        twice = int(turning * part)
        yield f"{again} twice: {twice} channels rotate, not {turning}", of(rotary_dim=twice)
        yield (
            f"{again} to the channels and not to the frequencies, which are the first of those of "
            f"{whole} channels",
            lambda: _plain(rope, turning // 2, whole),
        )
        yield (
            f"{again} a second time in the exponents of the frequencies",
            lambda: _plain(rope, turning // 2, turning * part),
        )
    yield from _scalings(rope, longest, of)


def _scalings(
    rope: RoPE, longest: int, of: Callable[..., Callable[[], Sequence[float]]]
) -> Iterator[_Fault]:
    scaling: Any = rope.scaling
    if scaling is None:
        for factor in (2, 4, 8, 16, 32, 40):
            words = f"no scaling is declared, and positions are divided by {factor}"
            yield words, of(scaling=PI(factor))
        return
    given = {each.name for each in fields(scaling)}
    factor = getattr(scaling, "factor", None)
    if factor and not isinstance(scaling, PI):
        name = type(scaling).__name__
        yield f"{name} is read as linear: all positions are divided by {factor:g}", of(
            scaling=PI(factor)
        )
    if "train_len" in given and scaling.train_len != longest:
        yield (
            f"original_max_position_embeddings={scaling.train_len} is not read: "
            f"max_position_embeddings={longest} instead",
            of(scaling=replace(scaling, train_len=longest)),
        )
    if isinstance(scaling, YaRN):
        other = not scaling.truncate
        yield f"truncate={scaling.truncate} is read as {other}", of(
            scaling=replace(scaling, truncate=other)
        )
        yield "YaRN's ramp is linear in turns, as in its paper, not in the index", of(
            scaling=replace(scaling, ramp="turns")
        )
        yield "beta_fast and beta_slow are not read: they are 32 and 1", of(
            scaling=replace(scaling, beta_fast=32, beta_slow=1)
        )


def _plain(rope: RoPE, count: int, width: float) -> Sequence[float]:
    """``count`` frequencies of unscaled RoPE whose exponents are ``2k / width``."""
    return [rope.base ** (-2 * k / width) for k in range(count)]


def explain_factor(rope: RoPE, found: float) -> str:
    """The mistake by which a reader would multiply cosines by ``found``; ``""``: unknown."""
    scaling, own = rope.scaling, rope.attention_factor
    given = getattr(scaling, "attention_factor", None)
    derived = _derived(scaling)
    if given is not None and derived is not None and _same(found, derived):
        return f"attention_factor={given:g} is ignored and derived from factor instead"
    if _same(found, 1):
        what = f"attention_factor={given:g}" if given is not None else "the attention factor"
        return f"{what} is ignored: it is 1"
    if isinstance(scaling, YaRN):
        m = 0.1 * math.log(max(scaling.factor, 1)) + 1
        if (scaling.mscale or scaling.mscale_all_dim) and _same(found, m):
            return "mscale and mscale_all_dim are not read: it is 0.1 ln(factor) + 1"
        all_dim = 0.1 * (scaling.mscale_all_dim or 0) * math.log(max(scaling.factor, 1)) + 1
        if _same(found, own * all_dim) or _same(found, own * all_dim**2):
            return "mscale_all_dim, which is the softmax scale's, multiplies cosines too"
    if _same(found, own**2):
        return "it is squared before scores square it"
    return ""


def _derived(scaling: Any) -> float | None:
    """The attention factor that follows from the other keys of a scaling."""
    try:
        return float(replace(scaling, attention_factor=None).amplitude)
    except TypeError:  # a scaling without the key
        return None


def explain_softmax(own: float, found: float) -> str:
    """The mistake by which a reader would multiply the softmax scale by ``found``."""
    if _same(found, 1):
        return f"the square of mscale, {own:.6g}, is missing from the softmax scale"
    if _same(found, math.sqrt(own)):
        return "mscale multiplies the softmax scale once, not squared"
    if _same(found, own**2):
        return "mscale squared multiplies the softmax scale twice"
    if _same(own, 1):
        return "the softmax scale is multiplied, though no key says so"
    return ""


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)
