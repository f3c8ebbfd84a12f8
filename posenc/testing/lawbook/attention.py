"""Laws of attention on one implementation: the values and the gradients of the definition."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from posenc.attn.call import Call, prepare
from posenc.evaluate import as_column, as_row
from posenc.protocol import Array
from posenc.testing.attention_case import AttentionCase
from posenc.testing.framework import Framework, Host, NumPy
from posenc.testing.law import law, require
from posenc.testing.lawbook.frameworks import gradients_of_embedding
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tolerances import ATTENTION_TOL, DERIVATIVE_TOL, REDUCTION_FACTOR, assert_near

_QUERIES, _KEYS = 9, 12
_LONG, _WINDOW = 20, 10  # several tiles of 8, and a window over the edge of one
_STEP = 1e-5


def _everything(case: SchemeCase) -> AttentionCase:
    """Positions in any order, with gaps, segments, a window, shared keys, rows that see nothing."""
    rng = np.random.default_rng(7)
    low, high = max(-20, case.positions[0]), min(40, case.positions[1])

    def places(length: int) -> Host:
        return np.stack(
            [rng.choice(np.arange(low, high + 1), length, replace=False) for _ in range(2)]
        )

    options = {
        "causal": True,
        "window": 30,
        "scale": 0.5,
        "q_pos": places(_QUERIES),
        "k_pos": places(_KEYS),
        "q_seg": np.arange(_QUERIES) % 4,  # segment 3 has no key
        "k_seg": np.stack([np.arange(_KEYS) % 3, np.zeros(_KEYS, int)]),
    }
    if (axes := case.scheme.axes) > 1:
        options["q_axes"], options["k_axes"] = (
            np.stack([places(length) for _ in range(axes)], axis=-1) for length in (_QUERIES, _KEYS)
        )
    tensors = case.tensors(_QUERIES, _KEYS, grouped=True)
    own = case.query_hidden(case.normal((2, _QUERIES, case.hidden_dim), 4))
    return case.call({**tensors, **own}, **options)


def _brought(case: SchemeCase) -> dict[str, AttentionCase]:
    """Calls with what callers bring: each alone, and all of it."""
    tensors, at = case.tensors(_KEYS), np.arange(_KEYS)
    valid = np.ones((2, _KEYS), bool)
    valid[0, :3] = valid[1, 5] = False
    added = case.normal((1, case.heads, _KEYS, _KEYS), 5)
    seen = (at <= at[:, None]) | (at < 4)
    seen[2] = False  # a query that sees nothing

    def of(extra: dict[str, Host], **options: object) -> AttentionCase:
        return case.call({**tensors, **extra}, **options)

    # Keys that are not valid have a segment, so positions alone do not tell which tokens are the
    # same.
    own = case.query_hidden(tensors["x"])
    sides, firsts = {"window": (4, 2)}, {"causal": True, "window": 4, "sink_tokens": 2}
    every = {"softcap": 2.0, "mask": _blocks, "k_valid": valid, "sink_tokens": 2, **sides}
    return {
        "all of it": of({"bias": added, **own}, **every),
        "all but a bias": of(own, **every),
        "bias": of({"bias": added}, causal=True),
        "softcap": of({}, causal=True, softcap=1.5),
        "mask": of({}, mask=seen[None, None]),
        "mask function": of({}, mask=_blocks),
        "k_valid": of(own, causal=True, k_valid=valid),
        "window and first tokens": of({}, **firsts),
        "sides of a window": of({}, **sides),
    }


def _blocks(q_pos: Array, k_pos: Array) -> Array:
    """Block diffusion: a token sees its own block of three, and those before."""
    return k_pos // 3 <= q_pos // 3


def _served(case: SchemeCase, framework: Framework, implementation: str) -> AttentionCase:
    """The hardest call that an implementation takes at all."""
    call = _everything(case)
    try:
        call.attend(framework, implementation)
    except NotImplementedError:
        if implementation == "reference":
            raise
        return case.call(case.tensors(_KEYS), causal=True)
    return call


def reference(call: AttentionCase) -> Host:
    """The definition in float64, on NumPy."""
    return call.attend(NumPy(), "reference", dtype="float64")


@law("implementation")
def implementation_equals_the_reference(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Attention is ``softmax(scale * q @ k.T + bias) @ v`` over what a query may see."""
    long, seg = case.tensors(_LONG, batch=1), np.repeat([0, 1], [8, _LONG - 8])
    calls = {
        "causal": case.call(case.tensors(_KEYS), causal=True),
        "window": case.call(long, causal=True, window=_WINDOW),
        "segments": case.call({**long, **case.query_hidden(long["x"])}, q_seg=seg, k_seg=seg),
        "everything": _everything(case),
    }
    _require_equal_or_refused(calls, framework, implementation)


