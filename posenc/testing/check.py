"""Every law on one scheme, at once or as the tests of a file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from posenc.checks import nearest
from posenc.protocol import PositionScheme
from posenc.testing.framework import Framework, named
from posenc.testing.law import BrokenLawError, Law, grounded
from posenc.testing.subject import Subject

if TYPE_CHECKING:
    import pytest

_NONE: Mapping[str, str] = MappingProxyType({})


def laws(frameworks: Sequence[str | Framework] | None = None) -> list[Law]:
    """Every law on every ground: the scheme itself, frameworks, their compilers, their
    implementations.

    Parameters
    ----------
    frameworks
        Array libraries, by name or as they are, such as ``posenc_torch.testing.Torch("cuda")``.
        Default: all that are installed, see ``frameworks()``.

    Raises
    ------
    ModuleNotFoundError
        A framework that is asked for is not installed.
    """
    importlib.import_module("posenc.testing.lawbook")  # enters them
    return grounded(named(frameworks))


def check_scheme(
    scheme: PositionScheme | Subject,
    *,
    frameworks: Sequence[str | Framework] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    **sizes: Any,
) -> None:
    """Try every law on a scheme; raise on the first that is broken.

    An implementation may say by ``NotImplementedError`` that it cannot serve the scheme;
    ``"reference"`` may not.

    Parameters
    ----------
    scheme
        The scheme, or a ``Subject`` that tells more about it.
    frameworks
        Array libraries, as ``laws`` takes them. Default: all that are installed.
    expected_failures
        Laws that the scheme is known to break, name -> reason; ``law-framework-path``, as
        ``str(law)`` has it, for one ground alone. Strict: a law that is kept after all is an error,
        and so is a name that no law has.
    sizes
        ``head_dim``, ``width``, ``params``, ``others``, ``reach``: see ``Subject``.

    Raises
    ------
    BrokenLawError
        Names the law, the ground and what was found.
    """
    known = expected_failures or {}
    if isinstance(scheme, Subject) and sizes:
        raise TypeError(f"{', '.join(sizes)}: a Subject has its own; give them to it")
    subject = scheme if isinstance(scheme, Subject) else Subject(scheme, **sizes)
    found = laws(frameworks)
    _check_names(known, found)
    for law in found:
        why = _expected(law, known)
        try:
            law(subject)
        except NotImplementedError:
            continue
        except BrokenLawError:
            if why is None:
                raise
            continue
        if why is not None:
            raise BrokenLawError(f"{law} is kept, though expected_failures says: {why}")


def parametrize_laws(
    schemes: Iterable[PositionScheme | Subject] | Mapping[str, PositionScheme | Subject],
    *,
    frameworks: Sequence[str | Framework] | None = None,
    expected_failures: Mapping[str, str] | Callable[[PositionScheme], Mapping[str, str]] = _NONE,
    select: Callable[[Law, PositionScheme], bool] = lambda law, scheme: True,
) -> pytest.MarkDecorator:
    """A pytest decorator: one test for each law and each scheme, with arguments ``law, scheme``.

    An implementation that cannot serve a scheme is a skip with its reason; an expected failure is
    an xfail, and strict.

    Parameters
    ----------
    schemes
        Schemes, by name if names should show in the tests' own.
    frameworks
        Array libraries, as ``laws`` takes them. Default: all that are installed.
    expected_failures
        Laws that are known to be broken, name -> reason, or a function of a scheme that tells.
    select
        Whether to try a law on a scheme. Default: all.
    """
    import pytest

    if not isinstance(schemes, Iterable):
        raise TypeError(f"schemes must be several, in a list or by name, got {schemes!r}")
    named = schemes.items() if isinstance(schemes, Mapping) else ((None, s) for s in schemes)
    found, cases = laws(frameworks), []
    for name, scheme in named:
        subject = scheme if isinstance(scheme, Subject) else Subject(scheme)
        title = name or repr(subject.scheme)
        known = expected_failures
        if callable(known):
            known = known(subject.scheme)
        _check_names(known, found)
        for law in found:
            if not select(law, subject.scheme):
                continue
            why = _expected(law, known)
            marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=True)]
            cases.append(pytest.param(_skipping(law), subject, id=f"{law}-{title}", marks=marks))
    return pytest.mark.parametrize(("law", "scheme"), cases)


def _skipping(law: Law) -> Callable[[Subject], None]:
    """A law under which a refusal is a skip."""

    def check(subject: Subject) -> None:
        import pytest

        try:
            law(subject)
        except NotImplementedError as reason:
            pytest.skip(f"refused: {reason}")

    return check


def _expected(law: Law, known: Mapping[str, str]) -> str | None:
    """Why a law is expected to be broken; None if it is not."""
    return known.get(str(law), known.get(law.name))


def _check_names(known: Mapping[str, str], found: Sequence[Law]) -> None:
    names = list(dict.fromkeys(law.name for law in found))
    for name in known:
        # The ground after it may be a framework that is not tried here.
        if name.partition("-")[0] not in names:
            raise ValueError(f"expected_failures: no law {name!r}{nearest(name, names)}")
