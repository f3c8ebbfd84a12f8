"""The interface of a positional encoding: ``PositionScheme`` and ``ParamSpec``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from posenc.checks import python_fields, python_number
from posenc.primitives import hold

Array: TypeAlias = Any  # an array of any Array API library, a tracer, or a kernel's tile
Namespace: TypeAlias = Any  # the Array API namespace that computes on it
Role = Literal["query", "key"]
Window: TypeAlias = "tuple[int | None, int | None]"  # (left, right), None for no bound
Initializer: TypeAlias = "Callable[[np.random.Generator, tuple[int, ...]], np.ndarray[Any, Any]]"


@dataclass(frozen=True)
class ParamSpec:
    """Declaration of one learned array of a scheme.

    Parameters
    ----------
    shape
        Its shape. The first axis of a per-head array is that of heads.
    init
        Draws its initial value: ``init(rng, shape)`` with a ``numpy.random.Generator``. Default:
        independent normal values, mean 0, standard deviation 0.02.
    per_head
        Whether the first axis is that of heads. Then ``bias``, ``key_bias`` and ``transform``
        receive the array in the form for per-head arrays that each describes. Otherwise they
        receive the whole array.
    of_keys
        Whether the heads of a per-head array are those of keys and values, which may be fewer than
        those of queries. Only ``transform`` of keys, ``hidden_features`` and ``key_features`` may
        read it.
    """

    shape: tuple[int, ...]
    init: Initializer | None = None
    per_head: bool = True
    of_keys: bool = False

    def __post_init__(self) -> None:
        if self.of_keys and not self.per_head:
            raise ValueError("of_keys=True, per_head=False: an array of keys has an axis of heads")
        object.__setattr__(self, "shape", tuple(python_number(size) for size in self.shape))


class SchemeWarning(UserWarning):
    """A call is allowed, but it probably does not do what its author wants."""


# The methods that change what a model computes; ``hooks()`` names those that a scheme overrides.
HOOKS = (
    "embedding", "transform", "rotary", "hidden_features", "query_features", "key_features", "bias",
    "key_bias", "bias_factor", "adjust_scores", "sink", "regions", "scale", "at_length",
)  # fmt: skip


class PositionScheme:
    """Base class of positional encodings.

    A scheme may act on token embeddings (``embedding``), on queries and keys (``transform``), and
    on attention scores (``bias``). A scheme is a frozen dataclass that inherits from this class.
    It overrides the methods that it needs; every method has a default that changes nothing.

    Methods are pure functions of *positions*. Positions are integers in any order. Methods do not
    see sequence lengths, array indices or masks, so caches, packing and padding need no code. The
    exceptions are ``at_length``, which gets a length, and ``adjust_scores``, which gets a mask.

    The arguments that methods share:

    ``params``
        Learned arrays (``param_specs``) and fixed numbers (``constants``), by name.
    ``xp``
        The Array API namespace of the arrays: that of NumPy, PyTorch or JAX.

    Hyperparameters are fields of the dataclass. NumPy numbers in them become Python numbers before
    ``__post_init__`` runs.

    If a bias depends on more than positions, the scheme computes *features*: named arrays, computed
    once per token. ``hidden_features`` computes them from hidden states, ``query_features`` and
    ``key_features`` from query and key vectors. ``bias`` and ``key_bias`` read them as
    ``params.query[name]`` and ``params.key[name]``. ``transform`` reads those of its own tokens as
    ``params.of(role)[name]``.

    Letters in shapes: ``B`` batch, ``H`` heads, ``Hk`` heads of keys and values, ``L`` tokens,
    ``Q`` queries, ``K`` keys, ``D`` head_dim, ``C`` width of hidden states, ``M`` size of a table.
    """

    # What a scheme declares about itself.

    relative: ClassVar[bool] = False
    """Whether ``bias`` depends on positions only through ``k_pos - q_pos``. It may read features
    too."""

    axes: ClassVar[int] = 1
    """Number of coordinates of a token: 1 for text, 2 for an image. With more than one,
    ``transform`` and ``embedding`` receive coordinates ("places") ``(..., L, axes)`` instead of
    positions. ``bias`` reads them as ``params.query["places"][axis]`` and
    ``params.key["places"][axis]``. Every token still has one integer position, which alone decides
    order, masks, cumulative sums and caches. If it depends on options, it is a field or a property
    of the scheme."""

    cumulative: ClassVar[tuple[str, ...]] = ()
    """Names of key features that the library sums in the order of positions, within a segment.
    ``params.query`` and ``params.key`` then hold the sum up to each token's own position."""

    shared: ClassVar[bool] = False
    """Whether the layers of a model share one set of learned params, as T5 does."""

    whole_rows: ClassVar[str] = ""
    """Why ``adjust_scores`` needs whole rows of scores, for the error of implementations that have
    only tiles of them."""

    paper: ClassVar[str] = ""
    """Authors, year and arXiv number, for the catalogue."""

    trained_as: ClassVar[str | None] = None
    """Name in the catalogue of the scheme that models are trained with, if this one extends them
    without training. A study of the whole catalogue then trains that one and tests this one."""

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Learned arrays, by name."""
        return {}

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        """Fixed numbers, one per head, by name. Methods read them from ``params``."""
        return {}

    # Where a scheme acts: embeddings, queries and keys, scores.

    def embedding(self, pos: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        """Return the term to add to token embeddings, ``pos.shape + (dim,)``; None for no term.

        With several ``axes``, ``pos`` holds places ``(..., L, axes)``, and the result is
        ``(..., L, dim)``.
        """
        return None

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Array:
        """Transform queries or keys ``x (..., L, D)`` by their positions, as RoPE rotates them.

        Tokens and heads are transformed independently. The result is finite at any position.

        Parameters
        ----------
        x
            Queries ``(..., L, D)`` if ``role`` is ``"query"``, keys if it is ``"key"``.
        pos
            Positions, which broadcast to ``(..., L)``. With several ``axes``: places
            ``(..., L, axes)``.
        params
            A per-head scalar has shape ``(H, 1, 1)``, which broadcasts against ``pos[..., None]``.
            For a per-head array with more axes, ``params[name][:]`` is ``(H, 1, ...)``, which
            broadcasts against ``x``. Grouped-query keys can use per-head params ``of_keys`` only.
            ``params.of(role)`` holds the features of these tokens, ``(B, H, L)`` or
            ``(B, H, L, M)``. ``self.tables(x, pos, params=params, xp=xp)`` is their ``rotary``.

        Returns
        -------
        ``(..., L, E)`` in the dtype of ``x``. ``E`` is ``D`` or more, and the same for queries and
        keys: PoPE makes two channels of one. ``scale`` still gets ``D``.
        """
        return x

    def rotary(
        self, pos: Array, *, dtype: Any, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        """Compute what ``transform`` needs from positions alone, as RoPE its sines and cosines.

        ``transform`` gets them by ``self.tables(x, pos, ...)``. A model computes them once for all
        layers, queries and keys (``posenc.rotary``). So they depend neither on vectors nor on
        arrays ``of_keys``.

        Parameters
        ----------
        pos
            Positions ``(..., L)``. With several ``axes``: places ``(..., L, axes)``.
        dtype
            float32 or float64.
        params
            As in ``transform``, without features.

        Returns
        -------
        Name -> ``(..., L, n)`` of ``dtype``, which broadcasts against ``x (..., L, D)`` but for the
        last axis.
        """
        return {}

    def bias(
        self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace
    ) -> Array | None:
        """Return the term to add to the scaled score of each query and key; None for no bias.

        Write it for one head and for one pair. The library calls it with positions ``q`` and ``k``
        that broadcast: single pairs, tiles or whole matrices.

        Parameters
        ----------
        q, k
            Integer positions of queries and keys.
        params
            A per-head scalar is 0-d or has shape ``(H, 1, 1)``. A per-head table is read by index,
            ``params[name][i]``. Features of queries are in ``params.query``, those of keys in
            ``params.key``: a feature ``(B, H, L)`` broadcasts, a feature ``(B, H, L, M)`` is read
            by index.

        Returns
        -------
        An array that broadcasts with ``q`` and ``k``, computed elementwise. ``-inf`` masks a pair.
        Every other value, and every gradient, is finite for all positions, also for masked pairs.
        The function must not close over arrays.
        """
        return None

    def key_bias(self, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        """Return ``w(k)`` if ``bias(q, k) = u(q) + w(k)`` for all ``k <= q``; else None.

        Under a causal mask an implementation may then use ``w`` instead of ``bias``: softmax
        ignores a term that depends on the query only. ``w`` must be finite, so a bias that masks
        has no ``key_bias``.
        """
        return None

    def constant_beyond(self) -> Window:
        """Return ``(left, right)``: how far a ``relative`` bias changes with distance.

        All keys at ``k - q <= -left`` have the same finite bias per head, and so have all keys at
        ``k - q >= right``. None: there is no such distance. Implementations may then read one
        number for far keys. A bias that reads features has none.
        """
        return None, None

    def bias_factor(self, q: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        """Return the factor of the bias of all parts of a ``Sum`` with this part; None for 1.

        Only ``Sum`` calls it, as it calls ``bias`` (Inkling's log-position scaling multiplies
        queries and bias). The factor is positive and finite.
        """
        return None

    # Features of tokens, which ``bias``, ``key_bias`` and ``transform`` read.

    def hidden_features(
        self, x: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        """Compute features from hidden states ``x (B, L, C)``, for each token independently.

        A feature is a number per head and token, ``(B, H, L)``, or a table per head and token,
        ``(B, H, L, M)``. Per-head arrays in ``params`` keep their head axis here.

        If ``lookback()`` is ``n > 0`` and ``role="key"``, ``x`` is ``(B, L, n + 1, C)``: the hidden
        states of the ``n`` tokens before each token in its segment, and its own last. Zeros stand
        for tokens before the first.

        The library asks for keys and for queries separately. With ``role="key"``, return the
        features for ``params.key`` and all that ``cumulative`` names. With ``role="query"``, return
        the features for ``params.query``, except those that ``cumulative`` names.
        """
        return {}

    def lookback(self) -> int:
        """Return how many earlier tokens ``hidden_features`` of keys sees with each token.

        For a short causal convolution over tokens (Selective RoPE, PaTH). "Earlier" is in the order
        of positions, within a segment.
        """
        return 0

    def query_features(
        self, q: Array, pos: Array, *, scale: float, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        """Compute features from query vectors ``q (B, H, Q, D)``, before ``transform``.

        Shapes of features and of ``params`` are those of ``hidden_features``. ``pos`` broadcasts to
        ``(B, H, Q)``; with several ``axes`` it holds places, ``(..., Q, axes)``. ``scale`` is the
        factor of the scores.
        """
        return {}

    def key_features(
        self, k: Array, pos: Array, *, scale: float, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        """Compute features from key vectors ``k (B, Hk, K, D)``, before ``transform``.

        As ``query_features``. With grouped queries ``Hk`` is less than ``H``; a feature may have
        either number of heads.
        """
        return {}

    # Rarer ways to act on attention.

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
        """Change whole rows of scaled scores ``(B, H, Q, K)``, before the bias is added.

        For schemes that cannot be computed tile by tile (CoPE, DAPE). Only
        ``implementation="reference"`` calls it.

        Parameters
        ----------
        scores
            Scaled scores of every query and key.
        q, k
            Positions ``(B or 1, 1, Q, 1)`` and ``(B or 1, 1, 1, K)``.
        visible
            Which pairs the mask leaves visible, booleans; None if all are. The score of one key
            may depend on another key of the row only if that key is visible.
        params
            As for ``bias``, for all heads at once. Of a per-head array with more axes,
            ``params[name][:]`` is ``(H, 1, ...)``; of a feature ``(B, H, L, M)``,
            ``params.query[name][:]`` is the whole array. If the call has segments,
            ``params.query["segment"]`` and ``params.key["segment"]`` are shaped as ``q`` and ``k``.
        """
        return scores

    def sink(self, q: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        """Return a logit to add to each query's softmax denominator; None for no sink.

        It belongs to no key and has no value, so a head can attend to nothing. gpt-oss learns one
        logit per head; the constant 0 gives the off-by-one softmax.

        ``q (B or 1, 1, Q, 1)`` are positions. The result broadcasts to ``(B, H, Q, 1)``. ``params``
        and ``params.query`` are those of ``bias``.
        """
        return None

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        """Return schemes for different ranges of distance, each with its window; empty for none.

        Attention is computed once per region, and the results are merged by log-sum-exp (ReRoPE,
        Self-Extend). A window ``(left, right)`` is that of ``attention``:
        ``-left <= k_pos - q_pos <= right``. Windows overlap only where all but one of their schemes
        mask a pair by a bias of ``-inf`` (dual chunk attention). A negative ``right`` leaves out
        near keys. A negative ``left`` leaves out keys up to the query and near ones after it;
        under a causal mask such a region is not computed. Each scheme receives the params that it
        declares. It may have regions itself, and its own ``scale``, unless this scheme or the
        caller sets one for all. It may have no ``sink``: that belongs to the whole row.

        Make the schemes in ``__post_init__``, because torch's compiler cannot construct a RoPE.
        """
        return ()

    def scale(self, head_dim: int) -> float:
        """Return the factor of the scores ``q @ k.T``, which applies before the bias."""
        return 1 / math.sqrt(head_dim)

    def at_length(self, length: int) -> PositionScheme:
        """Return the scheme for a context of ``length`` tokens (dynamic NTK, LongRoPE)."""
        return self

    def caution(self, *, causal: bool) -> str | None:
        """Return why attention with this mask is probably a mistake; None if it is not.

        Attention issues it as a ``SchemeWarning`` and computes the result anyway.
        """
        return None

    def tables(
        self, x: Array, pos: Array, *, params: Mapping[str, Array], xp: Namespace
    ) -> Mapping[str, Array]:
        """Return the ``rotary`` of vectors ``x`` at ``pos``: the caller's, or else computed here.

        ``transform`` calls it with its own arguments.
        """
        given: Mapping[str, Array] | None = getattr(params, "rotary", None)
        if given:
            return given
        work = xp.float64 if x.dtype == xp.float64 else xp.float32
        return hold(self.rotary(pos, dtype=work, params=params, xp=xp), xp)

    # What the library asks of a scheme. A combination of schemes overrides these.

    def hooks(self) -> frozenset[str]:
        """Return the names of the methods in ``HOOKS`` that this scheme overrides."""
        return self._hooks

    def reads_features(self) -> bool:
        """Return whether ``bias`` may read features, or places on several axes.

        If it does not and the scheme is ``relative``, its bias is a table over distances.
        """
        features = {"hidden_features", "query_features", "key_features"}
        return "bias" in self.hooks() and (self.axes > 1 or bool(features & self.hooks()))

    def bias_terms(self) -> tuple[tuple[str, PositionScheme], ...]:
        """Return schemes whose biases add up to ``bias``, each with the prefix of its names.

        The prefix is that of its params and features among those of this scheme.
        """
        return (("", self),) if "bias" in self.hooks() else ()

    def rotary_params(self) -> frozenset[str]:
        """Return the names of the learned arrays that ``rotary`` may read."""
        names: set[str] = set()
        if "rotary" in self.hooks():
            names.update(name for name, spec in self.param_specs().items() if not spec.of_keys)
        for scheme, _ in self.regions():
            names.update(scheme.rotary_params())
        return frozenset(names)

    _hooks: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hasattr(cls, "gate"):
            raise TypeError(
                f"{cls.__name__}.gate: a gate is a feature now; return {{name: (B, H, L)}} from "
                "hidden_features, and list the name in cumulative"
            )
        own = {n for n in HOOKS if getattr(cls, n) is not getattr(PositionScheme, n)}
        # A class that inherits ``rotary`` and writes its own transform may change positions first.
        writer = {n: next(c for c in cls.__mro__ if n in vars(c)) for n in ("rotary", "transform")}
        if not issubclass(writer["rotary"], writer["transform"]):
            own -= {"rotary"}
        cls._hooks = frozenset(own)
        if "__post_init__" in cls.__dict__:
            cls.__post_init__ = _with_python_fields(cls.__post_init__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        python_fields(self)


def _with_python_fields(post_init: Callable[..., None]) -> Callable[..., None]:
    """``post_init``, called after the scheme's fields have become Python numbers."""

    @functools.wraps(post_init)
    def convert_then_init(self: Any, *args: Any) -> None:
        python_fields(self)
        post_init(self, *args)

    return convert_then_init
