"""``audit``: somebody's function against the definition, check by check over the grid."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import posenc
from posenc.audit import conventions
from posenc.audit.candidate import Candidate, CannotExpressError
from posenc.audit.conventions import NotCalledError, Reply
from posenc.audit.faults import explain
from posenc.audit.gold import (
    Question,
    allowed,
    answer,
    at_length,
    drawn,
    drawn_params,
    rotation_gradient,
)
from posenc.audit.grid import Case, cases
from posenc.audit.labels import definition
from posenc.audit.record import Record
from posenc.contract.protocol import PositionScheme
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Framework, Host
from posenc.testing.tolerances import UNIT


def audit(candidate: Candidate, grid: str = "full") -> list[Record]:
    """One record per check of the grid and dtype.

    Parameters
    ----------
    candidate
        The implementation, and the definition that it should equal.
    grid
        ``full``, or ``ci``, which takes seconds on a CPU.

    Raises
    ------
    ValueError
        There is no such grid.
    ModuleNotFoundError
        The framework of the candidate is not installed.
    """
    arrays = conventions.framework(candidate.framework)
    window = _window(candidate)
    axes = 1
    records: list[Record] = []
    first = cases(candidate.kind, grid)[0]
    try:
        axes = candidate.scheme(first.sizes).axes
    except (CannotExpressError, ValueError, TypeError) as error:
        return [_record(candidate, first, "", "not called", message=f"{error}")]
    for case in cases(candidate.kind, grid, axes=axes, window=window):
        for dtype in candidate.dtypes:
            if dtype in ("float16", "bfloat16") and not case.half:
                continue
            record = check(candidate, case, dtype, arrays, window)
            records += [] if record is None else [record]
    return records


def audit_path(
    path: str,
    label: str,
    kind: str | None = None,
    framework: str | None = None,
    grid: str = "full",
) -> list[Record]:
    """Audit the function ``module:function``, found from the current folder.

    Parameters
    ----------
    path
        ``module:function``. It may also name a ``Candidate``.
    label
        The definition, as a label of ``posenc compare``.
    kind, framework
        Default: told from the signature; NumPy, torch and JAX are tried in turn.
    grid
        As in ``audit``.

    Returns
    -------
    Records; one whose status is ``not called`` if there is no such function, or it takes no arrays.
    """
    conventions_checked(kind, framework)
    definition(label)
    module = path.partition(":")[0]
    try:
        found = load(path)
    except Exception as error:
        message = f"{path} was not found: {type(error).__name__}: {error}"
        return [Record("", path, label, "call", "not called", message=message)]
    if isinstance(found, Candidate):
        return audit(found, grid)
    name = path.partition(":")[2].partition(".")[0]
    rest = path.partition(":")[2].partition(".")[2]
    reproducer = f"from {module} import {name}" + (f"; f = {name}.{rest}" if rest else " as f")
    try:
        candidate = candidate_of(
            found, label, kind=kind, framework=framework, subject=path, reproducer=reproducer
        )
    except (NotCalledError, TypeError) as error:
        return [Record("", path, label, "call", "not called", message=str(error))]
    return audit(candidate, grid)


def load(path: str) -> Any:
    """What ``module:name`` names."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"path must be module:function, got {path!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def conventions_checked(kind: str | None, framework: str | None) -> None:
    """Raise ``ValueError`` for a kind or a framework that there is not."""
    if kind is not None:
        conventions.check_kind(kind)
    if framework is not None and framework not in conventions.FRAMEWORKS:
        accepted = ", ".join(conventions.FRAMEWORKS)
        raise ValueError(f"framework must be one of {accepted}, got {framework!r}")


def candidate_of(
    f: Callable[..., Any],
    label: str,
    *,
    kind: str | None = None,
    framework: str | None = None,
    subject: str = "",
    reproducer: str = "",
    dtypes: tuple[str, ...] | None = None,
    scheme: Callable[[Any], PositionScheme] | None = None,
) -> Candidate:
    """A plain function as a candidate; its arrays are found by calling it.

    Raises
    ------
    NotCalledError
        It takes the arrays of no framework; the message says what was tried, and each error.
    """
    if not callable(f):
        raise NotCalledError(f"{subject or 'it'} is {type(f).__name__}, not a function")
    defined = None if scheme else definition(label)
    of_sizes = scheme or (defined.scheme if defined else None)
    assert of_sizes is not None
    pinned: Mapping[str, int] = defined.pinned if defined else {}

    def make(sizes: Any) -> Callable[..., Any]:
        for name, size in pinned.items():
            if name in ("num_heads", "head_dim") and getattr(sizes, name) != size:
                raise CannotExpressError(f"{label} is for {name}={size} alone")
        return f

    name = subject or getattr(f, "__name__", type(f).__name__)
    found = Candidate(
        make,
        kind or conventions.kind_of(f),  # type: ignore[arg-type]
        of_sizes,
        label,
        subject=name,
        reproducer=reproducer,
    )
    chosen = framework or tried(found, pinned)
    halves = () if chosen == "numpy" else ("bfloat16",)
    return replace(
        found,
        framework=chosen,
        dtypes=dtypes or ("float32", *halves),
        differentiable=chosen != "numpy",
    )


def tried(candidate: Candidate, pinned: Mapping[str, int]) -> str:
    """The first framework whose arrays a candidate takes."""
    case = cases(candidate.kind)[1]
    case = replace(
        case,
        heads=pinned.get("num_heads", case.heads),
        head_dim=pinned.get("head_dim", case.head_dim),
    )
    errors = []
    for name in conventions.installed():
        arrays = conventions.framework(name)
        question = asked(candidate, case, arrays, _window(candidate))
        try:
            conventions.ask(candidate.make(case.sizes), question, arrays, "float32")
        except (NotCalledError, CannotExpressError) as error:
            errors.append(f"{name}: {error}")
            continue
        return name
    raise NotCalledError(f"it could not be called with any arrays. {'; '.join(errors)}")


def asked(candidate: Candidate, case: Case, arrays: Framework, window: int | None) -> Question:
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
        of_keys = (batch, case.heads, keys.shape[1], case.head_dim)
        vectors = {"q": drawn(shape, 1), "k": drawn(of_keys, 2), "v": drawn(of_keys, 3)}
    return Question(
        case.kind, scheme, case.q_pos, case.k_pos, params, vectors, case.causal, window,
        case.seg, case.heads, region=case.region,
    )  # fmt: skip


def learned(candidate: Candidate, case: Case, scheme: PositionScheme) -> Mapping[str, Host]:
    """The learned arrays of a question: those of the candidate, or drawn ones."""
    if callable(candidate.params):
        return dict(candidate.params(case.sizes))
    return candidate.params or drawn_params(scheme)


def check(
    candidate: Candidate, case: Case, dtype: str, arrays: Framework, window: int | None
) -> Record | None:
    """The record of one case; None for one that says nothing of the candidate."""
    try:
        question = asked(candidate, case, arrays, window)
        f = candidate.make(case.sizes)
        if case.what == "gradients":
            return _gradients(candidate, case, question, f, dtype, arrays)
        if case.what == "values again":
            far = cases(case.kind)[2]
            far_question = asked(candidate, replace(far, heads=case.heads), arrays, window)
            conventions.ask(f, far_question, arrays, dtype)
        reply = conventions.ask(f, question, arrays, dtype)
    except (CannotExpressError, ValueError) as error:
        return _record(candidate, case, dtype, "cannot express", message=str(error))
    except NotCalledError as error:
        half = dtype in ("float16", "bfloat16") and "raised" in str(error)
        status = "cannot express" if half else "not called"
        return _record(candidate, case, dtype, status, message=str(error))
    if reply.changed:
        message = f"it changes its argument {', '.join(reply.changed)} in place"
        return _record(candidate, case, dtype, "differs", message=message)
    return _values(candidate, case, question, reply, dtype)


@dataclass(frozen=True)
class Difference:
    """Where and how far a result is from the gold."""

    error: float
    tolerance: float
    wrong: Host
    where: Mapping[str, int]
    found: float
    expected: float


def compare(question: Question, found: Host, gold: Host, tolerance: Host) -> Difference:
    """Where numbers differ by more than the tolerance; ``where`` is the lowest position of them."""
    compared = _region(question, gold.shape)
    same = (found == gold) | ~compared
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(found - gold))
    error = np.where(np.isnan(error), np.inf, error)
    wrong = error > tolerance
    worst = np.unravel_index(np.argmax(error / tolerance), error.shape)
    where: dict[str, int] = {}
    value = expected = 0.0
    if np.any(wrong):
        places = np.argwhere(wrong)
        named = [_place(question, tuple(int(i) for i in place)) for place in places]
        index = min(range(len(named)), key=lambda n: tuple(named[n].values()))
        where, at = named[index], tuple(places[index])
        value, expected = float(found[at]), float(gold[at])
    return Difference(float(error[worst]), float(tolerance[worst]), wrong, where, value, expected)


