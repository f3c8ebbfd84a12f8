"""Laws of attention on one implementation: values and gradients equal those of the reference."""

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
_LONG, _WINDOW = 20, 10  # several tiles of 8, and a window that crosses tiles
_STEP = 1e-5


def _hard_call(case: SchemeCase) -> AttentionCase:
    """Unsorted positions with gaps, segments, a window, shared keys, fully masked rows."""
    rng = np.random.default_rng(7)
    low, high = max(-20, case.positions[0]), min(40, case.positions[1])

    def draw_positions(length: int) -> Host:
        return np.stack(
            [rng.choice(np.arange(low, high + 1), length, replace=False) for _ in range(2)]
        )

    options = {
        "causal": True,
        "window": 30,
        "scale": 0.5,
        "q_pos": draw_positions(_QUERIES),
        "k_pos": draw_positions(_KEYS),
        "q_seg": np.arange(_QUERIES) % 4,  # segment 3 has no key
        "k_seg": np.stack([np.arange(_KEYS) % 3, np.zeros(_KEYS, int)]),
    }
    if (axes := case.scheme.axes) > 1:
        options["q_axes"], options["k_axes"] = (
            np.stack([draw_positions(length) for _ in range(axes)], axis=-1)
            for length in (_QUERIES, _KEYS)
        )
    tensors = case.tensors(_QUERIES, _KEYS, grouped=True)
    own = case.query_hidden(case.normal((2, _QUERIES, case.hidden_dim), 4))
    return case.call({**tensors, **own}, **options)


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

    # With k_valid, q_x is needed: positions alone do not identify tokens.
    own = case.query_hidden(tensors["x"])
    window = (4, 2)
    most = {
        "softcap": 2.0,
        "mask": _block_diffusion,
        "k_valid": valid,
        "sink_tokens": 2,
        "window": window,
    }
    return {
        "all options": call({"bias": added, **own}, **most),
        "all but a bias": call(own, **most),
        "bias": call({"bias": added}, causal=True),
        "softcap": call({}, causal=True, softcap=1.5),
        "mask": call({}, mask=visible[None, None]),
        "mask function": call({}, mask=_block_diffusion),
        "k_valid": call(own, causal=True, k_valid=valid),
        "window and sink tokens": call({}, causal=True, window=4, sink_tokens=2),
        "two-sided window": call({}, window=window),
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
        "segments": case.call({**long, **case.query_hidden(long["x"])}, q_seg=seg, k_seg=seg),
        "everything": _hard_call(case),
    }
    _require_equal_or_refused(calls, framework, implementation)


@law("implementation")
def implementation_takes_all_options(
    case: SchemeCase, framework: Framework, implementation: str
) -> None:
    """A bias, a softcap, a mask, invalid keys, sink tokens and a two-sided window."""
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
        assert_near(out, reference(call), ATTENTION_TOL["float32"], name)
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
        assert_near(lse, _log_sum_exp(call), ATTENTION_TOL["float32"], name)
    if len(refused) == len(calls):
        raise refused[0]


def _log_sum_exp(call: AttentionCase) -> Host:
    """``log(sum(exp(score)))`` of every row in float64, from explicit scores."""
    params = {name: a.astype(np.float64) for name, a in call.params.items()}
    options = {**call.options, "return_lse": True}
    causal = options.pop("causal", False)
    tensors: Any = call.tensors
    prepared = prepare(**tensors, scheme=call.scheme, params=params, causal=causal, **options)
    rows = _all_scores(prepared)
    if prepared.sink is not None:
        rows.append(np.broadcast_to(prepared.sink[..., None], (*rows[0].shape[:3], 1)))
    return np.asarray(np.logaddexp.reduce(np.concatenate(rows, axis=-1), axis=-1))


def _all_scores(prepared: Call) -> list[Host]:
    """Scores of each region of a call, or of the whole."""
    return [_visible_scores(part) for part in prepared.regions or (prepared,)]


