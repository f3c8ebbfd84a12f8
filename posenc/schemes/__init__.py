"""The catalogue: every positional encoding, one file each."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posenc.checks import check_count, nearest
from posenc.protocol import PositionScheme
from posenc.schemes.alibi import ALiBi
from posenc.schemes.learned import Learned
from posenc.schemes.nope import NoPE
from posenc.schemes.rope import RoPE
from posenc.schemes.sink import Sink
from posenc.schemes.sinusoidal import Sinusoidal
from posenc.schemes.sum import Sum
from posenc.schemes.t5 import T5Bias

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ALiBi", "Learned", "NoPE", "RoPE", "Sink", "Sinusoidal", "Sum", "T5Bias", "make", "schemes",
]  # fmt: skip

Maker = Callable[..., PositionScheme]

_OURS: dict[str, type[PositionScheme]] = {
    "alibi": ALiBi,
    "learned": Learned,
    "nope": NoPE,
    "rope": RoPE,
    "sinusoidal": Sinusoidal,
    "t5": T5Bias,
}
_GROUP = "posenc.schemes"
SIZES = ("num_heads", "head_dim", "max_len", "train_len", "dim")


def catalogue() -> dict[str, Maker]:
    """The catalogue, name -> maker.

    A maker takes sizes of a model (``num_heads``, ``head_dim``, ``max_len``, ``train_len``,
    ``dim``) and a scheme's own options by keyword. It ignores the sizes that its scheme does not
    use, and names those that are missing; a function gets those that it names, or all by ``**``.
    Other packages add theirs through the entry-point group ``posenc.schemes``; one that cannot be
    loaded, or that takes a name of ours, is a warning.
    """
    from importlib.metadata import entry_points  # read only when the catalogue is asked for

    found: dict[str, Maker] = {name: _maker(kind) for name, kind in _OURS.items()}
    for entry in entry_points(group=_GROUP):
        if entry.name in found:
            warnings.warn(f"{_GROUP}: {entry.value} takes the name {entry.name!r}", stacklevel=2)
        elif (maker := _loaded(entry)) is not None:
            found[entry.name] = maker
    return found


def make(
    name: str,
    *,
    num_heads: int | None = None,
    head_dim: int | None = None,
    max_len: int | None = None,
    train_len: int | None = None,
    dim: int | None = None,
    **options: Any,
) -> PositionScheme:
    """A scheme by its name in the catalogue, for a model of these sizes.

    Only the sizes that the scheme uses are needed; the others may be given and change nothing.
    ``dim`` defaults to ``num_heads * head_dim`` where both are given. ``options`` are the scheme's
    own fields; ``posenc list NAME`` shows them. A dotted name, ``"module.Class"``, is imported: a
    scheme need not be in the catalogue.

    ``max_len`` is the longest context of the model, ``train_len`` the length that it is trained at.
    A class may say with a classmethod ``fitted(cls, sizes)`` what its options are for the sizes
    that are given, a mapping of name to value; those in ``options`` outweigh it. ``T5Bias`` has
    one: no bucket of it stays unseen in training.

    >>> make("rope", head_dim=64, base=500_000.0)
    RoPE(head_dim=64, base=500000.0, layout='half', rotary_dim=None)
    >>> make("t5", num_heads=8, train_len=64)
    T5Bias(num_heads=8, num_buckets=32, max_distance=64, causal=True, scaled=True)
    """
    maker = maker_of(name)
    given = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "max_len": max_len,
        "train_len": train_len,
        "dim": dim,
    }
    sizes = {size: check_count(size, value) for size, value in given.items() if value is not None}
    if {"num_heads", "head_dim"} <= sizes.keys():
        sizes.setdefault("dim", sizes["num_heads"] * sizes["head_dim"])
    return maker(**sizes, **options)


def fitted_options(name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The options that the class of a name fits to ``sizes``, by name; of most classes none.

    Raises
    ------
    TypeError, ValueError
        What ``fitted`` answers is no mapping, or names something that is no option.
    """
    kind = inspect.unwrap(maker_of(name))
    return _fitted(kind, sizes) if _inherits(kind) else {}


def maker_of(name: str) -> Maker:
    """The maker of a name in the catalogue, or of a dotted name."""
    names = catalogue()
    if isinstance(name, str) and name.lower() in names:
        return names[name.lower()]
    if not isinstance(name, str) or "." not in name:
        hint = nearest(name, names)
        raise ValueError(f"unknown scheme {name!r}{hint}, or a dotted name module.Class")
    return _checked(_imported(name), name)


