"""Tables of heads and of tokens, which schemes read by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from posenc.contract.operations import device, take_along_axis
from posenc.contract.protocol import Array, Namespace, Role


class ReadTable(Protocol):
    """How a backend reads a table per token.

    ``values[..., i, j] = table[..., i, index[..., i, j]]``. ``table`` is ``(B, H, L, M)``.
    ``index`` is ``(B or 1, H or 1, L, N)``, or has 1 instead of ``L`` or ``N``. The result is
    ``(B, H, L, N)``. ``by_distance``: the index is the same along every diagonal, as a function of
    the distance is where positions are consecutive.
    """

    def __call__(self, table: Array, index: Array, *, by_distance: bool) -> Array: ...


class TokenTable:
    """A feature ``(B, H, L, M)``, a table per token, that ``bias`` reads as ``table[index]``.

    ``index`` is an integer, or integers that broadcast to ``(B, H, Q, K)``; so does the result.
    With ``rows=True``, for ``adjust_scores``, ``table[:]`` is ``(B, H, L, M)``.

    Parameters
    ----------
    read
        How to read it; by default with ``take_along_axis``.
    by_distance
        Whether an index without batch and heads is a function of the distance, and positions are
        consecutive.
    """

    def __init__(
        self,
        array: Array,
        xp: Namespace,
        role: Role,
        *,
        read: ReadTable | None = None,
        by_distance: bool = False,
        rows: bool = False,
    ) -> None:
        self._array, self._xp, self._of_keys, self._rows = array, xp, role == "key", rows
        self._read, self._by_distance = read or self._take, by_distance
        self.shape, self.dtype = (array.shape[-1],), array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def _not_an_array(self, what: str) -> TypeError:
        return TypeError(
            f"a feature with {self.shape[0]} numbers per token is read by index, "
            f"params.query[name][i] with an integer or integers; it is not an array: {what} does "
            "not work"
        )

    def __getitem__(self, index: Any) -> Array:
        xp, table = self._xp, self._array
        if self._rows and isinstance(index, slice) and index == slice(None):
            return table
        if isinstance(index, slice | tuple | list) or index is None or index is Ellipsis:
            raise self._not_an_array(f"an index of {index!r}")
        if isinstance(index, int):
            column = table[..., index]
            return column[..., None, :] if self._of_keys else column[..., :, None]
        if len(index.shape) != 4:
            raise IndexError(
                "the index of a feature must be an integer, or be computed from q "
                "(B or 1, 1, Q, 1) and k (B or 1, 1, 1, K), "
                f"got shape {tuple(index.shape)}"
            )
        by_distance = self._by_distance and tuple(index.shape[:2]) == (1, 1)
        if not self._of_keys:
            return self._read(table, index, by_distance=by_distance)
        values = self._read(table, xp.matrix_transpose(index), by_distance=by_distance)
        return xp.matrix_transpose(values)

    def _take(self, table: Array, index: Array, *, by_distance: bool) -> Array:
        xp, (table, index) = self._xp, broadcast_index(table, index, self._xp)
        index = index if index.dtype == xp.int64 else xp.astype(index, xp.arange(1).dtype)
        return take_along_axis(table, index, axis=-1, xp=xp)


def broadcast_index(table: Array, index: Array, xp: Namespace) -> tuple[Array, Array]:
    """A table ``(B, H, L, M)`` and its index ``(B, H, L, N)`` with the same leading axes."""
    heads = [max(a, b) for a, b in zip(table.shape[:2], index.shape[:2], strict=True)]
    shape = (*heads, table.shape[2])
    return (
        xp.broadcast_to(table, (*shape, table.shape[3])),
        xp.broadcast_to(index, (*shape, index.shape[3])),
    )


class HeadTable:
    """A per-head array ``(H, n, ...)`` that returns ``table[index, ...]`` for every head at once.

    A scheme writes ``table[index]`` for one head, and this class serves all heads. Each index is an
    integer or an array that broadcasts against ``(H, 1, 1)``. The result has the head axis of
    ``(H, 1, 1)``. ``len`` is ``n``; iteration over a table of one axis gives ``table[0]``,
    ``table[1]``, and so on.

    A table is not an array. Arithmetic, slices and array functions raise a ``TypeError`` that says
    what to write instead. With ``rows=True``, for ``transform`` and ``adjust_scores``, ``table[:]``
    is ``(H, 1, n, ...)``, which broadcasts against ``x (B, H, L, D)``.
    """

    def __init__(
        self, array: Array, xp: Namespace, name: str = "table", *, rows: bool = False
    ) -> None:
        self._array, self._xp, self._name, self._rows = array, xp, name, rows
        self.shape, self.dtype = tuple(array.shape[1:]), array.dtype

    @property
    def of_all_heads(self) -> Array:
        """The array ``(H, n, ...)``, for an operation of the library."""
        return self._array

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Array]:
        if len(self.shape) > 1:
            raise self._not_an_array("iteration")
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # libraries and copy probe for these
            raise AttributeError(name)
        raise AttributeError(str(self._not_an_array(f".{name}")))

    def _not_an_array(self, what: str) -> TypeError:
        name, axes = self._name, ("i", "j", "k")[: len(self.shape)]
        index, last = ", ".join(axes), axes[-1]
        return TypeError(
            f"params[{name!r}] has {self.shape} numbers per head and is read by index, "
            f"{name}[{index}] with integers or integer arrays; it is not an array: {what} does "
            "not work. Write a product as "
            f"sum({name}[{index}] * x[{last}] for {last} in range({self.shape[-1]})), "
            "and declare an array that all heads share with ParamSpec(..., per_head=False)"
        )

    def __getitem__(self, index: Any) -> Array:
        indices = index if isinstance(index, tuple) else (index,)
        if self._rows and isinstance(index, slice) and index == slice(None):
            return self._array[:, None, ...]
        for i in indices:
            if i is None or i is Ellipsis or isinstance(i, slice | list):
                raise self._not_an_array(f"an index of {i!r}")
        if len(indices) != len(self.shape):
            raise IndexError(
                f"params[{self._name!r}], a per-head table {self.shape}, takes {len(self.shape)} "
                f"indices, got {len(indices)}"
            )
        if all(isinstance(i, int) for i in indices):
            return self._array[(slice(None), *indices)][:, None, None]
        xp, heads = self._xp, self._array.shape[0]
        like = next(i for i in indices if not isinstance(i, int))
        axes = len(like.shape)
        shared = len(indices) == 1 and axes <= 4 and (axes < 3 or like.shape[-3] == 1)
        # Of a DTensor that is split by heads, PyTorch 2.13 gets the gradient of this wrong.
        if shared and not hasattr(self._array, "device_mesh"):
            return self._of_all_heads(like)
        flat: Any = xp.reshape(
            xp.arange(heads, dtype=like.dtype, device=device(like)), (heads, 1, 1)
        )
        for size, i in zip(self.shape, indices, strict=True):
            flat = flat * size + i
        values = xp.take(xp.reshape(self._array, (-1,)), xp.reshape(flat, (-1,)), axis=0)
        return xp.reshape(values, flat.shape)

    def _of_all_heads(self, index: Array) -> Array:
        """The numbers at an index that heads share, which is read once for all of them."""
        xp, heads = self._xp, self._array.shape[0]
        values = xp.take(self._array, xp.reshape(index, (-1,)), axis=1)
        pairs = (1, 1, *index.shape)[-2:]
        batch = index.shape[:-3]
        if not batch or batch[0] == 1:
            return xp.reshape(values, (*batch, heads, *pairs))
        return xp.moveaxis(xp.reshape(values, (heads, *batch, *pairs)), 0, 1)


def _raise_not_an_array(what: str) -> Callable[..., Any]:
    """A method of a table for ``what`` needs an array: it raises and says what to write instead."""

    def refuse(self: HeadTable | TokenTable, *_: Any, **__: Any) -> Any:
        raise self._not_an_array(what)

    return refuse


def _refuse_torch(kind: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    given = [*args, *(kwargs or {}).values()]
    given += [item for value in given if isinstance(value, tuple | list) for item in value]
    table = next(value for value in given if isinstance(value, HeadTable | TokenTable))
    raise table._not_an_array(getattr(function, "__name__", "a function of torch"))


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@",
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "abs": "abs"}
_TABLES: tuple[Any, ...] = (HeadTable, TokenTable)
for _table in _TABLES:
    for _name, _sign in _OPERATORS.items():
        setattr(_table, f"__{_name}__", _raise_not_an_array(_sign))
        setattr(_table, f"__r{_name}__", _raise_not_an_array(_sign))
    for _name, _sign in _COMPARISONS.items():
        setattr(_table, f"__{_name}__", _raise_not_an_array(_sign))
    # NumPy and PyTorch look for these on a foreign argument; JAX raises an error of its own.
    _table.__array__ = _raise_not_an_array("a function of NumPy")
    _table.__array_ufunc__ = _raise_not_an_array("a function of NumPy")
    _table.__torch_function__ = classmethod(_refuse_torch)
