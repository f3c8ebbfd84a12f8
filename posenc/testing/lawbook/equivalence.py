"""Laws of equivalence on one implementation: caches, packing, padding and batching change nothing.

Each compares a part computed by the implementation with the whole computed by the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import posenc
from posenc.apply.transform import has_transform
from posenc.attn.caches import CacheNeeds
from posenc.contract.protocol import Hook
from posenc.contract.tokens import Tokens
from posenc.positions.integers import left_padded, packed
from posenc.testing.attention_case import AttentionCase
from posenc.testing.framework import Framework, Host
from posenc.testing.law import law, require
from posenc.testing.lawbook.attention import all_scores, assert_attention_near, reference
from posenc.testing.lawbook.queries import sink_moves
from posenc.testing.places import of_tokens
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

_LENGTH = 12
_FLOAT32 = ATTENTION_TOL["float32"]
Tensors = Mapping[str, Host]


def _rows(tensors: Tensors, q_rows: Any, k_rows: Any) -> dict[str, Host]:
    """Queries at ``q_rows``; keys, values and hidden states at ``k_rows``."""
    rows = {"q": q_rows, "k": k_rows, "v": k_rows}
    return {n: tensors[n][:, :, at] for n, at in rows.items()} | {"x": tensors["x"][:, k_rows]}


def _call_at(
    case: SchemeCase, tensors: Tensors, pos: Host, seg: Host, exists: Host | None = None
) -> AttentionCase:
    """A causal call at positions and segments, which have one shape for all laws."""
    batch, real = len(tensors["q"]), np.ones(pos.shape[-1:], bool) if exists is None else exists
    own = (np.broadcast_to(a, (batch, pos.shape[-1])) for a in (pos, seg, real))
    at, segments, given = own
    return case.call(tensors, causal=True, tokens=Tokens(at, segments, exists=given))


def _reference_of(case: SchemeCase, tensors: Tensors) -> Host:
    """Causal attention of a whole sequence by the reference."""
    return reference(case.call(tensors, causal=True))


@law("implementation")
def decoding_equals_prefill(case: SchemeCase, framework: Framework, implementation: str) -> None:
    """The last queries against all keys give the last rows of the whole."""
    tensors = case.tensors(_LENGTH)
    whole = _reference_of(case, tensors)
    for start in (_LENGTH - 1, _LENGTH - 4):
        part = _rows(tensors, slice(start, None), slice(None))
        call = case.call(part, causal=True)
        out = call.attend(framework, implementation)
        assert_attention_near(out, whole[:, :, start:], call, f"tokens from {start}")


@law("implementation")
def one_token_per_sequence_equals_prefill(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """A step of decoding equals prefill where each sequence of a batch is at its own position."""
    offsets = [min(offset, case.positions[1] + 1 - _LENGTH) for offset in _OFFSETS]
    batch = len(offsets)
    tensors, first = case.tensors(_LENGTH, batch=batch), np.asarray(offsets)[:, None]
    last = _rows(tensors, slice(-1, None), slice(None))
    # Caches of one length at other positions, and of several lengths from position 0 on.
    sizes = [_LENGTH - 5 * row for row in range(batch)]
    everywhere = np.arange(_LENGTH) + first
    calls = {
        "other positions": Tokens(everywhere), "other lengths": left_padded(sizes, _LENGTH)
    }  # fmt: skip
    for name, tokens in calls.items():
        at = tokens.pos
        call = case.call(last, causal=True, tokens=tokens)
        out = call.attend(framework, implementation)
        for row in range(batch):
            padded = tokens.exists is not None
            own = slice(_LENGTH - sizes[row], None) if padded else slice(None)
            alone = {n: a[row : row + 1] for n, a in _rows(tensors, own, own).items()}
            there = at[row : row + 1, own]
            whole = reference(_call_at(case, alone, there, np.zeros_like(there)))[0, :, -1:]
            what, rows = f"{name}, sequence {row} of {batch}", slice(row, row + 1)
            assert_attention_near(out[rows], whole[None], call, what, rows=rows)


_OFFSETS = (120, 0, 99_989)  # the last tokens are at 131, 11 and 100 000


@law("implementation")
def cache_may_hold_transformed_keys(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Keys that are transformed before caching are not transformed again."""
    if not has_transform(case.scheme):
        return
    needs = posenc.cache_needs(case.scheme)
    tensors = case.tensors(_LENGTH)
    whole, cache = _reference_of(case, tensors), _Cache(case, needs)
    cache.add(_rows(tensors, slice(None), slice(None)))
    step = cache.step(_LENGTH - 1, tensors)
    assert_attention_near(step.attend(framework, implementation), whole[:, :, -1:], step)


