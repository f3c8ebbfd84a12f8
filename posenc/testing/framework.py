"""Array libraries as laws use them: NumPy arrays go in, NumPy arrays come out."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, NamedTuple, TypeAlias

import array_api_compat
import array_api_compat.numpy
import numpy as np

from posenc.attn.reference import attention
from posenc.contract.protocol import Array, Namespace

Host: TypeAlias = "np.ndarray[Any, Any]"
Function: TypeAlias = Callable[[Namespace, dict[str, Array]], Array | None]
_GROUP = "posenc.frameworks"


class Answer(NamedTuple):
    """The result of a function, and how the function treated its arguments."""

    values: Host  # a dtype that NumPy lacks is widened to float32
    dtype: str
    device_changed: bool  # the result lies on another device than the arguments
    mutated: tuple[str, ...]  # names of arguments that the function wrote to


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
        Ways to compile a function.
    default_compiler
        The one that laws use unless they name another; None for eager execution.
    differentiable
        Whether it has gradients.
    """

    name: str
    xp: Namespace
    implementations: tuple[str, ...] = ("reference",)
    dtypes: tuple[str, ...] = ("float64", "float32", "float16")
    compilers: tuple[str, ...] = ()
    default_compiler: str | None = None
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
        """The device of an array."""
        return array_api_compat.device(array)

    def precision_scope(self, dtypes: Sequence[str]) -> AbstractContextManager[Any]:
        """Context in which arrays of these dtypes are made and computed with."""
        return nullcontext()

    def compile(self, function: Function, compiler: str) -> Function:
        """``function`` through one of ``compilers``."""
        raise NotImplementedError(f"{self.name} has no compiler")

    def attend(self, implementation: str, tensors: Mapping[str, Array], **options: Any) -> Array:
        """Attention of q, k, v, and hidden states for features.

        Vectors are ``(B, H, L, D)`` here, whatever the layout of the backend. With ``return_lse``
        the result is a pair, whose second array is ``(B, H, Q)``.
        """
        return attention(**tensors, implementation=implementation, **options)

    def attend_in_pass(
        self, implementation: str, tensors: Mapping[str, Array], layers: int, **options: Any
    ) -> Array:
        """``attend`` of the last of several equal layers, in one forward pass over all of them."""
        raise NotImplementedError(f"{self.name} has no layers")

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
        """``function(xp, arrays)`` on arrays of this library; None if it returns None.

        ``cast`` names dtypes by array; it is for those that NumPy does not have.
        """
        dtypes = _dtypes(arrays, cast)
        with self.precision_scope(list(dtypes.values())):
            native = {name: self.array(array, dtypes[name]) for name, array in arrays.items()}
            before = {name: self.host(array) for name, array in native.items()}
            run = function if compiler is None else self.compile(function, compiler)
            result = run(self.xp, native)
            if result is None:
                return None
            mutated = tuple(n for n in native if not _same(self.host(native[n]), before[n]))
            device = self.device(result)
            device_changed = any(self.device(a) != device for a in native.values())
            return Answer(self.host(result), self.dtype(result), device_changed, mutated)

    def gradients(
        self,
        function: Function,
        arrays: Mapping[str, Host],
        d_out: Host,
        *,
        cast: Mapping[str, str] | None = None,
        compiler: str | None = None,
    ) -> tuple[Answer, dict[str, Host]]:
        """``function(xp, arrays)``, and gradients of ``sum(d_out * result)`` for every float array.

        Without a ``compiler``, the framework chooses how to run it.
        """
        dtypes = _dtypes(arrays, cast)
        with self.precision_scope(list(dtypes.values())):
            native = {name: self.array(array, dtypes[name]) for name, array in arrays.items()}
            floats = [name for name in arrays if "float" in dtypes[name]]
            out, gradients = self.pullback(function, native, floats, d_out, compiler)
            answer = Answer(self.host(out), self.dtype(out), device_changed=False, mutated=())
            return answer, {name: self.host(gradients[name]) for name in floats}


class NumPy(Framework):
    """NumPy, with read-only arrays."""

    name = "numpy"
    xp = array_api_compat.numpy

    def array(self, array: Host, dtype: str) -> Host:
        return readonly(np.array(array, dtype=dtype))

    def host(self, array: Host) -> Host:
        return np.asarray(array)


class Strict(Framework):
    """array-api-strict, which implements only the standard, on one of its devices."""

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
    """The installed array libraries, by name.

    Backends register theirs by entry points. Backends whose framework is not installed are left
    out.
    """
    return {name: load() for name, load in _loaders().items()}


def _loaders() -> dict[str, Callable[[], Framework]]:
    """What imports and makes each installed framework, so that only those asked for are."""
    installed: dict[str, Callable[[], Framework]] = {"numpy": NumPy}
    if importlib.util.find_spec("array_api_strict") is not None:
        installed |= {"strict": partial(Strict, "device1")}
        installed |= {"strict-no-float64": partial(Strict, "no_float64")}
    for entry in sorted(entry_points(group=_GROUP), key=lambda entry: entry.name):
        if importlib.util.find_spec(entry.name) is not None:
            installed[entry.name] = partial(_load, entry)
    return installed


def _load(entry: EntryPoint) -> Framework:
    framework: Framework = entry.load()()
    return framework


def select_frameworks(asked: Sequence[str | Framework] | None) -> list[Framework]:
    """The frameworks asked for, by name or as objects; None asks for all installed ones.

    Raises
    ------
    ModuleNotFoundError
        A framework asked for is not installed.
    """
    if isinstance(asked, str):
        raise TypeError(f"frameworks must be a list of names, got {asked!r}")
    installed = _loaders()
    for name in asked or ():
        if not isinstance(name, Framework) and name not in installed:
            raise ModuleNotFoundError(
                f"frameworks names {name!r}, installed are: {', '.join(installed)}", name=name
            )
    return [
        one if isinstance(one, Framework) else installed[one]()
        for one in (installed if asked is None else asked)
    ]


def readonly(array: Any) -> Host:
    """A read-only copy."""
    copy = np.array(array)
    copy.flags.writeable = False
    return copy


def _dtypes(arrays: Mapping[str, Host], cast: Mapping[str, str] | None) -> dict[str, str]:
    return {name: (cast or {}).get(name, str(array.dtype)) for name, array in arrays.items()}


def _same(left: Host, right: Host) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()
