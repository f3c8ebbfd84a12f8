"""Laws of the dataclass itself: a value, with declared params and no memory."""

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
from posenc.evaluate import as_column, as_row
from posenc.params import Params, head_views, tile_views
from posenc.protocol import PositionScheme, Role
from posenc.testing.framework import Host, readonly
from posenc.testing.law import law, require, require_equal
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tokens import Tokens

_LENGTHS = (1, 96, 4096, 2**20)
Answers: TypeAlias = "dict[str, Host | None]"
_CLOSE = 0.75  # "bais" is that close to "bias", "base" is not


@law("scheme")
def scheme_is_a_frozen_value(case: SchemeCase) -> None:
    """A scheme is a frozen, hashable dataclass; copies are equal and answer alike."""
    scheme: Any = case.scheme
    require(isinstance(scheme, PositionScheme), "not a PositionScheme")
    require(is_dataclass(scheme), "not a dataclass")
    before = _answers(case)
    scale = scheme.scale(case.head_dim)
    require(np.ndim(scale) == 0 and np.isfinite(scale), f"scale must be a finite number: {scale!r}")
    for name, answer in before.items():
        require(answer is None or not np.any(np.isnan(answer)), f"{name} is NaN, near or far")
    twins = {
        "replace": replace(scheme),
        "pickle": pickle.loads(pickle.dumps(scheme)),
        "copy": copy.copy(scheme),
        "deepcopy": copy.deepcopy(scheme),
    }
    for how, twin in twins.items():
        require(twin == scheme and hash(twin) == hash(scheme), f"{how}: unequal, or another hash")
        after = _answers(replace(case, scheme=twin))
        other = _differing(after, before)
        require(not other, f"{how}: another {other}")
    for name in ["brand_new", *(field.name for field in fields(scheme))]:
        try:
            setattr(scheme, name, 0)
        except FrozenInstanceError:
            continue
        raise AssertionError(f"{name} can be assigned; write @dataclass(frozen=True)")


@law("scheme")
def hooks_are_those_of_the_protocol(case: SchemeCase) -> None:
    """A method that is nearly named like one of ``PositionScheme`` is meant to be it."""
    hooks = [name for name in dir(PositionScheme) if not name.startswith("_")]
    for kind in type(case.scheme).__mro__:
        if kind is PositionScheme:
            break
        own = (name for name, value in vars(kind).items() if isfunction(value))
        for name in (name for name in own if not name.startswith("_")):  # helpers are no hooks
            close = difflib.get_close_matches(name, hooks, n=1, cutoff=_CLOSE)
            require(not close or name in hooks, f"{name}: did you mean {close and close[0]}?")


@law("scheme")
def schemes_share_no_state(case: SchemeCase) -> None:
    """Schemes that differ in a field answer differently, and leave each other's answers alone."""
    before = _answers(case)
    for change, other in case.named_variants():
        require(other != case.scheme, f"equal in spite of {change}")
        alike = not _differing(_variant(case, other), before)
        # A field may steer params, constants, or first values alone.
        idle = alike and _declared(other) == _declared(case.scheme)
        require(not idle or _drawn_otherwise(case, other), f"answers alike in spite of {change}")
        _require_unmoved(case, before, f"{change} has answered")
    for change, twin in case.variants_of_uncompared_fields():
        if twin == case.scheme:  # and so what was compiled for one runs for the other
            other_part = _differing(_variant(case, twin), before)
            require(not other_part, f"equal in spite of {change}, but another {other_part}")
    for name, value in case.params.items():
        params = {**case.params, name: readonly(1.25 * value + 0.01)}
        after = _answers(replace(case, params=params))
        require(_differing(after, before), f"answers alike whatever {name} is")
    if case.params:
        _require_unmoved(case, before, "other params were given")


def _require_unmoved(case: SchemeCase, before: Answers, once: str) -> None:
    """The scheme's answers are still what they were."""
    other = _differing(_answers(case), before)
    require(not other, f"another {other} once {once}")


def _drawn_otherwise(case: SchemeCase, other: PositionScheme) -> bool:
    """Whether another scheme's first values are others."""
    own, theirs = (posenc.init_params(scheme) for scheme in (case.scheme, other))
    return any(not np.array_equal(own[name], theirs[name]) for name in own)


def _declared(scheme: PositionScheme) -> dict[str, Any]:
    """Params and constants, by name."""
    return {"params": _shapes(scheme), "constants": dict(scheme.constants())}


def _shapes(scheme: PositionScheme) -> dict[str, tuple[int, ...]]:
    return {name: tuple(spec.shape) for name, spec in scheme.param_specs().items()}


def _variant(case: SchemeCase, other: PositionScheme) -> Answers:
    """What another scheme of the kind answers, on the same params if it takes them."""
    same = _shapes(other) == _shapes(case.scheme)
    params = case.params if same else {}
    hidden_dim = case.hidden_dim if same else 0
    # A transform asks for its own number of channels.
    tried = replace(
        case, scheme=other, params=params, head_dim=0, hidden_dim=hidden_dim, variants=()
    )
    return _answers(tried)


