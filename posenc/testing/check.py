"""Run the laws on schemes: all at once, or as the tests of a file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from posenc.contract.checks import nearest
from posenc.contract.protocol import PositionScheme
from posenc.testing.framework import Framework, select_frameworks
from posenc.testing.law import BrokenLawError, Law, registered_laws
from posenc.testing.scheme_case import SchemeCase

if TYPE_CHECKING:
    import pytest

_NONE: Mapping[str, str] = MappingProxyType({})


def laws(frameworks: Sequence[str | Framework] | None = None) -> list[Law]:
    """Every law in every scope: the scheme itself, each framework, its compilers and its
    implementations of attention.

    Parameters
    ----------
    frameworks
        Array libraries, by name or as objects such as ``posenc_torch.testing.Torch("cuda")``.
        Default: all installed ones, see ``frameworks()``.

    Raises
    ------
    ModuleNotFoundError
        A framework asked for is not installed.
    """
    importlib.import_module("posenc.testing.lawbook")  # registers them
    return registered_laws(select_frameworks(frameworks))


def check_scheme(
    scheme: PositionScheme | SchemeCase,
    *,
    frameworks: Sequence[str | Framework] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    **sizes: Any,
) -> None:
    """Run every law on a scheme; raise on the first that is broken.

    An implementation may raise ``NotImplementedError`` if it cannot serve the scheme;
    ``"reference"`` may not.

    Parameters
    ----------
    scheme
        The scheme, or a ``SchemeCase``: the scheme with the sizes and positions to test it with.
    frameworks
        Array libraries, as ``laws`` takes them. Default: all installed ones.
    expected_failures
        Laws that the scheme is known to break, name -> reason. ``law-framework-implementation``,
        as printed by ``str(law)``, names one scope only. Strict: it is an error if the scheme keeps
        the law, or if no law has the name.
    sizes
        ``head_dim``, ``hidden_dim``, ``params``, ``variants``, ``positions``: see ``SchemeCase``.

    Raises
    ------
    BrokenLawError
        Names the law, its scope and what it measured.
    """
    known = expected_failures or {}
    if isinstance(scheme, SchemeCase) and sizes:
        raise TypeError(f"{', '.join(sizes)}: a SchemeCase has its own; give them to it")
    case = scheme if isinstance(scheme, SchemeCase) else SchemeCase(scheme, **sizes)
    all_laws = laws(frameworks)
    _check_names(known, all_laws)
    for law in all_laws:
        why = _expected_failure(law, known)
        try:
            law(case)
        except NotImplementedError:
            continue
        except BrokenLawError:
            if why is None:
                raise
            continue
        if why is not None:
            raise BrokenLawError(f"{law} is kept, though expected_failures says: {why}")


def parametrize_laws(
    schemes: Iterable[PositionScheme | SchemeCase] | Mapping[str, PositionScheme | SchemeCase],
    *,
    frameworks: Sequence[str | Framework] | None = None,
    expected_failures: Mapping[str, str] | Callable[[PositionScheme], Mapping[str, str]] = _NONE,
    select: Callable[[Law, PositionScheme], bool] = lambda law, scheme: True,
) -> pytest.MarkDecorator:
    """A pytest decorator: one test per law and scheme, with arguments ``law, scheme``.

    If an implementation cannot serve a scheme, the test is skipped with the reason. An expected
    failure is a strict xfail.

    Parameters
    ----------
    schemes
        Schemes, in a list or by name; names become part of the test ids.
    frameworks
        Array libraries, as ``laws`` takes them. Default: all installed ones.
    expected_failures
        Laws that are known to be broken, name -> reason; or a function from a scheme to these.
    select
        Whether to run a law on a scheme. Default: all.
    """
    import pytest

    if not isinstance(schemes, Iterable):
        raise TypeError(f"schemes must be several, in a list or by name, got {schemes!r}")
    items = schemes.items() if isinstance(schemes, Mapping) else ((None, s) for s in schemes)
    all_laws, tests = laws(frameworks), []
    for name, scheme in items:
        case = scheme if isinstance(scheme, SchemeCase) else SchemeCase(scheme)
        title = name or repr(case.scheme)
        known = expected_failures
        if callable(known):
            known = known(case.scheme)
        _check_names(known, all_laws)
        for law in all_laws:
            if not select(law, case.scheme):
                continue
            why = _expected_failure(law, known)
            marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=True)]
            tests.append(pytest.param(_skip_refusals(law), case, id=f"{law}-{title}", marks=marks))
    return pytest.mark.parametrize(("law", "scheme"), tests)


def _skip_refusals(law: Law) -> Callable[[SchemeCase], None]:
    """A law that skips the test where an implementation refuses the scheme."""

    def check(case: SchemeCase) -> None:
        import pytest

        try:
            law(case)
        except NotImplementedError as reason:
            pytest.skip(f"refused: {reason}")

    return check


def _expected_failure(law: Law, known: Mapping[str, str]) -> str | None:
    """Why a law is expected to be broken; None if it is not."""
    return known.get(str(law), known.get(law.name))


def _check_names(known: Mapping[str, str], all_laws: Sequence[Law]) -> None:
    names = list(dict.fromkeys(law.name for law in all_laws))
    for name in known:
        # The scope after the name may be a framework that is not tested here.
        if name.partition("-")[0] not in names:
            raise ValueError(f"expected_failures: no law {name!r}{nearest(name, names)}")