@law("implementation")
def cache_holds_what_is_needed(case: SchemeCase, framework: Framework, implementation: str) -> None:
    """Chunked prefill and decoding need only what ``posenc.cache_needs`` names."""
    tensors = case.tensors(_LENGTH)
    whole, start = _reference_of(case, tensors), 0
    cache = _Cache(case, posenc.cache_needs(case.scheme))
    for size in _CHUNKS:
        rows = slice(start, start + size)
        cache.add(_rows(tensors, rows, rows))
        step, what = cache.step(start, tensors), f"tokens {start} to {rows.stop - 1}"
        assert_attention_near(step.attend(framework, implementation), whole[:, :, rows], step, what)
        start = rows.stop


_CHUNKS = (5, 6, 1)


class _Cache:
    """A cache that holds only what the scheme declares to need of earlier tokens."""

    def __init__(self, case: SchemeCase, needs: CacheNeeds) -> None:
        self._case, self._needs, self._length = case, needs, 0
        self._kept: dict[str, Host] = {}
        self._carry: dict[str, Host] | None = None
        self._x_before: Host | None = None
        self._keys = self._queries = Tokens()

    def add(self, tensors: Tensors) -> None:
        """Append the next tokens."""
        case, needs = self._case, self._needs
        k, pos = tensors["k"], np.arange(self._length, self._length + tensors["k"].shape[2])
        self._length += pos.size
        wide = {name: a.astype(np.float64) for name, a in case.params.items()}
        queries, keys = posenc.features(
            case.scheme, wide, Tokens(pos, x=tensors["x"]), q=tensors["q"], k=k,
            carry=self._carry, x_before=self._x_before,
        )  # fmt: skip
        of_keys = keys.features or {}
        if needs.transformed:
            k = posenc.transform(case.scheme, k, pos, role="key", params=wide, features=of_keys)
        new = {"k": k, "v": tensors["v"]}
        kept = of_keys if "features" in needs.keep else {}
        now = Tokens(pos, features=kept if needs.features else None)
        self._keys = now if self._keys.pos is None else self._keys.concat(now)
        self._queries = replace(queries, x=None)
        for name, array in new.items():
            before = [self._kept[name]] if name in self._kept else []
            self._kept[name] = np.concatenate([*before, array], axis=2)
        if needs.carry:
            self._carry = {name: of_keys[name][:, :, -1] for name in needs.carry}
        if needs.x_before:
            before = [] if self._x_before is None else [self._x_before]
            self._x_before = np.concatenate([*before, tensors["x"]], axis=1)[:, -needs.x_before :]

    def step(self, start: int, tensors: Tensors) -> AttentionCase:
        """Attention of the queries from ``start`` on to all cached keys."""
        now = slice(start, self._length)
        given = {"q": tensors["q"][:, :, now], **self._kept}
        where: dict[str, Any] = {"tokens": self._keys}
        where["queries"] = self._queries[start - self._length :]
        if not self._needs.features:
            where["queries"] = replace(where["queries"], features=None)
        if self._needs.transformed:
            where["k_transformed"] = True
        return self._case.call(given, causal=True, **where)


