"""Faults of rotations: layouts, frequencies, factors, widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import permutations
from typing import Any, TypeAlias

import numpy as np

from posenc.audit.faults import Guess, Hypothesis
from posenc.audit.gold import Question
from posenc.audit.hypotheses.positions import axes_of
from posenc.audit.hypotheses.turns import Turn, joined, pairs_of
from posenc.contract.protocol import PositionScheme
from posenc.schemes import NTK, PI, MRoPE, NoPE, RoPE, Sum, Wrapper, YaRN

ROTATION, BOTH = ("rotation",), ("rotation", "attention")
_BASES = (10_000.0, 500_000.0, 1_000_000.0, 10_000_000.0, 100_000.0, 5_000_000.0, 100.0)
PAIRS = {
    "half": "halves, (k, k + n)",
    "interleaved": "neighbours, (2k, 2k + 1)",
}
Change: TypeAlias = "Callable[[RoPE], RoPE | PositionScheme]"


def other(layout: str) -> str:
    """The other layout of pairs."""
    return "half" if layout == "interleaved" else "interleaved"


def rope_in(scheme: PositionScheme) -> RoPE | None:
    """The RoPE of a scheme, of a sum with one, or around which it is."""
    if isinstance(scheme, RoPE):
        return scheme
    inside = getattr(scheme, "schemes", ()) if isinstance(scheme, Sum) else ()
    inside = (scheme.scheme,) if isinstance(scheme, Wrapper) else inside
    return next((found for part in inside if (found := rope_in(part))), None)


def with_rope(scheme: PositionScheme, change: Change) -> PositionScheme:
    """The scheme with another RoPE."""
    if isinstance(scheme, RoPE):
        return change(scheme)
    if isinstance(scheme, Sum):
        return Sum(*(with_rope(part, change) for part in scheme.schemes))
    if isinstance(scheme, Wrapper):
        around: Any = scheme
        made: PositionScheme = replace(around, scheme=with_rope(around.scheme, change))
        return made
    return scheme


def changed(question: Question, change: Change) -> Question:
    """The question to another RoPE, with the scale of the scores kept."""
    return question.change(scheme=with_rope(question.scheme, change))


def _replaced(rope: RoPE, **other: Any) -> RoPE:
    return replace(rope, **other)


def turn_of(question: Question) -> Turn | None:
    """The plain rotation of a question, if its scheme is a RoPE."""
    scheme = question.scheme
    if question.kind != "rotation" or not isinstance(scheme, RoPE):
        return None
    return Turn.of(scheme, question.q_pos)


def _layout(question: Question) -> Iterator[Guess]:
    rope = rope_in(question.scheme)
    if rope is None:
        return
    found, right = PAIRS[other(rope.layout)], PAIRS[rope.layout]
    given: dict[str, Any] = {"layout": other(rope.layout)}
    yield (
        f"It pairs channels as {found}, where layout={rope.layout!r} pairs {right}.",
        changed(question, lambda r: replace(r, **given)),
    )


def _mixed_layouts(question: Question) -> Iterator[Guess]:
    turn = turn_of(question)
    if turn is None:
        return
    right, wrong = turn.pairs, other(turn.pairs)
    yield (
        (
            f"Its cosines and sines are laid out for {wrong!r} pairs, its rotation is for "
            f"{right!r} pairs: scores no longer depend on the difference of positions."
        ),
        turn.change(table=wrong).values(question),
    )
    yield (
        (
            f"Its cosines and sines are laid out for {right!r} pairs, its rotation is for "
            f"{wrong!r} pairs: scores no longer depend on the difference of positions."
        ),
        turn.change(pairs=wrong, stored=wrong).values(question),
    )
    yield (
        (f"It rotates the right pairs, but leaves the result in the order of {wrong!r} pairs."),
        turn.change(stored=wrong).values(question),
    )


def _direction(question: Question) -> Iterator[Guess]:
    turn = turn_of(question)
    if turn is not None:
        yield "It rotates the other way: by -angle.", turn.change(sign=-1.0).values(question)
        yield (
            ("It rotates twice: by two times the angle."),
            turn.change(frequencies=2 * turn.frequencies, factor=turn.factor**2).values(question),
        )
        yield ("It swaps cosine and sine."), _swapped(question, turn)


def _swapped(question: Question, turn: Turn) -> Any:
    x, width = question.vectors["x"], 2 * len(turn.frequencies)
    angle = turn.angles(question.q_pos)[:, None]
    first, second = pairs_of(x[..., :width], turn.pairs)
    sin, cos = np.cos(angle), np.sin(angle)
    out = joined(first * cos - second * sin, second * cos + first * sin, turn.pairs)
    return np.concatenate([turn.factor * out, x[..., width:]], -1)


def _not_rotated(question: Question) -> Iterator[Guess]:
    if question.kind == "rotation":
        yield "It returns the vectors as they are: nothing is rotated.", question.vectors["x"]
    elif rope_in(question.scheme) is not None:
        yield (
            "Queries and keys are not rotated at all.",
            changed(question, lambda rope: NoPE()).change(scale=_scale(question)),
        )


def _scale(question: Question) -> float:
    return question.scores_scale


def _factor(question: Question) -> Iterator[Guess]:
    """The factor of cosines and sines."""
    rope = rope_in(question.scheme)
    if rope is None or rope.scaling is None:
        return
    own, scaling = rope.attention_factor, rope.scaling
    numbers: Any = scaling
    names = {field.name for field in fields(scaling)}
    if "attention_factor" in names and numbers.attention_factor is not None:
        derived = replace(scaling, **_given(attention_factor=None))
        yield (
            f"The given attention_factor={own:g} is ignored: cosines and sines have the factor "
            f"{derived.amplitude:.6g} that follows from the scaling factor.",
            changed(question, lambda r: replace(r, scaling=derived)),
        )
    if "attention_factor" not in names:
        return
    for value, words in (
        (1.0, f"The attention factor of cosines and sines is missing: 1 instead of {own:.6g}."),
        (own**2, f"The attention factor {own:.6g} of cosines and sines is applied twice."),
        (1 / own, f"Cosines and sines are divided by the attention factor {own:.6g}."),
        (own**0.5, f"Cosines and sines have the root of the attention factor {own:.6g}."),
    ):
        wrong = replace(scaling, **_given(attention_factor=value))
        yield words, changed(question, partial(_replaced, scaling=wrong))


def _given(**given: Any) -> Any:
    return given


def _scaling(question: Question) -> Iterator[Guess]:
    rope = rope_in(question.scheme)
    if rope is None or rope.scaling is None:
        return
    scaling, name = rope.scaling, type(rope.scaling).__name__
    keep = _scale(question) if question.kind == "attention" else None
    for scale, more in ((keep, ""), (None, ", and neither does the softmax scale")):
        if (scale is None and question.kind == "attention") or not more:
            yield (
                f"{name} is not applied: it is plain RoPE with base {rope.base:g}{more}.",
                changed(question, lambda r: replace(r, scaling=None)).change(scale=scale),
            )
    turn = turn_of(question)
    if turn is not None and rope.attention_factor != 1:
        plain = np.array(replace(rope, scaling=None).frequencies())
        yield (
            (
                f"The frequencies are those of plain RoPE; of {name} it has the attention factor "
                "alone."
            ),
            turn.change(frequencies=plain).values(question),
        )
    numbers: Any = scaling
    lists = ("short_factor", "long_factor")
    if all(hasattr(scaling, each) for each in lists):
        short, long = (getattr(scaling, each) for each in lists)
        for wrong, words in (
            ({"long_factor": short}, "It keeps the short factors in contexts longer"),
            ({"short_factor": long}, "It takes the long factors in contexts that are no longer"),
        ):
            made = replace(scaling, **_given(**wrong))
            yield (
                f"{words} than train_len={numbers.train_len}.",
                changed(question, partial(_replaced, scaling=made)),
            )
    for wrong_scaling, words in _neighbours(scaling):
        yield words, changed(question, partial(_replaced, scaling=wrong_scaling))


def _neighbours(scaling: Any) -> Iterator[tuple[Any, str]]:
    """Scalings that are taken for a given one."""
    factor = getattr(scaling, "factor", None)
    name = type(scaling).__name__
    if isinstance(scaling, YaRN):
        whole = replace(scaling, truncate=not scaling.truncate)
        what = "not truncated" if scaling.truncate else "truncated"
        yield whole, f"The ends of YaRN's ramp are {what}, where truncate={scaling.truncate}."
        turns = replace(scaling, ramp="turns" if scaling.ramp == "index" else "index")
        yield turns, f"The ramp of YaRN is linear in {turns.ramp}, not in {scaling.ramp}."
        for fast, slow in ((32.0, 1.0), (scaling.beta_slow, scaling.beta_fast)):
            if fast >= slow:
                wrong = replace(scaling, beta_fast=fast, beta_slow=slow)
                yield wrong, f"It has beta_fast={fast:g} and beta_slow={slow:g}."
    if factor:
        for kind in (PI, NTK):
            if type(scaling) is not kind:
                yield kind(factor=factor), f"It scales as {kind.__name__}, not as {name}."


def _width(question: Question) -> Iterator[Guess]:
    rope = rope_in(question.scheme)
    if rope is None:
        return
    width, whole = rope.rotary_dim or rope.head_dim, rope.head_dim
    if width < whole:
        yield (
            f"rotary_dim={width} is ignored: all {whole} channels rotate.",
            changed(question, lambda r: replace(r, rotary_dim=None)),
        )
        given: dict[str, Any] = {"layout": other(rope.layout), "rotary_dim": None}
        yield (
            f"layout={rope.layout!r} and rotary_dim={width} are both ignored: all {whole} channels "
            f"rotate, paired as {PAIRS[other(rope.layout)]}.",
            changed(question, partial(_replaced, **given)),
        )
        twice = width * width // whole
        if twice % 2 == 0 and twice > 1:
            yield (
                f"The partial factor is applied twice: {twice} channels rotate, not {width}.",
                changed(question, lambda r: replace(r, rotary_dim=twice)),
            )
    turn = turn_of(question)
    if turn is None or width == whole:
        return
    of_whole = np.array(replace(rope, rotary_dim=None, scaling=None).frequencies())
    yield (
        (
            f"Its frequencies are those of the whole head, base**(-2k/{whole}), where rotary_dim="
            f"{width} divides by {width}."
        ),
        turn.change(frequencies=of_whole[: width // 2]).values(question),
    )
    yield (
        (f"It rotates the last {width} channels, not the first."),
        turn.change(first=whole - width).values(question),
    )


def _base(question: Question) -> Iterator[Guess]:
    rope = rope_in(question.scheme)
    for base in _BASES:
        if rope is not None and base != rope.base:
            yield (
                f"Its base is {base:g}, not {rope.base:g}.",
                changed(question, partial(_replaced, base=base)),
            )


def _half(question: Question) -> Iterator[Guess]:
    turn = turn_of(question)
    if turn is None:
        return
    for half in ("bfloat16", "float16"):
        for rounded, words in (
            (("frequencies",), f"Its frequencies (inv_freq) are rounded to {half}"),
            (("angles",), f"Its angles are rounded to {half}"),
            (("positions", "angles"), f"Positions and angles are rounded to {half}"),
            (
                ("positions", "frequencies", "angles"),
                f"Positions, frequencies and angles are rounded to {half}",
            ),
            (("frequencies", "angles"), f"Its frequencies and angles are rounded to {half}"),
            (("tables",), f"Its cosines and sines are rounded to {half}"),
        ):
            if half == "float16" and np.max(np.abs(question.q_pos)) > 65504:
                continue
            sentence = f"{words}: compute them in float32, whatever the dtype of the vectors."
            yield sentence, turn.change(rounded=rounded, half=half).values(question)


def _axes(question: Question) -> Iterator[Guess]:
    scheme = question.scheme
    if scheme.axes == 1 or question.q_pos.ndim != 3:
        return
    names = (*axes_of(question), "fourth")
    for order in list(permutations(range(scheme.axes)))[1:]:
        words = ", ".join(names[axis] for axis in order)
        yield (
            f"It takes the axes of positions in the order {words}.",
            question.change(q_pos=question.q_pos[..., list(order)]),
        )
    for axis in range(scheme.axes):
        same = np.repeat(question.q_pos[..., axis : axis + 1], scheme.axes, -1)
        words = f"Every pair turns by the axis {names[axis]} alone."
        yield words, question.change(q_pos=same)
    if isinstance(scheme, MRoPE):
        for layout in ("chunked", "interleaved", "ernie", "hunyuan"):
            yield (
                f"It shares out pairs to the axes as {layout!r}, not as {scheme.layout!r}.",
                _mrope(question, scheme, layout=layout),
            )
        yield (
            f"It pairs channels as {PAIRS[other(scheme.rope.layout)]}.",
            _mrope(question, scheme, pairing=other(scheme.rope.layout)),
        )


def _mrope(question: Question, scheme: MRoPE, **other: Any) -> Question:
    try:
        return question.change(scheme=replace(scheme, **other))
    except ValueError:  # sections that the layout does not have; the right answer is no fault
        return question


FAULTS = (
    Hypothesis("layout", BOTH, _layout),
    Hypothesis("mixed layouts", ROTATION, _mixed_layouts),
    Hypothesis("not rotated", BOTH, _not_rotated),
    Hypothesis("scaling", BOTH, _scaling),
    Hypothesis("attention factor", BOTH, _factor),
    Hypothesis("partial width", BOTH, _width),
    Hypothesis("direction", ROTATION, _direction),
    Hypothesis("axes", ROTATION, _axes),
    Hypothesis("half precision", ROTATION, _half, rounds=True),
    Hypothesis("base", BOTH, _base),
)
