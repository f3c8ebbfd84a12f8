"""Learned arrays of a scheme: first values, checks, and the per-head views that methods read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posenc.contract.checks import check_scheme, nearest
from posenc.contract.operations import accepted_libraries, constant_array, is_numpy
from posenc.contract.protocol import Array, Namespace, ParamSpec, PositionScheme, Role
from posenc.contract.tables import HeadTable, ReadTable, TokenTable

PLACES, SEGMENT = "places", "segment"
OF_ALL_PARTS = (PLACES, SEGMENT)  # features that the library adds, which every part reads


def without_prefix(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays or features of one part, by their names without its prefix, and those of all."""
    own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    return own | {n: a for n, a in arrays.items() if n in OF_ALL_PARTS}


class Features(Mapping[str, Array]):
    """Features of the queries or of the keys, by name: ``params.query`` and ``params.key``."""

    def __init__(self, arrays: Mapping[str, Array], role: str) -> None:
        self._arrays, self._role = arrays, role

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            known = ", ".join(self._arrays) or "none"
            raise KeyError(f"the {self._role} has no feature {name!r}; it has: {known}")
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Params(Mapping[str, Array]):
    """The ``params`` of a scheme's methods: arrays by name, and the working ``dtype``.

    ``query`` and ``key`` are the features of queries and of keys, by name. ``rotary`` holds the
    tables that the caller made for a transform; None if the transform makes its own. ``in_order``:
    it is known that each key has a later position than the key before it in memory.
    """

    rotary: Mapping[str, Array] | None = None
    in_order: bool = False

    def __init__(
        self,
        arrays: Mapping[str, Array],
        dtype: Any,
        query: Mapping[str, Array] | None = None,
        key: Mapping[str, Array] | None = None,
    ) -> None:
        self._arrays = dict(arrays)
        self.dtype = dtype
        # Not default arguments: torch's compiler cannot hold an object that calls share.
        self.query = Features({}, "query") if query is None else query
        self.key = Features({}, "key") if key is None else key

    def of(self, role: Role) -> Mapping[str, Array]:
        """Features of queries or of keys: those that ``transform`` reads for this role."""
        return self.query if role == "query" else self.key

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            known = ", ".join(self._arrays) or "none"
            raise KeyError(f"the scheme has no param or constant {name!r}; it has: {known}")
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class GroupedKeyParams(Params):
    """Params for ``transform`` of grouped-query keys: of per-head ones, only those of keys."""

    def __init__(
        self, params: Params, scheme: PositionScheme, *, heads: int, key_heads: int
    ) -> None:
        super().__init__(params, params.dtype, params.query, params.key)
        self.rotary = params.rotary
        self._heads, self._key_heads = heads, key_heads
        self._of_keys = of_keys(scheme)

    def __getitem__(self, name: str) -> Array:
        array = super().__getitem__(name)
        if name in self._of_keys:
            return array
        if isinstance(array, HeadTable) or (len(array.shape) == 3 and array.shape[0] != 1):
            raise ValueError(
                f"x has {self._key_heads} heads, but {name!r} is per head, for {self._heads}: "
                f"query heads share these keys (GQA); repeat k and v to {self._heads} heads"
            )
        return array


def init_params(
    scheme: PositionScheme, seed: int | Sequence[int] = 0
) -> dict[str, np.ndarray[Any, Any]]:
    """First values of a scheme's learned arrays: ``{}`` or float32 NumPy arrays by name.

    Every framework starts from the same numbers. ``seed`` goes to ``numpy.random.default_rng``.
    """
    check_scheme(scheme)
    try:
        rng = np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        wrong = f"seed must be an integer of at least 0, or several of them, got {seed!r}"
        raise type(error)(wrong) from error
    return {name: initial_value(spec, rng) for name, spec in scheme.param_specs().items()}


def initial_value(spec: ParamSpec, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """The first value of one learned array, float32."""
    return np.asarray((spec.init or _normal)(rng, spec.shape), dtype=np.float32)


def as_mapping(params: Mapping[str, Array] | None, name: str = "params") -> Mapping[str, Array]:
    """``params``, or ``{}`` for None; a ``TypeError`` if it is not a mapping."""
    if params is None:
        return {}
    if not hasattr(params, "keys"):
        raise TypeError(f"{name} must map names to arrays, got {type(params).__name__}")
    return params


def check_params(
    scheme: PositionScheme, params: Mapping[str, Array] | None, *, xp: Namespace
) -> dict[str, Array]:
    """``params``, if they are exactly the arrays that the scheme declares, in their shapes.

    NumPy arrays and numbers are accepted with any framework.
    """
    specs = scheme.param_specs()
    # NumPy makes a number of an array without axes in any operation, as in a step of a gradient.
    given = {
        name: np.asarray(a) if isinstance(a, np.floating) else a
        for name, a in as_mapping(params).items()
    }
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
                f"params[{key!r}] must be a floating-point array of {accepted_libraries(xp)}, "
                f"got {type(value).__name__}{_of_dtype(value)}"
            )
        shape, declared = tuple(value.shape), specs[key].shape
        if shape != declared:
            hint = "; transpose it" if shape == declared[::-1] else ""
            raise ValueError(f"params[{key!r}] has shape {shape}, {name} declares {declared}{hint}")
    return given


