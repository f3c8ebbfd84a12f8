"""What can be measured of a result that no known fault explains."""

from __future__ import annotations

import numpy as np

from posenc.audit.faults import NEARLY
from posenc.audit.gold import Question
from posenc.audit.hypotheses.rotations import turn_of
from posenc.audit.hypotheses.turns import pairs_of
from posenc.testing.framework import Host


def _ratio(question: Question, found: Host, gold: Host, tolerance: Host, compared: Host) -> str:
    """All numbers are the right ones times one number."""
    use = compared & np.isfinite(gold)
    power = float(np.sum(gold[use] ** 2))
    ratio = float(np.sum(found[use] * gold[use])) / power if power else 0.0
    if ratio and np.all(np.abs(found - ratio * gold)[use] <= (1 + abs(ratio)) * tolerance[use]):
        return f"All numbers are {ratio:.6g} times those of the definition."
    return ""


def _frequencies(
    question: Question, found: Host, gold: Host, tolerance: Host, compared: Host
) -> str:
    """Every pair is rotated, but not by the angles of the definition."""
    turn = turn_of(question) if question.kind == "rotation" else None
    if turn is None:
        return ""
    x, width = question.vectors["x"], 2 * len(turn.frequencies)
    for layout in (turn.pairs, "half" if turn.pairs == "interleaved" else "interleaved"):
        a, b = pairs_of(x[..., :width], layout)
        c, d = pairs_of(found[..., :width], layout)
        before, after = np.hypot(a, b), np.hypot(c, d)
        longer = np.abs(after - turn.factor * before)
        if not np.all(longer <= 1e-2 + 1e-5 * before):
            continue
        z = (c + 1j * d) * np.conj(a + 1j * b)
        angle = np.angle(np.sum(z, axis=1))  # (B, L, n), the same for all heads
        right = np.angle(np.exp(1j * turn.angles(question.q_pos)))
        off = np.abs(np.angle(np.exp(1j * (angle - right))))
        worst = np.max(off, axis=(0, 1))
        bad = np.flatnonzero(worst > 1e-3 * (1 + np.max(np.abs(question.q_pos)) * 1e-4))
        if not len(bad):
            return ""
        pair = int(bad[0])
        row, token = np.unravel_index(np.argmax(off[..., pair]), off.shape[:2])
        lengths = "Vectors keep their lengths, but"
        if np.max(longer) > 2 * np.max(tolerance):  # two numbers, each off by as much
            lengths = f"Lengths are off by up to {np.max(longer):.1g}, and"
        count = f"{len(bad)} of {len(worst)} pairs turn"
        angles = (
            f"{lengths} {count} by other angles: pair {pair} at position "
            f"{int(question.q_pos[row, token])} by {angle[row, token, pair]:.4g} rad instead of "
            f"{right[row, token, pair]:.4g}."
        )
        if 2 * len(bad) < len(worst):
            return angles
        return (
            f"{angles} No known base, scaling or width gives these frequencies; a table that was "
            "never initialised would (inv_freq after a load from the meta device)."
        )
    return ""


def _heads(question: Question, found: Host, gold: Host, tolerance: Host, compared: Host) -> str:
    """Which heads or rows alone are wrong."""
    wrong = (np.abs(found - gold) > tolerance) & compared
    names = {"bias": ("head",), "embedding": ("row",)}.get(question.kind, ("row", "head"))
    return _only(wrong, names, 1.0)


def _tokens(question: Question, found: Host, gold: Host, tolerance: Host, compared: Host) -> str:
    """Which tokens alone are wrong, if these are few."""
    wrong = (np.abs(found - gold) > tolerance) & compared
    names = {"bias": ("head", "query", "key"), "embedding": ("row", "token", "channel")}.get(
        question.kind, ("row", "head", "token")
    )
    return _only(wrong, names, 0.5)


