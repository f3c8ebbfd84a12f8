"""Faults of attention: scale, windows, sinks, masks, caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

import posenc
from posenc.audit.faults import Guess, Hypothesis
from posenc.audit.gold import Question, at_length
from posenc.audit.hypotheses.rotations import rope_in
from posenc.contract.protocol import Hook, PositionScheme
from posenc.contract.tokens import Tokens
from posenc.schemes import ALiBi, NoPE, Sink, Sum, T5Bias
from posenc.testing.framework import Host

ATTENTION = ("attention",)


def _scale(question: Question) -> Iterator[Guess]:
    dim = question.vectors["q"].shape[-1]
    rope = rope_in(question.scheme)
    right = question.scheme.scale(dim)
    if rope is not None and not math.isclose(right, dim**-0.5):
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


def _windows(question: Question) -> Iterator[Guess]:
    width = question.window
    if not isinstance(width, int):
        return
    for step, words in ((1, "one key too many"), (-1, "one key too few")):
        yield (
            f"The window is one off: a query sees {words}. window={width} is |q - k| < {width}, "
            f"{width} keys with the query's own.",
            question.change(window=width + step),
        )
    yield f"The window of {width} is ignored.", question.change(window=None)
    yield (
        f"The window is centred: it reaches {width // 2} keys back, not {width - 1}.",
        question.change(window=width // 2 + 1),
    )


def _masks(question: Question) -> Iterator[Guess]:
    if question.causal:
        yield "It has no causal mask.", question.change(causal=False)
        before = question.q_pos - 1
        hidden = question.change(q_pos=before)
        if rope_in(question.scheme) is None and not question.params:
            yield "A query does not see its own key.", hidden
    else:
        yield "It is causal where no causal mask is asked for.", question.change(causal=True)
    if question.seg is not None:
        yield (
            "Documents, or padding, are not kept apart: a query sees keys of other segments.",
            question.change(seg=None),
        )
        if question.q_pos.shape == _keys(question).shape:
            index = np.arange(question.q_pos.shape[-1])
            seen = index[None, :] <= index[:, None]
            yield (
                "Documents, or padding, are not kept apart: a query sees all keys before it in "
                "memory.",
                _attend(
                    question.change(seg=None, causal=False), _now(question), mask=seen[None, None]
                ),
            )


def _keys(question: Question) -> Host:
    return question.q_pos if question.k_pos is None else question.k_pos


def _now(question: Question) -> PositionScheme:
    return at_length(question.scheme, _keys(question))


def _sinks(question: Question) -> Iterator[Guess]:
    scheme = question.scheme
    found = next((p for p in _parts(scheme) if Hook.SINK in p.hooks()), None)
    if found is None:
        return
    bare = _without_sink(scheme)
    params = {n: a for n, a in question.params.items() if n in bare.param_specs()}
    yield (
        "The sink is dropped: the softmax has no logit beside those of the keys.",
        question.change(scheme=bare, params=params),
    )
    if "sink" in question.params:
        sink = question.params["sink"]
        for value, words in (
            (np.full_like(sink, sink[0]), "Every head has the sink of the first."),
            (np.zeros_like(sink), "Every sink is 0: the learned logits are not read."),
            (sink[::-1], "The sinks of heads are in the opposite order."),
        ):
            yield words, question.change(params={**question.params, "sink": value})


def _parts(scheme: PositionScheme) -> tuple[PositionScheme, ...]:
    return scheme.schemes if isinstance(scheme, Sum) else (scheme,)


def _without_sink(scheme: PositionScheme) -> PositionScheme:
    kept = []
    for part in _parts(scheme):
        bare: Any = part.scheme if isinstance(part, Sink) else part
        kept += [] if isinstance(bare, NoPE) else [bare]
    if not kept:
        return NoPE()
    return kept[0] if len(kept) == 1 else Sum(*kept)


def _without_bias(question: Question) -> Iterator[Guess]:
    kept = [part for part in _parts(question.scheme) if not isinstance(part, (ALiBi, T5Bias))]
    if len(kept) == len(_parts(question.scheme)):
        return
    bare = NoPE() if not kept else kept[0] if len(kept) == 1 else Sum(*kept)
    params = {n: a for n, a in question.params.items() if n in bare.param_specs()}
    scale = question.scheme.scale(question.vectors["q"].shape[-1])
    queries = question.q_pos.shape[1]
    cached = question.k_pos is not None and queries < question.k_pos.shape[1]
    where = " on the cached step" if cached else ""
    yield (
        f"The bias is dropped{where}: scores have none.",
        question.change(scheme=bare, params=params, scale=scale),
    )


def _scaled_bias(question: Question) -> Iterator[Guess]:
    """The scale that multiplies scores multiplies the bias too."""
    if not any(isinstance(part, (ALiBi, T5Bias)) for part in _parts(question.scheme)):
        return
    scale = question.scheme.scale(question.vectors["q"].shape[-1])
    for factor, words in ((scale, "also multiplied by the softmax scale"), (-1.0, "subtracted")):
        yield f"The bias is {words}.", _attend_with_bias(question, factor)


def _attend_with_bias(question: Question, factor: float) -> Host:
    keys = _keys(question)
    wide = {n: np.asarray(a, np.float64) for n, a in question.params.items()}
    bias = posenc.bias(question.scheme, question.q_pos, keys, wide, dtype=np.float64)
    return _attend(question, question.scheme, bias=(factor - 1) * np.asarray(bias))


def _attend(question: Question, scheme: PositionScheme, k: Host | None = None, **more: Any) -> Host:
    """Attention with another scheme, or with keys that are rotated already."""
    keys, vectors = _keys(question), question.vectors
    found: Host = posenc.attention(
        vectors["q"], vectors["k"] if k is None else k, vectors["v"], scheme,
        {n: np.asarray(a, np.float64) for n, a in question.params.items()}, question.causal,
        window=question.window, tokens=Tokens(keys, question.seg), queries=question.queries(),
        scale=question.scale, k_transformed=k is not None, **more,
    )  # fmt: skip
    return found


def _old_keys(question: Question) -> Iterator[Guess]:
    keys = _keys(question)
    now = _now(question)
    short = question.scheme.at_length(1)
    if rope_in(question.scheme) is None:
        return
    if now != short:
        turned = posenc.transform(short, question.vectors["k"], keys, role="key")
        yield (
            "Cached keys keep old angles: they were rotated for the short context, and the query "
            "for the long one.",
            _attend(question, now, np.asarray(turned)),
        )
    once = posenc.transform(now, question.vectors["k"], keys, role="key")
    twice = posenc.transform(now, once, keys, role="key")
    yield "Keys are rotated twice.", _attend(question, now, np.asarray(twice))
    yield "Keys are not rotated.", _attend(question, now, question.vectors["k"])
    q = np.asarray(posenc.transform(now, question.vectors["q"], question.q_pos, role="query"))
    both = question.change(vectors={**question.vectors, "q": q})
    yield "Queries are rotated twice.", _attend(both, now)
    yield "Queries and keys are rotated twice.", _attend(both, now, np.asarray(twice))


FAULTS = (
    Hypothesis("softmax scale", ATTENTION, _scale),
    Hypothesis("window", ATTENTION, _windows),
    Hypothesis("sink", ATTENTION, _sinks),
    Hypothesis("mask", ATTENTION, _masks),
    Hypothesis("bias dropped", ATTENTION, _without_bias),
    Hypothesis("bias scaled", ATTENTION, _scaled_bias),
    Hypothesis("keys of a cache", ATTENTION, _old_keys),
)
