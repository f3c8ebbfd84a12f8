"""Makers: schemes by their names in the catalogue, for a model of given sizes."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from posenc.contract.checks import check_count, nearest
from posenc.contract.protocol import PositionScheme
from posenc.schemes import MODULES
from posenc.schemes.sizes import (
    SIZES,
    given_sizes,
    join_names,
    no_option,
    taking_sizes,
    with_widths,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Maker = Callable[..., PositionScheme]
# A class, a class with options that the name sets, or a function; a string names one in
# ``MODULES``.
Entry = str | type[PositionScheme] | Maker | tuple[str | type[PositionScheme], Mapping[str, Any]]

_BUILT_IN: dict[str, Entry] = {
    "alibi": "ALiBi",
    "alibi_2d": "ALiBi2D",
    "axial_rope": "AxialRoPE",
    "bam": "BAM",
    "cable": "CABLE",
    "carope": "CARoPE",
    "cope": "CoPE",
    "dape": "dape_on_alibi",
    "deberta": "DeBERTa",
    "dual_chunk": "DualChunk",
    "fire": "FIRE",
    "fope": "FoPE",
    "fox": "FoX",
    "grape_a": "GRAPEA",
    "grape_ap": "GRAPEAP",
    "inkling": "Inkling",
    "kerple_log": ("Kerple", {"kind": "log"}),
    "kerple_power": ("Kerple", {"kind": "power"}),
    "learned": "Learned",
    "learned_rope": "LearnedRoPE",
    "log_scale": "LogScale",
    "mixed_rope": "MixedRoPE",
    "mrope": "MRoPE",
    "nope": "NoPE",
    "p_rope": ("RoPE", {"scaling": "Proportional"}),
    "path": "PaTH",
    "pope": "PoPE",
    "relative_table": "RelativeTable",
    "repo": "RePo",
    "rerope": "ReRoPE",
    "rope": "RoPE",
    "rope_clip_hann": ("RoPE", {"scaling": "ClipHann"}),
    "rope_clip_period": ("RoPE", {"scaling": "ClipPeriod"}),
    "rope_dynamic": ("RoPE", {"scaling": "DynamicNTK"}),
    "rope_llama3": ("RoPE", {"scaling": "Llama3"}),
    "rope_longrope": ("RoPE", {"scaling": "LongRoPE"}),
    "rope_ntk": ("RoPE", {"scaling": "NTK"}),
    "rope_ntk_mixed": ("RoPE", {"scaling": "NTKMixed"}),
    "rope_pi": ("RoPE", {"scaling": "PI"}),
    "rope_yarn": ("RoPE", {"scaling": "YaRN"}),
    "sandwich": ("Sandwich", {"dim": 128}),  # not the dim of the model
    "self_extend": "SelfExtend",
    "selective_rope": "SelectiveRoPE",
    "shaw": "Shaw",
    "sink": "sink_alone",
    "sinusoidal": "Sinusoidal",
    "t5": "T5Bias",
    "tra": "TRA",
    "transformer_xl": "TransformerXL",
    "wall": "Wall",
    "wavelet": "Wavelet",
    "xpos": "XPos",
}
_GROUP = "posenc.schemes"
_NONE: Mapping[str, Any] = MappingProxyType({})


def catalogue() -> dict[str, Maker]:
    """The catalogue, name -> maker.

    A maker takes sizes of a model (``num_heads``, ``head_dim``, ``max_len``, ``train_len``,
    ``dim``, ``hidden_dim``) and the options of its scheme, by keyword. It ignores sizes that its
    scheme does not use, and raises an error that names missing ones. A maker that is a function
    receives the sizes that it names, or all of them if it takes ``**``.

    Other packages add schemes through the entry-point group ``posenc.schemes``. An entry point that
    cannot be loaded, or whose name is taken, gives a warning.
    """
    from importlib.metadata import entry_points  # slow, and only the catalogue needs it

    makers: dict[str, Maker] = {name: _maker(entry) for name, entry in _BUILT_IN.items()}
    for entry in entry_points(group=_GROUP):
        if entry.name in makers:
            warnings.warn(f"{_GROUP}: {entry.value} takes the name {entry.name!r}", stacklevel=2)
        elif (maker := _load(entry)) is not None:
            makers[entry.name] = maker
    return makers


def make(
    name: str,
    *,
    num_heads: int | None = None,
    head_dim: int | None = None,
    max_len: int | None = None,
    train_len: int | None = None,
    dim: int | None = None,
    hidden_dim: int | None = None,
    **options: Any,
) -> PositionScheme:
    """Make a scheme by its name in the catalogue, for a model of these sizes.

    Parameters
    ----------
    name
        A name in the catalogue, or a dotted name ``"module.Class"``, which is imported.
    num_heads, head_dim, max_len, train_len, dim, hidden_dim
        Sizes of the model. ``max_len`` is its longest context, and ``train_len`` the length that it
        is trained at. Only the sizes that the scheme uses are needed; the others have no effect.
        ``dim`` defaults to ``num_heads * head_dim``, and ``hidden_dim``, the width of the hidden
        states that attention receives as ``x=``, to ``dim``.
    options
        Fields of the scheme; ``posenc list NAME`` shows them. A class may have a classmethod
        ``fitted(cls, sizes)``, which returns defaults of options for the given sizes. ``T5Bias``
        has one, so that training sees every bucket.

    >>> make("rope", head_dim=64, base=500_000.0)
    RoPE(head_dim=64, base=500000.0, layout='half', rotary_dim=None, scaling=None)
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
        "hidden_dim": hidden_dim,
    }
    sizes = {size: check_count(size, value) for size, value in given.items() if value is not None}
    return maker(**with_widths(sizes), **options)