@law("scheme")
def reads_what_it_declares(case: SchemeCase) -> None:
    """A scheme reads all of its params and constants, and nothing else."""
    scheme = case.scheme
    specs, constants = set(scheme.param_specs()), set(scheme.constants())
    require(not specs & constants, f"both a param and a constant: {specs & constants}")
    read = _read(case)
    for part, _ in scheme.regions():
        own = {name: a for name, a in case.params.items() if name in part.param_specs()}
        read |= _read(replace(case, scheme=part, params=own, variants=()))
    require(
        read == specs | constants, f"declares {specs | constants or '{}'}, reads {read or '{}'}"
    )


def _read(case: SchemeCase) -> set[str]:
    """Names of the arrays that any method of a scheme reads."""
    scheme, pos = case.scheme, np.arange(3)
    q, k = (case.tokens(pos, role) for role in _ROLES)
    whole, found = case.whole_params(), set[str]()

    def views(q: Tokens, k: Tokens, *, rows: bool = False) -> Params:
        """What methods read that speak of one head, of all heads at once."""
        sides = {t.role: t.features if rows else _seen(t) for t in (q, k)}
        made = head_views(scheme, dict(whole), dtype=whole.dtype, xp=xp, rows=rows, **sides)
        return _Recording(made, found)

    vectors = case.normal((1, case.heads, 3, case.head_dim), 0).astype(np.float32)
    where = pos if scheme.axes == 1 else cast(Host, q.places)
    at = as_column(pos), as_row(pos)
    scheme.bias(*at, params=views(q, k), xp=xp)
    scheme.key_bias(at[1], params=views(q, k), xp=xp)
    scheme.sink(at[0], params=views(q, k), xp=xp)
    if "adjust_scores" in scheme.hooks():
        scores = vectors @ np.swapaxes(vectors, -1, -2)
        scheme.adjust_scores(scores, *at, visible=None, params=views(q, k), xp=xp)
    hidden = case.normal((1, 3, case.hidden_dim), 0).astype(np.float32)
    recorded = _Recording(whole, found)
    for role in _ROLES:
        scheme.transform(vectors, where, role=role, params=views(q, k, rows=True), xp=xp)
        scheme.hidden_features(hidden, role=role, params=recorded, xp=xp)
    scheme.query_features(vectors, where, scale=1.0, params=recorded, xp=xp)
    scheme.key_features(vectors, where, scale=1.0, params=recorded, xp=xp)
    scheme.embedding(where, params=recorded, xp=xp)
    return found


_ROLES: tuple[Role, Role] = ("query", "key")


def _seen(tokens: Tokens) -> Any:
    return tile_views(tokens.seen(np.float32), tokens.role, xp=xp)


@law("scheme")
def first_values_are_declared(case: SchemeCase) -> None:
    """First values have the declared shapes, are finite, and are the same for the same seed."""
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
    """``at_length`` gives the same scheme, or one of its kind that takes the same params."""
    scheme = case.scheme
    own, untouched = _shapes(scheme), "at_length" not in scheme.hooks()
    for length in _LENGTHS:
        longer = scheme.at_length(length)
        require(isinstance(longer, type(scheme)), f"at {length}: a {type(longer).__name__}")
        theirs = _shapes(longer)
        require(own == theirs, f"at {length}: params {own} become {theirs}")
        require(longer is scheme or not untouched, "another scheme, though it has no at_length")
        require(scheme.at_length(length) == longer, f"at {length}: another one the second time")


class _Recording(Params):
    """Params that remember what was read."""

    def __init__(self, params: Params, read: set[str]) -> None:
        super().__init__(params, params.dtype, params.query, params.key)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)


def _answers(case: SchemeCase) -> Answers:
    """All that a scheme says, near and far, on read-only arrays, by name."""
    high = case.positions[1]
    far = [p for p in (13, 100, 130, 1000, 2**17 + 1, high) if 12 < p <= high]
    pos = readonly([*range(min(12, high + 1)), *far])
    x = readonly(case.normal((1, case.heads, pos.size, case.head_dim), 2).astype("float32"))
    scheme, params = case.scheme, case.params
    q, k = (case.tokens(pos, role) for role in _ROLES)

    def turned(scheme: PositionScheme, tokens: Tokens) -> Host:
        return replace(case, scheme=scheme).transform(x, tokens, params)

    found = {
        "bias": case.bias(q, k),
        "embedding": posenc.embedding(scheme, pos, params),
        "transform of queries": turned(scheme, q),
        "transform of keys": turned(scheme, k),
        "scale": np.asarray([scheme.scale(dim) for dim in (case.head_dim, 64)], np.float64),
    }
    for tokens in (q, k):
        found |= {f"{name} of the {tokens.role}": a for name, a in tokens.features.items()}
    if scheme.hooks() & {"adjust_scores", "sink", "regions"}:
        tensors: Any = {n: a.astype(np.float32) for n, a in case.tensors(12).items()}
        found["attention"] = posenc.attention(
            **tensors, scheme=scheme, params=params, causal=True, implementation="reference"
        )
    longer = {length: scheme.at_length(length) for length in _LENGTHS}
    return found | {
        f"transform at length {length}": found["transform of queries"]
        if other is scheme
        else turned(other, q)
        for length, other in longer.items()
    }


def _differing(left: Answers, right: Answers) -> str:
    """The first answer that is not the same, by name; empty if all are."""
    if left.keys() != right.keys():
        return " and ".join(sorted(left.keys() ^ right.keys()))
    for name, answer in left.items():
        if not np.array_equal(cast(Host, answer), cast(Host, right[name]), equal_nan=False):
            return name
    return ""
