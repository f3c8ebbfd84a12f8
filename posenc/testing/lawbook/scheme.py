"""Laws of the dataclass: it is a value, declares its params, and has no state."""

from __future__ import annotations

import copy
import difflib
import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from inspect import isfunction
from typing import Any, TypeAlias, cast

import array_api_compat.numpy as xp
import numpy as np

import posenc
from posenc.apply.shapes import as_column, as_row
from posenc.attn.channel_decay import ChannelDecay
from posenc.attn.earlier import with_earlier
from posenc.contract.params import Params, head_views, tile_views
from posenc.contract.protocol import Hook, PositionScheme, Role
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Host, readonly
from posenc.testing.law import law, require, require_equal
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tokens import RoleTokens

_LENGTHS = (1, 96, 4096, 2**20)
Answers: TypeAlias = "dict[str, Host | None]"
_CLOSE = 0.75  # similarity of names: "bais" is that close to "bias", "base" is not


@law("scheme")
def scheme_is_a_frozen_value(case: SchemeCase) -> None:
    """A scheme is a frozen, hashable dataclass; copies are equal and compute the same."""
    scheme: Any = case.scheme
    require(isinstance(scheme, PositionScheme), "not a PositionScheme")
    require(is_dataclass(scheme), "not a dataclass")
    before = _answers(case)
    scale = scheme.scale(case.head_dim)
    require(np.ndim(scale) == 0 and np.isfinite(scale), f"scale must be a finite number: {scale!r}")
    for name, value in before.items():
        require(value is None or not np.any(np.isnan(value)), f"{name} is NaN, near or far")
    twins = {
        "replace": replace(scheme),
        "pickle": pickle.loads(pickle.dumps(scheme)),
        "copy": copy.copy(scheme),
        "deepcopy": copy.deepcopy(scheme),
    }
    for how, twin in twins.items():
        require(twin == scheme and hash(twin) == hash(scheme), f"{how}: unequal, or another hash")
        after = _answers(replace(case, scheme=twin))
        changed = _first_difference(after, before)
        require(not changed, f"{how}: another {changed}")
    for name in ["brand_new", *(field.name for field in fields(scheme))]:
        try:
            setattr(scheme, name, 0)
        except FrozenInstanceError:
            continue
        raise AssertionError(f"{name} can be assigned; write @dataclass(frozen=True)")


@law("scheme")
def hooks_are_those_of_the_protocol(case: SchemeCase) -> None:
    """No method has a misspelled name of a method of ``PositionScheme``."""
    hooks = [name for name in dir(PositionScheme) if not name.startswith("_")]
    for kind in type(case.scheme).__mro__:
        if kind is PositionScheme:
            break
        own = (name for name, value in vars(kind).items() if isfunction(value))
        for name in (name for name in own if not name.startswith("_")):  # private helpers are free
            close = difflib.get_close_matches(name, hooks, n=1, cutoff=_CLOSE)
            require(not close or name in hooks, f"{name}: did you mean {close and close[0]}?")


@law("scheme")
def schemes_share_no_state(case: SchemeCase) -> None:
    """Schemes that differ in a field compute different results, and do not affect each other."""
    before = _answers(case)
    for group in case.named_variants():
        idle: list[str] = []
        for change, other in group:
            require(other != case.scheme, f"equal in spite of {change}")
            alike = not _first_difference(_variant(case, other), before)
            _require_unchanged(case, before, f"{change} was evaluated")
            # A field may affect only params, constants or initial values.
            if not alike or _declared(other) != _declared(case.scheme):
                break
            if _has_other_init(case, other):
                break
            idle.append(change)  # perhaps another value of the field changes something
        else:
            require(not idle, f"same results in spite of {' and '.join(idle)}")
    for change, twin in case.variants_of_uncompared_fields():
        if twin == case.scheme:  # programs compiled for one then run for the other
            changed = _first_difference(_variant(case, twin), before)
            require(not changed, f"equal in spite of {change}, but another {changed}")
    for name, value in case.params.items():
        reacts = False
        for step in (0.01, -0.01):  # a scheme may clip values, on one side of the first ones
            params = {**case.params, name: readonly(1.25 * value + step)}
            after = _answers(replace(case, params=params))
            reacts |= bool(_first_difference(after, before))
        require(reacts, f"same results whatever {name} is")
    if case.params:
        _require_unchanged(case, before, "other params were given")


def _require_unchanged(case: SchemeCase, before: Answers, once: str) -> None:
    """Raise unless the scheme still computes the same."""
    changed = _first_difference(_answers(case), before)
    require(not changed, f"another {changed} once {once}")


def _has_other_init(case: SchemeCase, other: PositionScheme) -> bool:
    """Whether another scheme has other initial values."""
    own, theirs = (posenc.init_params(scheme) for scheme in (case.scheme, other))
    return any(not np.array_equal(own[name], theirs[name]) for name in own)