def fitted_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that ``fitted`` of a class returns; ``{}`` for most classes.

    ``given`` are sizes, and options that others may follow from.

    Raises
    ------
    TypeError, ValueError
        ``fitted`` does not return a mapping, or returns a name that is not an option.
    """
    maker = maker_of(name)
    kind = inspect.unwrap(maker)
    return _fit_all(kind, getattr(maker, "preset", _NONE), given) if _inherits(kind) else {}


def maker_of(name: str) -> Maker:
    """The maker of a name in the catalogue, or of a dotted name."""
    if isinstance(name, str) and name.lower() in _BUILT_IN:
        return _maker(_BUILT_IN[name.lower()])  # without importing the others
    names = catalogue()
    if isinstance(name, str) and name.lower() in names:
        return names[name.lower()]
    if not isinstance(name, str) or "." not in name:
        raise ValueError(_unknown(name, names))
    return _as_maker(_import(name), name)


def _unknown(name: Any, names: Iterable[str]) -> str:
    """The error for a name that is not in the catalogue, which may be that of a plan."""
    from posenc.presets import PLANS  # which imports many schemes

    if isinstance(name, str) and name in PLANS:
        return f"{name!r} is a plan of all layers of a model, no scheme: posenc.presets.{name}()"
    if isinstance(name, str) and (scheme := name.partition(":")[0]) in names:
        return (
            f"{name!r} is a label, as `posenc compare` and `posenc show` take it; the name is "
            f"{scheme!r}, and options are keywords of posenc.make"
        )
    hint = nearest(name, [*names, *PLANS], listing="`posenc list`")
    return f"unknown scheme {name!r}{hint}; your own is a dotted name, module.Class"


def _import(name: str) -> Any:
    """The object of a dotted name; an error in its module becomes an ``ImportError``."""
    module, _, attribute = name.rpartition(".")
    if not all(name.split(".")):
        raise ValueError(f"unknown scheme {name!r}; a dotted name reads module.Class")
    try:
        home = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"unknown scheme {name!r}: {error}{_search_hint()}") from error
        cause = f"{type(error).__name__}: {error}{_line(error)}"
        raise ImportError(f"scheme {name!r}: cannot import {module!r}: {cause}") from error
    try:
        return getattr(home, attribute)
    except AttributeError as error:
        names = [key for key, value in vars(home).items() if _inherits(value)]
        raise ValueError(f"unknown scheme {name!r}: {error}{nearest(attribute, names)}") from error


def _search_hint() -> str:
    here = os.getcwd()  # noqa: PTH109 # pathlib is slow to import
    return f"; the folder {here} was searched" if {here, ""} & set(sys.path) else ""


def _line(error: Exception) -> str:
    """The line of a module at which its import failed, because a command shows no traceback."""
    import traceback  # only errors need it

    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if frame.name == "<module>"]
    return f", at {lines[-1]}" if lines else ""


def _as_maker(value: Any, name: str) -> Maker:
    """The maker for a class or a function; other values are a ``TypeError``."""
    if not isinstance(value, type):
        if not callable(value):
            raise TypeError(f"scheme {name!r} is neither a PositionScheme nor a maker: {value!r}")
        return taking_sizes(cast(Maker, value))
    kind = value.__name__
    if not _inherits(value):
        advice = f"inherit from posenc.PositionScheme: class {kind}(PositionScheme)"
        raise TypeError(f"scheme {name!r}: class {kind} is not a PositionScheme; {advice}")
    if not getattr(getattr(value, "__dataclass_params__", None), "frozen", False):
        advice = f"write @dataclass(frozen=True) above class {kind}"
        raise TypeError(f"scheme {name!r}: class {kind} is not a frozen dataclass; {advice}")
    return _class_maker(value)


def _inherits(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, PositionScheme) and value != PositionScheme


def _maker(entry: Entry) -> Maker:
    """The maker of an entry of the built-in catalogue."""
    if isinstance(entry, tuple):
        kind, preset = entry
        return _class_maker(_made(kind), {key: _made(value) for key, value in preset.items()})
    found: Any = _made(entry)
    return _class_maker(found) if isinstance(found, type) else taking_sizes(found)


def _made(value: Any) -> Any:
    """What a string names in ``MODULES``; any other value is itself."""
    if not isinstance(value, str) or value not in MODULES:
        return value
    return getattr(importlib.import_module(f"posenc.schemes.{MODULES[value]}"), value)


def _class_maker(kind: type[PositionScheme], preset: Mapping[str, Any] = _NONE) -> Maker:
    """A maker of a class, which knows the sizes and options that it takes.

    ``preset`` are options that the scheme's name sets, so the maker does not take them. If one is a
    class, as a scaling of RoPE, the maker takes the options of that class and makes it.
    """
    parts = {name: value for name, value in preset.items() if isinstance(value, type)}
    init = [field for owner in (kind, *parts.values()) for field in _init_fields(owner, preset)]
    accepted = {field.name for field in init}
    needed = [f.name for f in init if f.default is MISSING and f.default_factory is MISSING]

    def maker(**given: Any) -> PositionScheme:
        for option in given.keys() - accepted - set(SIZES):
            known = sorted(accepted - set(SIZES))
            raise ValueError(no_option(kind.__name__, option, known))
        sizes = with_widths({name: value for name, value in given.items() if name in SIZES})
        made = {**_fit_all(kind, preset, {**given, **sizes}), **given, **sizes}
        missing = [name for name in needed if name not in made]
        if missing:
            raise TypeError(f"{kind.__name__} needs {join_names(missing)}{given_sizes(given)}")

        def own(owner: Any) -> dict[str, Any]:
            names = [field.name for field in _init_fields(owner, preset)]
            return {name: made[name] for name in names if name in made}

        made_parts = {name: part(**own(part)) for name, part in parts.items()}
        return kind(**own(kind), **{**preset, **made_parts})

    # __wrapped__ keeps the class; updated=() does not copy its attributes.
    functools.update_wrapper(maker, kind, updated=())
    maker.preset = preset  # type: ignore[attr-defined]
    maker.trained_as = _trained_as(kind, parts)  # type: ignore[attr-defined]
    return maker


def _init_fields(owner: Any, preset: Mapping[str, Any]) -> list[Field[Any]]:
    """The fields that the constructor of a dataclass takes, without those that a name sets."""
    return [field for field in fields(owner) if field.init and field.name not in preset]


def _trained_as(kind: type[PositionScheme], parts: Mapping[str, type]) -> str | None:
    """The name of the scheme that models are trained with, if this one extends them.

    That is the class alone for parts that extend a model trained without them.
    """
    if kind.trained_as is not None:
        return kind.trained_as
    if all(getattr(part, "trained", True) for part in parts.values()):
        return None
    return next((name for name, entry in _BUILT_IN.items() if _is(entry, kind)), None)


def _is(entry: Entry, kind: type) -> bool:
    """Whether an entry of the catalogue is this class; imports none for the answer."""
    home = f"posenc.schemes.{MODULES.get(kind.__name__)}"
    return entry is kind or (entry == kind.__name__ and kind.__module__ == home)


def _fit_all(kind: Any, preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that fit the sizes, of a class and of the classes that its name sets.

    The latter are told the given options too.
    """
    fitted = _fit_options(kind, {name: given[name] for name in given if name in SIZES})
    for part in preset.values():
        if isinstance(part, type):
            fitted |= _fit_options(part, given)
    return fitted


def _fit_options(kind: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The options that ``kind.fitted`` returns for these sizes."""
    options = kind.fitted(sizes)
    if not isinstance(options, Mapping):
        raise TypeError(f"{kind.__name__}.fitted must return options by name, got {options!r}")
    known = sorted({field.name for field in fields(kind) if field.init} - set(SIZES))
    for option in options.keys() - set(known):
        raise ValueError(f"{kind.__name__}.fitted has no option {option!r}{nearest(option, known)}")
    return dict(options)


def _load(entry: EntryPoint) -> Maker | None:
    """The maker of an entry point; None, with a warning, if it cannot be loaded."""
    try:
        return _as_maker(entry.load(), entry.name)
    except Exception as error:
        warnings.warn(f"{_GROUP}: cannot load {entry.value}: {error!r}", stacklevel=3)
        return None
