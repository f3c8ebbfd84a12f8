"""``Tokens``: what is known of the tokens of the keys, or of the queries, beside their vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from posenc.contract.operations import shared_namespace
from posenc.contract.protocol import Array, PositionScheme
from posenc.contract.specs import Namespace


@dataclass(frozen=True, eq=False)
class Rotary:
    """Sines and cosines at some positions, or what else a scheme's ``rotary`` returns.

    ``posenc.rotary`` makes it. It serves the queries and the keys at these positions in every layer
    with an equal scheme and, if the frequencies are learned, the same arrays.

    Attributes
    ----------
    scheme
        The scheme that it was made for.
    tables
        Name -> ``(L, n)``, ``(H, L, n)`` or ``(B, H or 1, L, n)``, float32 or float64.
    regions
        One for each of the scheme's ``regions``, None where a region needs none.
    """

    scheme: PositionScheme
    tables: Mapping[str, Array]
    regions: tuple[Rotary | None, ...] = ()

    def map(self, function: Callable[[Array], Array]) -> Rotary:
        """The same with ``function`` applied to every table."""
        return self.join((), lambda tables: function(tables[0]))

    def join(self, others: Sequence[Rotary], function: Callable[[list[Array]], Array]) -> Rotary:
        """The same with ``function`` of each table and those of others, made for this scheme."""
        every = (self, *others)
        for other in others:
            if other.scheme != self.scheme:
                raise ValueError(f"rotary was made for {self.scheme} and for {other.scheme}")
        tables = {n: function([each.tables[n] for each in every]) for n in self.tables}
        regions = tuple(
            None if part is None else part.join([each.regions[n] for each in others], function)  # type: ignore[misc]  # equal schemes have equal regions
            for n, part in enumerate(self.regions)
        )
        return Rotary(self.scheme, tables, regions)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one side of attention: of the keys, or of the queries.

    ``tokens[-8:]`` are the last eight tokens, ``tokens.concat(more)`` are these and more. In JAX it
    is a pytree.

    Attributes
    ----------
    pos
        Integer positions, ``(L,)`` or ``(B, L)``, in any order. They decide order: masks, sums and
        caches follow them, and tokens with the same position see each other under a causal mask.
        Default: in order, and the ends of queries and keys align, ``K - Q .. K - 1``.
    seg
        Integer segments, ``(L,)`` or ``(B, L)``: a query sees only keys of its segment.
    places
        Integer coordinates that the scheme encodes instead of positions, ``(L, axes)`` or
        ``(B, L, axes)``; for a scheme of one axis also ``(L,)`` or ``(B, L)``. If a model repeats
        ``position_ids`` (image tokens, tree decoding), they are places. Default: the position on
        every axis.
    exists
        Booleans, ``(L,)`` or ``(B, L)``: False for padding, which no token sees and which sees no
        token. Its result is 0.
    x
        Hidden states ``(B, L, C)``, for a scheme whose features read them.
    features
        Features by name, ``(B, H, L)`` or ``(B, H, L, M)``, if they are known already;
        ``posenc.features`` computes them.
    rotary
        ``posenc.rotary`` at these positions, or places, if it is made once for many calls.
    """

    # "axis" is that of tokens, which slicing follows.
    pos: Any = field(default=None, metadata={"axis": -1})
    seg: Any = field(default=None, metadata={"axis": -1})
    places: Any = field(default=None, metadata={"axis": None})  # by its number of axes
    exists: Any = field(default=None, metadata={"axis": -1})
    x: Any = field(default=None, metadata={"axis": -2})
    features: Any = field(default=None, metadata={"axis": 2})
    rotary: Rotary | None = field(default=None, metadata={"axis": -2})

    @property
    def encoded_pos(self) -> Any:
        """The positions that the scheme encodes: ``places``, or ``pos`` if there are none."""
        return self.pos if self.places is None else self.places

    def with_features(self, features: Mapping[str, Array]) -> Tokens:
        """The same tokens with other features."""
        return replace(self, features=features)

    def map_features(self, function: Callable[[Array], Any]) -> Tokens:
        """The same tokens with ``function`` applied to every feature."""
        return self.with_features({n: function(a) for n, a in (self.features or {}).items()})

    def __getitem__(self, index: slice) -> Tokens:
        """The tokens of a slice, as views."""
        if not isinstance(index, slice):
            raise TypeError(f"tokens must be indexed by a slice, got {index!r}; tokens[n : n + 1]")
        for name, value in self._fields():
            _check_arrays(name, value)
        return self._each(lambda array, axis: _slice(array, index, axis))

    def concat(self, *others: Tokens) -> Tokens:
        """These tokens, and then others, whose fields must be the same ones.

        Raises
        ------
        ValueError
            A field is given for some of them only, or their shapes do not fit.
        """
        for other in others:
            if not isinstance(other, Tokens):
                raise TypeError(f"others must be posenc.Tokens, got {type(other).__name__}")
        every = (self, *others)
        joined: dict[str, Any] = {}
        for each in fields(Tokens):
            given = [getattr(tokens, each.name) for tokens in every]
            if all(value is None for value in given):
                continue
            if any(value is None for value in given):
                raise ValueError(
                    f"{each.name} is given for some of the tokens only: give it for all or none"
                )
            for value in given:
                _check_arrays(each.name, value)
            if each.name == "places":
                axes = [tokens._axis_of_places() for tokens in every]
                if len(set(axes)) > 1:
                    shapes = [tuple(value.shape) for value in given]
                    raise ValueError(f"places {shapes} differ in their axes")
                joined[each.name] = _concat(given, axes[0], each.name)
            else:
                joined[each.name] = _concat(given, _AXES[each.name], each.name)
        return Tokens(**joined)

    def select(self, tokens: slice, heads: slice = slice(None)) -> Tokens:
        """Views of some tokens, and of some heads of their features; places have one axis."""
        selected = self._each(lambda array, axis: _slice(array, tokens, axis), axis_of_places=-1)
        if heads != slice(None) and selected.features:
            own = {n: _of_heads(array, heads) for n, array in selected.features.items()}
            return selected.with_features(own)
        return selected

    def map(self, function: Callable[[Any], Any]) -> Tokens:
        """The same tokens with ``function`` applied to every array but those of ``rotary``."""
        given = {name: value for name, value in self._fields() if value is not None}
        given.pop("rotary", None)
        mapped: dict[str, Any] = {
            name: {n: function(a) for n, a in value.items()}
            if isinstance(value, Mapping)
            else function(value)
            for name, value in given.items()
        }
        return replace(self, **mapped)

    def _each(
        self, function: Callable[[Any, int], Any], axis_of_places: int | None = None
    ) -> Tokens:
        """``function(value, axis of tokens)`` of every field that is given."""
        made: dict[str, Any] = {}
        for name, value in self._fields():
            if value is not None:
                axis = _AXES[name]
                if axis is None:
                    axis = self._axis_of_places() if axis_of_places is None else axis_of_places
                made[name] = function(value, axis)
        return Tokens(**made)

    def _fields(self) -> list[tuple[str, Any]]:
        """Names and values; ``vars`` is beyond Dynamo before PyTorch 2.13."""
        return [(name, getattr(self, name)) for name in _AXES]

    def _axis_of_places(self) -> int:
        """The axis of tokens in ``places``: ``(L,)``, ``(B, L)``, ``(L, axes)``, ``(B, L, axes)``.

        Other fields tell the length of a table of two axes.
        """
        shape = tuple(self.places.shape)
        if len(shape) != 2:
            return -1 if len(shape) == 1 else -2
        others = (self.pos, self.seg, self.exists)
        lengths = [a.shape[-1] for a in others if a is not None]
        lengths += [] if self.x is None else [self.x.shape[-2]]
        if not lengths or (shape[0] == shape[1] == lengths[0]):
            raise ValueError(
                f"places {shape} may be (B, L) or (L, axes): give (B, L, axes), or positions too"
            )
        return -1 if shape[-1] == lengths[0] else -2


