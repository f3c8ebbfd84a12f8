"""What is timed and checked: a function of arrays, and the arrays, for any framework.

Each function below returns both. It raises ``NotImplementedError`` where a scheme has nothing to
compute.
"""

from __future__ import annotations

import numpy as np
from harness.run import named, params_of, tokens_of

import posenc
from posenc.apply.embed import has_embedding
from posenc.apply.transform import has_transform
from posenc.attn.embedding_only import embeds_only
from suite import DIM, HEADS, has_plain_bias, hidden_states, make, normal

_OF_QUERY, _OF_KEYS = "queries.features.", "tokens.features."


def bias(name, framework, pos, dtype=None):
    """The dense bias ``(H, L, L)``."""
    scheme, params = make(name, int(pos.max()) + 1)
    if not has_plain_bias(scheme):
        raise NotImplementedError("no bias that depends on positions alone")
    xp = framework.xp()

    def function(arrays):
        at = arrays["pos"]
        return posenc.bias(scheme, at, at, params_of(arrays), dtype=dtype, xp=xp)

    return function, {"pos": pos} | named(params)


def transform(name, framework, pos):
    """Queries ``(1, H, L, D)``, transformed, from the features that this takes."""
    scheme, params = make(name, int(pos.max()) + 1)
    if not has_transform(scheme):
        raise NotImplementedError("no transform")
    xp, hidden = framework.xp(), hidden_states(scheme, params, pos.size)

    def function(arrays):
        own, q, at = params_of(arrays), arrays["q"], arrays["pos"]
        features = None
        if hidden:
            tokens = posenc.Tokens(at, x=arrays["x"])
            features = posenc.features(scheme, own, tokens, q=q, k=q, xp=xp)[0].features
        return posenc.transform(scheme, q, at, role="query", params=own, features=features, xp=xp)

    return function, {"pos": pos, "q": normal(1, HEADS, pos.size, DIM)} | hidden | named(params)


def embedding(name, framework, pos, dtype=None):
    """The term ``(L, H D)`` that is added to tokens."""
    scheme, params = make(name, int(pos.max()) + 1)
    if not has_embedding(scheme):
        raise NotImplementedError("no embedding")
    xp = framework.xp()

    def function(arrays):
        return posenc.embedding(scheme, arrays["pos"], params_of(arrays), dtype=dtype, xp=xp)

    return function, {"pos": pos} | named(params)


def attention(name, framework, length, implementation="auto", heads=HEADS):
    """Causal attention of a whole sequence."""
    scheme, params = make(name, length, heads)
    if embeds_only(scheme):
        raise NotImplementedError("acts on embeddings only")

    hidden = hidden_states(scheme, params, length)
    attend = framework.attend(scheme, implementation=implementation)
    return attend, _vectors(framework, length, heads) | hidden | named(params)


def without_positions(framework, length):
    """The framework's own causal attention, with which the above is compared."""

    def function(arrays):
        return framework.without_positions(*tokens_of(arrays))

    return function, _vectors(framework, length, HEADS)


def decoding(name, framework, keys, given):
    """Attention of the last token to its cache, whose keys are transformed already.

    ``given``: with positions, as for a cache with padding; otherwise at the default ones.
    """
    scheme, params = make(name, keys)
    if embeds_only(scheme):
        raise NotImplementedError("acts on embeddings only")
    needs = posenc.cache_needs(scheme)
    vectors = {n: normal(1, HEADS, keys, DIM, seed=i) for i, n in enumerate("qkv")}
    pos = np.arange(keys)
    of_queries, of_keys = posenc.features(
        scheme, params, posenc.Tokens(pos, **hidden_states(scheme, params, keys)),
        q=vectors["q"], k=vectors["k"],
    )  # fmt: skip
    if needs.transformed:
        vectors["k"] = posenc.transform(
            scheme, vectors["k"], pos, role="key", params=params, features=of_keys.features
        )
    arrays = {n: framework.layout(a) for n, a in vectors.items()}
    arrays["q"] = framework.layout(vectors["q"][:, :, -1:])
    if needs.features:
        arrays |= named(of_queries[-1:].features, _OF_QUERY)
    if "features" in needs.keep:
        arrays |= named(of_keys.features, _OF_KEYS)
    if given or needs.transformed:
        arrays["pos"] = pos

    def function(arrays):
        tokens = posenc.Tokens(arrays.get("pos"))
        options = {"k_transformed": True} if needs.transformed else {}
        if needs.features:
            last = tokens if tokens.pos is None else tokens[-1:]
            options["queries"] = last.with_features(params_of(arrays, _OF_QUERY))
            tokens = tokens.with_features(params_of(arrays, _OF_KEYS))
        return framework.attention(
            *tokens_of(arrays), scheme, params_of(arrays), True,
            tokens=tokens, **options,
        )  # fmt: skip

    return function, arrays | named(params)


def _vectors(framework, length, heads):
    """q, k and v in the framework's layout."""
    return {n: framework.layout(normal(1, heads, length, DIM, seed=i)) for i, n in enumerate("qkv")}
