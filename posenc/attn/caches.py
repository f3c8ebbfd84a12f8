"""What a cache keeps of the tokens that came before, for a scheme: read off its hooks."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.checks import check_scheme
from posenc.protocol import PositionScheme


@dataclass(frozen=True)
class CacheNeeds:
    """What to keep of tokens, so that later ones can be attended from alone.

    Positions, segments and places are the caller's: what is given of the new tokens must be given
    of those that are kept.

    Attributes
    ----------
    keep
        Names of arguments of ``attention`` that grow by each token: ``("k", "v")``, or
        ``("k", "v", "k_features")``.
    transformed
        Whether keys are kept transformed, and given with ``k_transformed=True``; else as they are.
    features
        Whether the features of new tokens are computed by ``posenc.features`` and given as
        ``q_features``, beside ``k_features``: those that are kept, or ``{}``.
    carry
        Names of sums of which the last ones are kept, for ``carry`` of ``posenc.features``.
    """

    keep: tuple[str, ...]
    transformed: bool
    features: bool
    carry: tuple[str, ...]


def cache_needs(scheme: PositionScheme) -> CacheNeeds:
    """The smallest cache from which a scheme goes on.

    >>> import posenc
    >>> cache_needs(posenc.RoPE(64))
    CacheNeeds(keep=('k', 'v'), transformed=True, features=False, carry=())
    """
    check_scheme(scheme)
    hooks = scheme.hooks()
    transformed = "transform" in hooks and "regions" not in hooks
    features = "hidden_features" in hooks or bool(scheme.cumulative)
    # Features of key vectors come back from the vectors, unless those are transformed.
    of_keys = features or ("key_features" in hooks and transformed)
    # A key that is transformed already has what its transform read.
    read = bool(hooks & _READERS)
    keep = ("k", "v", "k_features") if of_keys and read else ("k", "v")
    return CacheNeeds(keep, transformed, features or of_keys, tuple(scheme.cumulative))


_READERS = frozenset({"bias", "key_bias", "adjust_scores", "regions"})