def _declared(scheme: PositionScheme) -> dict[str, Any]:
    """Params and constants, by name."""
    return {"params": _shapes(scheme), "constants": dict(scheme.constants())}


def _shapes(scheme: PositionScheme) -> dict[str, tuple[int, ...]]:
    return {name: tuple(spec.shape) for name, spec in scheme.param_specs().items()}


def _variant(case: SchemeCase, other: PositionScheme) -> Answers:
    """Results of a variant, with the same params if their shapes fit."""
    same = _shapes(other) == _shapes(case.scheme)
    params = case.params if same else {}
    hidden_dim = case.hidden_dim if same else 0
    # head_dim=0: a variant may need another number of channels.
    variant = replace(
        case, scheme=other, params=params, head_dim=0, hidden_dim=hidden_dim, variants=()
    )
    return _answers(variant)


@law("scheme")
def reads_what_it_declares(case: SchemeCase) -> None:
    """A scheme reads exactly its declared params and constants."""
    scheme = case.scheme
    specs, constants = set(scheme.param_specs()), set(scheme.constants())
    require(not specs & constants, f"both a param and a constant: {specs & constants}")
    read, declared = _names_read(case), specs | constants
    for part, _ in scheme.regions():
        own = {name: a for name, a in case.params.items() if name in part.param_specs()}
        read |= _names_read(replace(case, scheme=part, params=own, variants=()))
        declared |= set(part.constants())
    require(read == declared, f"declares {declared or '{}'}, reads {read or '{}'}")


def _names_read(case: SchemeCase) -> set[str]:
    """Names of the arrays that any method of a scheme reads."""
    scheme, pos = case.scheme, np.arange(3)
    q, k = (case.tokens(pos, role) for role in _ROLES)
    whole, names = case.whole_params(), set[str]()

    def views(q: RoleTokens, k: RoleTokens, *, rows: bool = False) -> Params:
        """Params as the per-head methods receive them, for all heads at once."""
        sides = {t.role: t.features if rows else _tile_features(t) for t in (q, k)}
        made = head_views(scheme, dict(whole), dtype=whole.dtype, xp=xp, rows=rows, **sides)
        return _Recording(made, names)

    vectors = case.normal((1, case.heads, 3, case.head_dim), 0).astype(np.float32)
    where = pos if scheme.axes == 1 else cast(Host, q.places)
    at = as_column(pos), as_row(pos)
    scheme.bias(*at, params=views(q, k), xp=xp)
    scheme.key_bias(at[1], params=views(q, k), xp=xp)
    scheme.bias_factor(at[0], params=views(q, k), xp=xp)
    scheme.sink(at[0], params=views(q, k), xp=xp)
    if Hook.CHANNEL_DECAY in scheme.hooks():
        both = (Tokens(t.pos, features=t.features) for t in (q, k))
        decay = ChannelDecay(scheme, xp, whole.dtype, dict(whole), *both)
        *of_tokens, made = decay.of_pairs()
        scheme.channel_decay(*of_tokens, params=_Recording(made, names), xp=xp)
    if Hook.ADJUST_SCORES in scheme.hooks():
        scores = vectors @ np.swapaxes(vectors, -1, -2)
        sides = {t.role: _tile_features(t, rows=True) for t in (q, k)}
        made = head_views(scheme, dict(whole), dtype=whole.dtype, xp=xp, rows=True, **sides)
        own = _Recording(made, names)
        scheme.adjust_scores(scores, *at, visible=None, params=own, xp=xp)
    hidden = case.normal((1, 3, case.hidden_dim), 0).astype(np.float32)
    recorded = _Recording(whole, names)
    for role in _ROLES:
        scheme.transform(vectors, where, role=role, params=views(q, k, rows=True), xp=xp)
    for spec in scheme.feature_specs().values():
        if spec.reads == "vectors":
            spec.compute(vectors, where, scale=1.0, params=recorded, xp=xp)
        else:
            seen = with_earlier(hidden, spec.lookback, xp=xp) if spec.lookback else hidden
            spec.compute(seen, params=recorded, xp=xp)
    scheme.embedding(where, params=recorded, xp=xp)
    return names


_ROLES: tuple[Role, Role] = ("query", "key")


def _tile_features(tokens: RoleTokens, *, rows: bool = False) -> Any:
    return tile_views(tokens.bias_reads(np.float32), tokens.role, xp=xp, rows=rows)


