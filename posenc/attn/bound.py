"""What passes of every framework have in common: which layers share, and what a pass is of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from posenc.apply.feature_needs import by_role, has_features
from posenc.apply.transform import rotary, transform
from posenc.attn.arguments import Arguments
from posenc.attn.shared import Made, Shared
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme
from posenc.contract.tokens import Tokens
from posenc.layers import LayerPlan
from posenc.positions.integers import concrete_values


class LayerFacts(NamedTuple):
    """Which layers of a model are equal.

    Attributes
    ----------
    first
        For each layer, the first one with an equal scheme, the same params and the same window.
    rotary
        For each layer, the first one with the same angles.
    """

    first: tuple[int, ...]
    rotary: tuple[int, ...]

    @classmethod
    def of_plan(cls, plan: LayerPlan) -> LayerFacts:
        """The layers of a plan."""
        return cls.of(plan.schemes, plan.windows, plan.sources, plan.rotary_layers)

    @classmethod
    def of(
        cls,
        schemes: Sequence[PositionScheme],
        windows: Sequence[int | None],
        sources: Sequence[int],
        rotary: Sequence[int],
    ) -> LayerFacts:
        """From schemes, windows, and which set of learned arrays and angles each layer has."""

        def equal(n: int, layer: int) -> bool:
            scheme = schemes[layer]
            if n == layer or windows[n] != windows[layer]:
                return n == layer
            same_params = sources[n] == sources[layer] or not scheme.param_specs()
            return same_params and schemes[n] == scheme

        layers = range(len(schemes))
        first = tuple(next(n for n in layers if equal(n, layer)) for layer in layers)
        return cls(first, tuple(rotary))


class PassState:
    """What a forward pass has made, and the lengths, dtype and device that it is of.

    Parameters
    ----------
    layers
        What each layer is.
    mode, making
        As in ``Made``.
    """

    def __init__(
        self,
        layers: LayerFacts,
        mode: Callable[[], Any],
        making: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._layers, self._mode, self._making = layers, mode, making
        self._of_pass = Made(mode, making)
        self._groups: dict[int, tuple[Hashable, Shared]] = {}
        self._of: tuple[Any, ...] | None = None

    def shared(self, layer: int, version: Hashable = None) -> Shared:
        """What a layer shares with others: those with an equal scheme, params and window.

        ``version`` changes with the values of what it is made from, in a framework whose arrays may
        change in place: another one than before begins again, None takes what there is.
        """
        first = self._layers.first[layer]
        before, shared = self._groups.get(first, (None, None))
        if shared is None or version not in (None, before):
            if shared is not None:
                self._of, self._of_pass = None, Made(self._mode, self._making)
            made = Made(self._mode, self._making)
            shared = Shared(made, self._of_pass, self._layers.rotary[layer])
            self._groups[first] = version, shared
        return shared

    def check(self, batch: int, q_len: int, k_len: int, dtype: Any, device: Any) -> None:
        """Check that a layer is called with the lengths, dtype and device of the others."""
        of = batch, q_len, k_len, dtype, device
        if self._of is None:
            self._of = of
        elif self._of != of:
            names = "batch", "queries", "keys", "dtype", "device"
            before, now = (
                ", ".join(f"{name} {value}" for name, value in zip(names, each, strict=True))
                for each in (self._of, of)
            )
            raise ValueError(
                f"a pass is of one shape: an earlier layer had {before}, this one has {now}; call "
                "bind again for other tokens"
            )


def arguments_of_pass(
    tokens: Tokens | None, queries: Tokens | None, window: Any, mask: Any
) -> Arguments:
    """The arguments of every layer, with both records of tokens checked."""
    return Arguments(window=window, mask=mask, tokens=tokens, queries=queries).check()


def tokens_to_embed(given: Arguments, length: int) -> Tokens:
    """The tokens whose embeddings a pass begins with: the queries, or the last of all tokens."""
    side = given.of_keys if given.queries is None else given.queries
    pos = side.pos
    if pos is not None and pos.shape[-1] != length and given.queries is None:
        pos = pos[..., -length:]
    return Tokens(pos)


def with_hidden(
    given: Arguments, x: Array, q_len: int, scheme: PositionScheme, xp: Namespace
) -> Arguments:
    """The arguments of a layer with the hidden states ``x (B, K, C)`` of its keys' tokens.

    The queries' tokens are the last of them, unless the queries have hidden states of their own.

    Raises
    ------
    ValueError
        A scheme reads those of the queries, whose positions are not the last ones.
    """
    keys, queries = given.of_keys, given.queries
    given = given._replace(tokens=replace(keys, x=x))
    if queries is None or queries.x is not None:
        return given
    if needs_own_hidden(scheme, queries, keys, xp):
        raise ValueError(
            f"x: {type(scheme).__name__} reads hidden states of the queries' tokens, and "
            "queries.pos are not the last of tokens.pos: call positions[layer].attend with "
            "tokens=Tokens(..., x=...) and queries=Tokens(..., x=...)"
        )
    return given._replace(queries=replace(queries, x=x[:, x.shape[1] - q_len :]))


def needs_own_hidden(scheme: PositionScheme, queries: Tokens, keys: Tokens, xp: Namespace) -> bool:
    """Whether a scheme reads hidden states of queries that are not the last of the keys' tokens.

    False too where positions cannot be read, as in a traced program.
    """
    reads = by_role(scheme.feature_specs(), "hidden")["query"]
    return bool(reads) and not _may_be_last(queries, keys, xp)


def _may_be_last(queries: Tokens, keys: Tokens, xp: Namespace) -> bool:
    """Whether the queries may be the last of the keys' tokens, by positions that can be read."""
    if queries.pos is None or keys.pos is None:
        return True  # attention takes both or none
    own, every = concrete_values(queries.pos, xp), concrete_values(keys.pos, xp)
    if own is None or every is None or own.shape[-1] > every.shape[-1]:
        return True  # which cannot be told here, or is told later
    last = every[..., every.shape[-1] - own.shape[-1] :]
    if own.ndim == last.ndim == 2 and len(own) != len(last) and 1 not in (len(own), len(last)):
        return True  # batches that do not fit, as attention says
    return bool(np.all(own == last))


