"""Laws of attention on one implementation: values and gradients equal those of the reference."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from posenc.attn.call import Call
from posenc.attn.masks import window
from posenc.contract.protocol import Array
from posenc.contract.tokens import Tokens
from posenc.testing.attention_case import AttentionCase
from posenc.testing.framework import Framework, Host, NumPy
from posenc.testing.large_biases import rounding_of_biases, visible_scores
from posenc.testing.law import law, require
from posenc.testing.lawbook.frameworks import gradients_of_embedding
from posenc.testing.places import of_tokens
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tolerances import ATTENTION_TOL, DERIVATIVE_TOL, REDUCTION_FACTOR, assert_near

_QUERIES, _KEYS = 9, 12
_LONG, _WINDOW = 20, 10  # several tiles of 8, and a window that crosses tiles
_STEP = 1e-5
_PASSES = 2  # forward and backward, of which each rounds the weights


def _hard_call(case: SchemeCase) -> AttentionCase:
    """Unsorted positions with gaps, segments, a window, shared keys, fully masked rows."""
    rng = np.random.default_rng(7)
    low, high = max(-20, case.positions[0]), min(40, case.positions[1])

    def draw_positions(length: int) -> Host:
        return np.stack(
            [rng.choice(np.arange(low, high + 1), length, replace=False) for _ in range(2)]
        )

    pos = draw_positions(_QUERIES), draw_positions(_KEYS)
    places: list[Host | None] = [None, None]
    if (axes := case.scheme.axes) > 1:
        places = [
            np.stack([draw_positions(length) for _ in range(axes)], axis=-1)
            for length in (_QUERIES, _KEYS)
        ]
    hidden = case.normal((2, _QUERIES, case.hidden_dim), 4) if case.reads_hidden else None
    seg = np.arange(_QUERIES) % 4  # segment 3 has no key
    queries = Tokens(pos[0], seg, places[0], x=hidden)
    tokens = Tokens(pos[1], np.stack([np.arange(_KEYS) % 3, np.zeros(_KEYS, int)]), places[1])
    tensors = case.tensors(_QUERIES, _KEYS, grouped=True)
    return case.call(tensors, causal=True, window=30, scale=0.5, tokens=tokens, queries=queries)


def _calls_with_options(case: SchemeCase) -> dict[str, AttentionCase]:
    """Calls with each option of attention alone, and with all together."""
    tensors, at = case.tensors(_KEYS), np.arange(_KEYS)
    valid = np.ones((2, _KEYS), bool)
    valid[0, :3] = valid[1, 5] = False
    added = case.normal((1, case.heads, _KEYS, _KEYS), 5)
    visible = (at <= at[:, None]) | (at < 4)
    visible[2] = False  # a fully masked query

    def call(extra: dict[str, Host], **options: object) -> AttentionCase:
        return case.call({**tensors, **extra}, **options)

    most = {
        "softcap": 2.0,
        "mask": window((4, 2), first=2) & _block_diffusion,
        "tokens": Tokens(exists=valid),
    }
    return {
        "all options": call({"bias": added}, **most),
        "all but a bias": call({}, **most),
        "bias": call({"bias": added}, causal=True),
        "softcap": call({}, causal=True, softcap=1.5),
        "mask": call({}, mask=visible[None, None]),
        "mask function": call({}, mask=_block_diffusion),
        "exists": call({}, causal=True, tokens=Tokens(exists=valid)),
        "window and first tokens": call({}, causal=True, mask=window(4, first=2)),
        "two-sided window": call({}, window=(4, 2)),
    }


def _block_diffusion(q_pos: Array, k_pos: Array) -> Array:
    """A mask: a token sees its own block of three tokens, and earlier blocks."""
    return k_pos // 3 <= q_pos // 3


def _hardest_call(case: SchemeCase, framework: Framework, implementation: str) -> AttentionCase:
    """The hard call; a plain causal one if the implementation refuses it."""
    call = _hard_call(case)
    try:
        call.attend(framework, implementation)
    except NotImplementedError:
        if implementation == "reference":
            raise
        return case.call(case.tensors(_KEYS), causal=True)
    return call


def assert_attention_near(
    out: Host,
    expected: Host,
    call: AttentionCase,
    what: str = "values",
    *,
    dtype: str = "float32",
    rows: Any = slice(None),
    queries: Any = slice(None),
) -> None:
    """Raise unless a result equals another within the roundings that ``call`` may have.

    ``out`` and ``expected`` are those of some ``rows`` of its batch, and of some ``queries``.
    """
    pos = np.broadcast_to(
        call.query_positions(), (len(call.tensors["q"]), call.tensors["q"].shape[2])
    )
    where = of_tokens("query", pos[rows][:, queries])
    try:
        assert_near(out, expected, ATTENTION_TOL[dtype], what, where=where)
    except AssertionError:
        more = rounding_of_biases(call, dtype).of_result[rows][:, :, queries]
        if not np.any(more):
            raise
        assert_near(out, expected, ATTENTION_TOL[dtype], what, where=where, more=more)


def reference(call: AttentionCase) -> Host:
    """The result of the reference in float64 on NumPy."""
    return call.attend(NumPy(), "reference", dtype="float64")


@law("implementation")
def implementation_equals_the_reference(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Attention is ``softmax(scale * q @ k.T + bias) @ v`` over the visible keys."""
    long, seg = case.tensors(_LONG, batch=1), np.repeat([0, 1], [8, _LONG - 8])
    calls = {
        "causal": case.call(case.tensors(_KEYS), causal=True),
        "window": case.call(long, causal=True, window=_WINDOW),
        "segments": case.call(long, tokens=Tokens(seg=seg)),
        "everything": _hard_call(case),
    }
    _require_equal_or_refused(calls, framework, implementation)


