"""What a framework does better than code for the Array API: one record for each.

Its backend provides the record when it is imported, and is imported when its arrays are first seen.
So what is computed does not depend on what else a program imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from array_api_compat import array_namespace, is_array_api_obj

from posenc.contract.specs import Array, Arrays, Namespace


@dataclass(frozen=True)
class Operations:
    """Functions of a backend, in place of those written for the Array API; None for none.

    Attributes
    ----------
    constant
        ``constant(values, dtype=, device=)`` makes an array of numbers, which calls may share. A
        backend keeps arrays if copying numbers to a device takes long. The running program must be
        able to use it, whether that is traced, compiled or eager.
    hold
        ``hold(array)``: the same array, which a compiler writes to memory and does not compute anew
        in each use. It has derivatives.
    rotate
        ``rotate(x, sin, cos, interleaved=)``: ``x (..., 2n)`` with its pairs rotated, which are
        ``(2k, 2k + 1)`` if interleaved, else ``(k, k + n)``. None for arrays that it does not
        serve.
    unfold
        ``unfold(table, rows)`` reads a table by distance at consecutive positions. From
        ``(..., N)`` it makes ``(..., rows, N - rows + 1)``. Each row is the row before, shifted by
        one, and the last one begins with the first number of the table. It may be traced, and has
        derivatives.
    network
        ``network(x, w1, b1, w2)``: a hidden layer of ``x (B or 1, 1, Q, K)``, as
        ``posenc.contract.network`` has it, with ``w2 (H, n)``. None for arrays that it does not
        serve.
    scan_back
        ``scan_back(step, start, blocks, fixed)``, as ``posenc.contract.scan`` has it, in a loop of
        one compiled program.
    take_along_axis
        ``take_along_axis(x, index, axis)``: ``x`` at indices, those below 0 from the end, as many
        axes as it has and no broadcasting.
    cumulative_sum
        ``cumulative_sum(x, axis)``: as that of the Array API.
    exp
        ``exp(x)`` of scores less the highest one of their row. It may be 0 where the weight of the
        score would be no normal number.
    softplus, sigmoid, leaky_relu
        ``softplus(z)``, ``sigmoid(z)``, ``leaky_relu(z, slope)``: as ``posenc.schemes.activations``
        has them.
    own_dtypes
        ``own_dtypes()``: a context in which no operation rounds what it is given, as PyTorch's
        autocast does.
    detach
        ``detach(array)``: the same numbers, which have no gradient.
    has_values
        ``has_values(array)``: False for an array that pretends to have values in a program that is
        transformed, where NumPy would read memory that is not its own.
    """

    constant: Callable[..., Array] | None = None
    hold: Callable[[Array], Array] | None = None
    rotate: Callable[..., Array | None] | None = None
    unfold: Callable[[Array, int], Array] | None = None
    network: Callable[..., Array | None] | None = None
    scan_back: Callable[..., Array] | None = None
    take_along_axis: Callable[[Array, Array, int], Array] | None = None
    cumulative_sum: Callable[[Array, int], Array] | None = None
    exp: Callable[[Array], Array] | None = None
    softplus: Callable[[Array], Array] | None = None
    sigmoid: Callable[[Array], Array] | None = None
    leaky_relu: Callable[[Array, float], Array] | None = None
    own_dtypes: Callable[[], AbstractContextManager[Any]] | None = None
    detach: Callable[[Array], Array] | None = None
    has_values: Callable[[Array], bool] | None = None


_BACKENDS = {"array_api_compat.torch": "posenc_torch", "jax.numpy": "posenc_jax"}
_PROVIDED: dict[str, Operations] = {}  # by the name of a namespace
_NAMESPACES: list[Namespace] = []  # those of backends that are imported


def provide(operations: Operations, *, xp: Namespace) -> None:
    """From now on these functions serve the arrays of a namespace."""
    _PROVIDED[xp.__name__] = operations
    _NAMESPACES.append(xp)


def operations_of(xp: Namespace) -> Operations:
    """The functions that serve the arrays of a namespace."""
    name = xp.__name__
    if name not in _PROVIDED:
        if is_compiling(xp):  # PyTorch's compiler traces no import
            return Operations()
        _PROVIDED[name] = Operations()  # also while the backend is imported
        if name in _BACKENDS:
            import_module(_BACKENDS[name])
    return _PROVIDED[name]


def own_dtypes(xp: Namespace) -> AbstractContextManager[Any]:
    """A context in which no operation rounds what it is given; for what users call."""
    context = operations_of(xp).own_dtypes
    return nullcontext() if context is None else context()


def detached(array: Array, xp: Namespace) -> Array:
    """The same numbers, which have no gradient; of a library that has none, the array."""
    of_framework = operations_of(xp).detach
    return array if of_framework is None else of_framework(array)


def exp_of_scores(ahead: Array, xp: Namespace) -> Array:
    """``exp`` of scores less the highest one of their row, to divide by their sum."""
    return (operations_of(xp).exp or xp.exp)(ahead)


def is_compiling(xp: Namespace) -> bool:
    """Whether PyTorch compiles or exports a program."""
    compiler = getattr(xp, "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


def is_exporting(xp: Namespace) -> bool:
    """Whether ``torch.export`` is tracing, which allows no side effects; known from PyTorch 2.7."""
    compiler = getattr(xp, "compiler", None)
    return bool(getattr(compiler, "is_exporting", bool)())


# Libraries whose arrays are told apart, by the first part of the name of their type's module.
_LIBRARIES = {
    "numpy": "NumPy", "torch": "PyTorch", "jax": "JAX", "jaxlib": "JAX", "cupy": "CuPy",
    "tensorflow": "TensorFlow", "mlx": "MLX", "array_api_strict": "array_api_strict",
}  # fmt: skip


def accepted_libraries(xp: Namespace) -> str:
    """Whose arrays a call of ``xp`` takes, as their users write it: its own and NumPy's."""
    own = library_of(xp)
    return own if own == "NumPy" else f"{own} or NumPy"


