"""What is timed and checked: a function of arrays, and the arrays, for any framework.

Each function below returns both. It raises ``NotImplementedError`` where a scheme has nothing to
compute.
"""

from __future__ import annotations

import numpy as np

import posenc
from posenc.evaluate import embeds_only, has_embedding, has_transform
from suite import DIM, HEADS, has_plain_bias, hidden_states, make, normal

_PARAM = "params."  # before the names of a scheme's arrays


def bias(name, framework, pos, dtype=None):
    """The dense bias ``(H, L, L)``."""
    scheme, params = make(name, int(pos.max()) + 1)
    if not has_plain_bias(scheme):
        raise NotImplementedError("no bias that depends on positions alone")
    xp = framework.xp()

    def function(arrays):
        at = arrays["pos"]
        return posenc.bias(scheme, at, at, _params(arrays), dtype=dtype, xp=xp)

    return function, {"pos": pos} | _named(params)


def transform(name, framework, pos):
    """Queries ``(1, H, L, D)``, transformed, from the features that this takes."""
    scheme, params = make(name, int(pos.max()) + 1)
    if not has_transform(scheme):
        raise NotImplementedError("no transform")
    xp, hidden = framework.xp(), hidden_states(scheme, params, pos.size)

    def function(arrays):
        own, q, at = _params(arrays), arrays["q"], arrays["pos"]
        features = {}
        if hidden:
            features, _ = posenc.features(scheme, own, x=arrays["x"], q=q, k=q, pos=at, xp=xp)
        return posenc.transform(scheme, q, at, role="query", params=own, features=features, xp=xp)

    return function, {"pos": pos, "q": normal(1, HEADS, pos.size, DIM)} | hidden | _named(params)


def embedding(name, framework, pos, dtype=None):
    """The term ``(L, H D)`` that is added to tokens."""
    scheme, params = make(name, int(pos.max()) + 1)
    if not has_embedding(scheme):
        raise NotImplementedError("no embedding")
    xp = framework.xp()

    def function(arrays):
        return posenc.embedding(scheme, arrays["pos"], _params(arrays), dtype=dtype, xp=xp)

    return function, {"pos": pos} | _named(params)


def attention(name, framework, length, implementation="auto", heads=HEADS):
    """Causal attention of a whole sequence."""
    scheme, params = make(name, length, heads)
    if embeds_only(scheme):
        raise NotImplementedError("acts on embeddings only")

    def function(arrays):
        hidden = {"x": arrays["x"]} if "x" in arrays else {}
        return framework.attention(
            arrays["q"], arrays["k"], arrays["v"], scheme, _params(arrays), True,
            implementation=implementation, **hidden,
        )  # fmt: skip

    hidden = hidden_states(scheme, params, length)
    return function, _tokens(framework, length, heads) | hidden | _named(params)


def without_positions(framework, length):
    """The framework's own causal attention, with which the above is compared."""

    def function(arrays):
        return framework.without_positions(arrays["q"], arrays["k"], arrays["v"])

    return function, _tokens(framework, length, HEADS)


def decoding(name, framework, keys, given):
    """Attention of the last token to its cache, whose keys are transformed already.

    ``given``: with positions, as for a cache with padding; otherwise at the default ones.
    """
    scheme, params = make(name, keys)
    if embeds_only(scheme):
        raise NotImplementedError("acts on embeddings only")
    needs = posenc.cache_needs(scheme)
    tokens = {n: normal(1, HEADS, keys, DIM, seed=i) for i, n in enumerate("qkv")}
    pos = np.arange(keys)
    of_query, of_keys = posenc.features(
        scheme, params, q=tokens["q"], k=tokens["k"], pos=pos,
        **hidden_states(scheme, params, keys),
    )  # fmt: skip
    if needs.transformed:
        tokens["k"] = posenc.transform(
            scheme, tokens["k"], pos, role="key", params=params, features=of_keys
        )
    arrays = {n: framework.layout(a) for n, a in tokens.items()}
    arrays["q"] = framework.layout(tokens["q"][:, :, -1:])
    arrays |= _named({n: a[:, :, -1:] for n, a in of_query.items()}, "q_features.")
    arrays |= _named(of_keys, "k_features.") if "k_features" in needs.keep else {}
    if given or needs.transformed:
        arrays |= {"q_pos": pos[-1:], "k_pos": pos}

    def function(arrays):
        options = {n: arrays[n] for n in ("q_pos", "k_pos") if n in arrays}
        if needs.transformed:
            options["k_transformed"] = True
        if needs.features:
            options["q_features"] = _params(arrays, "q_features.")
            options["k_features"] = _params(arrays, "k_features.")
        return framework.attention(
            arrays["q"], arrays["k"], arrays["v"], scheme, _params(arrays), True, **options
        )

    return function, arrays | _named(params)


def _tokens(framework, length, heads):
    """q, k and v in the framework's layout."""
    return {n: framework.layout(normal(1, heads, length, DIM, seed=i)) for i, n in enumerate("qkv")}


def _named(arrays, prefix=_PARAM):
    return {f"{prefix}{name}": np.asarray(a, np.float32) for name, a in arrays.items()}


def _params(arrays, prefix=_PARAM):
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