@law("implementation")
def places_default_to_positions(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Coordinates equal to the positions on every axis change nothing, in any order of tokens."""
    tensors, axes = case.tensors(_LENGTH), case.scheme.axes
    whole, at = _reference_of(case, tensors), np.arange(_LENGTH)
    places = at if axes == 1 else np.stack([at] * axes, axis=-1)
    given = case.call(tensors, causal=True, tokens=Tokens(places=places))
    out, what = given.attend(framework, implementation), "places equal to positions"
    assert_attention_near(out, whole, given, what)
    order = np.random.default_rng(12).permutation(_LENGTH)
    shuffled = _rows(tensors, order, order)
    call = case.call(shuffled, causal=True, tokens=Tokens(order, places=places[order]))
    out = call.attend(framework, implementation)
    assert_attention_near(out, whole[:, :, order], call, "likewise, in another order")


@law("implementation")
def heads_are_independent(case: SchemeCase, framework: Framework, implementation: str) -> None:
    """A change to one head's vectors changes no other head, unless the scheme adjusts scores."""
    if case.heads == 1 or Hook.ADJUST_SCORES in case.scheme.hooks():
        return
    tensors, own = case.tensors(_LENGTH), case.heads - 1
    other = {name: np.array(array) for name, array in tensors.items()}
    for name in ("q", "k", "v"):
        other[name][:, own] += 1
    before, after = (
        case.call(arrays, causal=True).attend(framework, implementation)
        for arrays in (tensors, other)
    )
    where = of_tokens("query", np.arange(_LENGTH))
    assert_near(after[:, :own], before[:, :own], _FLOAT32, where=where)
    require(
        not np.array_equal(after[:, own], before[:, own]),
        "a head did not change, though its vectors did",
    )


@law("implementation")
def packed_equals_separate(case: SchemeCase, framework: Framework, implementation: str) -> None:
    """Documents packed into one sequence, each from position 0, equal separate documents."""
    sizes = [3, 5, 4]
    tensors = case.tensors(_LENGTH)
    tokens = packed(sizes)
    seg = np.asarray(tokens.seg)
    call = _call_at(case, tensors, tokens.pos, seg)
    out = call.attend(framework, implementation)
    for document in range(len(sizes)):
        rows = np.flatnonzero(seg == document)
        alone, what = _reference_of(case, _rows(tensors, rows, rows)), f"document {document}"
        assert_attention_near(out[:, :, rows], alone, call, what, queries=rows)


@law("implementation")
def left_padding_changes_nothing(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """A left-padded sequence gives the same result as alone, and 0 at the padding."""
    tensors, pad = case.tensors(_LENGTH), 4
    tokens = left_padded([_LENGTH, _LENGTH - pad], _LENGTH)
    call = _call_at(case, tensors, tokens.pos, np.zeros_like(tokens.pos), tokens.exists)
    out = call.attend(framework, implementation)
    rows = slice(pad, None)
    second = {name: a[1:] for name, a in _rows(tensors, rows, rows).items()}
    expected, row = _reference_of(case, second), slice(1, None)
    assert_attention_near(out[1:, :, rows], expected, call, rows=row, queries=rows)
    require(not np.any(out[1, :, :pad]), "a padded query is not 0")


@law("implementation")
def batch_rows_are_independent(case: SchemeCase, framework: Framework, implementation: str) -> None:
    """Permuting the batch permutes the result; each sequence has its own positions."""
    tensors = case.tensors(_LENGTH)
    rng = np.random.default_rng(10)
    pos = np.stack([rng.permutation(2 * _LENGTH)[:_LENGTH] for _ in range(2)])
    seg = np.zeros_like(pos)
    flipped = {name: a[::-1] for name, a in tensors.items()}
    call = _call_at(case, flipped, pos[::-1], seg)
    out = call.attend(framework, implementation)
    for row in range(2):
        alone = {name: a[row : row + 1] for name, a in tensors.items()}
        expected = reference(_call_at(case, alone, pos[row : row + 1], seg[:1]))
        own = slice(1 - row, 2 - row)
        assert_attention_near(out[own], expected, call, f"sequence {row}", rows=own)


@law("implementation")
def order_in_memory_does_not_matter(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Tokens shuffled together with their positions give the shuffled result."""
    tensors = case.tensors(_LENGTH)
    order = np.random.default_rng(11).permutation(_LENGTH)
    shuffled = _rows(tensors, order, order)
    # Without segments here: cumulative features must follow positions in this case too.
    call = case.call(shuffled, causal=True, tokens=Tokens(order))
    out = call.attend(framework, implementation)
    assert_attention_near(out, _reference_of(case, tensors)[:, :, order], call)


@law("implementation")
def causal_hides_the_future(case: SchemeCase, framework: Framework, implementation: str) -> None:
    """With a causal mask later tokens change nothing; without it they do."""
    tensors, now = case.tensors(_LENGTH), 7
    later = {name: np.array(array) for name, array in tensors.items()}
    for name in ("q", "k", "v"):
        later[name][:, :, now:] += 3
    later["x"][:, now:] += 3
    for causal in (True, False):
        before, after = (
            case.call(arrays, causal=causal).attend(framework, implementation)[:, :, :now]
            for arrays in (tensors, later)
        )
        if causal:
            assert_near(after, before, _FLOAT32, where=of_tokens("query", np.arange(now)))
        elif not _bias_hides_later(case, tensors, now):
            require(
                not np.array_equal(after, before),
                "later tokens change nothing without a mask either",
            )


def _bias_hides_later(case: SchemeCase, tensors: Tensors, now: int) -> bool:
    """Whether the bias itself masks all later tokens, or leaves them weights that round to 0."""
    call = case.call(tensors).prepared()
    scores = np.concatenate(all_scores(call), axis=-1)[:, :, :now]
    below = scores - np.max(scores, axis=-1, keepdims=True)
    later = np.arange(scores.shape[-1]) % _LENGTH >= now  # of every region
    return bool(np.all(below[..., later] < _NO_WEIGHT))


_NO_WEIGHT = -104.0  # exp of it is 0 in float32


@law("implementation")
def relative_scheme_may_begin_anywhere(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """A scheme with only a relative bias gives the same result from any first position."""
    tensors, by = case.tensors(_LENGTH), min(1000, case.positions[1] + 1 - _LENGTH)
    absolute = has_transform(case.scheme) or sink_moves(case, np.arange(_LENGTH), by)
    if not case.scheme.relative or absolute:
        return
    pos, seg = np.arange(_LENGTH) + by, np.zeros(_LENGTH, int)
    out = _call_at(case, tensors, pos, seg).attend(framework, implementation)
    # No more roundings than of a call at the first positions: an implementation may subtract them.
    near = _call_at(case, tensors, pos - by, seg)
    assert_attention_near(out, _reference_of(case, tensors), near)