def _region(question: Question, shape: tuple[int, ...]) -> Host:
    """Which numbers are compared."""
    if question.kind != "bias" or question.region == "all":
        return np.ones(shape, bool)
    keys = question.q_pos if question.k_pos is None else question.k_pos
    before = keys[None, :] <= question.q_pos[:, None]
    return np.broadcast_to(before if question.region == "before" else ~before, shape)


def _place(question: Question, index: tuple[int, ...]) -> dict[str, int]:
    """An index as positions, row, head and channel, in the order of "first"."""
    if question.kind == "bias":
        head, i, j = index
        keys = question.q_pos if question.k_pos is None else question.k_pos
        return {"position": int(question.q_pos[i]), "key": int(keys[j]), "head": head}
    row, head, i, channel = index
    at = question.q_pos[row, i]
    position = int(np.max(at)) if np.ndim(at) else int(at)
    return {"position": position, "row": row, "head": head, "channel": channel}


def _values(
    candidate: Candidate, case: Case, question: Question, reply: Reply, dtype: str
) -> Record:
    gold = answer(question)
    worked = max(reply.dtype, dtype, key=lambda name: UNIT[name])  # the coarser of both
    tolerance = allowed(question, gold, worked)
    difference = compare(question, reply.values, gold, tolerance)
    measured = {"error": difference.error, "tolerance": difference.tolerance}
    if not np.any(difference.wrong):
        return _record(candidate, case, dtype, "agrees", **measured)
    fault = explain(question, reply.values, gold, tolerance, _region(question, gold.shape))
    message = f"{fault} {told(difference)}"
    return _record(
        candidate, case, dtype, "differs", message=message, where=difference.where,
        reproducer=_reproducer(candidate, case, dtype), **measured,
    )  # fmt: skip


