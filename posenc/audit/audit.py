"""``audit``: somebody's function against the definition, check by check over the grid."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.audit import conventions
from posenc.audit.arguments import NAMES, parameters_of
from posenc.audit.candidate import Candidate, CannotExpressError, Kind, Sizes, said
from posenc.audit.check import asked, at_sizes, check, has_gradients
from posenc.audit.conventions import NotCalledError
from posenc.audit.grid import Case, cases, near, on_axes
from posenc.audit.labels import definition, sizes_of, window_of
from posenc.audit.record import Record
from posenc.contract.protocol import Hook, PositionScheme

__all__ = ["audit", "audit_path", "candidate_of", "cases_of", "importing", "load", "show"]


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
    cases(candidate.kind, grid)  # whether there is such a grid
    arrays = conventions.framework(candidate.framework)
    try:
        scheme = candidate.scheme(at_sizes(near(candidate.kind), candidate.pinned).sizes)
        _check_acts(candidate, scheme)
    except (NotCalledError, CannotExpressError, ValueError, TypeError) as error:
        return [_not_called(candidate.subject, candidate.label, str(error), candidate)]
    records: list[Record] = []
    for case in cases_of(candidate, grid):
        for dtype in candidate.dtypes:
            if dtype in ("float32", "float64") or case.half:
                record = check(candidate, case, dtype, arrays)
                records += [] if record is None else [record]
    if not any(record.status in ("agrees", "differs") for record in records):
        first = f"{records[0].check}: {records[0].message}"
        message = f"no check of the grid could be asked of it; {first}"
        return [_not_called(candidate.subject, candidate.label, message, candidate), *records]
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

    Raises
    ------
    ValueError
        The label, the kind, the framework or the grid is none.
    """
    _check_names(kind, framework)
    cases("rotation", grid)
    definition(label)
    try:
        found = load(path)
    except Exception as error:  # whatever an import of somebody's module raises
        return [_not_called(path, label, f"{path} was not found: {said(error)}")]
    if isinstance(found, Candidate):
        return audit(found, grid)
    try:
        candidate = candidate_of(
            found, label, kind=kind, framework=framework, subject=path, reproducer=importing(path)
        )
    except (NotCalledError, TypeError, ValueError) as error:
        return [_not_called(path, label, str(error))]
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


def importing(path: str) -> str:
    """Python that imports ``module:name`` as ``f``."""
    module, _, name = path.partition(":")
    first, dot, rest = name.partition(".")
    if dot:
        return f"from {module} import {first}; f = {first}.{rest}"
    return f"from {module} import {first} as f"


def candidate_of(
    f: Callable[..., Any],
    equals: str | PositionScheme | Callable[[Sizes], PositionScheme],
    *,
    kind: str | None = None,
    framework: str | None = None,
    subject: str = "",
    reproducer: str = "",
    dtypes: tuple[str, ...] | None = None,
    params: Mapping[str, Any] | None = None,
) -> Candidate:
    """A plain function as a candidate; whose arrays it takes is found by calling it.

    Parameters
    ----------
    f
        The function.
    equals
        Its definition: a label, a scheme, or a function from sizes to a scheme. With a scheme the
        grid has that scheme's heads and channels alone.
    kind, framework, dtypes
        Default: told from the signature; tried in turn; float32, with torch and JAX bfloat16 too.
    subject, reproducer, params
        As in ``Candidate``.

    Raises
    ------
    NotCalledError
        It takes the arrays of no framework; the message says what was tried, and each error.
    """
    _check_names(kind, framework)
    name = subject or getattr(f, "__name__", type(f).__name__)
    if not callable(f):
        raise NotCalledError(f"{name} is {type(f).__name__}, not a function")
    scheme: Callable[[Sizes], PositionScheme]
    given: dict[str, Any] = {"subject": name, "reproducer": reproducer, "params": params or {}}
    if isinstance(equals, str):
        defined = definition(equals)
        given |= {"window": defined.window, "pinned": defined.pinned}
        label, scheme = equals, defined.scheme
    elif isinstance(equals, PositionScheme):
        label, scheme = repr(equals), _always(equals)
        given["pinned"] = sizes_of(equals)
    else:
        label, scheme = getattr(equals, "__name__", "equals"), equals
    own: Any = kind or conventions.kind_of(f)
    whose: Kind = own
    found = Candidate(lambda sizes: f, whose, scheme, label, **given)
    made = scheme(at_sizes(near(whose), found.pinned).sizes)
    _check_acts(found, made)
    if params is None:
        _check_learned(f, made)
    chosen = framework or _tried(found, f)
    halves = () if chosen == "numpy" or whose == "embedding" else ("bfloat16",)
    return replace(
        found,
        framework=chosen,
        dtypes=dtypes or ("float32", *halves),
        differentiable=chosen != "numpy",
    )


