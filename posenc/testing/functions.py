"""Check a function of one's own against a scheme, as scikit-learn checks an estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from posenc.contract.checks import check_choice, nearest
from posenc.contract.protocol import PositionScheme

if TYPE_CHECKING:
    import pytest

    from posenc.audit.candidate import Candidate
    from posenc.audit.record import Record

OnFail = Literal["raise", "return"]
_NONE: Mapping[str, str] = MappingProxyType({})


class FunctionError(AssertionError):
    """A function is not what it should equal; ``records`` says where."""

    def __init__(self, message: str, records: list[Record]) -> None:
        super().__init__(message)
        self.records = records


def check_function(
    fn: Callable[..., Any],
    equals: str | PositionScheme,
    *,
    kind: str | None = None,
    framework: str | None = None,
    grid: str = "full",
    params: Mapping[str, Any] | None = None,
    expected_failures: Mapping[str, str] = _NONE,
    strict: bool = True,
    on_fail: OnFail = "raise",
    callback: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Audit a function over the grid of ``posenc.audit``; raise where it differs.

    Parameters
    ----------
    fn
        A rotation ``f(x, pos)``, a bias ``f(num_heads, q_pos, k_pos)`` or an attention
        ``f(q, k, v, ...)``: see ``posenc.audit.conventions``.
    equals
        Its definition: a scheme, whose sizes are then the only ones, or a label such as
        ``"rope:layout=interleaved"``, which has all sizes.
    kind, framework
        Default: told from the signature; NumPy, torch and JAX are tried in turn.
    grid
        ``full``, or the shorter ``ci``.
    params
        Learned arrays of the scheme that ``fn`` has inside. Default: it takes them by name.
    expected_failures
        Checks that are known to fail, name -> reason.
    strict
        Whether it is an error if an expected failure agrees.
    on_fail
        ``raise``, or ``return``: then the records say what failed.
    callback
        Called with each record.

    Returns
    -------
    One record per check and dtype.

    Raises
    ------
    FunctionError
        A check failed that is not expected to, or could not be asked, or, with ``strict``, agrees
        though it is expected to fail. The message has every one of them.
    ValueError
        No check has a name in ``expected_failures``.
    """
    check_choice("on_fail", on_fail, ("raise", "return"))
    from posenc.audit.audit import audit  # an audit is above the laws

    candidate = _candidate(fn, equals, kind=kind, framework=framework, params=params)
    records = audit(candidate, grid)
    _check_names(expected_failures, [record.check for record in records])
    for record in records:
        if callback is not None:
            callback(record)
    failed = [text for record in records if (text := _failure(record, expected_failures, strict))]
    if failed and on_fail == "raise":
        title = f"{candidate.subject} is not {candidate.label}"
        raise FunctionError("\n  ".join([title, *failed]), records)
    return records


def parametrize_checks(
    functions: Mapping[str, tuple[Callable[..., Any], str | PositionScheme]],
    *,
    kind: str | None = None,
    framework: str | None = None,
    grid: str = "full",
    expected_failures: Mapping[str, str] = _NONE,
) -> pytest.MarkDecorator:
    """A pytest decorator: one test per function and check, with the argument ``check``.

    A check that the function cannot express is skipped with the reason, and an expected failure is
    a strict xfail::

        @parametrize_checks({"turn": (turn, "rope:layout=interleaved")})
        def test_functions(check):
            check()

    Parameters
    ----------
    functions
        Name -> function, and what it should equal.
    kind, framework, grid, expected_failures
        As for ``check_function``.
    """
    import pytest

    from posenc.audit.audit import cases_of

    tests, names = [], []
    for title, (fn, equals) in functions.items():
        candidate = _candidate(fn, equals, kind=kind, framework=framework, params=None)
        for case in cases_of(candidate, grid):
            names.append(case.name)
            for dtype in (d for d in candidate.dtypes if d == "float32" or case.half):
                why = expected_failures.get(case.name)
                marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=True)]
                run = _Check(candidate, case, dtype)
                tests.append(pytest.param(run, id=f"{title}-{case.name}-{dtype}", marks=marks))
    _check_names(expected_failures, names)
    return pytest.mark.parametrize("check", tests)


class _Check:
    """One check of a function, as a test calls it."""

    def __init__(self, candidate: Candidate, case: Any, dtype: str) -> None:
        self._candidate, self._case, self._dtype = candidate, case, dtype

    def __call__(self) -> Record:
        import pytest

        from posenc.audit.check import check
        from posenc.audit.conventions import framework

        arrays = framework(self._candidate.framework)
        record = check(self._candidate, self._case, self._dtype, arrays)
        if record is None:
            pytest.skip(f"it has nothing of the kind: {self._case.name}")
        if record.status == "cannot express":
            pytest.skip(f"refused: {record.message}")
        text = _failure(record, _NONE, strict=True)
        if text:
            raise FunctionError(text, [record])
        return record


def _candidate(
    fn: Callable[..., Any],
    equals: str | PositionScheme,
    *,
    kind: str | None,
    framework: str | None,
    params: Mapping[str, Any] | None,
) -> Candidate:
    from posenc.audit.audit import candidate_of, importing
    from posenc.audit.conventions import NotCalledError

    try:
        made = candidate_of(fn, equals, kind=kind, framework=framework, params=params)
    except NotCalledError as error:
        raise FunctionError(str(error), []) from error
    module, name = getattr(fn, "__module__", ""), getattr(fn, "__qualname__", "")
    if module and name and "<" not in name:
        start = importing(f"{module}:{name}")
        schemes = "" if isinstance(equals, str) else "; from posenc.schemes import *"
        made = replace(made, reproducer=start + schemes)
    return made


def _failure(record: Record, expected: Mapping[str, str], strict: bool) -> str:
    """What is wrong with a record, in words; empty where nothing is."""
    why = expected.get(record.check)
    where = f"{record.check}{f' ({record.dtype})' if record.dtype else ''}"
    if record.status in ("differs", "not called"):
        if why is not None:
            return ""
        again = f"\n    {record.reproducer}" if record.reproducer else ""
        return f"{where}: {record.message}{again}"
    if record.status == "agrees" and why is not None and strict:
        return f"{where}: it agrees, though expected_failures says: {why}"
    return ""


def _check_names(expected: Mapping[str, str], names: list[str]) -> None:
    for name in expected:
        if name not in names:
            raise ValueError(f"expected_failures: no check {name!r}{nearest(name, names)}")
