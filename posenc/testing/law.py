"""What a law is, and the list that they are entered in."""

from __future__ import annotations

import sysconfig
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from posenc.protocol import SchemeWarning
from posenc.testing.framework import Framework
from posenc.testing.subject import Subject

Ground = Literal["scheme", "framework", "implementation", "gradient", "compiler"]


class BrokenLawError(AssertionError):
    """A scheme, or an implementation that serves it, breaks a law."""


@dataclass(frozen=True)
class Law:
    """One statement about every scheme, on the ground where it is tried.

    Attributes
    ----------
    name
        What it says, in short.
    statement
        The first line of its documentation.
    check
        Raises if a subject breaks it.
    framework, implementation, compiler
        Where it is tried; None where it does not matter.
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
        """Try it on a scheme; ``sizes`` are those of ``Subject``.

        Raises
        ------
        BrokenLawError
            Says which law, on what ground, and what was found.
        NotImplementedError
            The implementation says why it cannot serve the scheme.
        """
        where = (self.framework, self.implementation, self.compiler)
        try:
            subject = scheme if isinstance(scheme, Subject) else Subject(scheme, **sizes)
            with warnings.catch_warnings():  # laws ask for what callers are warned of
                warnings.simplefilter("ignore", SchemeWarning)
                self.check(subject, *(part for part in where if part is not None))
        except NotImplementedError:
            if self.implementation in (None, "reference"):  # the definition serves everything
                raise self._broken(scheme, "refused") from None
            raise
        except AssertionError as error:
            raise self._broken(scheme, str(error)) from error
        except Exception as error:
            found = f"{type(error).__name__}: {error}{_place(error)}"
            raise self._broken(scheme, found) from error

    def _broken(self, scheme: Any, found: str) -> BrokenLawError:
        named = scheme.scheme if isinstance(scheme, Subject) else scheme
        parts = {
            "framework": self.framework,
            "implementation": self.implementation,
            "compiler": self.compiler,
        }
        where = ", ".join(f"{name} {part}" for name, part in parts.items() if part is not None)
        ground = f"\n  on {where}" if where else ""
        return BrokenLawError(f"{self.name}: {self.statement}\n  {named!r}{ground}\n  {found}")


def _place(error: BaseException) -> str:
    """Where in the scheme's own file an exception came from."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    ours = str(Path(__file__).parents[1])
    own = [f for f in frames if not f.filename.startswith((*installed, ours))]
    if not own:
        return ""
    return f"\n  at {own[-1].filename}:{own[-1].lineno}, {own[-1].name}: {own[-1].line}"


_ENTERED: list[tuple[Ground, Callable[..., None]]] = []


def law(ground: Ground) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a law that is tried once a scheme, or on every framework, compiler or implementation.

    The function receives a ``Subject``, then the framework, then the implementation or the
    compiler; ``"gradient"`` stands for the implementations of frameworks that have gradients.
    """

    def enter(check: Callable[..., None]) -> Callable[..., None]:
        _ENTERED.append((ground, check))
        return check

    return enter


def grounded(frameworks: list[Framework]) -> list[Law]:
    """Every law on every ground that there is; those that are tried at once come first."""
    order = list(get_args(Ground))

    def rank(entry: tuple[Ground, Callable[..., None]]) -> tuple[int, bool]:
        ground, check = entry
        return order.index(ground), not check.__module__.endswith(".scheme")

    entries = sorted(_ENTERED, key=rank)
    return [made for ground, check in entries for made in _on(ground, check, frameworks)]


def _on(ground: Ground, check: Callable[..., None], frameworks: list[Framework]) -> list[Law]:
    statement = (check.__doc__ or "").strip().partition("\n")[0]
    name = check.__name__
    if ground == "scheme":
        return [Law(name, statement, check)]
    if ground == "framework":
        return [Law(name, statement, check, f) for f in frameworks]
    if ground == "compiler":
        return [Law(name, statement, check, f, compiler=c) for f in frameworks for c in f.compilers]
    able = [f for f in frameworks if f.differentiable or ground == "implementation"]
    return [
        Law(name, statement, check, f, implementation)
        for f in able
        for implementation in f.implementations
    ]


def require(holds: bool | Any, found: str) -> None:
    """Raise with ``found`` unless it holds."""
    if not bool(holds):
        raise AssertionError(found)


def require_equal(found: Any, expected: Any, what: str) -> None:
    """Bitwise equality of two arrays, -0 and NaN aside."""
    found, expected = np.asarray(found), np.asarray(expected)
    require(found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}")
    wrong = ~((found == expected) | (np.isnan(found) & np.isnan(expected)))
    if np.any(wrong):
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        count = f"{np.sum(wrong)} of {wrong.size} differ"
        raise AssertionError(f"{what}: {found[at]!r} at {at}, not {expected[at]!r}; {count}")
