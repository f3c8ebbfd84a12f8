"""What can be measured of a result that no known fault explains."""

from __future__ import annotations

import numpy as np

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
        if not np.allclose(after, turn.factor * before, atol=1e-2):
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
        count = f"{len(bad)} of {len(worst)} pairs turn"
        angles = (
            f"Vectors keep their lengths, but {count} by other angles: pair {pair} at position "
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
            which = ", ".join(str(int(n)) for n in np.flatnonzero(of_axis)[:8])
            more = ", ..." if np.sum(of_axis) > 8 else ""
            several = "s" if np.sum(of_axis) > 1 else ""
            return f"No known fault explains it; only {name}{several} {which}{more} of " + (
                f"{len(of_axis)} differ{'' if several else 's'}."
            )
    return ""


MEASURES = (_ratio, _heads, _tokens, _frequencies)
