"""What the features of a scheme need, known before a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from posenc.contract.protocol import Array, FeatureSpec, Hook, PositionScheme, Role
from posenc.contract.specs import Source

Specs = Mapping[str, FeatureSpec]
_ROLES: tuple[Role, ...] = get_args(Role)


def by_role(specs: Specs, reads: Source) -> dict[Role, Specs]:
    """The features of queries and of keys that are computed from one source."""
    return {
        role: {n: s for n, s in specs.items() if s.of == role and s.reads == reads}
        for role in _ROLES
    }


def has_features(scheme: PositionScheme) -> bool:
    """Whether a scheme has features of tokens."""
    return bool(scheme.feature_specs())


def reads_hidden(scheme: PositionScheme) -> bool:
    """Whether a scheme computes features from hidden states."""
    return any(spec.reads == "hidden" for spec in scheme.feature_specs().values())


def reads_vectors(scheme: PositionScheme, role: Role) -> bool:
    """Whether a scheme computes features from queries, or from keys."""
    return bool(by_role(scheme.feature_specs(), "vectors")[role])


def summed_features(scheme: PositionScheme) -> tuple[str, ...]:
    """Names of the features that are summed in the order of positions."""
    return tuple(name for name, spec in scheme.feature_specs().items() if spec.cumulative)


def lookback(scheme: PositionScheme) -> int:
    """How many earlier tokens a feature sees with each token."""
    return lookback_of(scheme.feature_specs())


def lookback_of(specs: Specs) -> int:
    """The largest ``lookback`` of features."""
    counts = [spec.lookback for spec in specs.values()]
    return max(counts) if counts else 0  # torch's compiler has no max(default=)


def reads_features(scheme: PositionScheme) -> bool:
    """Whether the bias may read features of tokens, or places on several axes.

    If it does not and the scheme is ``relative``, its bias is a table over distances.
    """
    terms = [term for _, term in scheme.bias_terms() if Hook.BIAS in term.hooks()]
    return any(term.axes > 1 or has_features(term) for term in terms)


def own_tokens(x: Array, most: int, count: int) -> Array:
    """Of hidden states ``(B, L, most + 1, C)``, those that a ``lookback`` of ``count`` sees."""
    if most == count:
        return x
    return x[:, :, -count - 1 :, :] if count else x[:, :, -1, :]
