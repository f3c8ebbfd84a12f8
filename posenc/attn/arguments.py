"""Check the arguments of attention, with errors that name them, and fill in defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import EllipsisType
from typing import Any, NamedTuple

from posenc.apply.shapes import positions_as_places
from posenc.attn.masks import Mask
from posenc.contract.operations import check_library, device, library_of
from posenc.contract.params import head_count, is_floating
from posenc.contract.protocol import Array, Namespace, PositionScheme, Window
from posenc.contract.tokens import Tokens
from posenc.positions.integers import (
    as_integers,
    as_places,
    check_range,
    concrete_values,
    from_numpy,
)

SWAPPED = (
    "are the axes of heads and tokens swapped? NumPy and PyTorch take (B, H, L, D), "
    "JAX (B, L, H, D)"
)


class Arguments(NamedTuple):
    """The arguments of ``attention`` after ``causal``, which its docstring explains.

    A window ``...`` is that of the layer, which a pass of several layers fills in.
    """

    window: int | Window | EllipsisType | None = None
    mask: Any = None
    tokens: Tokens | None = None
    queries: Tokens | None = None
    bias: Array | None = None
    softcap: float | None = None
    scale: float | None = None
    k_transformed: bool = False
    return_lse: bool = False

    @property
    def of_keys(self) -> Tokens:
        """What is known of the keys."""
        return _UNKNOWN if self.tokens is None else self.tokens

    @property
    def of_queries(self) -> Tokens:
        """What is known of the queries; nothing if they are the last of the keys' tokens."""
        return _UNKNOWN if self.queries is None else self.queries

    def map(self, function: Callable[[Any], Any]) -> Arguments:
        """The same with ``function`` applied to every array."""
        tokens, queries = (
            t.map(function) if isinstance(t, Tokens) else t for t in (self.tokens, self.queries)
        )
        mask = self.mask
        if isinstance(mask, Mask) and mask.array is not None:
            mask = replace(mask, array=function(mask.array))
        elif hasattr(mask, "dtype"):
            mask = function(mask)
        bias = None if self.bias is None else function(self.bias)
        return self._replace(tokens=tokens, queries=queries, mask=mask, bias=bias)

    def floats(self) -> list[Any]:
        """The arrays whose dtype may make the working dtype float64."""
        arrays: list[Any] = [self.bias]
        for side in (self.tokens, self.queries):
            if isinstance(side, Tokens):
                features = side.features if isinstance(side.features, Mapping) else {}
                arrays += [side.x, *features.values()]
        return [array for array in arrays if array is not None]

    def check(self, xp: Namespace | None = None) -> Arguments:
        """The same, if both records of tokens are ones, and arrays are of ``xp`` or of NumPy."""
        mask = self.mask.array if isinstance(self.mask, Mask) else self.mask
        arrays = {"mask": mask, "bias": self.bias}
        for name, side in (("tokens", self.tokens), ("queries", self.queries)):
            if side is None:
                continue
            if not isinstance(side, Tokens):
                raise TypeError(
                    f"{name} must be posenc.Tokens, got {type(side).__name__}; "
                    "Tokens(pos=..., seg=..., places=..., exists=..., x=...)"
                )
            for part in ("pos", "seg", "places", "exists", "x"):
                arrays[f"{name}.{part}"] = getattr(side, part)
            if isinstance(side.features, Mapping):
                arrays |= {f"{name}.features[{n!r}]": a for n, a in side.features.items()}
        if xp is not None:
            for name, array in arrays.items():
                check_library(name, array, xp)
        return self


_UNKNOWN = Tokens()


def check_heads(scheme: PositionScheme, q: Array) -> None:
    """Check that the scheme and the queries have the same number of heads."""
    heads, q_len = q.shape[1], q.shape[2]
    declared = head_count(scheme)
    # Compared one by one: torch's compiler answers "in" wrongly for symbols.
    if declared is not None and declared != 1 and declared != heads:
        hint = f"; {SWAPPED}" if declared == q_len else ""
        raise ValueError(f"q has {heads} heads, the scheme num_heads={declared}: {scheme}{hint}")


class Sides(NamedTuple):
    """Queries and keys with positions, segments and places.

    ``aligned``: positions are the default. ``in_the_past``: it is known from given positions that
    no key is after a query.
    """

    query: Tokens
    key: Tokens
    aligned: bool
    in_the_past: bool


