"""The arrays of a scheme: drawn, checked, and cut into what one head may see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import device, is_numpy_namespace

from posenc.checks import check_scheme, nearest
from posenc.protocol import Array, Namespace, PositionScheme, Role


class Features(Mapping[str, Array]):
    """Features of the queries or the keys, by name, as a method of a scheme reads them."""

    def __init__(self, found: Mapping[str, Array], role: str) -> None:
        self._found, self._role = found, role

    def __getitem__(self, name: str) -> Array:
        if name not in self._found:
            there = ", ".join(self._found) or "none"
            raise KeyError(f"{name!r} is no feature of the {self._role}; there are: {there}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Params(Mapping[str, Array]):
    """What a scheme's methods receive as ``params``: arrays by name, and the working ``dtype``.

    ``query`` and ``key`` are features of the tokens on each side, by name.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        dtype: Any,
        query: Mapping[str, Array] | None = None,
        key: Mapping[str, Array] | None = None,
    ) -> None:
        self._arrays = dict(arrays)
        self.dtype = dtype
        # Made here: torch's compiler cannot hold one that is a default of every call.
        self.query = Features({}, "query") if query is None else query
        self.key = Features({}, "key") if key is None else key

    def of(self, role: Role) -> Mapping[str, Array]:
        """Features of one side: what a transform of queries, or of keys, may read."""
        return self.query if role == "query" else self.key

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            there = ", ".join(self._arrays) or "none"
            raise KeyError(
                f"{name!r} is no param and no constant of the scheme; there are: {there}"
            )
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class SharedKeys(Params):
    """Params of a transform of keys that several heads share: what is one head's own has no key."""

    def __init__(self, params: Params, *, heads: int, own: int) -> None:
        super().__init__(params, params.dtype, params.query, params.key)
        self._heads, self._own = heads, own

    def __getitem__(self, name: str) -> Array:
        found = super().__getitem__(name)
        if isinstance(found, HeadTable) or (len(found.shape) == 3 and found.shape[0] != 1):
            raise ValueError(
                f"x has {self._own} heads, {name!r} is for {self._heads}: keys that heads share "
                "have no transform of one head's own; repeat keys and values for every head"
            )
        return found


class TokenTable:
    """``(B, H, L, M)``: a table of each query or key, which answers ``table[index]`` on a tile.

    ``index`` is an integer, or integers that broadcast to ``(B, H, Q, K)``; so does the answer.
    """

    def __init__(self, array: Array, xp: Namespace, role: Role) -> None:
        self._array, self._xp, self._of_keys = array, xp, role == "key"
        self.shape, self.dtype = (array.shape[-1],), array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def _no_array(self, what: str) -> TypeError:
        return TypeError(
            f"a feature with a table of {self.shape[0]} numbers per token is read by index, "
            f"params.query[name][i] with an integer or integers; it is no array for {what}"
        )

    def __getitem__(self, index: Any) -> Array:
        xp, table = self._xp, self._array
        if isinstance(index, slice | tuple | list) or index is None or index is Ellipsis:
            raise self._no_array(f"an index of {index!r}")
        if isinstance(index, int):
            found = table[..., index]
            return found[..., None, :] if self._of_keys else found[..., :, None]
        if len(index.shape) != 4:
            raise IndexError(
                "an index of a feature's table must be an integer, or come from q and k, which are "
                f"(B or 1, 1, Q, 1) and (B or 1, 1, 1, K); got shape {tuple(index.shape)}"
            )
        if self._of_keys:
            index = xp.matrix_transpose(index)
        heads = [max(a, b) for a, b in zip(table.shape[:2], index.shape[:2], strict=True)]
        rows = table.shape[2]
        index = xp.broadcast_to(index, (*heads, rows, index.shape[3]))
        table = xp.broadcast_to(table, (*heads, rows, table.shape[3]))
        index = index if index.dtype == xp.int64 else xp.astype(index, xp.arange(1).dtype)
        found = xp.take_along_axis(table, index, axis=-1)
        return xp.matrix_transpose(found) if self._of_keys else found