def library_of(xp: Namespace) -> str:
    """The library of a namespace, as its users write it."""
    name = xp.__name__.removeprefix("array_api_compat.")
    return _library(name) or name


def is_numpy(xp: Namespace) -> bool:
    """Whether a namespace is that of NumPy."""
    return library_of(xp) == "NumPy"


def device(array: Array) -> Any:
    """Where to make arrays that meet this one; None for JAX's that are traced, spread or may move.

    What JAX makes with ``device=`` stays there, and meets no array on other devices.
    ``array_api_compat.device`` asks functions with a cache, of which PyTorch's compiler warns.
    """
    where = getattr(array, "device", None)  # an array that is traced has none
    if where is None or not hasattr(array, "committed"):
        return where
    return where if array.committed and not hasattr(where, "device_set") else None


def shared_namespace(**arrays: Array) -> Namespace:
    """The Array API namespace that the arrays share."""
    for name, array in arrays.items():
        if not hasattr(array, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
    of = {n: _library(type(a).__module__) or type(a).__name__ for n, a in arrays.items()}
    for xp in _NAMESPACES:  # array_api_compat asks functions with a cache, as in ``device``
        if is_compiling(xp) and set(of.values()) == {library_of(xp)}:
            return xp
    try:
        return array_namespace(*arrays.values())
    except TypeError:
        for name, array in arrays.items():
            if not is_array_api_obj(array):  # as JAX's sparse arrays
                own, kind = type(array).__module__, type(array).__name__
                raise TypeError(f"{name} must be an array, got {kind} of {own}") from None
        found = ", ".join(f"{name} of {library}" for name, library in of.items())
        raise TypeError(f"arrays must be of one library, got {found}") from None


def _library(module: str) -> str | None:
    """The library of a module; None if it is none that is known here."""
    return _LIBRARIES.get(module.partition(".")[0])


def check_library(name: str, array: Any, xp: Namespace) -> None:
    """Check that an array is of the library of ``xp`` or of NumPy.

    Arrays of another one often have dtypes that print alike, and fail later or not at all.
    """
    if is_compiling(xp) or not hasattr(array, "dtype"):
        return
    own, accepted = _library(type(array).__module__), accepted_libraries(xp)
    # A type of one's own, such as a subclass of a tensor, is of no library that is known here.
    if own is not None and own not in accepted:
        raise TypeError(f"{name} must be an array of {accepted}, got one of {own}, {array.dtype}")


def constant_array(values: tuple[float, ...], *, dtype: Any, device: Any, xp: Namespace) -> Array:
    """``values`` as an array ``(n,)``. Never write to it: calls may share it."""
    make = operations_of(xp).constant or xp.asarray
    return make(values, dtype=dtype, device=device)


def hold(arrays: Mapping[str, Array], xp: Namespace) -> Arrays:
    """The same arrays, which a compiler writes to memory and does not compute anew in each use.

    A compiler that fuses a table ``(L, n)`` into a loop over ``(B, H, L, D)`` would take each sine
    once per head.
    """
    of_framework = operations_of(xp).hold
    if of_framework is None:
        return dict(arrays)
    return {name: of_framework(array) for name, array in arrays.items()}


def rotated(x: Array, sin: Array, cos: Array, *, interleaved: bool, xp: Namespace) -> Array | None:
    """``x (..., 2n)`` with its pairs rotated by a backend; None if it has nothing better."""
    of_framework = operations_of(xp).rotate
    return None if of_framework is None else of_framework(x, sin, cos, interleaved=interleaved)


def cumulative_sum(x: Array, *, axis: int, xp: Namespace) -> Array:
    """Sums along an axis, without the look-up by which PyTorch's namespace finds itself."""
    of_framework = operations_of(xp).cumulative_sum
    return xp.cumulative_sum(x, axis=axis) if of_framework is None else of_framework(x, axis)


def take_along_axis(x: Array, index: Array, *, axis: int, xp: Namespace) -> Array:
    """``x`` at an ``index`` of its own shape but along ``axis``; below 0 from the end.

    That of PyTorch's namespace fixes the length in a program that ``torch.export`` makes.
    """
    of_framework = operations_of(xp).take_along_axis
    if of_framework is None:
        return xp.take_along_axis(x, index, axis=axis)
    return of_framework(x, index, axis)