def complete_sides(
    q: Array, k: Array, given: Arguments, scheme: PositionScheme, xp: Namespace
) -> Sides:
    """Both sides, with default positions if none are given.

    Queries are the last of the keys' tokens, unless they are given.
    """
    q_len, k_len, here = q.shape[2], k.shape[2], device(q)
    keys, queries = given.of_keys, given.queries
    same = queries is None
    if queries is None:
        if q_len > k_len and any(
            a is not None for a in (keys.pos, keys.seg, keys.places, keys.exists)
        ):
            raise ValueError(
                f"q has length {q_len}, k only {k_len}: give queries, the tokens of the queries"
            )
        queries = keys
    else:
        for name in ("pos", "seg", "places"):
            check_pair(
                f"queries.{name}", getattr(queries, name), f"tokens.{name}", getattr(keys, name)
            )

    def both(name: str, read: Callable[[str, Array, int], Array]) -> tuple[Array | None, ...]:
        """A field of the queries and of the keys."""
        of_keys, of_queries = getattr(keys, name), getattr(queries, name)
        key = None if of_keys is None else read(f"tokens.{name}", of_keys, k_len)
        if same:
            return key, key  # cut below
        return None if of_queries is None else read(f"queries.{name}", of_queries, q_len), key

    def integers(name: str, values: Array, length: int) -> Array:
        return as_integers(name, values, device=here, xp=xp)

    aligned, in_the_past = keys.pos is None, False
    if aligned:
        q_pos, k_pos = _default_positions(q_len, k_len, here, xp)
    else:
        k_range = q_range = check_range("tokens.pos", keys.pos, xp)
        q_pos, k_pos = both("pos", integers)
        if not same:
            q_range = check_range("queries.pos", queries.pos, xp)
        elif q_len < k_len and k_range is not None:
            q_range = check_range("tokens.pos", keys.pos[..., k_len - q_len :], xp)
        in_the_past = q_range is not None and k_range is not None and k_range[1] <= q_range[0]
    q_seg, k_seg = both("seg", integers)
    q_exists, k_exists = both(
        "exists", lambda n, a, size: as_booleans(n, a, size, q.shape[0], here, xp)
    )
    q_places, k_places = both(
        "places", lambda n, a, size: as_places(n, a, scheme.axes, size, device=here, xp=xp)
    )
    if not aligned or q_seg is not None or k_places is not None:
        arrays = {
            "queries.pos": (q_pos, q_len), "tokens.pos": (k_pos, k_len),
            "queries.seg": (q_seg, q_len), "tokens.seg": (k_seg, k_len),
            "queries.places": (q_places, q_len), "tokens.places": (k_places, k_len),
        }  # fmt: skip
        _check_lengths(arrays, q, k, scheme.axes, same)
    known = not aligned or any(a is not None for a in (q_seg, q_exists, q_places))
    # Lengths last, because an exported program keeps every condition on them that it evaluates.
    if same and known and q_len < k_len:  # the last tokens
        last = slice(k_len - q_len, None)
        q_pos = q_pos if aligned else k_pos[..., last]
        q_seg, q_exists = (None if a is None else a[..., last] for a in (q_seg, q_exists))
        if q_places is not None:
            q_places = q_places[..., last, :] if scheme.axes > 1 else q_places[..., last]
    if k_places is None and scheme.axes > 1:
        q_places, k_places = (positions_as_places(p, scheme.axes, xp=xp) for p in (q_pos, k_pos))
    if q_exists is not None or k_exists is not None:
        q_seg, k_seg = without_padding(
            (q_seg, k_seg), (q_exists, k_exists), (q_len, k_len), here, xp
        )
    query = Tokens(q_pos, q_seg, q_places, features={})
    key = Tokens(k_pos, k_seg, k_places, features={})
    return Sides(query, key, aligned, in_the_past)


# Segments that no token of the other side has.
NO_QUERY, NO_KEY = -(2**31), -(2**31) + 1


def without_padding(
    segments: tuple[Array | None, Array | None],
    exists: tuple[Array | None, Array | None],
    lengths: tuple[int, int],
    here: Any,
    xp: Namespace,
) -> tuple[Array, ...]:
    """Segments of queries and keys, in which padding sees no token and is seen by none."""
    hidden: list[Array] = []
    for name, seg, own, length, reserved in zip(
        ("queries", "tokens"), segments, exists, lengths, (NO_KEY, NO_QUERY), strict=True
    ):
        if seg is None:
            seg = xp.zeros((length,), dtype=xp.int32, device=here)
        elif (values := concrete_values(seg, xp)) is not None:
            for wrong in (NO_QUERY, NO_KEY):
                if (values == wrong).any():
                    raise ValueError(f"{name}.seg holds {wrong}, which is reserved for padding")
        hidden.append(seg if own is None else xp.where(own, seg, xp.full_like(seg, reserved)))
    return tuple(hidden)


def as_booleans(
    name: str, given: Array, length: int, batch: int, here: Any, xp: Namespace
) -> Array:
    """Booleans ``(L,)`` or ``(B, L)``, one per token."""
    given = from_numpy(given, xp=xp, device=here)
    if not hasattr(given, "dtype") or not xp.isdtype(given.dtype, "bool"):
        kind = getattr(given, "dtype", type(given).__name__)
        raise TypeError(f"{name} must be an array of booleans, got {kind}")
    shape = tuple(given.shape)
    fits = len(shape) in (1, 2) and shape[-1] == length
    if not fits or (len(shape) == 2 and shape[0] != 1 and shape[0] != batch):
        raise ValueError(f"{name} must be ({length},) or {(batch, length)}, got {shape}")
    return given