_AXES: dict[str, Any] = {each.name: each.metadata["axis"] for each in fields(Tokens)}


def _of_heads(array: Array, heads: slice) -> Array:
    return array if array.shape[1] == 1 else array[:, heads, ...]


def _slice(value: Any, index: slice, axis: int) -> Any:
    """A slice of an array, or of the arrays of a mapping or a ``Rotary``, along an axis."""
    if isinstance(value, Mapping):
        return {name: _slice(array, index, axis) for name, array in value.items()}
    if isinstance(value, Rotary):
        return value.map(lambda table: _slice(table, index, axis))
    before = axis if axis >= 0 else len(value.shape) + axis
    return value[(*[slice(None)] * before, index)]


def _check_arrays(name: str, value: Any) -> None:
    """``TypeError`` if a field is a list, or anything else without a shape."""
    if not (value is None or isinstance(value, Mapping | Rotary) or hasattr(value, "shape")):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def _concat(values: list[Any], axis: int, name: str) -> Any:
    """Arrays one after the other along an axis, or those of mappings or of ``Rotary``."""
    first = values[0]
    if isinstance(first, Mapping):
        if any(set(value) != set(first) for value in values):
            names = [sorted(value) for value in values]
            raise ValueError(f"{name} of the tokens differ: {names}")
        return {n: _concat([value[n] for value in values], axis, name) for n in first}
    if isinstance(first, Rotary):
        return first.join(values[1:], lambda tables: _concat(tables, axis, name))
    xp = shared_namespace(**{f"{name} {n}": value for n, value in enumerate(values)})
    most = max(len(value.shape) for value in values)
    wide = [xp.reshape(v, (*[1] * (most - len(v.shape)), *v.shape)) for v in values]
    at = axis % most
    lead = [max(v.shape[n] for v in wide) for n in range(most)]
    if any(v.shape[n] not in (1, lead[n]) for v in wide for n in range(most) if n != at):
        shapes = [tuple(value.shape) for value in values]
        raise ValueError(
            f"{name} of the tokens must have shapes that differ only in the axis of tokens or by "
            f"axes of 1, got {shapes}"
        )
    _check_dtypes(values, name, xp)
    wide = [
        xp.broadcast_to(v, tuple(v.shape[n] if n == at else lead[n] for n in range(most)))
        for v in wide
    ]
    return xp.concat(wide, axis=at)


def _check_dtypes(values: list[Array], name: str, xp: Namespace) -> None:
    """``TypeError`` if integers of these dtypes have no integer dtype in common."""
    dtypes = [value.dtype for value in values]
    if len(set(dtypes)) == 1 or not all(xp.isdtype(dtype, "integral") for dtype in dtypes):
        return
    try:
        joint = xp.result_type(*values)
    except (TypeError, RuntimeError):  # PyTorch promotes no unsigned integers
        joint = None
    if joint is None or not xp.isdtype(joint, "integral"):  # int32 and uint64: float64 in NumPy
        found = ", ".join(map(str, dtypes))
        raise TypeError(f"{name} of the tokens must have one integer dtype, got {found}")