def told(difference: Difference) -> str:
    """The first difference, in words."""
    place = ", ".join(f"{name} {value}" for name, value in difference.where.items())
    count, size = int(np.sum(difference.wrong)), difference.wrong.size
    return (
        f"First at {place}: {difference.found:.6g}, the definition says "
        f"{difference.expected:.6g}; {count} of {size} numbers differ, by up to "
        f"{difference.error:.2g}."
    )


def _gradients(
    candidate: Candidate,
    case: Case,
    question: Question,
    f: Callable[..., Any],
    dtype: str,
    arrays: Framework,
) -> Record | None:
    if not candidate.differentiable or not arrays.differentiable or dtype != "float32":
        return None
    if question.kind == "bias" and not question.params:
        return None
    d_out = drawn(conventions.expected_shape(question), 11)
    found = conventions.gradients(f, question, arrays, dtype, d_out)
    gold = gold_gradients(question, arrays, d_out)
    for name, expected in gold.items():
        tolerance = gradient_tolerance(question, expected, d_out)
        moved = question.change(kind="rotation") if question.kind != "bias" else question
        same = expected.shape == d_out.shape and question.kind != "bias"
        if not same:
            error = float(np.max(np.abs(found[name] - expected), initial=0))
            wrong = error > float(np.max(tolerance))
            where: Mapping[str, int] = {}
        else:
            difference = compare(moved, found[name], expected, tolerance)
            error, wrong, where = difference.error, bool(np.any(difference.wrong)), difference.where
        measured: dict[str, Any] = {"error": error, "tolerance": float(np.max(tolerance))}
        if wrong:
            message = f"The gradient of {name} is not that of the definition. "
            message += gradient_fault(question, found, gold, d_out, name)
            return _record(
                candidate, case, dtype, "differs", message=message, where=where,
                reproducer=_reproducer(candidate, case, dtype), **measured,
            )  # fmt: skip
    return _record(candidate, case, dtype, "agrees", **measured)