class HeadTable:
    """A per-head array ``(H, n, ...)`` that answers ``table[index, ...]`` for every head at once.

    Each index is an integer or an array that broadcasts against ``(H, 1, 1)``; the answer has the
    head where ``(H, 1, 1)`` puts it. So a scheme that speaks of one head serves all of them. It is
    no array: arithmetic, slices and functions of arrays are a ``TypeError`` that says what to
    write. ``len`` is ``n``; iteration over a table of one axis gives ``table[0], table[1], ...``.

    ``rows``: it is read by a transform, where ``table[:]`` is ``(H, 1, n, ...)``, which fits
    ``x (B, H, L, D)``.
    """

    def __init__(
        self, array: Array, xp: Namespace, name: str = "table", *, rows: bool = False
    ) -> None:
        self._array, self._xp, self._name, self._rows = array, xp, name, rows
        self.shape, self.dtype = tuple(array.shape[1:]), array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Array]:
        if len(self.shape) > 1:
            raise self._no_array("iteration")
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by libraries, and by copy
            raise AttributeError(name)
        raise AttributeError(str(self._no_array(f".{name}")))

    def _no_array(self, what: str) -> TypeError:
        name, axes = self._name, ("i", "j", "k")[: len(self.shape)]
        index, last = ", ".join(axes), axes[-1]
        return TypeError(
            f"params[{name!r}] has {self.shape} numbers a head and is read by index, "
            f"{name}[{index}] with integers or integer arrays; it is no array for {what}. Write a "
            f"product as sum({name}[{index}] * x[{last}] for {last} in range({self.shape[-1]})), "
            "and declare what all heads share with ParamSpec(..., per_head=False): that is an array"
        )

    def __getitem__(self, index: Any) -> Array:
        indices = index if isinstance(index, tuple) else (index,)
        if self._rows and isinstance(index, slice) and index == slice(None):
            return self._array[:, None, ...]
        for one in indices:
            if one is None or one is Ellipsis or isinstance(one, slice | list):
                raise self._no_array(f"an index of {one!r}")
        if len(indices) != len(self.shape):
            raise IndexError(
                f"params[{self._name!r}], a per-head table {self.shape}, takes {len(self.shape)} "
                f"indices, got {len(indices)}"
            )
        if all(isinstance(i, int) for i in indices):
            return self._array[(slice(None), *indices)][:, None, None]
        xp, heads = self._xp, self._array.shape[0]
        where = next(i for i in indices if not isinstance(i, int))
        flat: Any = xp.reshape(
            xp.arange(heads, dtype=where.dtype, device=device(where)), (heads, 1, 1)
        )
        for size, i in zip(self.shape, indices, strict=True):
            flat = flat * size + i
        values = xp.take(xp.reshape(self._array, (-1,)), xp.reshape(flat, (-1,)), axis=0)
        return xp.reshape(values, flat.shape)


def _refusing(what: str) -> Callable[..., Any]:
    """A method that tells who uses a table as an array what to write instead."""

    def refuse(self: HeadTable | TokenTable, *_: Any, **__: Any) -> Any:
        raise self._no_array(what)

    return refuse


def _refuse_torch(kind: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    given = [*args, *(kwargs or {}).values()]
    given += [each for one in given if isinstance(one, tuple | list) for each in one]
    table = next(each for each in given if isinstance(each, HeadTable | TokenTable))
    raise table._no_array(getattr(function, "__name__", "a function of torch"))


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@",
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "abs": "abs"}
_KINDS: tuple[Any, ...] = (HeadTable, TokenTable)
for _kind in _KINDS:
    for _name, _sign in _OPERATORS.items():
        setattr(_kind, f"__{_name}__", _refusing(_sign))
        setattr(_kind, f"__r{_name}__", _refusing(_sign))
    for _name, _sign in _COMPARISONS.items():
        setattr(_kind, f"__{_name}__", _refusing(_sign))
    # What NumPy and PyTorch ask of an argument that is none of their arrays; JAX says so by itself.
    _kind.__array__ = _refusing("a function of NumPy")
    _kind.__array_ufunc__ = _refusing("a function of NumPy")
    _kind.__torch_function__ = classmethod(_refuse_torch)


def init_params(
    scheme: PositionScheme, seed: int | Sequence[int] = 0
) -> dict[str, np.ndarray[Any, Any]]:
    """First values of a scheme's learned arrays: ``{}`` or float32 NumPy arrays by name.

    The same numbers for every framework. ``seed`` is what ``numpy.random.default_rng`` takes.
    """
    check_scheme(scheme)
    rng = np.random.default_rng(seed)
    draws = {
        name: (spec.init or _normal)(rng, spec.shape) for name, spec in scheme.param_specs().items()
    }
    return {name: np.asarray(value, dtype=np.float32) for name, value in draws.items()}


def as_mapping(params: Mapping[str, Array] | None, what: str = "params") -> Mapping[str, Array]:
    """``params`` themselves, or none; a ``TypeError`` for what has no names."""
    if params is None:
        return {}
    if not hasattr(params, "keys"):
        raise TypeError(f"{what} must map names to arrays, got {type(params).__name__}")
    return params


