"""Choose the implementation that serves a call, and explain the choice.

Every backend uses this one mechanism. An implementation *plans* a call: it refuses, or returns what
runs it. ``posenc.attn.merge`` adds sinks and merges regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posenc.attn.call import Call
from posenc.attn.merge import LogSumExp, PartialAttention, add_sink, merge_parts
from posenc.contract.checks import nearest
from posenc.contract.protocol import Array, Hook


def _no_reason(call: Call) -> None:
    return None


def _nothing(call: Call) -> None:
    return None


@dataclass(frozen=True)
class Refusal:
    """Why an implementation cannot serve a call."""

    why: str


@dataclass(frozen=True)
class Planned:
    """A call that an implementation serves, with all that it had to find out to say so.

    Attributes
    ----------
    run
        Computes ``(B, H, Q, Dv)`` and the log-sum-exp of the call that was planned, or of one that
        differs from it in vectors alone; None instead of the log-sum-exp if it has none.
    without_lse
        Why there is no log-sum-exp; None if there is one.
    takes_sink
        Whether ``run`` adds the call's sink itself.
    pairs_in_pass
        How many numbers the layers of a pass keep at most for each head and pair of tokens.
    fixed
        Returns ``run`` as a function of transformed queries, keys and values alone, without a
        log-sum-exp, for the layers of a pass; None if it has none for a call.
    """

    run: Callable[[Call], tuple[Array, LogSumExp | None]]
    without_lse: str | None = None
    takes_sink: bool = False
    pairs_in_pass: int = 3
    fixed: Callable[[Call], Callable[[Array, Array, Array], Array] | None] = _nothing


def plan_unless(why: str | None, planned: Planned) -> Planned | Refusal:
    """``planned``, or the refusal if there is a reason for one."""
    return planned if why is None else Refusal(why)


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention, and the calls that it serves.

    Attributes
    ----------
    name
        The name in ``implementation=name``.
    plan
        How it serves a call without regions, and without a sink unless it takes one; or why not.
    not_preferred
        Returns why ``"auto"`` skips it, even for a call that it serves; None if it does not.
    decays
        Whether it computes scores whose channels decay.
    whole_rows
        Whether it holds whole rows of scores, which ``adjust_scores`` needs.
    within
        The function of which it is an implementation, unless that is ``attention``.
    """

    name: str
    plan: Callable[[Call], Planned | Refusal]
    not_preferred: Callable[[Call], str | None] = _no_reason
    decays: bool = False
    whole_rows: bool = False
    within: str | None = None

    def plan_all(self, call: Call) -> Planned | Refusal:
        """How it serves a whole call, merges its regions and adds its sink; or why not."""
        plans: list[Planned] = []
        for part in call.regions or (call,):
            refused = self._refuse_scores(part)
            planned = self.plan(part) if refused is None else refused
            if isinstance(planned, Refusal):
                return planned
            plans.append(planned)
        if (why := _why_no_lse(call, plans)) is not None:
            return Refusal(why)
        first = plans[0]
        pairs = sum(planned.pairs_in_pass for planned in plans)
        return Planned(partial(_run_all, tuple(plans)), pairs_in_pass=pairs, fixed=first.fixed)

    def _refuse_scores(self, part: Call) -> Refusal | None:
        """Refuse a scheme that changes scores in a way that it does not compute."""
        who, hooks = type(part.scheme).__name__, part.scheme.hooks()
        if Hook.ADJUST_SCORES in hooks and not self.whole_rows:
            because = part.scheme.whole_rows and f": {part.scheme.whole_rows}"
            which = f"'{self.name}' of {self.within}" if self.within else f"'{self.name}'"
            return Refusal(
                f"{who} adjusts whole rows of scores, which {which} does not hold{because}"
            )
        if Hook.CHANNEL_DECAY in hooks and not self.decays:
            return Refusal(
                f"each channel of a score of {who} decays by itself, relative to an anchor between "
                "query and key, which only 'chunked' and 'reference' compute"
            )
        return None


def _why_no_lse(call: Call, plans: Sequence[Planned]) -> str | None:
    """Why a log-sum-exp that a call needs is missing; None if it is not."""
    name = type(call.scheme).__name__
    purpose = "return_lse=True" if call.wants_lse else None
    if call.regions:
        purpose = f"merging the regions of {name}"
    elif call.sink is not None and not plans[0].takes_sink:
        purpose = f"the sink of {name}"
    reasons = (planned.without_lse for planned in plans if planned.without_lse is not None)
    if purpose is None or (why := next(reasons, None)) is None:
        return None
    return f"{purpose} needs a log-sum-exp, and {why}"


def _run_all(plans: Sequence[Planned], call: Call) -> PartialAttention:
    if call.regions:
        pairs = zip(plans, call.regions, strict=True)
        result = merge_parts([PartialAttention(*plan.run(part)) for plan, part in pairs], call)
    else:
        result = PartialAttention(*plans[0].run(call))
    if call.sink is not None and not plans[0].takes_sink:
        result = add_sink(result, call)
    return result


class Explanation(dict[str, Any]):
    """What ``explain`` returns: ``implementation`` (a name) and ``others`` (name -> reason)."""

    def __str__(self) -> str:
        lines = [f"implementation: {self['implementation']}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self["others"].items()])


def choose(implementations: Sequence[Implementation], call: Call, name: str) -> tuple[str, Planned]:
    """The implementation ``name``, or the first suitable one for ``"auto"``: its name and its plan.

    ``"auto"`` skips those that do not serve the call, and those that are not preferred for it.
    Later implementations are not asked, because their questions about lengths would become
    conditions of an exported program.

    Raises
    ------
    NotImplementedError
        The named implementation cannot serve the call; says why.
    ValueError
        No implementation has this name.
    """
    check_implementation(name, [implementation.name for implementation in implementations])
    reasons = {}
    for implementation in implementations:
        if name not in ("auto", implementation.name):
            continue
        # not_preferred first: it is cheaper.
        why = implementation.not_preferred(call) if name == "auto" else None
        if why is None:
            planned = implementation.plan_all(call)
            if isinstance(planned, Planned):
                return implementation.name, planned
            why = planned.why
        reasons[implementation.name] = why
    if name != "auto":
        why = f"implementation {name!r} cannot serve this call: {reasons[name]}"
        raise NotImplementedError(why)
    raise NotImplementedError(f"no implementation can serve this call: {reasons}")


def check_implementation(name: Any, names: Sequence[str]) -> str:
    """``name``, if it is ``"auto"`` or one of ``names``."""
    if name != "auto" and name not in names:
        raise ValueError(f"unknown implementation {name!r}{nearest(name, ['auto', *names])}")
    return str(name)


def explain_choice(implementations: Sequence[Implementation], call: Call, name: str) -> Explanation:
    """Which implementation ``choose`` takes, and why not each of the others."""
    chosen, _ = choose(implementations, call, name)
    default_reason = f"{chosen!r} was asked for"
    if name == "auto":
        default_reason = f"supported, but {chosen!r} is preferred"
    others = {}
    for implementation in implementations:
        if implementation.name == chosen:
            continue
        planned = implementation.plan_all(call)
        why = planned.why if isinstance(planned, Refusal) else None
        if why is None and name == "auto":
            why = implementation.not_preferred(call)
        others[implementation.name] = why or default_reason
    return Explanation(implementation=chosen, others=others)