def show(
    f: Callable[..., Any],
    equals: str | PositionScheme,
    name: str,
    *,
    kind: str | None = None,
    framework: str = "numpy",
    dtype: str = "float32",
) -> Record:
    """Print what one check of ``f`` found; the reproducers of an audit call it.

    Raises
    ------
    ValueError
        There is no check of that name.
    """
    candidate = candidate_of(f, equals, kind=kind, framework=framework, dtypes=(dtype,))
    every = {case.name: case for case in cases_of(candidate)}
    if name not in every:
        raise ValueError(f"name must be a check: {', '.join(every)}; got {name!r}")
    arrays = conventions.framework(framework)
    record = check(candidate, every[name], dtype, arrays)
    if record is None:
        option = every[name].option
        why = f": it has no parameter {option}" if option else ""
        if every[name].what == "in two steps":
            why = ": two of its rotations are not one"
        if every[name].what == "gradients" and not has_gradients(candidate, arrays, dtype):
            why = ": no gradients"
        raise ValueError(f"the check {name!r} says nothing of it{why}")
    print(f"{record.status}: {record.message}" if record.message else record.status)
    return record


def cases_of(candidate: Candidate, grid: str = "full") -> list[Case]:
    """The checks of a candidate."""
    first = at_sizes(near(candidate.kind), candidate.pinned)
    axes = candidate.scheme(first.sizes).axes
    window = candidate.window or window_of(candidate.label)
    return cases(candidate.kind, grid, axes=axes, window=window)


def _always(scheme: PositionScheme) -> Callable[[Sizes], PositionScheme]:
    return lambda sizes: scheme


def _check_names(kind: str | None, framework: str | None) -> None:
    """Raise ``ValueError`` for a kind or a framework that there is not."""
    if kind is not None:
        conventions.check_kind(kind)
    if framework is not None and framework not in conventions.FRAMEWORKS:
        accepted = ", ".join(conventions.FRAMEWORKS)
        raise ValueError(f"framework must be one of {accepted}, got {framework!r}")


_ACTS = {"rotation": Hook.TRANSFORM, "bias": Hook.BIAS, "embedding": Hook.EMBEDDING}


def _check_acts(candidate: Candidate, scheme: PositionScheme) -> None:
    """Raise if the definition has nothing of the kind of the function."""
    hook = _ACTS.get(candidate.kind)
    if hook is not None and hook not in scheme.hooks():
        raise NotCalledError(
            f"{candidate.label} defines no {candidate.kind}, and {candidate.subject} is taken for "
            "one by its signature: say kind='rotation', 'bias', 'attention' or 'embedding' "
            "(--kind rotation)"
        )


def _check_learned(f: Callable[..., Any], scheme: PositionScheme) -> None:
    """Raise if a function has no parameter for a learned array of its definition."""
    own = parameters_of(f)
    for name, spec in scheme.param_specs().items():
        names = NAMES.get(name, (name,))
        if own and not any(each in own for each in names):
            raise NotCalledError(
                f"the definition learns {name} {tuple(spec.shape)}: give the function a parameter "
                f"of that name, or make a Candidate that loads posenc.audit.drawn_params(scheme)"
            )


def _tried(candidate: Candidate, f: Callable[..., Any]) -> str:
    """The first framework whose arrays a function takes."""
    errors = []
    question = asked(candidate, _with_axes(candidate))
    for name in conventions.installed():
        try:
            conventions.ask(f, question, conventions.framework(name), "float32")
        except (NotCalledError, CannotExpressError) as error:
            errors.append(f"{name}: {error}")
        else:
            return name
    raise NotCalledError(f"it could not be called with any arrays. {'; '.join(errors)}")


def _with_axes(candidate: Candidate) -> Case:
    """The plain case, at the sizes and for the axes of a candidate."""
    case = at_sizes(near(candidate.kind), candidate.pinned)
    axes = candidate.scheme(case.sizes).axes
    return on_axes(case, axes) if axes > 1 else case


def _not_called(
    subject: str, label: str, message: str, candidate: Candidate | None = None
) -> Record:
    library = candidate.library if candidate else ""
    version = candidate.version if candidate else ""
    path = candidate.path if candidate else "eager"
    return Record(library, subject, label, "the call", "not called", version, path, message=message)