def _visible_scores(prepared: Call) -> Host:
    """Scaled scores with their bias, ``(B, H, Q, K)``; ``-inf`` for masked keys."""
    k = np.repeat(prepared.k, prepared.q.shape[1] // prepared.k.shape[1], axis=1)
    scores = prepared.cap_scores(prepared.scale * prepared.q @ np.swapaxes(k, -1, -2))
    bias, visible = prepared.bias_and_visible()
    if "adjust_scores" in prepared.scheme.hooks():
        at = as_column(prepared.query.encoded_pos), as_row(prepared.key.encoded_pos)
        scores = prepared.scheme.adjust_scores(
            scores, *at, visible=visible, params=prepared.views(rows=True), xp=prepared.xp
        )
    if bias is not None:
        scores = scores + bias
    return scores if visible is None else np.where(visible, scores, -np.inf)


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
        assert_near(out, expected, ATTENTION_TOL[dtype], dtype)
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
        assert_near(along / size, expected / size, DERIVATIVE_TOL, f"derivative along {name}")


def _finite_difference(call: AttentionCase, name: str, direction: Any, d_out: Host) -> float:
    """The derivative of ``sum(d_out * attention)`` along a direction, by a central difference."""
    values = []
    field, key = ("tensors", name) if name in call.tensors else ("params", call.param_name(name))
    arrays = getattr(call, field)
    for step in (_STEP, -_STEP):
        changed: Any = {field: {**arrays, key: arrays[key] + step * direction}}
        varied = replace(call, **changed)
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
    call = case.call(case.tensors(_KEYS), causal=True)
    d_out = case.normal((2, case.heads, _KEYS, case.head_dim), 9)
    _, gradients = call.gradients(framework, implementation, d_out)
    embedded = gradients_of_embedding(case, framework)
    for name, spec in specs.items():
        nonzero = np.asarray(gradients[call.name_in_floats(name)] != 0) | (
            embedded.get(name, 0.0) != 0
        )
        by_head = nonzero.reshape(spec.shape[0] if spec.per_head else 1, -1)
        zero = [head for head, own in enumerate(by_head) if not np.any(own)]
        zero = [head for head in zero if not _cancels_in_softmax(call, name, head)]
        where = f" of heads {zero}" if spec.per_head else ""
        require(not zero, f"no gradient reaches {name}{where}")


def _cancels_in_softmax(call: AttentionCase, name: str, head: int) -> bool:
    """Whether a learned array only adds a constant per query to the scores, which softmax ignores.

    The last offset of FIRE's network does, and that of DAPE's.
    """
    wide = {each: array.astype(np.float64) for each, array in call.params.items()}
    shifted, per_head = np.array(wide[name]), call.scheme.param_specs()[name].per_head
    shifted[head if per_head else ...] += 0.25
    other = replace(call, params={**wide, name: shifted})
    tensors: Any = call.tensors
    scores, other_scores = (
        _all_scores(prepare(**tensors, scheme=call.scheme, params=params, causal=True))
        for params in (wide, other.params)
    )
    if all(np.array_equal(a, b) for a, b in zip(scores, other_scores, strict=True)):
        return False
    return bool(
        np.allclose(reference(other), reference(call), rtol=0, atol=ATTENTION_TOL["float64"])
    )


@law("compiler")
def compiled_attention_equals_eager(case: SchemeCase, framework: Framework, compiler: str) -> None:
    """Compiled attention and its gradients equal eager ones, on every implementation."""
    call = _hard_call(case)
    d_out = case.normal((2, case.heads, _QUERIES, case.head_dim), 9)
    for implementation in framework.implementations:
        with suppress(NotImplementedError):  # reported by the laws of each implementation
            eager = call.attend_eagerly(framework, implementation)
            compiled = call.attend(framework, implementation, compiler=compiler)
            assert_near(compiled, eager, ATTENTION_TOL["float32"], implementation)
            if not framework.differentiable:
                continue
            expected = call.gradients(framework, implementation, d_out)[1]
            _, gradients = call.gradients(framework, implementation, d_out, compiler=compiler)
            for name, gradient in gradients.items():
                summed = 1 if name in ("q", "k", "v") else REDUCTION_FACTOR
                what = f"gradient of {name} on {implementation}"
                assert_near(gradient, expected[name], summed * ATTENTION_TOL["float32"], what)
