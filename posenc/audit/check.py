"""One check of an audit: a function asked one question of the grid, against the gold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from posenc.audit import conventions
from posenc.audit.arguments import takes
from posenc.audit.candidate import Candidate, CannotExpressError
from posenc.audit.conventions import NotCalledError, Reply
from posenc.audit.difference import compare, compared_in, told
from posenc.audit.faults import explain
from posenc.audit.gold import Question, allowed, answer, drawn, drawn_params
from posenc.audit.gradients import check_gradients
from posenc.audit.grid import HEADS, Case, named, on_axes
from posenc.audit.labels import window_of
from posenc.audit.record import Record, Status
from posenc.contract.protocol import PositionScheme
from posenc.schemes.learned import OutsideTableError
from posenc.testing.framework import Framework, Host
from posenc.testing.tolerances import UNIT


def asked(candidate: Candidate, case: Case) -> Question:
    """The question of a case."""
    sizes = case.sizes
    scheme = candidate.scheme(sizes)
    params = learned(candidate, case, scheme)
    batch, queries = case.q_pos.shape[:2] if case.kind != "bias" else (1, len(case.q_pos))
    shape = (batch, case.heads, queries, case.head_dim)
    vectors: dict[str, Host] = {}
    if case.kind == "rotation":
        vectors = {"x": drawn(shape, 1)}
    elif case.kind == "attention":
        keys = case.q_pos if case.k_pos is None else case.k_pos
        of_keys = (batch, case.kv_heads or case.heads, keys.shape[1], case.head_dim)
        vectors = {"q": drawn(shape, 1), "k": drawn(of_keys, 2), "v": drawn(of_keys, 3)}
    window = candidate.window or window_of(candidate.label)
    return Question(
        case.kind, scheme, case.q_pos, case.k_pos, params, vectors, case.causal, window,
        case.seg, case.heads, case.scale, case.softcap, case.region,
    )  # fmt: skip


def learned(candidate: Candidate, case: Case, scheme: PositionScheme) -> Mapping[str, Host]:
    """The learned arrays of a question: those of the candidate, or drawn ones."""
    if callable(candidate.params):
        return dict(candidate.params(case.sizes))
    return candidate.params or drawn_params(scheme)


def check(candidate: Candidate, case: Case, dtype: str, arrays: Framework) -> Record | None:
    """The record of one case; None for one that says nothing of the candidate."""
    if case.what == "gradients" and not has_gradients(candidate, arrays, dtype):
        return None
    try:
        case = at_sizes(case, candidate.pinned)
        question = asked(candidate, case)
        if case.kv_heads and _has_key_heads(question.scheme):
            return None
        gold = _gold(question)
        f = candidate.make(case.sizes)
        if not takes(f, case.option):
            return None
        if case.what == "gradients":
            return _gradients(candidate, case, f, dtype, arrays)
        if case.what == "in two steps":
            if not _adds_up(question, gold):
                return None
            f = _in_two_steps(f)
        reply = conventions.ask(f, question, arrays, dtype)
        if case.what == "values again":
            far = _far(candidate, case, question.scheme.axes)
            conventions.ask(f, asked(candidate, far), arrays, dtype)
            again = conventions.ask(f, question, arrays, dtype)
            if not np.array_equal(again.values, reply.values, equal_nan=True):
                return _forgot_nothing(candidate, case, question, again, dtype)
            reply = again
    except CannotExpressError as error:
        return record(candidate, case, dtype, "cannot express", message=str(error))
    except NotCalledError as error:
        # A function that lacks half precision raises; one that has it is audited there.
        half = dtype in ("float16", "bfloat16") and "raised" in str(error)
        status: Status = "cannot express" if half else "not called"
        return record(candidate, case, dtype, status, message=str(error))
    if reply.changed:
        message = f"It changes its argument {', '.join(reply.changed)} in place."
        return record(candidate, case, dtype, "differs", message=message)
    return _values(candidate, case, question, reply, gold, dtype)


def _in_two_steps(f: Callable[..., Any]) -> Callable[..., Any]:
    """A rotation by half of each position, and again by the rest, as a cache shifts its keys."""

    def turned(x: Any, pos: Any) -> Any:
        first = pos // 2
        part = f(x, first)
        if getattr(part, "shape", None) != x.shape:
            raise NotCalledError("its result has not the shape of its vectors")
        return f(part, pos - first)

    return turned


def _adds_up(question: Question, gold: Host) -> bool:
    """Whether two rotations of the definition are one, as without a factor of cosines and sines."""
    twice = _in_two_steps(lambda x, pos: answer(question.change(vectors={"x": x}, q_pos=pos)))
    return np.allclose(twice(question.vectors["x"], question.q_pos), gold, atol=1e-6)


def _has_key_heads(scheme: PositionScheme) -> bool:
    """Whether a scheme learns arrays of the heads of keys, whose number it then has."""
    return any(spec.of_keys for spec in scheme.param_specs().values())


def _gold(question: Question) -> Host:
    """The right answer."""
    try:
        return answer(question)
    except OutsideTableError as error:
        raise CannotExpressError(f"the definition ends before: {error}") from error


def has_gradients(candidate: Candidate, arrays: Framework, dtype: str) -> bool:
    """Whether gradients of a candidate are audited in a dtype."""
    return candidate.differentiable and arrays.differentiable and dtype == "float32"


def at_sizes(case: Case, pinned: Mapping[str, int]) -> Case:
    """The case at the sizes that a function has alone."""
    heads = pinned.get("num_heads", case.heads)
    if heads != case.heads and case.heads != HEADS:
        raise CannotExpressError(f"it has {heads} heads alone")
    if case.kv_heads and heads % case.kv_heads:
        raise CannotExpressError(f"{heads} heads are no groups of {case.kv_heads}")
    case = replace(case, heads=heads, head_dim=pinned.get("head_dim", case.head_dim))
    if case.kind == "embedding" and "max_len" in pinned:  # no row of a table comes after
        case = replace(case, q_pos=np.minimum(case.q_pos, pinned["max_len"] - 1))
    return case


def _far(candidate: Candidate, case: Case, axes: int) -> Case:
    """Far positions at the sizes of a case."""
    far = replace(named(case.kind, "far positions"), heads=case.heads, head_dim=case.head_dim)
    far = at_sizes(far, candidate.pinned)
    return on_axes(far, axes) if axes > 1 else far


def _forgot_nothing(
    candidate: Candidate, case: Case, question: Question, again: Reply, dtype: str
) -> Record:
    """The record of a function that answers otherwise once it was called at far positions."""
    gold = answer(question)
    difference = compare(question, again.values, gold, allowed(question, gold, dtype))
    message = (
        "The same call gives other numbers once it was called at far positions: it keeps the base, "
        "the factors or the table of the longest context that it has seen."
    )
    return record(
        candidate, case, dtype, "differs", message=message, error=difference.error,
        tolerance=difference.tolerance, where=difference.where,
        reproducer=reproducer(candidate, case, dtype),
    )  # fmt: skip


def _gradients(
    candidate: Candidate, case: Case, f: Callable[..., Any], dtype: str, arrays: Framework
) -> Record | None:
    slope = check_gradients(f, asked(candidate, case), arrays, dtype)
    if slope is None:
        return None
    measured: dict[str, Any] = {"error": slope.error, "tolerance": slope.tolerance}
    if not slope.message:
        return record(candidate, case, dtype, "agrees", **measured)
    return record(
        candidate, case, dtype, "differs", message=slope.message, where=slope.where,
        reproducer=reproducer(candidate, case, dtype), **measured,
    )  # fmt: skip


def _values(
    candidate: Candidate, case: Case, question: Question, reply: Reply, gold: Host, dtype: str
) -> Record:
    worked = max(reply.dtype, dtype, key=lambda name: UNIT[name])  # the coarser of both
    tolerance = allowed(question, gold, worked)
    difference = compare(question, reply.values, gold, tolerance)
    measured: dict[str, Any] = {"error": difference.error, "tolerance": difference.tolerance}
    if not np.any(difference.wrong):
        return record(candidate, case, dtype, "agrees", **measured)
    fault = explain(question, reply.values, gold, tolerance, compared_in(question, gold.shape))
    message = f"{fault} {told(difference)}"
    return record(
        candidate, case, dtype, "differs", message=message, where=difference.where,
        reproducer=reproducer(candidate, case, dtype), **measured,
    )  # fmt: skip


def record(candidate: Candidate, case: Case, dtype: str, status: Status, **found: Any) -> Record:
    """A record of a candidate."""
    return Record(
        candidate.library, candidate.subject, candidate.label, case.name, status,
        version=candidate.version, path=candidate.path, dtype=dtype, **found,
    )  # fmt: skip


def reproducer(candidate: Candidate, case: Case, dtype: str) -> str:
    """One line of Python that shows the first difference."""
    if not candidate.reproducer:
        return ""
    made = candidate.reproducer
    for name, size in vars(case.sizes).items():
        made = made.replace(f"{{{name}}}", str(size))
    label = candidate.label if "(" in candidate.label.partition(":")[0] else repr(candidate.label)
    call = (
        f"show(f, {label}, {case.name!r}, kind={candidate.kind!r}, "
        f"framework={candidate.framework!r}, dtype={dtype!r})"
    )
    return f"{made}; from posenc.audit.audit import show; {call}"