def check_params(
    scheme: PositionScheme, params: Mapping[str, Array] | None, *, xp: Namespace
) -> dict[str, Array]:
    """Exactly the arrays the scheme declares, in their shapes; NumPy arrays may stand for any."""
    specs, given = scheme.param_specs(), dict(as_mapping(params))
    name = type(scheme).__name__
    for extra in given.keys() - specs.keys():
        raise ValueError(f"{name} has no param {extra!r}{nearest(extra, specs)}")
    for missing in specs.keys() - given.keys():
        raise ValueError(
            f"params lacks {missing!r} of {name}, shape {specs[missing].shape}; "
            "posenc.init_params(scheme) draws first values"
        )
    for key, value in given.items():
        if not hasattr(value, "shape") or not _is_float(value, xp):
            raise TypeError(
                f"params[{key!r}] must be a floating-point array of {xp.__name__} or of NumPy, "
                f"got {type(value).__name__}"
            )
        found, declared = tuple(value.shape), specs[key].shape
        if found != declared:
            hint = "; transpose it" if found == declared[::-1] else ""
            raise ValueError(f"params[{key!r}] has shape {found}, {name} declares {declared}{hint}")
    return given


def working_dtype(arrays: Sequence[Any], *, xp: Namespace) -> Any:
    """float64 if any array is, else float32."""
    return xp.float64 if any(_is_double(a, xp) for a in arrays) else xp.float32


def _is_double(array: Any, xp: Namespace) -> bool:
    # Apart: array_api_strict warns of NumPy's dtypes, and None equals NumPy's float64.
    if isinstance(array, np.ndarray):
        return bool(array.dtype == np.float64)
    return hasattr(array, "dtype") and bool(array.dtype == xp.float64)


def merge_constants(
    scheme: PositionScheme,
    params: Mapping[str, Array] | None,
    *,
    dtype: Any,
    device: Any,
    xp: Namespace,
) -> dict[str, Array]:
    """Learned arrays and constants together, whole, in the working dtype."""
    learned = {
        name: xp.asarray(a, dtype=dtype, device=device, copy=True)
        if isinstance(a, np.ndarray)
        else xp.astype(a, dtype)
        for name, a in check_params(scheme, params, xp=xp).items()
    }
    fixed = {
        name: xp.asarray(values, dtype=dtype, device=device)
        for name, values in scheme.constants().items()
    }
    return learned | fixed


def tile_views(features: Mapping[str, Array], role: Role, *, xp: Namespace) -> Features:
    """Features ``(B, H, L)`` and ``(B, H, L, M)`` as ``bias`` reads them on a tile of all heads."""

    def view(array: Array) -> Any:
        if len(array.shape) == 4:
            return TokenTable(array, xp, role)
        return array[..., None, :] if role == "key" else array[..., :, None]

    return Features({name: view(array) for name, array in features.items()}, role)


def head_views(
    scheme: PositionScheme,
    arrays: Mapping[str, Array],
    *,
    dtype: Any,
    xp: Namespace,
    query: Mapping[str, Array] | None = None,
    key: Mapping[str, Array] | None = None,
    rows: bool = False,
) -> Params:
    """Merged arrays as ``bias``, ``key_bias`` and ``transform`` receive them, all heads at once.

    ``rows``: a transform reads them, and may ask a table for whole rows.
    """
    specs = scheme.param_specs()

    def view(name: str, array: Array) -> Array:
        if name in specs and not specs[name].per_head:
            return array
        if len(array.shape) == 1:
            return xp.reshape(array, (-1, 1, 1))
        return HeadTable(array, xp, name, rows=rows)

    views = {name: view(name, array) for name, array in arrays.items()}
    return Params(views, dtype, query, key)


def float_dtype(params: Mapping[str, Array], xp: Namespace) -> Any:
    """The working float that ``params`` come with; float32 for a plain mapping."""
    return getattr(params, "dtype", xp.float32)


def head_count(scheme: PositionScheme) -> int | None:
    """How many heads the scheme's per-head arrays speak of; None if it has none."""
    counts = {s.shape[0] for s in scheme.param_specs().values() if s.per_head}
    counts |= {len(values) for values in scheme.constants().values()}
    if len(counts) > 1:
        raise ValueError(f"{scheme} declares per-head arrays of different lengths: {counts}")
    return counts.pop() if counts else getattr(scheme, "num_heads", None)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return 0.02 * rng.standard_normal(shape)


def _is_float(array: Array, xp: Namespace) -> bool:
    if isinstance(array, np.ndarray):
        return np.issubdtype(array.dtype, np.floating)
    return not is_numpy_namespace(xp) and is_floating(array, xp)


def is_floating(array: Array, xp: Namespace) -> bool:
    """Whether an array holds floating-point numbers of this library; False for another's."""
    try:
        return bool(xp.isdtype(array.dtype, "real floating"))
    except (AttributeError, TypeError):
        return False
