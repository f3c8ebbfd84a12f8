"""``Law``, and the decorator ``law`` that registers one."""

from __future__ import annotations

import sysconfig
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from posenc.contract.protocol import SchemeWarning
from posenc.testing.framework import Framework
from posenc.testing.places import Where, first_index
from posenc.testing.scheme_case import SchemeCase

Scope = Literal["scheme", "framework", "implementation", "gradient", "compiler"]


class BrokenLawError(AssertionError):
    """A scheme, or an implementation that serves it, breaks a law."""


@dataclass(frozen=True)
class Law:
    """One statement about every scheme, with the scope in which it is checked.

    Attributes
    ----------
    name
        The name of ``check``, which says in short what must hold.
    statement
        The first line of the docstring of ``check``.
    check
        Raises if a ``SchemeCase`` breaks the law.
    framework, implementation, compiler
        Its scope; None where it does not matter.
    """

    name: str
    statement: str
    check: Callable[..., None]
    framework: Framework | None = None
    implementation: str | None = None
    compiler: str | None = None

    def __str__(self) -> str:
        where = (self.framework, self.implementation, self.compiler)
        return "-".join([self.name, *(str(part) for part in where if part is not None)])

    def __call__(self, scheme: Any, **sizes: Any) -> None:
        """Check the law on a scheme; ``sizes`` are fields of ``SchemeCase``.

        Raises
        ------
        BrokenLawError
            Names the law, its scope, and what it measured.
        NotImplementedError
            The implementation cannot serve the scheme; the message says why.
        """
        where = (self.framework, self.implementation, self.compiler)
        try:
            case = scheme if isinstance(scheme, SchemeCase) else SchemeCase(scheme, **sizes)
            with warnings.catch_warnings():  # laws make calls that users are warned of
                warnings.simplefilter("ignore", SchemeWarning)
                self.check(case, *(part for part in where if part is not None))
        except NotImplementedError:
            if self.implementation in (None, "reference"):  # the definition serves everything
                raise self._broken(scheme, "refused") from None
            raise
        except AssertionError as error:
            raise self._broken(scheme, str(error)) from error
        except Exception as error:
            message = f"{type(error).__name__}: {error}{_origin(error)}"
            raise self._broken(scheme, message) from error

    def _broken(self, scheme: Any, message: str) -> BrokenLawError:
        tested = scheme.scheme if isinstance(scheme, SchemeCase) else scheme
        parts = {
            "framework": self.framework,
            "implementation": self.implementation,
            "compiler": self.compiler,
        }
        where = ", ".join(f"{name} {part}" for name, part in parts.items() if part is not None)
        scope = f"\n  on {where}" if where else ""
        return BrokenLawError(f"{self.name}: {self.statement}\n  {tested!r}{scope}\n  {message}")


def _origin(error: BaseException) -> str:
    """The line of the scheme's file that raised an exception; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    library = str(Path(__file__).parents[1])
    own = [f for f in frames if not f.filename.startswith((*installed, library))]
    if not own:
        return ""
    return f"\n  at {own[-1].filename}:{own[-1].lineno}, {own[-1].name}: {own[-1].line}"


_REGISTERED: list[tuple[Scope, Callable[..., None]]] = []


def law(scope: Scope) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a law that is checked once per scheme, framework, compiler or implementation.

    The function receives a ``SchemeCase``, then the framework, then the implementation or the
    compiler. Scope ``"gradient"``: the implementations of frameworks that have gradients.
    """

    def register(check: Callable[..., None]) -> Callable[..., None]:
        _REGISTERED.append((scope, check))
        return check

    return register


def registered_laws(frameworks: list[Framework]) -> list[Law]:
    """Every registered law in every scope. Laws of the scheme alone, the fastest, come first."""
    order = list(get_args(Scope))

    def rank(entry: tuple[Scope, Callable[..., None]]) -> tuple[int, bool]:
        scope, check = entry
        return order.index(scope), not check.__module__.endswith(".scheme")

    entries = sorted(_REGISTERED, key=rank)
    return [each for scope, check in entries for each in _laws_in(scope, check, frameworks)]


def _laws_in(scope: Scope, check: Callable[..., None], frameworks: list[Framework]) -> list[Law]:
    """One law for each framework, implementation or compiler of the scope."""
    statement = (check.__doc__ or "").strip().partition("\n")[0]
    name = check.__name__
    if scope == "scheme":
        return [Law(name, statement, check)]
    if scope == "framework":
        return [Law(name, statement, check, f) for f in frameworks]
    if scope == "compiler":
        return [Law(name, statement, check, f, compiler=c) for f in frameworks for c in f.compilers]
    chosen = [f for f in frameworks if f.differentiable or scope == "implementation"]
    return [
        Law(name, statement, check, f, implementation)
        for f in chosen
        for implementation in f.implementations
    ]


def require(holds: bool | Any, message: str) -> None:
    """Raise ``AssertionError(message)`` unless ``holds``."""
    if not bool(holds):
        raise AssertionError(message)


def require_equal(actual: Any, expected: Any, what: str, where: Where = str) -> None:
    """Raise unless two arrays are equal bit by bit; -0 equals 0, and NaN equals NaN.

    ``where`` names the place of an index, for the first number that differs.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    require(actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}")
    wrong = ~((actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    if np.any(wrong):
        at = first_index(wrong)
        count = f"{np.sum(wrong)} of {wrong.size} differ"
        found = f"{actual[at]}, expected {expected[at]}"
        raise AssertionError(f"{what}: {found} at {where(at)}; {count}")
