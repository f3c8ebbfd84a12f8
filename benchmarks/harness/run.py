"""How every benchmark here runs a framework: a function of arrays is made ready, then called.

A function maps arrays by name to one array, or to several. Names of learned arrays begin with
``params.``. ``numpy_run``, ``torch_run`` and ``jax_run`` have a runner each. The module of a
framework is imported only when its runner is asked for.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np

import posenc
from harness.clock import Sample

Arrays = Mapping[str, Any]
Function = Callable[[Arrays], Any]
Shape = tuple[int, ...]
Gradients = Callable[[Sequence[Shape]], Sequence[Any]]  # of results, by their shapes
FORWARD, STEP = KINDS = "forward", "step"
PARAM = "params."
_SEED = 2  # of gradients of results


class Ready(ABC):
    """A function with its arrays, to be called again and again.

    Attributes
    ----------
    kind
        ``"forward"``; or ``"step"``, a forward pass and the gradients of learned arrays.
    seconds
        What making it ready took: ``"trace"`` and ``"compile"``, where the framework does that.
    """

    kind: str
    seconds: Mapping[str, float]

    @abstractmethod
    def __call__(self) -> Any:
        """Call it and wait: the results, of a step with the gradients."""

    @abstractmethod
    def answers(self) -> tuple[list[Any], dict[str, Any]]:
        """Results of a call, and gradients by name."""

    @abstractmethod
    def peak_memory(self) -> int | None:
        """Most bytes that a call holds beside its arguments; calls it, or has compiled it."""

    def compile(self) -> None:  # noqa: B027
        """Compile it, if that was not done; other threads may do the same for others."""

    def counts(self) -> dict[str, int]:
        """What its program counts, which does not vary; empty without a program."""
        return {}

    def first(self) -> tuple[float, dict[str, Any]]:
        """Milliseconds of a first sample, and what a record says of the call."""
        raise NotImplementedError

    def sample(self) -> Sample:
        """Milliseconds of a call, by stage, and of the host that queues it."""
        raise NotImplementedError


class Runner(ABC):
    """One array library on one device.

    Attributes
    ----------
    backend
        The package of posenc for it.
    kinds
        Passes that it has.
    axes
        Its order of the axes of tokens ``(B, H, L, D)``; None: this one.
    workers
        How many programs it compiles at the same time.
    compiles
        Whether each call is compiled for its length, which tells its memory before it runs.
    warm_lengths
        Lengths that compile what is compiled for any length.
    """

    name: ClassVar[str]
    backend: Any
    kinds: tuple[str, ...] = KINDS
    axes: tuple[int, ...] | None = None
    workers = 1
    compiles = False
    warm_lengths: tuple[int, ...] = ()

    def __init__(self, device: str | None = None) -> None:
        self.device = device or "cpu"

    @property
    def implementations(self) -> Sequence[str]:
        """Names of posenc's implementations."""
        return self.backend.IMPLEMENTATIONS

    @abstractmethod
    def xp(self) -> Any:
        """Its namespace for posenc."""

    def attention(self, *arguments: Any, **options: Any) -> Any:
        """Attention of posenc."""
        return self.backend.attention(*arguments, **options)

    @abstractmethod
    def without_positions(self, q: Any, k: Any, v: Any, causal: bool = True) -> Any:
        """The framework's own attention."""

    def begin(self, threads: int) -> Runner:
        """Use so many threads in this process; returns itself."""
        return self

    def layout(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``(B, H, L, D)`` of NumPy in this framework's order of axes."""
        return tokens if self.axes is None else np.ascontiguousarray(tokens.transpose(self.axes))

    @abstractmethod
    def array(self, value: np.ndarray[Any, Any]) -> Any:
        """An array of the framework."""

    def converted(self, array: Any) -> Any:
        """An array of the framework, if it is not one yet."""
        return self.array(array) if isinstance(array, np.ndarray) else array

    @abstractmethod
    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """A NumPy array."""

    def leaf(self, array: Any) -> Any:
        """The array as one that gradients are asked of."""
        return array

    def normal(self, seed: int, shape: Shape, dtype: str) -> Any:
        """Normal numbers, drawn on the device."""
        raise NotImplementedError

    def tokens(self, seed: int, shape: Shape, dtype: str = "float32") -> Any:
        """Normal tokens ``(B, H, L, D)`` in this framework's order of axes."""
        own = shape if self.axes is None else tuple(shape[axis] for axis in self.axes)
        return self.normal(seed, own, dtype)

    def ready(
        self,
        function: Function,
        arrays: Arrays,
        kind: str,
        *,
        learned: Sequence[str] | None = None,
        d_out: Gradients | None = None,
    ) -> Ready:
        """A function with its arrays, of the framework or of NumPy.

        ``learned`` names those with gradients; None: all of floating numbers. ``d_out`` makes
        gradients of the results from their shapes; None: normal numbers.
        """
        if kind not in self.kinds:
            raise NotImplementedError(f"{self.name} has no gradients")
        own = {name: self.converted(a) for name, a in arrays.items()}
        if kind != STEP:
            return self.forward(function, own)
        if learned is None:
            isdtype = self.xp().isdtype
            learned = [name for name, a in own.items() if isdtype(a.dtype, "real floating")]
        if not learned:
            raise NotImplementedError("the result does not depend on floating arrays")
        return self.step(function, own, learned, d_out or like)

    @abstractmethod
    def forward(self, function: Function, arrays: Arrays) -> Ready:
        """A forward pass on arrays of the framework."""

    def step(
        self, function: Function, arrays: Arrays, learned: Sequence[str], d_out: Gradients
    ) -> Ready:
        """A step on arrays of the framework."""
        raise NotImplementedError

    def attend(self, scheme: Any, **options: Any) -> Function:
        """Posenc's causal attention of ``q``, ``k``, ``v``, params and hidden states ``x``."""

        def call(arrays: Arrays) -> Any:
            hidden = {"tokens": posenc.Tokens(x=arrays["x"])} if "x" in arrays else {}
            return self.attention(
                *tokens_of(arrays), scheme, params_of(arrays), causal=True, **hidden, **options
            )

        return call

    def jitted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one program, where that is how the framework runs fast."""
        return function

    def wide(self) -> AbstractContextManager[Any]:
        """Inside, numbers may have 64 bits."""
        return nullcontext()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as ``ready`` takes it, to be compiled by the framework."""
        return function

    def reset(self) -> None:  # noqa: B027
        """Forget what was compiled, which has no more use."""

    def check(self) -> None:  # noqa: B027
        """Raise if the device computes nothing any more, as after an illegal address."""

    def free(self) -> float:
        """Bytes of free memory."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def release(self) -> None:  # noqa: B027
        """Give memory back that nothing uses."""

    def out_of_memory(self, error: Exception) -> bool:
        """Whether an error says that the memory does not suffice."""
        return False

    def describe(self) -> dict[str, Any]:
        """Name of the device, and what distinguishes it."""
        return {"name": "cpu", "threads": os.cpu_count()}

    def versions(self) -> dict[str, Any]:
        """Versions of what the framework runs on."""
        return {}


def load(name: str, device: str | None = None) -> Runner:
    """The runner of a framework; it ends the program if the device is not there."""
    runner: Runner = importlib.import_module(f"harness.{name}_run").FrameworkRunner(device)
    return runner


def use_threads(count: int) -> None:
    """Say how many threads to use before PyTorch, XLA and Keras read it."""
    os.environ["OMP_NUM_THREADS"] = os.environ["NPROC"] = str(count)


def like(shapes: Sequence[Shape]) -> list[np.ndarray[Any, Any]]:
    """Gradients of results: normal numbers of these shapes, the same for all frameworks."""
    return [np.random.default_rng(_SEED).standard_normal(shape, np.float32) for shape in shapes]


def several(value: Any) -> list[Any]:
    """What a function returned, as a list."""
    return list(value) if isinstance(value, tuple | list) else [value]


def named(arrays: Mapping[str, Any], prefix: str = PARAM) -> dict[str, Any]:
    """Learned arrays of NumPy as a function gets them."""
    return {f"{prefix}{name}": np.asarray(a, np.float32) for name, a in arrays.items()}


def tokens_of(arrays: Arrays) -> tuple[Any, Any, Any]:
    """Queries, keys and values."""
    return arrays["q"], arrays["k"], arrays["v"]


def params_of(arrays: Arrays, prefix: str = PARAM) -> dict[str, Any]:
    """Learned arrays as posenc takes them."""
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
