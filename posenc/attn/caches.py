"""The contents of a key-value cache that a scheme needs, derived from its hooks."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.apply.feature_needs import lookback, reads_hidden, reads_vectors, summed_features
from posenc.contract.checks import check_scheme
from posenc.contract.protocol import Hook, PositionScheme


@dataclass(frozen=True)
class CacheNeeds:
    """What a cache must keep of earlier tokens, to decode later ones without them.

    Positions, segments and places are up to the caller: if they are given for new tokens, they must
    be given for cached ones.

    Attributes
    ----------
    keep
        What grows with each token: ``("k", "v")``, or ``("k", "v", "features")``, of which the last
        is a field of ``Tokens``.
    transformed
        Whether the cache holds transformed keys, which ``k_transformed=True`` announces. If not, it
        holds raw keys. Transformed keys may have more channels than raw ones, as those of PoPE;
        a cache may hold raw keys instead, which are then transformed in every call.
    features
        Whether ``posenc.features`` must compute the features of new tokens. Its first result is
        ``queries``; ``tokens`` are the cached ones and its second result, or have ``features={}``.
    carry
        Names of cumulative sums whose last values the cache keeps, for ``carry`` of
        ``posenc.features``.
    x_before
        Number of the last hidden states ``x`` that the cache keeps, for ``x_before`` of
        ``posenc.features``.
    """

    keep: tuple[str, ...]
    transformed: bool
    features: bool
    carry: tuple[str, ...]
    x_before: int = 0


def cache_needs(scheme: PositionScheme) -> CacheNeeds:
    """The smallest cache that a scheme can decode from.

    >>> import posenc
    >>> cache_needs(posenc.RoPE(64))
    CacheNeeds(keep=('k', 'v'), transformed=True, features=False, carry=(), x_before=0)
    """
    check_scheme(scheme)
    hooks = scheme.hooks()
    transformed = Hook.TRANSFORM in hooks and Hook.REGIONS not in hooks
    summed = summed_features(scheme)
    features = reads_hidden(scheme) or bool(summed)
    # Features of key vectors can be computed again, unless the cached keys are transformed.
    has_key_features = features or (reads_vectors(scheme, "key") and transformed)
    # A feature that only transform reads is not needed for keys that are transformed.
    read = bool(hooks & _READ_KEY_FEATURES)
    keep = ("k", "v", "features") if has_key_features and read else ("k", "v")
    return CacheNeeds(keep, transformed, features or has_key_features, summed, lookback(scheme))


_READ_KEY_FEATURES = frozenset(
    {Hook.BIAS, Hook.KEY_BIAS, Hook.CHANNEL_DECAY, Hook.ADJUST_SCORES, Hook.REGIONS}
)
