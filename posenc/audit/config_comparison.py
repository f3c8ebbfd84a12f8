"""One fact of two readers of a configuration: whether it agrees, and what to tell if not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posenc.audit.config_faults import explain_factor, explain_frequencies, explain_softmax
from posenc.audit.readers import Facts, Unsaid
from posenc.audit.record import Status
from posenc.audit.rotation_difference import Rotation, difference, frequency_bound
from posenc.schemes.rope import RoPE

FACTOR_TOLERANCE = 1e-5
"""Of factors, relative: some are measured in float32, from a few products."""


@dataclass(frozen=True)
class Finding:
    """What a comparison found; fields as those of ``Record``."""

    status: Status
    message: str = ""
    error: float | None = None
    tolerance: float | None = None
    where: Mapping[str, int] = field(default_factory=dict)


def compare(fact: str, own: Facts, found: Facts, rope: RoPE | None, far: int) -> Finding | None:
    """Compare a fact of a reader with that of the definition; None: it does not apply.

    ``rope`` is the definition's, and ``far`` the last position of the longest text.
    """
    one, other = getattr(own, fact), getattr(found, fact)
    if fact != "frequencies" and not (own.rotates and found.rotates) and fact != "window":
        return None  # told by the frequencies
    if fact == "sections" and isinstance(one, Unsaid) and other is None:
        return Finding("agrees", _said(fact, None))
    for value in (one, other):
        if isinstance(value, Unsaid):
            return Finding("cannot express", value.reason)
    if fact == "frequencies":
        return _frequencies(own, found, rope, far)
    if fact in ("attention_factor", "softmax_factor"):
        return _factors(fact, one, other, rope)
    if one == other:
        return Finding("agrees", f"{_said(fact, one)}")
    return {"layout": _layouts, "rotary_dim": _widths, "window": _windows, "sections": _sections}[
        fact
    ](own, found, rope, far)


def _said(fact: str, value: Any) -> str:
    if fact == "sections":
        if value is None:
            return "positions have one axis"
        counts = (f"{value.count(axis)} turn by axis {axis}" for axis in sorted(set(value)))
        return f"of {len(value)} pairs, {', '.join(counts)}"
    if fact == "window":
        return "no window" if value is None else f"{value} keys"
    return f"{value} channels" if fact == "rotary_dim" else str(value)


def _frequencies(own: Facts, found: Facts, rope: RoPE | None, far: int) -> Finding:
    ones, others = own.frequencies, found.frequencies
    assert not isinstance(ones, Unsaid)
    assert not isinstance(others, Unsaid)
    if not own.rotates or not found.rotates:
        if own.rotates == found.rotates:
            return Finding("agrees", "no rotation")
        message = (
            "these layers rotate, and are left unrotated"
            if own.rotates
            else "these layers do not rotate, and are rotated"
        )
        return Finding("differs", message, error=2.0, where={"position": 1})
    assert rope is not None
    worst = 0.0
    for length in sorted(set(ones) & set(others)):
        f, g = ones[length], others[length]
        if len(f) == len(g):
            bound = frequency_bound(f, rope.base)
            apart = np.abs(np.subtract(f, g))
            worst = max(worst, float((apart / np.maximum(np.abs(f), 1e-30)).max(initial=0)))
            if np.all(apart <= bound):
                continue
        return _other_frequencies(own, found, rope, length, far)
    return Finding(
        "agrees", f"{len(ones[min(ones)])} frequencies", worst,
        float((frequency_bound(f, rope.base) / np.maximum(np.abs(f), 1e-30)).max(initial=0)),
    )  # fmt: skip


def _other_frequencies(own: Facts, found: Facts, rope: RoPE, length: int, far: int) -> Finding:
    assert not isinstance(own.frequencies, Unsaid)
    assert not isinstance(found.frequencies, Unsaid)
    f, g = own.frequencies[length], found.frequencies[length]
    layout = own.layout if isinstance(own.layout, str) else "half"
    apart = difference(Rotation(f, layout), Rotation(g, layout), far)
    told = explain_frequencies(rope, g, length, far + 1)
    if len(f) == len(g):
        wrong = np.flatnonzero(np.abs(np.subtract(f, g)) > frequency_bound(f, rope.base))
        ratios = [f[n] / g[n] if g[n] else math.inf for n in wrong]
        worst = int(wrong[int(np.argmax(np.abs(np.log(np.clip(ratios, 1e-300, 1e300)))))])
        what = (
            f"{len(wrong)} of {len(f)} frequencies differ, most that of pair {worst}: "
            f"{g[worst]:.6g}, not {f[worst]:.6g}"
        )
        where = {"pair": int(wrong[0])}
    else:
        what, where = f"{len(g)} frequencies, not {len(f)}", {}
    if length > 1:
        what = f"texts of {length} tokens: {what}"
    if apart.first is not None:
        where["position"] = apart.first
    message = "; ".join(filter(None, (told, what, apart.words())))
    return Finding("differs", message, apart.largest, where=where)


def _factors(fact: str, one: float, other: float, rope: RoPE | None) -> Finding:
    error = abs(other / one - 1) if one else math.inf
    if error <= FACTOR_TOLERANCE:
        return Finding("agrees", f"{one:.6g}", error, FACTOR_TOLERANCE)
    if fact == "attention_factor":
        told, scores = explain_factor(rope, other) if rope is not None else "", (other / one) ** 2
        what = f"cosines and sines are multiplied by {other:.6g}, not {one:.6g}"
    else:
        told, scores = explain_softmax(one, other), other / one
        what = f"the softmax scale is multiplied by {other:.6g}, not {one:.6g}"
    scores_text = (
        f"rotated scores are {scores:.4g} times as large as they should be, at every distance; a "
        "token that sees itself alone (position 0) hides it"
    )
    message = "; ".join(filter(None, (told, what, scores_text)))
    return Finding("differs", message, abs(scores - 1), FACTOR_TOLERANCE, {"position": 1})


def _rotation(facts: Facts) -> Rotation | None:
    layout = facts.layout if isinstance(facts.layout, str) else ""
    known = layout.partition(",")[0] in ("half", "interleaved")
    if not known or isinstance(facts.frequencies, Unsaid):
        return None
    return Rotation(facts.frequencies[min(facts.frequencies)], layout)


def _layouts(own: Facts, found: Facts, rope: RoPE | None, far: int) -> Finding:
    pairs = {"half": "channels k and k + R/2", "interleaved": "neighbours, 2k and 2k + 1"}

    def told(layout: Any) -> str:
        name, _, way = str(layout).partition(", ")
        return f"{pairs.get(name, name)}{f', {way}' if way else ''}"

    message = f"pairs are {told(found.layout)}; they should be {told(own.layout)}"
    return _with_difference(message, own, found, far)


def _widths(own: Facts, found: Facts, rope: RoPE | None, far: int) -> Finding:
    whole = "" if rope is None else f" of {rope.head_dim}"
    message = f"{found.rotary_dim} channels rotate, not {own.rotary_dim}{whole}"
    return _with_difference(message, own, found, far)


def _with_difference(message: str, own: Facts, found: Facts, far: int) -> Finding:
    one, other = _rotation(own), _rotation(found)
    if one is None or other is None:
        return Finding("differs", message)
    apart = difference(one, other, far)
    where = {} if apart.first is None else {"position": apart.first}
    return Finding("differs", f"{message}; {apart.words()}", apart.largest, where=where)


def _windows(own: Facts, found: Facts, rope: RoPE | None, far: int) -> Finding:
    one, other = own.window, found.window
    assert not isinstance(one, Unsaid)
    assert not isinstance(other, Unsaid)
    first = min(size for size in (one, other) if size is not None)
    if other is None:
        told = f"the window of {one} keys is not read"
    elif one is None:
        told = f"a window of {other} keys, where every key is visible"
    else:
        off = f", {abs(other - one)} off" if abs(other - one) == 1 else ""
        told = f"a window of {other} keys, not {one}{off}"
    message = f"{told}; masks differ from position {first} on"
    return Finding("differs", message, where={"position": first})


def _sections(own: Facts, found: Facts, rope: RoPE | None, far: int) -> Finding:
    one, other = own.sections, found.sections
    assert not isinstance(one, Unsaid)
    assert not isinstance(other, Unsaid)
    if one is None or other is None:
        told = "positions have one axis" if other is None else "pairs turn by several axes"
        return Finding("differs", f"{told}; {_said('sections', one)} should hold")
    wrong = _first_other(one, other)
    message = (
        f"{sum(a != b for a, b in zip(one, other, strict=False))} of {len(one)} pairs turn by "
        f"another axis, the first is pair {wrong}: by axis "
        f"{other[wrong] if wrong < len(other) else 'none'}, not {one[wrong]}; text alone hides it, "
        "whose coordinates are equal"
    )
    return Finding("differs", message, where={"pair": wrong})


def _first_other(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