def transformed_keys(
    k: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None,
    given: Arguments,
    shared: Shared | None,
    xp: Namespace,
) -> Array:
    """Keys ``(B, Hk, L, D)`` of the queries' tokens of a pass, transformed, for a cache."""
    own = given.of_keys if given.queries is None else given.queries
    if own.pos is None:
        name = "tokens" if given.queries is None else "queries"
        raise ValueError(f"{name}.pos is missing: a pass that fills a cache needs positions")
    if Hook.REGIONS in scheme.hooks():
        raise ValueError(f"{type(scheme).__name__} transforms keys in several ways; cache raw keys")
    length = k.shape[2]
    own = Tokens(own.pos, places=own.places)
    if given.queries is None and own.pos.shape[-1] != length:
        own = own[-length:]
    made = None
    if Hook.ROTARY in scheme.hooks() and shared is not None:
        made = shared.of_pass.once(
            ("rotary", shared.rotary_key, "query", str(k.dtype), length),
            lambda: rotary(scheme, own, params, dtype=k.dtype, xp=xp),
        )
    try:
        return transform(
            scheme, k, own.pos, role="key", params=params, places=own.places, rotary=made, xp=xp
        )
    except KeyError as error:
        if not has_features(scheme):
            raise
        # Features are of a layer's hidden states or vectors.
        raise ValueError(
            f"{type(scheme).__name__} transforms keys by features of their tokens, which a pass "
            "does not know before attention: posenc.features computes them, and "
            "posenc.transform(..., features=...) takes them"
        ) from error
