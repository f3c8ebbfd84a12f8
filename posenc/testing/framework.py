"""Array libraries as laws use them: NumPy arrays go in, NumPy arrays come out."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeAlias

import array_api_compat
import array_api_compat.numpy
import numpy as np

from posenc.attn.reference import attention
from posenc.protocol import Array, Namespace

Host: TypeAlias = "np.ndarray[Any, Any]"
Function: TypeAlias = Callable[[Namespace, dict[str, Array]], Array | None]
_GROUP = "posenc.frameworks"


class Answer(NamedTuple):
    """What a function gave: its values, and how it treated what it was given."""

    values: Host  # a dtype that NumPy lacks is widened to float32
    dtype: str
    moved: bool  # to another device than that of the arguments
    touched: tuple[str, ...]  # arguments that are not what they were


class Framework(ABC):
    """One array library. A backend brings its own through the entry-point group
    ``posenc.frameworks``.

    Attributes
    ----------
    name, xp
        Its name and its namespace.
    implementations
        Names of its implementations of attention.
    dtypes
        Floating-point dtypes it computes in.
    compilers
        Ways to compile a function; ``usual`` is how laws run one, None for eagerly.
    differentiable
        Whether it has gradients.
    """

    name: str
    xp: Namespace
    implementations: tuple[str, ...] = ("reference",)
    dtypes: tuple[str, ...] = ("float64", "float32", "float16")
    compilers: tuple[str, ...] = ()
    usual: str | None = None
    differentiable: ClassVar[bool] = False

    def __repr__(self) -> str:
        return self.name

    @abstractmethod
    def array(self, array: Host, dtype: str) -> Array:
        """A copy in this library, on its device."""

    @abstractmethod
    def host(self, array: Array) -> Host:
        """The values of an array of this library."""

    def dtype(self, array: Array) -> str:
        """The name of an array's dtype."""
        return str(array.dtype).rpartition(".")[2]

    def device(self, array: Array) -> Any:
        """Where an array lies."""
        return array_api_compat.device(array)

    def scope(self, dtypes: Sequence[str]) -> AbstractContextManager[Any]:
        """What must hold while arrays of these dtypes are made and computed with."""
        return nullcontext()

    def compiled(self, function: Function, compiler: str) -> Function:
        """``function`` through one of ``compilers``."""
        raise NotImplementedError(f"{self.name} compiles nothing")

    def attend(self, implementation: str, tensors: Mapping[str, Array], **options: Any) -> Array:
        """Attention of q, k, v, ``(B, H, L, D)`` whatever the layout of this library, and of hidden
        states. With ``return_lse`` a pair, whose second is ``(B, H, Q)``.
        """
        return attention(**tensors, implementation=implementation, **options)

    def pullback(
        self,
        function: Function,
        arrays: dict[str, Array],
        names: Sequence[str],
        d_out: Host,
        compiler: str | None,
    ) -> tuple[Array, dict[str, Array]]:
        """``function(xp, arrays)``, and gradients of ``sum(d_out * result)`` by ``names``."""
        raise NotImplementedError(f"{self.name} has no gradients")

    def evaluate(
        self,
        function: Function,
        arrays: Mapping[str, Host],
        *,
        cast: Mapping[str, str] | None = None,
        compiler: str | None = None,
    ) -> Answer | None:
        """``function(xp, arrays)`` on arrays of this library; None if it answers None.

        ``cast`` names the dtypes of arrays that NumPy cannot hold.
        """
        dtypes = _dtypes(arrays, cast)
        with self.scope(list(dtypes.values())):
            native = {name: self.array(array, dtypes[name]) for name, array in arrays.items()}
            before = {name: self.host(array) for name, array in native.items()}
            run = function if compiler is None else self.compiled(function, compiler)
            result = run(self.xp, native)
            if result is None:
                return None
            touched = tuple(n for n in native if not _same(self.host(native[n]), before[n]))
            moved = any(self.device(result) != self.device(a) for a in native.values())
            return Answer(self.host(result), self.dtype(result), moved, touched)

    def gradients(
        self,
        function: Function,
        arrays: Mapping[str, Host],
        d_out: Host,
        *,
        cast: Mapping[str, str] | None = None,
        compiler: str | None = None,
    ) -> tuple[Answer, dict[str, Host]]:
        """``function(xp, arrays)``, and gradients of ``sum(d_out * result)`` for every float.

        Without a ``compiler``, eagerly, or however this framework likes best.
        """
        dtypes = _dtypes(arrays, cast)
        with self.scope(list(dtypes.values())):
            native = {name: self.array(array, dtypes[name]) for name, array in arrays.items()}
            floats = [name for name in arrays if "float" in dtypes[name]]
            out, found = self.pullback(function, native, floats, d_out, compiler)
            answer = Answer(self.host(out), self.dtype(out), moved=False, touched=())
            return answer, {name: self.host(found[name]) for name in floats}


class NumPy(Framework):
    """NumPy, with arrays that nobody may write to."""

    name = "numpy"
    xp = array_api_compat.numpy

    def array(self, array: Host, dtype: str) -> Host:
        return readonly(np.array(array, dtype=dtype))

    def host(self, array: Host) -> Host:
        return np.asarray(array)


class Strict(Framework):
    """array-api-strict, which has nothing but the standard, on a device of one's choice."""

    def __init__(self, device: str) -> None:
        import array_api_strict

        self.xp = array_api_strict
        self._device, self._home = (array_api_strict.Device(n) for n in (device, "CPU_DEVICE"))
        wide = device != "no_float64"
        self.name = "strict" if wide else "strict-no-float64"
        self.dtypes = ("float64", "float32") if wide else ("float32",)

    def array(self, array: Host, dtype: str) -> Array:
        made = self.xp.asarray(np.array(array), device=self._home)
        return self.xp.astype(made, getattr(self.xp, dtype)).to_device(self._device)

    def host(self, array: Array) -> Host:
        return np.array(array.to_device(self._home))


def frameworks() -> dict[str, Framework]:
    """The array libraries that are installed, by name; those of backends from their entry points.

    A backend whose own framework is missing is left out.
    """
    from importlib.metadata import entry_points

    found: dict[str, Framework] = {"numpy": NumPy()}
    if importlib.util.find_spec("array_api_strict") is not None:
        found |= {made.name: made for made in map(Strict, ("device1", "no_float64"))}
    for entry in sorted(entry_points(group=_GROUP), key=lambda entry: entry.name):
        if importlib.util.find_spec(entry.name) is not None:
            found[entry.name] = entry.load()()
    return found


def named(asked: Sequence[str | Framework] | None) -> list[Framework]:
    """All that are installed, or exactly those asked for, by name or as they are.

    Raises
    ------
    ModuleNotFoundError
        One that is asked for is not installed.
    """
    if isinstance(asked, str):
        raise TypeError(f"frameworks must be a list of names, got {asked!r}")
    installed = frameworks()
    for name in asked or ():
        if not isinstance(name, Framework) and name not in installed:
            raise ModuleNotFoundError(
                f"frameworks names {name!r}, installed are: {', '.join(installed)}", name=name
            )
    return [
        one if isinstance(one, Framework) else installed[one]
        for one in (installed if asked is None else asked)
    ]


def readonly(array: Any) -> Host:
    """A copy that nobody may write to."""
    copied = np.array(array)
    copied.flags.writeable = False
    return copied


def _dtypes(arrays: Mapping[str, Host], cast: Mapping[str, str] | None) -> dict[str, str]:
    return {name: (cast or {}).get(name, str(array.dtype)) for name, array in arrays.items()}


def _same(left: Host, right: Host) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()
