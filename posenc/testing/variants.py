"""Schemes that differ from a given one in a single field.

Laws need them to check that every field matters. The contract does not list the legal values of a
field, so a few likely ones are tried; callers give ``SchemeCase(variants=...)`` for other fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from posenc.contract.params import head_count
from posenc.contract.protocol import PositionScheme


def field_variants(
    scheme: PositionScheme, *, compared: bool = True
) -> Iterator[Iterator[tuple[str, PositionScheme]]]:
    """For each field, variants with other values of that field, as ``("field=value", scheme)``.

    ``compared`` chooses between fields that ``==`` compares and those that it does not.
    """
    for field in fields(cast(Any, scheme)):
        if field.init and field.compare is compared:
            yield (
                (f"{field.name}={value!r}", other)
                for value, other in _with_other_values(scheme, field.name)
                if _fits_together(other)
            )


def sizes_of(scheme: Any, name: str) -> list[int]:
    """Values of the field ``name`` of a scheme; of its parts if it has no such field."""
    own = getattr(scheme, name, None)
    if own is not None or not is_dataclass(scheme):
        return [] if own is None else [own]
    values = [getattr(scheme, field.name, None) for field in fields(scheme)]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [size for part in parts if _is_scheme(part) for size in sizes_of(part, name)]


def _fits_together(scheme: PositionScheme) -> bool:
    """Whether the parts of a combination still have equal sizes."""
    try:
        head_count(scheme)
    except (TypeError, ValueError):
        return False
    return all(len(set(sizes_of(scheme, size))) < 2 for size in ("head_dim", "hidden_dim"))


def _with_other_values(scheme: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """Other values of a field that the class accepts, with the scheme that has them."""
    hint = get_type_hints(type(scheme)).get(name)
    for value in _other_values(getattr(scheme, name), hint):
        try:
            other = replace(scheme, **{name: value})
        except (TypeError, ValueError):
            continue  # not a value of this field
        if getattr(other, name) != getattr(scheme, name):  # a size that the scheme does not use
            yield value, other


def _other_values(value: Any, hint: Any) -> list[Any]:
    """Other values that a field of this type might take."""
    others: Iterable[Any] = ()
    if get_origin(hint) is Literal:
        others = get_args(hint)
    elif isinstance(value, Enum):
        others = type(value)
    elif is_dataclass(value):
        others = _changed_parts(value)
    elif isinstance(value, tuple) and value and all(map(_is_scheme, value)):
        others = (
            (*value[:n], other, *value[n + 1 :])
            for n, part in enumerate(value)
            for other in _changed_parts(part)
        )
    elif isinstance(value, bool):
        others = (not value,)
    elif isinstance(value, int):
        # A step of 1 may change nothing; a large one may be needed.
        others = (2 * value, value + 2, value + 1, value - 1, 64 * value)
    elif isinstance(value, float):
        others = (2 * value, value / 2, value + 1, value / 1024)
    elif isinstance(value, tuple) and value and all(isinstance(v, int | float) for v in value):
        others = (tuple(v + 0.5 for v in value), tuple(2 * v for v in value))
    elif value is None and {int, float} & set(get_args(hint)):
        others = (2, 4, 0.5)
    return [other for other in others if other != value]


def _changed_parts(part: Any) -> Iterator[Any]:
    """Variants of a scheme, or of a scaling, that is itself a field: one of its fields changed."""
    for field in fields(part):
        if field.init and field.compare:
            yield from (other for _, other in _with_other_values(part, field.name))


def _is_scheme(value: Any) -> bool:
    return isinstance(value, PositionScheme) and is_dataclass(value)
