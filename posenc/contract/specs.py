"""What a scheme declares: learned arrays (``ParamSpec``) and features (``FeatureSpec``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from posenc.contract.checks import check_choice, check_count, python_number

Array: TypeAlias = Any  # an array of any Array API library, a tracer, or a kernel's tile
Namespace: TypeAlias = Any  # the Array API namespace that computes on it
Arrays: TypeAlias = "Mapping[str, Array]"  # by name
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
        those of queries. Only ``transform`` of keys and features of keys may read it.
    """

    shape: tuple[int, ...]
    init: Initializer | None = None
    per_head: bool = True
    of_keys: bool = False

    @classmethod
    def of_values(cls, values: Sequence[float], *, per_head: bool = True) -> ParamSpec:
        """An array ``(n,)`` that starts from ``n`` given numbers."""
        return cls((len(values),), lambda rng, shape: np.asarray(values), per_head)

    def __post_init__(self) -> None:
        if self.of_keys and not self.per_head:
            raise ValueError("of_keys=True, per_head=False: an array of keys has an axis of heads")
        object.__setattr__(self, "shape", tuple(python_number(size) for size in self.shape))


Source = Literal["hidden", "vectors"]
_ROLES, _SOURCES = get_args(Role), get_args(Source)


@dataclass(frozen=True)
class FeatureSpec:
    """Declaration of one feature: an array with an entry per token, computed once per token.

    A feature is a number per head and token, ``(B, H, L)``, or a table per head and token,
    ``(B, H, L, M)``. Per-head arrays in ``params`` keep their head axis in ``compute``.

    Parameters
    ----------
    compute
        Computes the feature, of each token independently.

        ============  ==================================================================
        ``reads``     call
        ============  ==================================================================
        ``hidden``    ``compute(x, params=, xp=)`` with hidden states ``x (B, L, C)``
        ``vectors``   ``compute(q, pos, scale=, params=, xp=)``, before ``transform``
        ============  ==================================================================

        Queries ``q`` are ``(B, H, L, D)``; keys ``(B, Hk, L, D)``, and their feature may have
        either number of heads. ``pos`` broadcasts to ``(B, H, L)``; with several ``axes`` it holds
        places, ``(..., L, axes)``. ``scale`` is the factor of the scores.
    of
        Whose feature it is: ``bias`` reads it as ``params.query[name]`` or ``params.key[name]``.
    reads
        Whether it is computed from hidden states or from query or key vectors.
    lookback
        How many earlier tokens a feature of keys sees with each token, for a short causal
        convolution of hidden states. ``x`` is then ``(B, L, lookback + 1, C)``, the token itself
        last. "Earlier" is in the order of positions, within a segment. Zeros stand for tokens
        before the first.
    cumulative
        Whether the library sums a feature of keys in the order of positions, within a segment.
        ``params.query`` and ``params.key`` then hold the sum up to each token's own position.
    """

    compute: Callable[..., Array]
    of: Role
    reads: Source = "hidden"
    lookback: int = 0
    cumulative: bool = False

    def __post_init__(self) -> None:
        # Made in every call of attention, so the usual ones are not checked one by one.
        if self.of not in _ROLES or self.reads not in _SOURCES or self.lookback or self.cumulative:
            self._check()

    def _check(self) -> None:
        check_choice("of", self.of, _ROLES)
        check_choice("reads", self.reads, _SOURCES)
        check_count("lookback", self.lookback, least=0)
        if self.of == "query" and (self.cumulative or self.lookback):
            what = "cumulative=True" if self.cumulative else f"lookback={self.lookback}"
            raise ValueError(f"{what} needs of='key', got 'query'")
        if self.reads == "vectors" and self.lookback:
            raise ValueError(f"lookback={self.lookback} needs reads='hidden', got 'vectors'")