def _imported(name: str) -> Any:
    """What a dotted name stands for; what fails in its module is an ``ImportError``."""
    module, _, attribute = name.rpartition(".")
    if not all(name.split(".")):
        raise ValueError(f"unknown scheme {name!r}; a dotted name reads module.Class")
    try:
        home = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"unknown scheme {name!r}: {error}{_searched()}") from error
        cause = f"{type(error).__name__}: {error}{_line(error)}"
        raise ImportError(f"scheme {name!r}: cannot import {module!r}: {cause}") from error
    try:
        return getattr(home, attribute)
    except AttributeError as error:
        own = [key for key, value in vars(home).items() if _inherits(value)]
        raise ValueError(f"unknown scheme {name!r}: {error}{nearest(attribute, own)}") from error


def _searched() -> str:
    here = Path.cwd()
    return f"; the folder {here} was searched" if {str(here), ""} & set(sys.path) else ""


def _line(error: Exception) -> str:
    """The line of a module at which its import ended; a command shows no traceback."""
    import traceback  # for errors only

    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if frame.name == "<module>"]
    return f", at {lines[-1]}" if lines else ""


def _checked(found: Any, name: str) -> Maker:
    """The maker that was found; a class is turned into one."""
    if not isinstance(found, type):
        if not callable(found):
            raise TypeError(f"scheme {name!r} is neither a PositionScheme nor a maker: {found!r}")
        return _function(cast(Maker, found))
    kind = found.__name__
    if not _inherits(found):
        advice = f"inherit from posenc.PositionScheme: class {kind}(PositionScheme)"
        raise TypeError(f"scheme {name!r}: class {kind} is no PositionScheme; {advice}")
    if not getattr(getattr(found, "__dataclass_params__", None), "frozen", False):
        advice = f"write @dataclass(frozen=True) above class {kind}"
        raise TypeError(f"scheme {name!r}: class {kind} is no frozen dataclass; {advice}")
    return _maker(found)


def _inherits(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, PositionScheme) and found != PositionScheme


def _maker(kind: type[PositionScheme]) -> Maker:
    written = [field for field in fields(cast(Any, kind)) if field.init]
    accepted = {field.name for field in written}
    needed = [f.name for f in written if f.default is MISSING and f.default_factory is MISSING]

    def maker(**given: Any) -> PositionScheme:
        for option in given.keys() - accepted - set(SIZES):
            own = sorted(accepted - set(SIZES))
            raise ValueError(f"{kind.__name__} has no option {option!r}{nearest(option, own)}")
        sizes = {name: value for name, value in given.items() if name in SIZES}
        given = {**_fitted(kind, sizes), **given}
        missing = [name for name in needed if name not in given]
        if missing:
            raise TypeError(f"{kind.__name__} needs {_listed(missing)}{_given(given)}")
        return kind(**{name: value for name, value in given.items() if name in accepted})

    # The class stays known, as ``__wrapped__``; ``updated=()``: its attributes are not copied.
    return functools.update_wrapper(maker, kind, updated=())


def _function(made: Maker) -> Maker:
    """A maker that is a function: of the sizes it gets those that it names, or all by ``**``."""
    try:
        taken = inspect.signature(made).parameters
    except (TypeError, ValueError):  # one that is written in C need not tell
        return made
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return made

    def maker(**given: Any) -> PositionScheme:
        return made(**{n: value for n, value in given.items() if n in taken or n not in SIZES})

    return functools.update_wrapper(maker, made)


def _fitted(kind: type[PositionScheme], sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a class says of its options for these sizes; nothing if it has no ``fitted``."""
    ask = getattr(kind, "fitted", None)
    if not callable(ask):  # none, or a field of that name
        return {}
    found = ask(sizes)
    if not isinstance(found, Mapping):
        raise TypeError(f"{kind.__name__}.fitted must answer options by name, got {found!r}")
    own = sorted({field.name for field in fields(cast(Any, kind)) if field.init} - set(SIZES))
    for option in found.keys() - set(own):
        raise ValueError(f"{kind.__name__}.fitted has no option {option!r}{nearest(option, own)}")
    return dict(found)


def _listed(missing: list[str]) -> str:
    """``max_len and dim (or num_heads and head_dim)``."""
    names = " and ".join(missing)
    return f"{names} (or num_heads and head_dim)" if missing[-1:] == ["dim"] else names


def _given(given: dict[str, Any]) -> str:
    names = ", ".join(name for name in given if name in SIZES)
    return f"; sizes that were given: {names or 'none'}"


def _loaded(entry: EntryPoint) -> Maker | None:
    """A third party's maker."""
    try:
        return _checked(entry.load(), entry.name)
    except Exception as error:
        warnings.warn(f"{_GROUP}: cannot load {entry.value}: {error!r}", stacklevel=3)
        return None