@law("implementation")
def implementation_takes_all_options(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """A bias, a softcap, a mask, padding, first tokens and a two-sided window."""
    # Compiling takes a second per call, so compilers get only the call with the most options.
    most = ("all options", "all but a bias") if framework.default_compiler is not None else ()
    _require_equal_or_refused(_calls_with_options(case), framework, implementation, most)


def _require_equal_or_refused(
    calls: dict[str, AttentionCase],
    framework: Framework,
    implementation: str,
    sufficient: tuple[str, ...] = (),
) -> None:
    """Raise unless each call equals the reference or is refused with a reason.

    Raises NotImplementedError if all calls are refused. Stops once a ``sufficient`` call equals
    the reference.
    """
    refused = []
    for name, call in calls.items():
        try:
            out = call.attend(framework, implementation)
        except NotImplementedError as reason:
            if implementation == "reference":
                raise
            require(str(reason), f"{name}: refused without a reason")
            refused.append(reason)
            continue
        assert_attention_near(out, reference(call), call, name)
        if name in sufficient:
            return
    if len(refused) == len(calls):
        raise refused[0]


@law("implementation")
def log_sum_exp_is_that_of_the_scores(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """``return_lse`` gives the log of the softmax denominator, including a sink."""
    calls = {
        "causal": case.call(case.tensors(_KEYS), causal=True),
        "everything": _hard_call(case),
    }
    refused = []
    for name, call in calls.items():
        try:
            lse = call.log_sum_exp(framework, implementation)
        except NotImplementedError as reason:
            if implementation == "reference":
                raise
            refused.append(reason)
            continue
        # Its error is that of the scores plus one rounding per term of the sum.
        where = of_tokens("query", call.query_positions())
        assert_near(lse, _log_sum_exp(call), ATTENTION_TOL["float32"], name, where=where)
    if len(refused) == len(calls):
        raise refused[0]


def _log_sum_exp(call: AttentionCase) -> Host:
    """``log(sum(exp(score)))`` of every row in float64, from explicit scores."""
    prepared = call.prepared()
    rows = all_scores(prepared)
    if prepared.sink is not None:
        rows.append(np.broadcast_to(prepared.sink[..., None], (*rows[0].shape[:3], 1)))
    return np.asarray(np.logaddexp.reduce(np.concatenate(rows, axis=-1), axis=-1))


def all_scores(prepared: Call) -> list[Host]:
    """Scores of each region of a call, or of the whole."""
    return [visible_scores(part) for part in prepared.regions or (prepared,)]


@law("implementation")
def implementation_equals_the_reference_in_other_floats(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Attention in float64 and half precision equals the reference within rounding errors."""
    call, refused = _hardest_call(case, framework, implementation), []
    expected = reference(call)
    dtypes = [name for name in framework.dtypes if name != "float32"]
    for dtype in dtypes:
        try:
            out = call.attend(framework, implementation, dtype=dtype)
        except NotImplementedError as reason:
            if implementation == "reference":
                raise
            refused.append(reason)
            continue
        assert_attention_near(out, expected, call, dtype, dtype=dtype)
    if dtypes and len(refused) == len(dtypes):
        raise refused[0]


@law("gradient")
def gradients_are_derivatives(case: SchemeCase, framework: Framework, implementation: str) -> None:
    """The gradient of every argument equals a finite difference."""
    call = _hardest_call(case, framework, implementation)
    d_out = case.normal(call.tensors["q"].shape, 9)
    _, gradients = call.gradients(framework, implementation, d_out)
    arrays = call.floats()
    message = f"gradients of {list(gradients)}, not of {list(arrays)}"
    require(gradients.keys() == arrays.keys(), message)
    for seed, (name, array) in enumerate(arrays.items()):
        require(np.all(np.isfinite(gradients[name])), f"gradient of {name} is not finite")
        direction = np.random.default_rng(seed).standard_normal(array.shape)
        along = float(np.sum(gradients[name] * direction))
        expected = _finite_difference(call, name, direction, d_out)
        size = max(1.0, float(np.linalg.norm(gradients[name]) * np.linalg.norm(direction)))
        what = f"derivative along {name}"
        _assert_gradient_near(along / size, expected / size, DERIVATIVE_TOL, what, call)


def _assert_gradient_near(
    actual: Any, expected: Any, tolerance: float, what: str, call: AttentionCase
) -> None:
    """Raise unless gradients agree within the roundings that ``call`` may have."""
    try:
        assert_near(actual, expected, tolerance, what)
    except AssertionError:
        more = _PASSES * rounding_of_biases(call).of_weight
        if more == 0:
            raise
        assert_near(actual, expected, tolerance + more, what)


def _finite_difference(call: AttentionCase, name: str, direction: Any, d_out: Host) -> float:
    """The derivative of ``sum(d_out * attention)`` along a direction, by a central difference."""
    values, array = [], call.floats()[name]
    for step in (_STEP, -_STEP):
        varied = call.with_float(name, array + step * direction)
        values.append(float(np.sum(d_out * reference(varied))))
    return (values[0] - values[1]) / (2 * _STEP)


@law("gradient")
def gradient_reaches_every_param(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Every learned array gets a gradient, in every head, if it affects attention at all."""
    specs = case.scheme.param_specs()
    if not specs:
        return
    tensors = case.tensors(_KEYS)
    d_out = case.normal((2, case.heads, _KEYS, case.head_dim), 9)
    call = case.call(tensors, causal=True)
    gradients = call.gradients(framework, implementation, d_out)[1]
    embedded = gradients_of_embedding(case, framework)
    for name, spec in specs.items():
        heads = spec.shape[0] if spec.per_head else 1
        zero = _heads_without(gradients[call.name_in_floats(name)], heads)
        if name in embedded:
            zero = [head for head in zero if head in _heads_without(embedded[name], heads)]
        zero = [head for head in zero if not _cancels_in_softmax(call, name, head)]
        later = [head for head in zero if _is_of_later_keys(case.call(tensors), name, head)]
        if later:
            found = _gradient_without_a_mask(case.call(tensors), framework, implementation, name)
            still = [] if found is None else _heads_without(found, heads)
            zero = [head for head in zero if head not in later or head in still]
        where = f" of heads {zero}" if spec.per_head else ""
        require(not zero, f"no gradient reaches {name}{where}")


def _heads_without(gradient: Host, heads: int) -> list[int]:
    """The heads in whose part of an array the gradient is 0."""
    by_head = np.asarray(gradient != 0).reshape(heads, -1)
    return [head for head, own in enumerate(by_head) if not np.any(own)]


def _cancels_in_softmax(call: AttentionCase, name: str, head: int) -> bool:
    """Whether a learned array only adds a constant per query to the scores, which softmax ignores.

    The last offset of FIRE's network does, and that of DAPE's.
    """
    before, after = _with_another(call, name, head)
    if _same_scores(before, after):
        return False
    tolerance = ATTENTION_TOL["float64"]
    return bool(np.allclose(reference(after), reference(before), rtol=0, atol=tolerance))


def _is_of_later_keys(call: AttentionCase, name: str, head: int) -> bool:
    """Whether a learned array changes scores without a causal mask, and none with it."""
    masked = replace(call, options={**call.options, "causal": True})
    return _same_scores(*_with_another(masked, name, head)) and not _same_scores(
        *_with_another(call, name, head)
    )


def _gradient_without_a_mask(
    call: AttentionCase, framework: Framework, implementation: str, name: str
) -> Host | None:
    """The gradient of an array; None if the call is refused, or softmax does not see the array."""
    specs = call.scheme.param_specs()
    heads = specs[name].shape[0] if specs[name].per_head else 1
    if all(_cancels_in_softmax(call, name, head) for head in range(heads)):
        return None
    d_out = np.asarray(np.random.default_rng(9).standard_normal(call.tensors["q"].shape))
    try:
        gradients = call.gradients(framework, implementation, d_out)[1]
    except NotImplementedError:  # reported by the laws of the implementation
        return None
    return gradients[call.name_in_floats(name)]


def _with_another(call: AttentionCase, name: str, head: int) -> tuple[AttentionCase, AttentionCase]:
    """The call in float64, and with another value of one head's part of a learned array."""
    wide = {each: array.astype(np.float64) for each, array in call.params.items()}
    shifted, per_head = np.array(wide[name]), call.scheme.param_specs()[name].per_head
    shifted[head if per_head else ...] += 0.25
    return replace(call, params=wide), replace(call, params={**wide, name: shifted})


def _same_scores(call: AttentionCase, other: AttentionCase) -> bool:
    """Whether two calls have the same scores, to the bit."""
    pairs = zip(all_scores(call.prepared()), all_scores(other.prepared()), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@law("compiler")
def compiled_attention_equals_eager(case: SchemeCase, framework: Framework, compiler: str) -> None:
    """Compiled attention and its gradients equal eager ones, on every implementation."""
    call = _hard_call(case)
    d_out = case.normal((2, case.heads, _QUERIES, case.head_dim), 9)
    for implementation in framework.implementations:
        with suppress(NotImplementedError):  # reported by the laws of each implementation
            eager = call.attend_eagerly(framework, implementation)
            compiled = call.attend(framework, implementation, compiler=compiler)
            assert_attention_near(compiled, eager, call, implementation)
            if not framework.differentiable:
                continue
            expected = call.gradients(framework, implementation, d_out)[1]
            _, gradients = call.gradients(framework, implementation, d_out, compiler=compiler)
            for name, gradient in gradients.items():
                summed = 1 if name in ("q", "k", "v") else REDUCTION_FACTOR
                what = f"gradient of {name} on {implementation}"
                tolerance = summed * ATTENTION_TOL["float32"]
                _assert_gradient_near(gradient, expected[name], tolerance, what, call)
