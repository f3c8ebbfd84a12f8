"""Options of the definition that a function does not read: it computes with their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from typing import Any

from posenc.audit.faults import Guess, Hypothesis
from posenc.audit.gold import Question
from posenc.audit.hypotheses.biases import with_part
from posenc.audit.hypotheses.positions import ALL
from posenc.contract.protocol import PositionScheme
from posenc.schemes import Sum, Wrapper


def _parts(scheme: PositionScheme) -> Iterator[Any]:
    """A scheme, and those in it."""
    yield scheme
    inside: Any = scheme
    for part in inside.schemes if isinstance(scheme, Sum) else ():
        yield from _parts(part)
    if isinstance(scheme, Wrapper):
        yield from _parts(inside.scheme)


def _unread(part: Any) -> Iterator[tuple[str, Any]]:
    """Each option that is not at its default: what to say, and the part without it."""
    for option in fields(part):
        value = getattr(part, option.name)
        default = option.default
        if not option.init or default is MISSING or value == default:
            continue
        value, default = (f"{v:g}" if isinstance(v, float) else repr(v) for v in (value, default))
        name = f"{option.name}={value}"
        name = name if len(name) < 40 else option.name
        sentence = f"{name} is ignored: it computes with the default, {default}."
        try:
            yield sentence, replace(part, **{option.name: option.default})
        except (ValueError, TypeError):  # it needs another option
            continue


def _ignored(question: Question) -> Iterator[Guess]:
    for part in _parts(question.scheme):
        if not is_dataclass(part):
            continue
        change = partial(with_part, question.scheme, type(part))
        for sentence, plain in _unread(part):
            made = {each.name: getattr(plain, each.name) for each in fields(plain) if each.init}
            yield sentence, question.change(scheme=change(**made))
        scaling: Any = getattr(part, "scaling", None)
        if is_dataclass(scaling):
            for sentence, plain in _unread(scaling):
                yield sentence, question.change(scheme=change(scaling=plain))


FAULTS = (Hypothesis("options that are not read", ALL, _ignored),)