@law("scheme")
def first_values_are_declared(case: SchemeCase) -> None:
    """Initial values have the declared shapes, are finite, and depend only on the seed."""
    drawn, again = (posenc.init_params(case.scheme, 3) for _ in range(2))
    for name, spec in case.scheme.param_specs().items():
        value = drawn[name]
        require(value.shape == tuple(spec.shape), f"{name}: {value.shape}, not {spec.shape}")
        require(np.all(np.isfinite(value)), f"{name}: not finite")
        require_equal(value, again[name], f"{name} drawn twice")
        require(not np.shares_memory(value, again[name]), f"{name} drawn twice is one array")
        if spec.per_head:
            require(spec.shape[0] in (1, case.heads), f"{name}: {spec.shape} is not per head")


@law("scheme")
def at_length_is_a_scheme_of_its_kind(case: SchemeCase) -> None:
    """``at_length`` returns the scheme itself, or one of its class with the same params."""
    scheme = case.scheme
    own, has_hook = _shapes(scheme), Hook.AT_LENGTH in scheme.hooks()
    for length in _LENGTHS:
        longer = scheme.at_length(length)
        require(isinstance(longer, type(scheme)), f"at {length}: a {type(longer).__name__}")
        theirs = _shapes(longer)
        require(own == theirs, f"at {length}: params {own} become {theirs}")
        require(longer is scheme or has_hook, "another scheme, though it has no at_length")
        require(scheme.at_length(length) == longer, f"at {length}: another one the second time")


class _Recording(Params):
    """Params that record the names that are read."""

    def __init__(self, params: Params, read: set[str]) -> None:
        super().__init__(params, params.dtype, params.query, params.key)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)


def _answers(case: SchemeCase) -> Answers:
    """Everything a scheme computes, near and far, on read-only arrays, by name."""
    high = case.positions[1]
    far = [p for p in (100, 130, 1000, 2**17 + 1, high) if 16 < p <= high]
    pos = readonly([*range(min(16, high + 1)), *far])
    x = readonly(case.normal((1, case.heads, pos.size, case.head_dim), 2).astype("float32"))
    scheme, params = case.scheme, case.params
    q, k = (case.tokens(pos, role) for role in _ROLES)

    answers = {
        "bias": case.bias(q, k),
        "embedding": posenc.embedding(scheme, pos, params),
        "transform of queries": case.transform(x, q, params),
        "transform of keys": case.transform(x, k, params),
        "scale": np.asarray([scheme.scale(dim) for dim in (case.head_dim, 64)], np.float64),
    }
    for tokens in (q, k):
        answers |= {f"{name} of the {tokens.role}": a for name, a in tokens.features.items()}
    if Hook.BIAS_FACTOR in scheme.hooks():
        views = head_views(scheme, case.whole_params(), dtype=np.dtype("float32"), xp=xp)
        answers["bias_factor"] = scheme.bias_factor(as_column(pos), params=views, xp=xp)
    if scheme.hooks() & {Hook.CHANNEL_DECAY, Hook.ADJUST_SCORES, Hook.SINK, Hook.REGIONS}:
        tensors: Any = {n: a.astype(np.float32) for n, a in case.tensors(12).items()}
        hidden = Tokens(x=tensors.pop("x"))
        answers["attention"] = posenc.attention(
            **tensors, scheme=scheme, params=params, causal=True, tokens=hidden,
            implementation="reference",
        )  # fmt: skip
    if Hook.REGIONS in scheme.hooks():
        answers["attention far away"] = _across_distances(case)
    for length in _LENGTHS:
        longer = scheme.at_length(length)
        if longer is scheme:
            there = answers
        else:
            there = _answers_at_length(replace(case, scheme=longer), q, k, x)
        answers |= {f"{name} at length {length}": there[name] for name in _AT_LENGTH}
    return answers


def _across_distances(case: SchemeCase) -> Host:
    """Attention of few tokens at distances of every size, as regions have them."""
    high = case.positions[1]
    pos = readonly([p for p in (0, 1, 3, 9, 33, 70, 150, 1000, 2**14, 2**18, 2**21) if p <= high])
    tensors: Any = {n: a.astype(np.float32) for n, a in case.tensors(pos.size, batch=1).items()}
    tokens = Tokens(pos, x=tensors.pop("x"))
    return np.asarray(
        posenc.attention(
            **tensors, scheme=case.scheme, params=case.params, tokens=tokens,
            implementation="reference",
        )
    )  # fmt: skip


_AT_LENGTH = ("bias", "transform of queries")


def _answers_at_length(case: SchemeCase, q: RoleTokens, k: RoleTokens, x: Host) -> Answers:
    """What ``at_length`` may change, by name."""
    return dict(zip(_AT_LENGTH, (case.bias(q, k), case.transform(x, q)), strict=True))


def _first_difference(left: Answers, right: Answers) -> str:
    """The name of the first result that differs; empty if none does."""
    if left.keys() != right.keys():
        return " and ".join(sorted(left.keys() ^ right.keys()))
    for name, value in left.items():
        if not np.array_equal(cast(Host, value), cast(Host, right[name]), equal_nan=False):
            return name
    return ""