def _of_dtype(value: Any) -> str:
    return f" of {value.dtype}" if hasattr(value, "dtype") else ""


def working_dtype(arrays: Sequence[Any], *, xp: Namespace) -> Any:
    """float64 if any array is float64, else float32."""
    double = xp.float64
    for array in arrays:
        # NumPy arrays first: array_api_strict warns about NumPy dtypes, and None == np.float64.
        if isinstance(array, np.ndarray):
            if array.dtype == np.float64:
                return double
        elif hasattr(array, "dtype") and array.dtype == double:
            return double
    return xp.float32


def merge_constants(
    scheme: PositionScheme,
    params: Mapping[str, Array] | None,
    *,
    dtype: Any,
    device: Any,
    xp: Namespace,
) -> dict[str, Array]:
    """Learned arrays and constants in one mapping, in the working dtype, with their head axis."""
    learned = {
        name: xp.asarray(a, dtype=dtype, device=device, copy=True)
        if isinstance(a, np.ndarray)
        else xp.astype(a, dtype, copy=False)
        for name, a in check_params(scheme, params, xp=xp).items()
    }
    fixed = {
        name: constant_array(values, dtype=dtype, device=device, xp=xp)
        for name, values in scheme.constants().items()
    }
    return learned | fixed


def tile_views(
    features: Mapping[str, Array],
    role: Role,
    *,
    xp: Namespace,
    read: ReadTable | None = None,
    by_distance: bool = False,
    rows: bool = False,
) -> Features:
    """Features ``(B, H, L)`` and ``(B, H, L, M)`` as ``bias`` reads them, for all heads at once.

    ``read`` and ``by_distance`` are those of ``TokenTable``. ``rows``: for ``adjust_scores``, which
    may read ``table[:]``.
    """

    def view(array: Array) -> Any:
        if len(array.shape) == 4:
            return TokenTable(array, xp, role, read=read, by_distance=by_distance, rows=rows)
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
    """Params as ``bias``, ``key_bias`` and ``transform`` receive them, for all heads at once.

    ``arrays`` come from ``merge_constants``. ``rows``: for ``transform`` and
    ``adjust_scores``, which may read ``table[:]``.
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
    """The working dtype of ``params``; float32 for a plain mapping."""
    return getattr(params, "dtype", xp.float32)


def head_count(scheme: PositionScheme) -> int | None:
    """Number of heads of the scheme's per-head arrays, except those of keys; None if it has none.

    The field ``num_heads`` counts if there is no array, of keys either.
    """
    specs = scheme.param_specs()
    counts = {s.shape[0] for s in specs.values() if s.per_head and not s.of_keys}
    counts |= {len(values) for values in scheme.constants().values()}
    if len(counts) > 1:
        raise ValueError(f"{scheme} declares per-head arrays of different lengths: {counts}")
    if counts:
        return counts.pop()
    return None if of_keys(scheme) else getattr(scheme, "num_heads", None)


def of_keys(scheme: PositionScheme) -> dict[str, ParamSpec]:
    """The learned arrays whose heads are those of keys."""
    return {name: spec for name, spec in scheme.param_specs().items() if spec.of_keys}


def key_head_count(scheme: PositionScheme) -> int | None:
    """Number of heads of the scheme's arrays of keys; None if it has none."""
    counts = {spec.shape[0] for spec in of_keys(scheme).values()}
    if len(counts) > 1:
        raise ValueError(f"{scheme} declares arrays of keys of different lengths: {counts}")
    return counts.pop() if counts else None


def check_key_heads(scheme: PositionScheme, key_heads: int) -> None:
    """Check that the scheme's arrays of keys and the keys have the same number of heads."""
    declared = key_head_count(scheme)
    if declared is not None and declared != key_heads:
        names = ", ".join(map(repr, of_keys(scheme)))
        raise ValueError(
            f"keys have {key_heads} heads, and {names} of {scheme} {declared}: its heads are those "
            "of keys and values"
        )


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return 0.02 * rng.standard_normal(shape)


def _is_float(array: Array, xp: Namespace) -> bool:
    if isinstance(array, np.ndarray):
        return np.issubdtype(array.dtype, np.floating)
    return not is_numpy(xp) and is_floating(array, xp)


def is_floating(array: Array, xp: Namespace) -> bool:
    """Whether an array is floating-point and belongs to library ``xp``."""
    try:
        return bool(xp.isdtype(array.dtype, "real floating"))
    except (AttributeError, TypeError):
        return False
