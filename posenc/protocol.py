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
Window: TypeAlias = "tuple[int | None, int | None]"
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


HOOKS = (
    "embedding", "transform", "hidden_features", "query_features", "key_features", "bias",
    "key_bias", "adjust_scores", "sink", "regions", "scale", "at_length",
)  # fmt: skip


class PositionScheme:
    """Base class of positional encodings.

    A scheme may act on token embeddings, on queries and keys, and on attention scores. It is a
    frozen dataclass that inherits from this class and writes only what it has; every method has a
    default that does nothing. Methods are pure functions of *positions*: integers of any order,
    never lengths, indices or masks. Hyperparameters live in ``self``, as Python's own numbers:
    those of NumPy are converted before ``__post_init__`` sees them. Learned arrays arrive in
    ``params``, together with ``constants()``. ``xp`` is the Array API namespace.

    What else a scheme wants to know of a token are *features*: named numbers or tables that the
    library computes once per token, from hidden states (``hidden_features``) or from the query or
    key vector (``query_features``, ``key_features``). ``bias`` and ``key_bias`` find those of the
    query in ``params.query`` and those of the key in ``params.key``; ``transform`` finds those of
    its own tokens in ``params.of(role)``.
    """

    relative: ClassVar[bool] = False
    """``bias`` depends on ``k_pos - q_pos`` and on features, not on the positions themselves."""

    axes: ClassVar[int] = 1
    """How many coordinates place a token. With several, ``transform`` and ``embedding`` receive
    places ``(..., L, axes)`` instead of positions; ``bias`` finds them in
    ``params.query["places"][axis]`` and ``params.key["places"][axis]``. Positions stay one integer
    per token: they alone decide order, masks, sums and caches."""

    cumulative: ClassVar[tuple[str, ...]] = ()
    """Names of key-side features that the library sums in the order of positions, within a segment.
    Both sides then read the sum up to their own position under this name."""

    shared: ClassVar[bool] = False
    """One set of learned params serves every layer of a model (T5), instead of one set a layer."""

    paper: ClassVar[str] = ""
    """Authors, year and arXiv number, for the catalogue."""

    _hooks: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hasattr(cls, "gate"):
            raise TypeError(
                f"{cls.__name__}.gate: a gate is a feature now; return {{name: (B, H, L)}} from "
                "hidden_features, and list the name in cumulative"
            )
        cls._hooks = frozenset(
            name for name in HOOKS if getattr(cls, name) is not getattr(PositionScheme, name)
        )
        if "__post_init__" in cls.__dict__:
            cls.__post_init__ = _with_python_fields(cls.__post_init__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        python_fields(self)

    def reads_features(self) -> bool:
        """Whether ``bias`` may read features of tokens, or places on several axes.

        A combination answers for its parts. Without, a relative bias is a table of distances.
        """
        features = {"hidden_features", "query_features", "key_features"}
        return "bias" in self.hooks() and (self.axes > 1 or bool(features & self.hooks()))

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

        Each token and each head by itself, and finite at any position. A number per head arrives
        as ``(H, 1, 1)``, which fits ``pos[..., None]``; of a per-head array with more axes,
        ``params[name][:]`` is ``(H, 1, ...)``, which fits ``x``. Shared keys have neither.
        With several ``axes``, ``pos`` are places ``(..., L, axes)``. Features of the tokens are in
        ``params.of(role)``, ``(B, H, L)`` or ``(B, H, L, M)``.
        """
        return x

    def hidden_features(
        self, x: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        """Features of tokens from their hidden states ``x (B, L, C)``, by name.

        A number per head and token ``(B, H, L)``, or a table per head and token ``(B, H, L, M)``.
        Each token by itself. ``role`` says which side asks: keys are asked for what ``params.key``
        shall have and for ``cumulative`` features; queries for what ``params.query`` shall have
        beside those. ``params`` are whole arrays.
        """
        return {}

    def query_features(
        self, q: Array, pos: Array, *, scale: float, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        """Features of queries from their own vectors ``q (B, H, Q, D)``, before ``transform``.

        Shapes as in ``hidden_features``. ``pos`` are positions, or places ``(..., Q, axes)``, and
        fit ``(B, H, Q)``; ``scale`` is what scores are multiplied by. ``params`` are whole arrays.
        """
        return {}

    def key_features(
        self, k: Array, pos: Array, *, scale: float, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        """Features of keys from their own vectors ``k (B, Hk, K, D)``, before ``transform``.

        As ``query_features``; ``Hk`` may be fewer heads than ``H``, and answers may have either.
        """
        return {}

    def bias(
        self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace
    ) -> Array | None:
        """Term one head adds to the scaled scores of query position ``q`` and key position ``k``.

        Elementwise in its broadcast arguments, closing over no arrays. Per-head numbers in
        ``params`` arrive 0-d or shaped ``(H, 1, 1)``; a per-head table answers ``table[bucket]``.
        Features are read as ``params.query[name]`` and ``params.key[name]``: a number broadcasts,
        a table answers ``params.query[name][index]``.
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

    def adjust_scores(
        self,
        scores: Array,
        q: Array,
        k: Array,
        *,
        visible: Array | None,
        params: Mapping[str, Array],
        xp: Namespace,
    ) -> Array:
        """Whole rows of scaled scores ``(B, H, Q, K)``, before the bias is added.

        For schemes that no tile can compute (CoPE, DAPE). ``q (B or 1, 1, Q, 1)`` and ``k (B or 1,
        1, 1, K)`` are positions; ``visible`` says which pairs may be seen, None for all. A key's
        score may depend on other keys of its row only as far as these are visible. Served by
        ``implementation="reference"`` alone.
        """
        return scores

    def sink(self, q: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        """A logit in the denominator of each query's softmax that belongs to no key.

        ``q (B or 1, 1, Q, 1)`` are positions; the answer broadcasts to ``(B, H, Q, 1)``. Params and
        ``params.query`` as in ``bias``. None: no sink. gpt-oss learns one number per head; 0 is the
        softmax off by one.
        """
        return None

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        """Schemes that serve different distances, each with its window; empty: this one serves all.

        Windows ``(left, right)`` are those of ``attention`` and must not overlap; a negative
        ``right`` leaves near keys out. Attention is computed once for each and merged by
        log-sum-exp (ReRoPE, Self-Extend). Each scheme receives the params that it declares. Make
        the schemes in ``__post_init__`` and return them here: torch's compiler cannot make a RoPE.
        """
        return ()

    def hooks(self) -> frozenset[str]:
        """Names of the methods that this scheme has beyond the defaults of this class.

        A combination answers for its parts.
        """
        return self._hooks

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
