"""Faults of attention: windows, sinks, masks, caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import posenc
from posenc.audit.faults import Guess, Hypothesis
from posenc.audit.gold import Question
from posenc.audit.hypotheses.rotations import PAIRS, other, rope_in, with_rope
from posenc.audit.hypotheses.scores import ATTENTION, at_its_length, attend, keys_of, parts_of
from posenc.contract.protocol import Hook, PositionScheme, Role
from posenc.schemes import NoPE, Sink, Sum
from posenc.testing.framework import Host


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
    order = np.arange(question.q_pos.shape[-1])
    if question.causal and question.q_pos.shape == keys_of(question).shape:
        what = "Documents, or padding, are not kept apart" if question.seg is not None else ""
        sentence = "a query sees all keys before it in memory, whatever their positions."
        seen = order[None, :] <= order[:, None]
        free = question.change(seg=None, causal=False)
        yield (
            f"{what}: {sentence}" if what else sentence.capitalize(),
            attend(free, at_its_length(question), mask=seen[None, None]),
        )


def _sinks(question: Question) -> Iterator[Guess]:
    scheme = question.scheme
    found = next((p for p in parts_of(scheme) if Hook.SINK in p.hooks()), None)
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


def _without_sink(scheme: PositionScheme) -> PositionScheme:
    kept = []
    for part in parts_of(scheme):
        bare: Any = part.scheme if isinstance(part, Sink) else part
        kept += [] if isinstance(bare, NoPE) else [bare]
    if not kept:
        return NoPE()
    return kept[0] if len(kept) == 1 else Sum(*kept)


def _keys_alone(question: Question) -> Iterator[Guess]:
    """Keys that are rotated otherwise than queries: by a cache, or by another module."""
    keys, k = keys_of(question), question.vectors["k"]
    scheme, short = at_its_length(question), question.scheme.at_length(1)
    rope = rope_in(scheme)
    if rope is None:
        return

    def turned(own: PositionScheme, vectors: Host, pos: Host, role: Role = "key") -> Host:
        return np.asarray(posenc.transform(own, vectors, pos, role=role))

    if scheme != short:
        yield (
            "Cached keys keep old angles: they were rotated for the short context, and the query "
            "for the long one.",
            attend(question, scheme, turned(short, k, keys)),
        )
    twice = turned(scheme, turned(scheme, k, keys), keys)
    yield "Keys are rotated twice.", attend(question, scheme, twice)
    yield "Keys are not rotated.", attend(question, scheme, k)
    q = turned(scheme, question.vectors["q"], question.q_pos, "query")
    both = question.change(vectors={**question.vectors, "q": q})
    yield "Queries are rotated twice.", attend(both, scheme)
    yield "Queries and keys are rotated twice.", attend(both, scheme, twice)
    layouts: dict[str, Any] = {"layout": other(rope.layout)}
    paired = with_rope(scheme, lambda own: replace(own, **layouts))
    yield (
        f"Keys are paired as {PAIRS[other(rope.layout)]}, and queries as {PAIRS[rope.layout]}: "
        "both must have one layout.",
        attend(question, scheme, turned(paired, k, keys)),
    )
    yield (
        f"Queries are paired as {PAIRS[other(rope.layout)]}, and keys as {PAIRS[rope.layout]}: "
        "both must have one layout.",
        attend(question, paired, turned(scheme, k, keys)),
    )
    counted = np.broadcast_to(np.arange(keys.shape[1]), keys.shape)
    for sentence, pos in (
        ("Keys keep the angles of where they were first cached, 0, 1, 2, ...: they are not shifted "
         "to their positions.", counted),
        ("The shift of cached keys goes the wrong way: keys first cached at 0, 1, 2, ... are "
         "rotated again by minus their shift.", 2 * counted - keys),
    ):  # fmt: skip
        yield sentence, attend(question, scheme, turned(scheme, k, pos))


FAULTS = (
    Hypothesis("window", ATTENTION, _windows),
    Hypothesis("sink", ATTENTION, _sinks),
    Hypothesis("mask", ATTENTION, _masks),
    Hypothesis("keys alone", ATTENTION, _keys_alone),
)