def _only(wrong: Host, names: tuple[str, ...], most: float) -> str:
    """A sentence, if only a part of less than ``most`` of an axis is wrong."""
    for axis, name in enumerate(names):
        others = tuple(n for n in range(wrong.ndim) if n != axis)
        of_axis = np.any(wrong, axis=others)
        if 0 < np.sum(of_axis) < most * len(of_axis):
            return f"No known fault explains it; only {_listed(name, of_axis)} differ" + (
                "." if np.sum(of_axis) > 1 else "s."
            )
    return ""


def _listed(name: str, chosen: Host) -> str:
    """``heads 8 to 11 of 12``, or ``head 3 of 8``."""
    which = [int(n) for n in np.flatnonzero(chosen)]
    first, last, total = which[0], which[-1], len(chosen)
    if len(which) == 1:
        return f"{name} {first} of {total}"
    plural = {"query": "queries"}.get(name, f"{name}s")
    if len(which) > 2 and last - first + 1 == len(which):
        return f"{plural} {first} to {last} of {total}"
    if len(which) > 4:
        return f"{len(which)} of {total} {plural}, the first {first},"
    return f"{plural} {', '.join(map(str, which))} of {total}"


def _lines(question: Question, found: Host, gold: Host, tolerance: Host, compared: Host) -> str:
    """A bias that is linear in distance, as that of the definition, with other slopes."""
    if question.kind != "bias":
        return ""
    keys = question.q_pos if question.k_pos is None else question.k_pos
    far = np.abs(question.q_pos[:, None] - keys).astype(np.float64)
    use = compared & np.isfinite(gold) & np.isfinite(found)
    slopes = []
    for values in (found, gold):
        power = np.sum(np.where(use, far**2, 0), axis=(1, 2))
        slope = np.sum(np.where(use, far * values, 0), axis=(1, 2)) / np.maximum(power, 1)
        off = np.abs(values - slope[:, None, None] * far)
        if np.any((off > 2 * tolerance)[use]):
            return ""
        slopes.append(-slope)
    own, right = (", ".join(f"{m:.6g}" for m in each[:4]) for each in slopes)
    return (
        f"It is linear in distance with other slopes: {own}, ... for the first heads, where the "
        f"definition has {right}, ..."
    )


def _scaled_angles(
    question: Question, found: Host, gold: Host, tolerance: Host, compared: Host
) -> str:
    """All angles are those of the definition times one number, or have another base."""
    turn = turn_of(question)
    if turn is None or not np.any(question.q_pos == 1):
        return ""
    n = len(turn.frequencies)
    row, token = (int(i) for i in np.argwhere(question.q_pos == 1)[0])
    before, after = (
        np.stack(pairs_of(a[row, 0, token, : 2 * n], turn.pairs))
        for a in (question.vectors["x"], found)
    )
    z = (after[0] + 1j * after[1]) * np.conj(before[0] + 1j * before[1])
    own = np.angle(z)  # at position 1: the frequencies, if none is above half a turn
    right, use = turn.frequencies, np.abs(z) > 1e-2
    ratio = float(np.sum((own * right)[use]) / np.sum((right**2)[use]))
    scaled = (
        f"Every angle is {ratio:.5g} times that of the definition: its positions or all its "
        "frequencies are scaled."
    )
    guesses = [(scaled, right * ratio)]
    pairs = np.arange(n)[use & (own > 1e-3)]
    if len(pairs) and pairs[-1]:
        base = float(own[pairs[-1]] ** (-n / pairs[-1]))
        guesses.append((f"Its base is about {base:.4g}.", base ** (-np.arange(n) / n)))
    near = np.broadcast_to((np.abs(question.q_pos) <= 40)[:, None, :, None], gold.shape)
    off = float(np.linalg.norm((found - gold)[near]))
    for sentence, frequencies in guesses:
        values = turn.change(frequencies=frequencies).values(question)
        if np.linalg.norm((found - values)[near]) < NEARLY * off:
            return sentence
    return ""


MEASURES = (_ratio, _lines, _scaled_angles, _heads, _tokens, _frequencies)