def as_pairs(
    name: str, given: Array | None, q: Array, k: Array, dtype: Any, xp: Namespace
) -> Array | None:
    """``given (B or 1, H or 1, Q, K)`` as an array of ``dtype``; None if it is None."""
    if given is None:
        return None
    given = from_numpy(given, xp=xp, device=device(q))
    if not hasattr(given, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(given).__name__}")
    kind = "bool" if dtype == xp.bool else "real floating"
    if not xp.isdtype(given.dtype, kind):
        raise TypeError(
            f"{name} must be {'boolean' if kind == 'bool' else 'floating'}, got {given.dtype}"
        )
    (batch, heads, q_len, _), k_len = q.shape, k.shape[2]
    wanted = (batch, heads, q_len, k_len)
    # Compared one by one: torch's compiler answers "in" wrongly for symbols.
    fits = len(given.shape) == 4 and all(
        have == want or (axis < 2 and have == 1)
        for axis, (have, want) in enumerate(zip(given.shape, wanted, strict=True))
    )
    if not fits:
        accepted = f"(B or 1, H or 1, Q, K) = ({batch} or 1, {heads} or 1, {q_len}, {k_len})"
        raise ValueError(f"{name} must be {accepted}, got {tuple(given.shape)}")
    return xp.astype(given, dtype, copy=False)


def check_shapes(q: Array, k: Array, v: Array, *, xp: Namespace) -> None:
    """Check that q, k and v are floating, have 4 axes each, and sizes that fit together.

    ``check_head_dims`` checks channels, because transformed keys may have more than queries.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not hasattr(array, "shape"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        if len(array.shape) != 4:
            raise ValueError(f"{name} must have 4 axes, got shape {tuple(array.shape)}")
        if 0 in array.shape:
            raise ValueError(f"{name} has an axis of length 0: {tuple(array.shape)}")
        if not is_floating(array, xp):
            kind = type(array)
            raise TypeError(
                f"{name} must be a floating-point array of {library_of(xp)}, got {kind.__module__}."
                f"{kind.__name__} of {array.dtype}"
            )
        if getattr(array.dtype, "itemsize", 2) < 2:
            raise TypeError(f"{name} must have 16 bits or more, got {array.dtype}; cast it first")
    (q_batch, heads, q_len, _), (k_batch, k_heads, k_len, _) = q.shape, k.shape
    if not q_batch == k_batch == v.shape[0]:
        raise ValueError(f"q, k and v differ in batch size: {_sizes(q, k, v)}")
    if k_heads != v.shape[1] or k_len != v.shape[2]:
        raise ValueError(f"k and v differ in heads or length: {_sizes(q, k, v)}")
    if heads % k_heads:
        hint = f"; {SWAPPED}" if q_len % k_len == 0 else ""
        wrong = "the heads of q are not a multiple of those of k and v"
        raise ValueError(f"{wrong}: {_sizes(q, k, v)}{hint}")


def _sizes(q: Array, k: Array, v: Array) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as (B, H, L, D)"


def check_head_dims(q: Array, k: Array, *, transformed: bool = False) -> None:
    """Check that q and k have the same number of channels: as given, or ``transformed``."""
    if q.shape[3] == k.shape[3]:
        return
    if transformed:
        raise ValueError(
            f"transformed queries have {q.shape[3]} channels, transformed keys {k.shape[3]}"
        )
    raise ValueError(f"q and k differ in head_dim: q {tuple(q.shape)}, k {tuple(k.shape)}")


def _default_positions(q_len: int, k_len: int, device: Any, xp: Namespace) -> tuple[Array, Array]:
    if q_len > k_len:
        raise ValueError(
            f"q has length {q_len}, k only {k_len}: give pos of tokens and of queries, the default "
            "aligns ends"
        )
    k_pos = xp.arange(k_len, dtype=xp.int32, device=device)
    return k_pos[k_len - q_len :], k_pos


def check_pair(q_name: str, q: Array | None, k_name: str, k: Array | None) -> bool:
    """Whether neither ``q`` nor ``k`` is given; a ``ValueError`` if only one of them is."""
    if (q is None) != (k is None):
        given, missing = (q_name, k_name) if k is None else (k_name, q_name)
        raise ValueError(f"{given} is given without {missing}; give both or neither")
    return q is None


def _check_lengths(
    arrays: Mapping[str, tuple[Array | None, int]], q: Array, k: Array, axes: int, same: bool
) -> None:
    """Check that positions, segments and places fit q and k."""
    for name, (array, length) in arrays.items():
        side = name[0]
        if array is None or (same and side == "q"):
            continue
        heads = (q if side == "q" else k).shape[1]
        several = axes > 1 and name.endswith("places")
        shape = tuple(array.shape[:-1] if several else array.shape)
        vectors = "q" if side == "q" else "k"
        if shape[-1] != length:
            hint = f"; {SWAPPED}" if shape[-1] == heads else ""
            raise ValueError(f"{name} has length {shape[-1]}, {vectors} has {length}{hint}")
        if len(shape) == 2 and shape[0] != 1 and shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {shape[0]}, {vectors} has {q.shape[0]}")
