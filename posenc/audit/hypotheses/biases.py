"""Faults of biases: slopes, buckets, signs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from posenc.audit.faults import Guess, Hypothesis
from posenc.audit.gold import Question, answer
from posenc.audit.hypotheses.positions import HALVES, round_to
from posenc.contract.protocol import PositionScheme
from posenc.schemes import ALiBi, Sum, T5Bias, Wrapper

BOTH = ("bias", "attention")


def with_part(scheme: PositionScheme, kind: type, /, **other: Any) -> PositionScheme:
    """The scheme with other fields of its part of a kind."""
    if isinstance(scheme, kind):
        own: Any = scheme
        made: PositionScheme = replace(own, **other)
        return made
    if isinstance(scheme, Sum):
        return Sum(*(with_part(part, kind, **other) for part in scheme.schemes))
    if isinstance(scheme, Wrapper):
        around: Any = scheme
        whole: PositionScheme = replace(around, scheme=with_part(around.scheme, kind, **other))
        return whole
    return scheme


def _part(scheme: PositionScheme, kind: type) -> Any:
    if isinstance(scheme, kind):
        return scheme
    inside: Any = getattr(scheme, "schemes", ()) if isinstance(scheme, Sum) else ()
    inside = (scheme.scheme,) if isinstance(scheme, Wrapper) else inside
    return next((found for part in inside if (found := _part(part, kind))), None)


def _slopes(question: Question) -> Iterator[Guess]:
    scheme = _part(question.scheme, ALiBi)
    if scheme is None or scheme.learned:
        return
    heads, right = question.num_heads, scheme.head_slopes()
    power = 2 ** (heads.bit_length() - 1)
    rule = scheme.slopes if isinstance(scheme.slopes, str) else ""
    most = scheme.max_bias
    rules = ("paper", "geometric")
    paper, geometric = (ALiBi(heads, slopes=s, max_bias=most).head_slopes() for s in rules)
    wrong: list[tuple[str, tuple[float, ...]]] = []
    if rule != "geometric":
        wrong.append((
            f"Its slopes are geometric, 2**(-{most:g}h/{heads}), for {heads} heads, which is no "
            f"power of two: the paper takes those of {power} heads, and then every second of "
            f"{2 * power}.",
            geometric,
        ))  # fmt: skip
    if rule != "paper":
        wrong.append(("Its slopes are those of the paper.", paper))
    for count in (n for n in range(1, heads) if heads % n == 0 and heads > n):
        own = ALiBi(count, slopes=rule or "paper", max_bias=most).head_slopes()
        wrong.append((
            f"Its slopes are those of a model of {count} heads, {heads // count} times over: a "
            f"slice of heads must take its slopes from all {heads}.",
            own * (heads // count),
        ))  # fmt: skip
    longer = ALiBi(2 * power, slopes="paper", max_bias=most).head_slopes()
    wrong += [
        (
            f"Its slopes are the first {heads} of a model of {2 * power} heads.",
            longer[:heads],
        ),
        (
            "The slopes after the largest power of two are the first of the longer series, not "
            "every second.",
            paper[:power] + longer[: heads - power],
        ),
        ("Its slopes are in the order of size.", tuple(sorted(right, reverse=True))),
        ("Its slopes begin with 1, one head too early.",
         tuple(m * 2 ** (most / power) for m in right)),
        ("Its slopes are in the opposite order of heads.", right[::-1]),
        ("All heads have the slope of the first.", (right[0],) * heads),
        ("The heads after the largest power of two have no slope.",
         right[:power] + (0.0,) * (heads - power)),
        ("The heads after the largest power of two repeat the first slopes.",
         (right[:power] * 2)[:heads]),
    ]  # fmt: skip
    for sentence, slopes in wrong:
        made: dict[str, Any] = {"slopes": slopes, "max_bias": 8.0}
        yield sentence, question.change(scheme=with_part(question.scheme, ALiBi, **made))


def _half(question: Question) -> Iterator[Guess]:
    """A bias in half precision, though it comes as float32."""
    keys = question.q_pos if question.k_pos is None else question.k_pos
    scheme, right = _part(question.scheme, ALiBi), answer(question)
    for half, largest in HALVES.items():
        if max(np.max(np.abs(a)) for a in (right, question.q_pos, keys)) > largest:
            continue
        cut = partial(round_to, dtype=half)
        yield f"Its numbers are rounded to {half}: compute the bias in float32.", cut(right)
        if scheme is None:
            continue
        slopes = np.array(scheme.head_slopes())[:, None, None]
        rounded, far = cut(slopes), np.abs(question.q_pos[:, None] - keys)
        yield f"Its slopes are rounded to {half}.", -rounded * far
        q, k = (cut(rounded * cut(pos)) for pos in (question.q_pos[:, None], keys[None, :]))
        yield (
            f"Slopes, positions and their products are rounded to {half}, so neighbouring keys "
            "share one bias: compute it in float32.",
            k - q,
        )


def _signs(question: Question) -> Iterator[Guess]:
    right = answer(question)
    yield "The sign of the bias is wrong: it favours far keys.", -right
    yield "It has no bias at all: every number is 0.", 0 * right
    mean = right[..., :1]
    yield (
        "It is right up to one number per query, which softmax removes: audit it as an attention "
        "if the bias goes into a softmax.",
        right - mean,
    )
    yield "Queries and keys are swapped: it is the transpose.", _transposed(question)


def _transposed(question: Question) -> Question:
    keys = question.q_pos if question.k_pos is None else question.k_pos
    return question.change(q_pos=-question.q_pos, k_pos=-keys)


def _one_off(question: Question) -> Iterator[Guess]:
    keys = question.q_pos if question.k_pos is None else question.k_pos
    for step, way in ((1, "long"), (-1, "short")):
        sentence = f"Distances are one too {way}."
        yield sentence, question.change(k_pos=keys - step)


def _buckets(question: Question) -> Iterator[Guess]:
    scheme = _part(question.scheme, T5Bias)
    if scheme is None:
        return
    words = "both directions" if scheme.causal else "one direction"
    least, most = scheme.max_distance - 1, scheme.max_distance + 1
    wrong: list[tuple[str, dict[str, Any]]] = [
        (f"Its buckets are those of {words}, where causal={scheme.causal}.",
         {"causal": not scheme.causal}),
        *((f"Its max_distance is {n}, not {scheme.max_distance}.", {"max_distance": n})
          for n in (32, 64, 128, 256, 512, 1024, 2048) if n != scheme.max_distance),
        (f"Its max_distance is {most}, one more than it should be.", {"max_distance": most}),
        (f"Its max_distance is {least}, one less than it should be.", {"max_distance": least}),
    ]  # fmt: skip
    for sentence, other in wrong:
        try:
            made = with_part(question.scheme, T5Bias, **other)
        except ValueError:
            continue
        yield sentence, question.change(scheme=made)
    for step, way in ((1, "above"), (-1, "below")):
        table = question.params["table"]
        index = np.clip(np.arange(table.shape[1]) + step, 0, table.shape[1] - 1)
        params = {**question.params, "table": table[:, index]}
        yield f"Its buckets are one {way} the right ones.", question.change(params=params)
    flipped = {**question.params, "table": question.params["table"][::-1]}
    yield "The heads of its table are in the opposite order.", question.change(params=flipped)


def _later(question: Question) -> Iterator[Guess]:
    """What a bias of causal models says of keys that they never see."""
    keys = question.q_pos if question.k_pos is None else question.k_pos
    later = keys[None, :] > question.q_pos[:, None]
    right = answer(question)
    for value, words in ((0.0, "0"), (-np.inf, "-inf")):
        sentence = f"Keys after the query have the bias {words}."
        yield sentence, np.where(later, value, right)
    yield (
        "Keys after the query have the opposite sign: it is linear in k - q, without the absolute "
        "value.",
        np.where(later, -right, right),
    )


FAULTS = (
    Hypothesis("slopes", BOTH, _slopes),
    Hypothesis("half precision of a bias", ("bias",), _half, rounds=True),
    Hypothesis("later keys", ("bias",), _later),
    Hypothesis("signs", ("bias",), _signs),
    Hypothesis("buckets", BOTH, _buckets),
    Hypothesis("distances one off", ("bias",), _one_off),
)
