"""Faults of the scores of an attention: scale, soft cap, heads of keys, biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

import posenc
from posenc.audit.arguments import integers_of_mask
from posenc.audit.faults import Guess, Hypothesis
from posenc.audit.gold import Question, at_length
from posenc.audit.hypotheses.rotations import rope_in
from posenc.contract.protocol import PositionScheme
from posenc.contract.tokens import Tokens
from posenc.schemes import ALiBi, NoPE, Sum, T5Bias
from posenc.testing.framework import Host

ATTENTION = ("attention",)


def _scale(question: Question) -> Iterator[Guess]:
    dim = question.vectors["q"].shape[-1]
    rope = rope_in(question.scheme)
    right = question.scores_scale
    if question.scale is not None:
        own = question.scheme.scale(dim)
        yield f"The given scale={right:g} is ignored: it is {own:.6g}.", question.change(scale=own)
        yield (
            f"The given scale={right:g} comes on top of {own:.6g}, not in its place.",
            question.change(scale=right * own),
        )
    elif rope is not None and not math.isclose(right, dim**-0.5):
        factor = right * math.sqrt(dim)
        yield (
            f"The softmax scale lacks the factor {factor:.6g} of the scaling (mscale squared): it "
            f"is 1/sqrt({dim}).",
            question.change(scale=dim**-0.5),
        )
        yield (
            f"The softmax scale has the factor {math.sqrt(factor):.6g} (mscale), where it is "
            "squared.",
            question.change(scale=dim**-0.5 * math.sqrt(factor)),
        )
        yield (
            f"The softmax scale has the factor {factor:.6g} twice.",
            question.change(scale=dim**-0.5 * factor**2),
        )
    for value, words in ((1.0, "1"), (1 / dim, f"1/{dim}"), (dim**-0.5, f"1/sqrt({dim})")):
        if not math.isclose(value, right):
            yield (
                f"Scores are multiplied by {words}, not by {right:.6g}.",
                question.change(scale=value),
            )


def _caps(question: Question) -> Iterator[Guess]:
    """``cap * tanh(score / cap)``, which comes after the scale, and before bias and mask."""
    cap = question.softcap
    if cap is None:
        return
    yield f"The soft cap of {cap:g} is ignored.", question.change(softcap=None)
    scale = question.scores_scale
    yield (
        "The soft cap is applied before the scale: to q @ k alone.",
        question.change(softcap=cap * scale),
    )
    seen, bias = integers_of_mask(question, keys_of(question)), _bias_of(question)
    raw, rotated = _scores(question)
    for sentence, scores in (
        (
            f"The soft cap is applied after the mask: hidden keys have a score of -{cap:g}, and "
            "weight.",
            cap * np.tanh(np.where(seen, raw + bias, -np.inf) / cap),
        ),
        (
            "The soft cap is applied after the bias, not before it.",
            np.where(seen, cap * np.tanh((raw + bias) / cap), -np.inf),
        ),
        (
            f"The soft cap is {cap:g} * tanh(score): the score is not divided by the cap.",
            np.where(seen, cap * np.tanh(raw) + bias, -np.inf),
        ),
        (
            "The soft cap is tanh(score / cap), not multiplied by the cap again.",
            np.where(seen, np.tanh(raw / cap) + bias, -np.inf),
        ),
        (
            "Scores are cut off at the cap, where they should be bent by tanh.",
            np.where(seen, np.clip(raw, -cap, cap) + bias, -np.inf),
        ),
    ):
        yield sentence, _softmax(scores) @ rotated


def _scores(question: Question) -> tuple[Host, Host]:
    """Scores without bias and cap, and values, with a head of keys for each of queries."""
    scheme, keys = at_its_length(question), keys_of(question)
    q, k, v = (question.vectors[name] for name in "qkv")
    wide = {n: np.asarray(a, np.float64) for n, a in question.params.items()}
    q = np.asarray(posenc.transform(scheme, q, question.q_pos, role="query", params=wide))
    k = np.asarray(posenc.transform(scheme, k, keys, role="key", params=wide))
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    return question.scores_scale * q @ k.swapaxes(-1, -2), v


def _bias_of(question: Question) -> Host:
    wide = {n: np.asarray(a, np.float64) for n, a in question.params.items()}
    keys = keys_of(question)
    bias = posenc.bias(question.scheme, question.q_pos, keys, wide, dtype=np.float64)
    return np.zeros(()) if bias is None else np.asarray(bias)


def _softmax(scores: Host) -> Host:
    weights = np.exp(scores - np.max(scores, -1, keepdims=True))
    return np.asarray(weights / np.sum(weights, -1, keepdims=True))


def _groups(question: Question) -> Iterator[Guess]:
    """Heads of keys that several heads of queries share."""
    if not question.grouped:
        return
    heads, own = question.num_heads, question.vectors["k"].shape[1]
    head = np.arange(heads)
    for sentence, index in (
        (
            f"Query head h reads key head h % {own}: heads of keys are tiled, [0, 1, ..., 0, 1, "
            f"...], where each is repeated {heads // own} times, h // {heads // own}.",
            head % own,
        ),
        ("Every query head reads key head 0.", 0 * head),
        ("The heads of keys are in the opposite order.", own - 1 - head // (heads // own)),
    ):
        vectors = dict(question.vectors)
        vectors |= {name: vectors[name][:, index] for name in "kv"}
        yield sentence, question.change(vectors=vectors)


def keys_of(question: Question) -> Host:
    """Positions of the keys."""
    return question.q_pos if question.k_pos is None else question.k_pos


def at_its_length(question: Question) -> PositionScheme:
    """The scheme at the length of the context."""
    return at_length(question.scheme, keys_of(question))


def parts_of(scheme: PositionScheme) -> tuple[PositionScheme, ...]:
    """The schemes of a sum, or the scheme alone."""
    return scheme.schemes if isinstance(scheme, Sum) else (scheme,)


def _without_bias(question: Question) -> Iterator[Guess]:
    kept = [part for part in parts_of(question.scheme) if not isinstance(part, (ALiBi, T5Bias))]
    if len(kept) == len(parts_of(question.scheme)):
        return
    bare = NoPE() if not kept else kept[0] if len(kept) == 1 else Sum(*kept)
    params = {n: a for n, a in question.params.items() if n in bare.param_specs()}
    scale = question.scores_scale
    queries = question.q_pos.shape[1]
    cached = question.k_pos is not None and queries < question.k_pos.shape[1]
    where = " on the cached step" if cached else ""
    yield (
        f"The bias is dropped{where}: scores have none.",
        question.change(scheme=bare, params=params, scale=scale),
    )


def _scaled_bias(question: Question) -> Iterator[Guess]:
    """The scale that multiplies scores multiplies the bias too."""
    if not any(isinstance(part, (ALiBi, T5Bias)) for part in parts_of(question.scheme)):
        return
    scale = question.scores_scale
    for factor, words in ((scale, "also multiplied by the softmax scale"), (-1.0, "subtracted")):
        yield f"The bias is {words}.", _attend_with_bias(question, factor)


def _attend_with_bias(question: Question, factor: float) -> Host:
    return attend(question, question.scheme, bias=(factor - 1) * _bias_of(question))


def attend(question: Question, scheme: PositionScheme, k: Host | None = None, **more: Any) -> Host:
    """Attention with another scheme, or with keys that are rotated already."""
    keys, vectors = keys_of(question), question.vectors
    found: Host = posenc.attention(
        vectors["q"], vectors["k"] if k is None else k, vectors["v"], scheme,
        {n: np.asarray(a, np.float64) for n, a in question.params.items()}, question.causal,
        window=question.window, tokens=Tokens(keys, question.seg), queries=question.queries(),
        scale=question.scale, softcap=question.softcap, k_transformed=k is not None, **more,
    )  # fmt: skip
    return found


FAULTS = (
    Hypothesis("softmax scale", ATTENTION, _scale),
    Hypothesis("key heads", ATTENTION, _groups),
    Hypothesis("soft cap", ATTENTION, _caps),
    Hypothesis("bias dropped", ATTENTION, _without_bias),
    Hypothesis("bias scaled", ATTENTION, _scaled_bias),
)