def gradient_fault(
    question: Question, found: Mapping[str, Host], gold: Mapping[str, Host], d_out: Host, name: str
) -> str:
    """What explains a wrong gradient."""
    own, right = found[name], gold[name]
    if not np.any(own):
        return "It is zero: the backward pass is missing, or cut off by a detach."
    if question.kind == "rotation":
        forward = answer(question.change(vectors={"x": d_out}))
        tolerance = gradient_tolerance(question, right, d_out)
        if np.all(np.abs(own - forward) <= tolerance):
            return "The backward pass rotates the same way as the forward pass, not back."
        if np.all(np.abs(own - d_out) <= tolerance):
            return "The backward pass does not rotate at all."
    ratio = float(np.sum(own * right) / np.sum(right * right))
    if np.allclose(own, ratio * right, atol=1e-4 * float(np.max(np.abs(right)))):
        return f"It is {ratio:.4g} times the right one."
    return f"It differs by up to {float(np.max(np.abs(own - right))):.2g}."


def gradient_tolerance(question: Question, gold: Host, d_out: Host) -> Host:
    """How far a gradient in float32 may be from the gold.

    A rotation's gradient is a rotation, so its tolerance is the same. Others sum over all tokens,
    each with the roundings of the values, forward and backward.
    """
    if question.kind == "rotation":
        return np.asarray(allowed(question.change(vectors={"x": d_out}), gold, "float32"))
    value = float(np.max(allowed(question, np.ones((1, 1, 1)), "float32")))
    size = max(1.0, float(np.max(np.abs(gold), initial=0)))
    return np.full(gold.shape, 4 * value * size * np.sqrt(d_out.shape[-2]))


def gold_gradients(question: Question, arrays: Framework, d_out: Host) -> dict[str, Host]:
    """The gradients of the definition: by linearity, or by the framework in float64."""
    if question.kind == "rotation" and not question.params:
        turned = rotation_gradient(question, d_out)
        if turned is not None:
            return {"x": turned}
    leaves = conventions.leaves_of(question)

    def run(native: Mapping[str, Any]) -> Any:
        return defined(question, arrays, native)

    return conventions.pulled(run, leaves, arrays, "float64", d_out)


def defined(question: Question, arrays: Framework, native: Mapping[str, Any]) -> Any:
    """The definition of a question on arrays of a framework."""
    params = {name: native[name] for name in question.params}
    keys = question.q_pos if question.k_pos is None else question.k_pos
    q_at, k_at = (conventions.integers(arrays, pos) for pos in (question.q_pos, keys))
    scheme = at_length(question.scheme, keys)
    if question.kind == "rotation":
        return posenc.transform(scheme, native["x"], q_at, role="query", params=params)
    if question.kind == "bias":
        bias = posenc.bias(scheme, q_at, k_at, params)
        return bias
    return posenc.attention(
        native["q"], native["k"], native["v"], scheme, params, question.causal,
        window=question.window, tokens=Tokens(k_at), queries=Tokens(q_at),
        implementation="reference",
    )  # fmt: skip


def _window(candidate: Candidate) -> int | None:
    return definition(candidate.label).window if "@" in candidate.label else None


def _record(candidate: Candidate, case: Case, dtype: str, status: str, **found: Any) -> Record:
    return Record(
        candidate.library, candidate.subject, candidate.label, case.name, status,
        version=candidate.version, path=candidate.path, dtype=dtype, **found,
    )  # fmt: skip


def _reproducer(candidate: Candidate, case: Case, dtype: str) -> str:
    """One line of Python that shows the first difference."""
    if not candidate.reproducer:
        return ""
    made = candidate.reproducer
    for name, size in vars(case.sizes).items():
        made = made.replace(f"{{{name}}}", str(size))
    call = (
        f"show(f, {candidate.label!r}, {case.name!r}, kind={candidate.kind!r}, "
        f"framework={candidate.framework!r}, dtype={dtype!r})"
    )
    return f"{made}; from posenc.audit.audit import show; {call}"


def show(
    f: Callable[..., Any],
    label: str,
    name: str,
    *,
    kind: str | None = None,
    framework: str = "numpy",
    dtype: str = "float32",
) -> Record:
    """Print what one check of ``f`` found; the reproducers of an audit call it."""
    candidate = candidate_of(f, label, kind=kind, framework=framework, dtypes=(dtype,))
    arrays, window = conventions.framework(framework), _window(candidate)
    sizes = cases(candidate.kind)[0].sizes
    axes = candidate.scheme(sizes).axes
    every = {case.name: case for case in cases(candidate.kind, axes=axes, window=window)}
    if name not in every:
        raise ValueError(f"name must be a check: {', '.join(every)}; got {name!r}")
    record = check(candidate, every[name], dtype, arrays, window)
    assert record is not None
    print(f"{record.status}: {record.message}")
    return record