@law("implementation")
def implementation_takes_what_callers_bring(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """A bias, a cap, a mask, keys that are not valid, first tokens, sides of a window."""
    # A compiler takes a second for each: there a call that has most stands for the others.
    most = ("all of it", "all but a bias") if framework.default_compiler is not None else ()
    _require_equal_or_refused(_brought(case), framework, implementation, most)


def _require_equal_or_refused(
    calls: dict[str, AttentionCase],
    framework: Framework,
    implementation: str,
    enough: tuple[str, ...] = (),
) -> None:
    """An implementation serves a call as the definition does, or says why not; one call at least.

    None is tried after one that is ``enough``.
    """
    refused = []
    for name, call in calls.items():
        try:
            found = call.attend(framework, implementation)
        except NotImplementedError as reason:
            if implementation == "reference":
                raise
            require(str(reason), f"{name}: refused without a reason")
            refused.append(reason)
            continue
        assert_near(found, reference(call), ATTENTION_TOL["float32"], name)
        if name in enough:
            return
    if len(refused) == len(calls):
        raise refused[0]


@law("implementation")
def log_sum_exp_is_that_of_the_scores(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """``return_lse``: the logarithm of the sum that the softmax divides by, sinks included."""
    calls = {
        "causal": case.call(case.tensors(_KEYS), causal=True),
        "everything": _everything(case),
    }
    refused = []
    for name, call in calls.items():
        try:
            found = call.log_sum_exp(framework, implementation)
        except NotImplementedError as reason:
            if implementation == "reference":
                raise
            refused.append(reason)
            continue
        # A logarithm moves by what its scores move, and by a rounding for each term of the sum.
        assert_near(found, _log_sum_exp(call), ATTENTION_TOL["float32"], name)
    if len(refused) == len(calls):
        raise refused[0]


def _log_sum_exp(call: AttentionCase) -> Host:
    """``log(sum(exp(score)))`` of every row in float64, from scores written out."""
    params = {name: a.astype(np.float64) for name, a in call.params.items()}
    options = {**call.options, "return_lse": True}
    causal = options.pop("causal", False)
    tensors: Any = call.tensors
    prepared = prepare(**tensors, scheme=call.scheme, params=params, causal=causal, **options)
    rows = [_seen_scores(part) for part in prepared.regions or (prepared,)]
    if prepared.sink is not None:
        rows.append(np.broadcast_to(prepared.sink[..., None], (*rows[0].shape[:3], 1)))
    return np.asarray(np.logaddexp.reduce(np.concatenate(rows, axis=-1), axis=-1))


def _seen_scores(prepared: Call) -> Host:
    """Scaled scores with their bias, ``(B, H, Q, K)``; ``-inf`` where nothing is seen."""
    k = np.repeat(prepared.k, prepared.q.shape[1] // prepared.k.shape[1], axis=1)
    scores = prepared.cap_scores(prepared.scale * prepared.q @ np.swapaxes(k, -1, -2))
    bias, seen = prepared.bias_and_visible()
    if "adjust_scores" in prepared.scheme.hooks():
        at, params = (
            (as_column(prepared.query.encoded_pos), as_row(prepared.key.encoded_pos)),
            prepared.views(),
        )
        scores = prepared.scheme.adjust_scores(
            scores, *at, visible=seen, params=params, xp=prepared.xp
        )
    if bias is not None:
        scores = scores + bias
    return scores if seen is None else np.where(seen, scores, -np.inf)


@law("implementation")
def implementation_equals_the_reference_in_other_floats(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Attention of float64 is right to float64, that of half precision to its own rounding."""
    call, refused = _served(case, framework, implementation), []
    expected = reference(call)
    dtypes = [name for name in framework.dtypes if name != "float32"]
    for dtype in dtypes:
        try:
            found = call.attend(framework, implementation, dtype=dtype)
        except NotImplementedError as reason:
            if implementation == "reference":
                raise
            refused.append(reason)
            continue
        assert_near(found, expected, ATTENTION_TOL[dtype], dtype)
    if dtypes and len(refused) == len(dtypes):
        raise refused[0]


@law("gradient")
def gradients_are_derivatives(case: SchemeCase, framework: Framework, implementation: str) -> None:
    """The gradient of every argument is how attention changes with it."""
    call = _served(case, framework, implementation)
    d_out = case.normal(call.tensors["q"].shape, 9)
    _, found = call.gradients(framework, implementation, d_out)
    arrays = call.floats()
    require(found.keys() == arrays.keys(), f"gradients of {list(found)}, not of {list(arrays)}")
    for seed, (name, array) in enumerate(arrays.items()):
        require(np.all(np.isfinite(found[name])), f"gradient of {name} is not finite")
        direction = np.random.default_rng(seed).standard_normal(array.shape)
        along = float(np.sum(found[name] * direction))
        expected = _slope(call, name, direction, d_out)
        size = max(1.0, float(np.linalg.norm(found[name]) * np.linalg.norm(direction)))
        assert_near(along / size, expected / size, DERIVATIVE_TOL, f"derivative along {name}")


def _slope(call: AttentionCase, name: str, direction: Any, d_out: Host) -> float:
    """The derivative of ``sum(d_out * attention)`` along a direction, from two values."""
    values = []
    own, bare = ("tensors", name) if name in call.tensors else ("params", call.bare(name))
    given = getattr(call, own)
    for step in (_STEP, -_STEP):
        changed: Any = {own: {**given, bare: given[bare] + step * direction}}
        varied = replace(call, **changed)
        values.append(float(np.sum(d_out * reference(varied))))
    return (values[0] - values[1]) / (2 * _STEP)


@law("gradient")
def gradient_reaches_every_param(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """Training moves every learned array that attention can see, and every head's part of one."""
    specs = case.scheme.param_specs()
    if not specs:
        return
    call = case.call(case.tensors(_KEYS), causal=True)
    d_out = case.normal((2, case.heads, _KEYS, case.head_dim), 9)
    _, found = call.gradients(framework, implementation, d_out)
    embedded = gradients_of_embedding(case, framework)
    for name, spec in specs.items():
        moved = np.asarray(found[call.name_of(name)] != 0) | (embedded.get(name, 0.0) != 0)
        each = moved.reshape(spec.shape[0], -1) if spec.per_head else moved.reshape(1, -1)
        still = [head for head, own in enumerate(each) if not np.any(own)]
        still = [head for head in still if not _unseen(call, name, head)]
        where = f" of heads {still}" if spec.per_head else ""
        require(not still, f"no gradient reaches {name}{where}")


def _unseen(call: AttentionCase, name: str, head: int) -> bool:
    """Whether a learned array moves the bias by as much at every key of a query, and nothing else:
    softmax cannot see that, as the last offset of FIRE's network.
    """
    wide = {each: array.astype(np.float64) for each, array in call.params.items()}
    other, per_head = np.array(wide[name]), call.scheme.param_specs()[name].per_head
    other[head if per_head else ...] += 0.25
    moved = replace(call, params={**wide, name: other})
    tensors: Any = call.tensors
    here, there = (
        prepare(**tensors, scheme=call.scheme, params=own, causal=True).bias()
        for own in (wide, moved.params)
    )
    if here is None or np.array_equal(here, np.asarray(there)):
        return False
    return bool(
        np.allclose(reference(moved), reference(call), rtol=0, atol=ATTENTION_TOL["float64"])
    )


@law("compiler")
def compiled_attention_equals_eager(case: SchemeCase, framework: Framework, compiler: str) -> None:
    """Attention and its gradients are the same compiled, on every implementation."""
    call = _everything(case)
    d_out = case.normal((2, case.heads, _QUERIES, case.head_dim), 9)
    for implementation in framework.implementations:
        with suppress(NotImplementedError):  # the law of each implementation says so
            eager = call.eagerly(framework, implementation)
            found = call.attend(framework, implementation, compiler=compiler)
            assert_near(found, eager, ATTENTION_TOL["float32"], implementation)
            if not framework.differentiable:
                continue
            expected = call.gradients(framework, implementation, d_out)[1]
            _, gradients = call.gradients(framework, implementation, d_out, compiler=compiler)
            for name, gradient in gradients.items():
                summed = 1 if name in ("q", "k", "v") else REDUCTION_FACTOR
                what = f"gradient of {name} on {implementation}"
                assert_near(gradient, expected[name], summed * ATTENTION_TOL["float32"], what)
