"""The contract that every positional encoding keeps: ``PositionScheme`` and ``ParamSpec``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from posenc.checks import python_fields, python_number

Array: TypeAlias = Any  # an array of any Array API library, a tracer, or a kernel's tile
Namespace: TypeAlias = Any  # the Array API namespace that computes on it
Role = Literal["query", "key"]
Initializer: TypeAlias = "Callable[[np.random.Generator, tuple[int, ...]], np.ndarray[Any, Any]]"


@dataclass(frozen=True)
class ParamSpec:
    """One learned array of a scheme.

    Parameters
    ----------
    shape
        Its shape. A per-head array has the head first.
    init
        Draws its first value: ``init(rng, shape)`` with a ``numpy.random.Generator``. Default:
        independent normal values, mean 0, standard deviation 0.02.
    per_head
        Whether the first axis counts heads. Then ``bias``, ``key_bias`` and ``transform``, which
        speak of one head, receive each head's own part; otherwise every head gets the whole array.
    """

    shape: tuple[int, ...]
    init: Initializer | None = None
    per_head: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(python_number(size) for size in self.shape))


class SchemeWarning(UserWarning):
    """A call that is allowed, and that probably does not do what it was written for."""


class PositionScheme:
    """Base class of positional encodings.

    A scheme may act on token embeddings, on queries and keys, and on attention scores. It is a
    frozen dataclass that inherits from this class and writes only what it has; every method has a
    default that does nothing. Methods are pure functions of *positions*: integers of any order,
    never lengths, indices or masks. Hyperparameters live in ``self``, as Python's own numbers:
    those of NumPy are converted before ``__post_init__`` sees them. Learned arrays arrive in
    ``params``, together with ``constants()``. ``xp`` is the Array API namespace.
    """

    relative: ClassVar[bool] = False
    """``bias`` depends on ``k_pos - q_pos`` alone."""

    shared: ClassVar[bool] = False
    """One set of learned params serves every layer of a model (T5), instead of one set a layer."""

    paper: ClassVar[str] = ""
    """Authors, year and arXiv number, for the catalogue."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__post_init__" in cls.__dict__:
            cls.__post_init__ = _with_python_fields(cls.__post_init__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        python_fields(self)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Learned arrays by name."""
        return {}

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        """Fixed numbers by name, one per head. They reach the methods through ``params``."""
        return {}

    def embedding(self, pos: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        """Term added to token embeddings, shape ``pos.shape + (dim,)``; None adds nothing."""
        return None

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Array:
        """Queries or keys ``x (..., L, D)`` as seen from ``pos``, broadcast to ``(..., L)``.

        Each token and each head by itself, and finite at any position. A number a head arrives
        as ``(H, 1, 1)``, which fits ``pos[..., None]``; keys that heads share have none.
        """
        return x

    def gate(self, x: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        """One number a token and head, ``(..., L, H)``, from hidden states ``x (..., L, C)``.

        Row-local. The library sums gates in the order of positions; ``bias`` and ``key_bias`` then
        receive the sums as coordinates instead of integer positions. None: no gate.
        """
        return None

    def bias(
        self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace
    ) -> Array | None:
        """Term one head adds to the scaled scores of query position ``q`` and key position ``k``.

        Elementwise in its broadcast arguments, closing over no arrays. Per-head numbers in
        ``params`` arrive 0-d or shaped ``(H, 1, 1)``; a per-head table answers ``table[bucket]``.
        ``-inf`` masks; every other value, and every gradient, is finite at any pair of positions,
        visible or not. None: no bias.
        """
        return None

    def key_bias(self, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        """``w(k)`` where ``bias(q, k) = u(q) + w(k)`` for every key that a query sees under a
        causal mask, ``k_pos <= q_pos``; else None. Finite: a bias that masks has none.

        Softmax cannot see ``u``, so a key-only term may stand for the bias.
        """
        return None

    def scale(self, head_dim: int) -> float:
        """What the scores ``q @ k`` are multiplied by before the bias is added."""
        return 1 / math.sqrt(head_dim)

    def at_length(self, length: int) -> PositionScheme:
        """The scheme for a context of ``length`` tokens (dynamic NTK, LongRoPE); else itself."""
        return self

    def caution(self, *, causal: bool) -> str | None:
        """Why a call of attention with this mask is probably a mistake; None if it is not.

        Attention gives it as a ``SchemeWarning``, and computes what was asked for.
        """
        return None


def _with_python_fields(own: Callable[..., None]) -> Callable[..., None]:
    """A scheme's ``__post_init__``, after its fields have become Python's numbers."""

    @functools.wraps(own)
    def after(self: Any, *given: Any) -> None:
        python_fields(self)
        own(self, *given)

    return after
