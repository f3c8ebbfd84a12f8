"""Choose the implementation that serves a call, explain the choice, and run it.

Every backend uses this one mechanism. ``posenc.attn.merge`` adds sinks and merges regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posenc.attn.call import Call
from posenc.attn.merge import PartialAttention, add_sink, merge_parts, public_lse
from posenc.checks import nearest
from posenc.protocol import Array


def _no_reason(call: Call) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes
    ----------
    name
        As in ``implementation=name``.
    run
        Computes ``(B, H, Q, Dv)`` and the log-sum-exp ``(B, H, Q)`` from a call; None for the
        second where it has none.
    unsupported
        Why it cannot serve a call; None if it can.
    not_preferred
        Why ``"auto"`` passes it by though it could; None if it does not.
    without_lse
        Why it has no log-sum-exp for a call; None if it has.
    takes_sink
        Whether it puts the call's sink into the softmax by itself.
    whole_rows
        Whether it holds whole rows of scores, which ``adjust_scores`` needs.
    """

    name: str
    run: Callable[[Call], tuple[Array, Array | None]]
    unsupported: Callable[[Call], str | None] = _no_reason
    not_preferred: Callable[[Call], str | None] = _no_reason
    without_lse: Callable[[Call], str | None] = _no_reason
    takes_sink: bool = False
    whole_rows: bool = False

    def why_not(self, call: Call) -> str | None:
        """Why it cannot serve a call; None if it can."""
        name = type(call.scheme).__name__
        if not self.whole_rows and "adjust_scores" in call.scheme.hooks():
            return (
                f"{name} adjusts whole rows of scores, which no implementation but 'reference' has"
            )
        for part in call.regions or (call,):
            if (why := self.unsupported(part)) is not None:
                return why
        needed = "return_lse=True asks for" if call.wants_lse else None
        if call.regions:
            needed = f"{name} merges its regions by"
        elif call.sink is not None and not self.takes_sink:
            needed = f"the sink of {name} is put in by"
        if needed is None or (why := self.without_lse(call)) is None:
            return None
        return f"{needed} a log-sum-exp, and {why}"


class Explanation(dict[str, Any]):
    """What ``explain`` returns: ``implementation`` (a name) and ``others`` (name -> reason)."""

    def __str__(self) -> str:
        lines = [f"implementation: {self['implementation']}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self["others"].items()])


def choose(implementations: Sequence[Implementation], call: Call, name: str) -> Implementation:
    """The implementation that serves ``call``, under its name or, for ``"auto"``, the first that
    may.

    No implementation after it is asked: a question about lengths stays in a program that is
    exported.

    Raises
    ------
    NotImplementedError
        The named implementation cannot serve the call; says why.
    ValueError
        No implementation has this name.
    """
    names = [implementation.name for implementation in implementations]
    if name != "auto" and name not in names:
        raise ValueError(f"unknown implementation {name!r}{nearest(name, ['auto', *names])}")
    reasons = {}
    for implementation in implementations:
        if name == "auto":
            why = implementation.not_preferred(call) or implementation.why_not(
                call
            )  # the cheaper question first
        elif name == implementation.name:
            why = implementation.why_not(call)
        else:
            continue
        if why is None:
            return implementation
        reasons[implementation.name] = why
    if name != "auto":
        why = f"implementation {name!r} cannot serve this call: {reasons[name]}"
        raise NotImplementedError(why)
    raise NotImplementedError(f"no implementation can serve this call: {reasons}")


def explain_choice(implementations: Sequence[Implementation], call: Call, name: str) -> Explanation:
    """Which implementation ``choose`` takes, and why not each of the others."""
    chosen = choose(implementations, call, name)
    served = f"{chosen.name!r} was asked for"
    if name == "auto":
        served = f"it could, and {chosen.name!r} comes first"
    others = {
        implementation.name: implementation.why_not(call)
        or (implementation.not_preferred(call) if name == "auto" else None)
        or served
        for implementation in implementations
        if implementation is not chosen
    }
    return Explanation(implementation=chosen.name, others=others)


def attend(
    implementations: Sequence[Implementation], call: Call, name: str
) -> tuple[Array, Array | None]:
    """Attention and, if the call wants it, its log-sum-exp, on the implementation that serves the
    call.

    The log-sum-exp is ``(B, H, Q)`` in the working float, ``-inf`` where nothing is seen.
    """
    implementation = choose(implementations, call, name)
    if call.regions:
        parts = [PartialAttention(*implementation.run(part)) for part in call.regions]
        found = merge_parts(parts, call)
    else:
        found = PartialAttention(*implementation.run(call))
    if call.sink is not None and not implementation.takes_sink:
        found = add_sink(found, call)
    return found.out, public_lse(found.lse, call) if call.wants_lse else None
