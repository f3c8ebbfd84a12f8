"""What is compared: a peer's call in its own words, and the same inputs for both sides."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import posenc
from posenc.contract.protocol import PositionScheme
from posenc.testing import Host
from posenc.testing.tolerances import UNIT

Axes = tuple[int, ...] | None  # order of posenc's axes in a peer's layout; None: the same
Options = Mapping[str, Any]
BLHD = (0, 2, 1, 3)  # swaps tokens and heads
T5_BIAS, T5_CAUSAL = (
    {"num_buckets": 32, "max_distance": 128, "causal": causal} for causal in (False, True)
)
STAGES = ("embedding", "transform", "rotation", "bias", "attention")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, and the number of tokens; one sequence."""

    heads: int = 16
    length: int = 2048
    dim: int = 64

    @property
    def of_model(self) -> dict[str, int]:
        """As ``posenc.make`` takes them. Models with scaled RoPE were trained at a quarter."""
        length = self.length
        return {
            "num_heads": self.heads,
            "head_dim": self.dim,
            "max_len": length,
            "train_len": length // 4,
        }


@dataclass(frozen=True)
class Difference:
    """Why a peer's right result differs from posenc's by more than rounding, and by how much.

    ``bound(inputs)`` is relative to the largest number of the result, or to 1.
    """

    why: str
    bound: Callable[[Inputs], float]


def _angles(inputs: Inputs) -> float:
    """An angle ``pos * frequency`` has two roundings more than posenc's, and turns the channels.

    Powers and divisions of the frequency round four times more. All are relative to the position.
    """
    return 6 * UNIT["float32"] * inputs.sizes.length


FLOAT32_ANGLES = Difference("its angles are float32 products", _angles)
KINKS = Difference(
    "a gradient has a kink at each integer position: float32 rounds some positions onto another "
    "slope, or, by ceil and floor, onto none; in float64 both agree",
    lambda inputs: 0.05,  # a few pairs of a million: .014 and less was seen at 2048
)
FLOAT32_SUMS = Difference(
    "sums of gates over all tokens are float32, in another order",
    lambda inputs: 4 * UNIT["float32"] * inputs.sizes.length,
)


@dataclass(frozen=True)
class Peer:
    """One call of another library that computes what a scheme of the catalogue does.

    Attributes
    ----------
    library
        Name of its distribution.
    scheme, options
        Name in the catalogue and options; ``options`` may be a function of the sizes.
    stage
        One of ``STAGES``: what is computed. A ``"transform"`` makes the angles in the call, where a
        peer does; for a ``"rotation"`` they are made before, once for all layers.
    call
        The call, as its users write it.
    ready
        Makes the call from the inputs; does everything that a user does only once.
    modes
        How both sides run: ``"eager"``, ``"compile"`` or ``"jit"``.
    passes
        ``"forward"``; ``"step"``, which is forward and backward.
    differs
        Why and how much its result may differ; None: by rounding only.
    """

    library: str
    scheme: str
    stage: str
    call: str
    ready: Callable[[Inputs], Side] = field(repr=False)
    modes: tuple[str, ...]
    options: Options | Callable[[Sizes], Options] = field(default_factory=dict)
    passes: tuple[str, ...] = ("forward", "step")
    differs: Difference | None = None

    def options_for(self, sizes: Sizes) -> dict[str, Any]:
        """The options of the scheme at these sizes."""
        return dict(self.options(sizes) if callable(self.options) else self.options)

    @property
    def framework(self) -> str:
        """Which arrays it takes."""
        return "jax" if "jit" in self.modes else "torch"


@dataclass(frozen=True)
class Side:
    """A call that is ready.

    Attributes
    ----------
    call
        A function of the leaves, in their order; a module that owns its leaves may ignore them.
    leaves
        Arrays with gradients, by name.
    axes
        Layout of the results.
    """

    call: Callable[..., Any]
    leaves: Mapping[str, Leaf]
    axes: Axes = None


@dataclass(frozen=True)
class Leaf:
    """An array in a peer's layout."""

    array: Any
    axes: Axes


class Inputs:
    """The same numbers for every side, by name.

    ``q``, ``k`` and ``v`` are ``(1, H, L, D)``, hidden states ``x`` are ``(1, L, H D)``. Learned
    arrays are ``params.NAME``.

    Attributes
    ----------
    constant
        Makes an array of the framework, without a gradient.
    """

    def __init__(
        self, name: str, options: Options, sizes: Sizes, array: Callable[[Host], Any]
    ) -> None:
        self.sizes = sizes
        self.scheme: PositionScheme = posenc.make(name, **sizes.of_model, **options)
        self.constant = array
        rng = np.random.default_rng(0)
        tokens = 1, sizes.heads, sizes.length, sizes.dim
        hidden = 1, sizes.length, sizes.heads * sizes.dim
        self.host: dict[str, Host] = {n: _normal(rng, tokens) for n in ("q", "k", "v")}
        self.host["x"] = _normal(rng, hidden)
        first = posenc.init_params(self.scheme, 0)
        self.params = tuple(first)
        for param, value in first.items():
            # First values are often near 0, or the same for all heads.
            self.host[f"params.{param}"] = np.float32(
                value + 0.1 * rng.standard_normal(np.shape(value))
            )

    @cached_property
    def positions(self) -> Any:
        """``0 .. L - 1``."""
        return self.constant(np.arange(self.sizes.length))

    def leaf(self, name: str, axes: Axes = None) -> Leaf:
        """A named input in a peer's layout."""
        value = self.host[name]
        return Leaf(self.constant(value if axes is None else value.transpose(axes)), axes)

    def tokens(self, axes: Axes = None, *more: str) -> dict[str, Leaf]:
        """Queries and keys, and what else is asked for, in a peer's layout."""
        return {name: self.leaf(name, axes) for name in ("q", "k", *more)}

    def gradient_of(self, shape: tuple[int, ...]) -> Host:
        """A gradient of a result of this shape, the same for every side."""
        return _normal(np.random.default_rng(1), shape)


def label(name: str, options: Options) -> str:
    """A scheme and its options, as ``posenc compare`` takes them."""
    own = ",".join(f"{key}={value}" for key, value in sorted(options.items()))
    return f"{name}:{own}" if own else name


def to_peer(value: Host, axes: Axes, shape: tuple[int, ...]) -> Host:
    """An array in a peer's layout, whose axes of size 1 may be others."""
    return np.ascontiguousarray(value if axes is None else value.transpose(axes)).reshape(shape)


def from_peer(value: Host, axes: Axes, shape: tuple[int, ...]) -> Host:
    """A peer's array in posenc's layout, of this shape."""
    if axes is None:
        return value.reshape(shape)
    return value.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))


def missing(library: str, module: str) -> str | None:
    """Why a library cannot be used; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # an installed library may fail in any way
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:120] if lines else type(error).__name__
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            return f"not installed: pip install {library}"
        return f"installed, but it cannot be imported: {reason}"
    return None


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Host:
    return rng.standard_normal(shape, dtype=np.float32)
