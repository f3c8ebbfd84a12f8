"""Choose the implementation that serves a call, explain the choice, and run it.

Every backend uses this one mechanism. ``posenc.attn.merge`` adds sinks and merges regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posenc.attn.call import Call
from posenc.attn.merge import PartialAttention, add_sink, merge_parts, public_lse
from posenc.contract.checks import nearest
from posenc.contract.protocol import Array, Hook


def _no_reason(call: Call) -> None:
    return None


def _nothing(call: Call) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention, and the calls that it supports.

    Attributes
    ----------
    name
        The name in ``implementation=name``.
    run
        Computes ``(B, H, Q, Dv)`` and the log-sum-exp ``(B, H, Q)`` from a call; None instead of
        the log-sum-exp if it has none.
    unsupported
        Returns why it cannot serve a call; None if it can.
    not_preferred
        Returns why ``"auto"`` skips it, even for a call that it supports; None if it does not.
    without_lse
        Returns why it has no log-sum-exp for a call; None if it has one.
    takes_sink
        Whether ``run`` adds the call's sink itself.
    fixed
        Returns ``run`` as a function of transformed queries, keys and values alone, without a
        log-sum-exp, for the layers of a pass; None if it has none for a call.
    whole_rows
        Whether it holds whole rows of scores, which ``adjust_scores`` needs.
    """

    name: str
    run: Callable[[Call], tuple[Array, Array | None]]
    unsupported: Callable[[Call], str | None] = _no_reason
    not_preferred: Callable[[Call], str | None] = _no_reason
    without_lse: Callable[[Call], str | None] = _no_reason
    takes_sink: bool = False
    fixed: Callable[[Call], Callable[[Array, Array, Array], Array] | None] = _nothing
    whole_rows: bool = False

    def why_not(self, call: Call) -> str | None:
        """Why it cannot serve a call; None if it can."""
        name = type(call.scheme).__name__
        for part in call.regions or (call,):
            if not self.whole_rows and Hook.ADJUST_SCORES in part.scheme.hooks():
                because = part.scheme.whole_rows and f": {part.scheme.whole_rows}"
                who = type(part.scheme).__name__
                return f"{who} adjusts whole rows of scores, which only 'reference' has{because}"
            if (why := self.unsupported(part)) is not None:
                return why
        purpose = "return_lse=True" if call.wants_lse else None
        if call.regions:
            purpose = f"merging the regions of {name}"
        elif call.sink is not None and not self.takes_sink:
            purpose = f"the sink of {name}"
        if purpose is None or (why := self.without_lse(call)) is None:
            return None
        return f"{purpose} needs a log-sum-exp, and {why}"


class Explanation(dict[str, Any]):
    """What ``explain`` returns: ``implementation`` (a name) and ``others`` (name -> reason)."""

    def __str__(self) -> str:
        lines = [f"implementation: {self['implementation']}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self["others"].items()])


def choose(implementations: Sequence[Implementation], call: Call, name: str) -> Implementation:
    """The implementation called ``name``, or the first suitable one for ``"auto"``.

    ``"auto"`` skips those that do not support the call, and those that are not preferred for it.
    Later implementations are not asked, because their questions about lengths would become
    conditions of an exported program.

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
            # not_preferred first: it is cheaper.
            why = implementation.not_preferred(call) or implementation.why_not(call)
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
    default_reason = f"{chosen.name!r} was asked for"
    if name == "auto":
        default_reason = f"supported, but {chosen.name!r} is preferred"
    others = {
        implementation.name: implementation.why_not(call)
        or (implementation.not_preferred(call) if name == "auto" else None)
        or default_reason
        for implementation in implementations
        if implementation is not chosen
    }
    return Explanation(implementation=chosen.name, others=others)


def attend(
    implementations: Sequence[Implementation], call: Call, name: str
) -> tuple[Array, Array | None]:
    """Compute attention, and the log-sum-exp if the call wants it, with the chosen implementation.

    The log-sum-exp is ``(B, H, Q)`` in the working dtype, ``-inf`` for a query without a visible
    key.
    """
    return run_chosen(choose(implementations, call, name), call)


def run_chosen(implementation: Implementation, call: Call) -> tuple[Array, Array | None]:
    """``attend`` with an implementation that serves the call."""
    if call.regions:
        parts = [PartialAttention(*implementation.run(part)) for part in call.regions]
        result = merge_parts(parts, call)
    else:
        result = PartialAttention(*implementation.run(call))
    if call.sink is not None and not implementation.takes_sink:
        result = add_sink(result, call)
    return result.out, public_lse(result.lse, call) if call.wants_lse else None
