"""How far roundings can carry a call of attention from its true value: bounds from its own numbers.

Scores near 5 have the tolerances of ``posenc.testing.tolerances``. Drawn calls have biases of any
size, and sums of gates that cancel, so here the error of each score is followed through softmax,
the sum of values, and the gradients. In a float32 bias of size m an error of ``m * 2**-24`` is
right; that of a weight is what the error of its score makes of it; and so on, in absolute values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from posenc.apply.feature_needs import summed_features
from posenc.testing.attention_case import AttentionCase
from posenc.testing.tolerances import UNIT, rounding_bound

# The smallest number that is not rounded to zero.
SMALLEST = {"float64": 0.0, "float32": 1e-37, "float16": 2.0**-24, "bfloat16": 1e-37}
# In the working dtype a rotation has four roundings, an exponential two, a sum one for each of up
# to 16 channels or 40 keys. In half precision are those of queries and keys before and after they
# are turned, of the score, the weight, the value and the result.
STEPS = {dtype: rounding_bound(4 + 2 + 16 + 40, 1, dtype) for dtype in ("float64", "float32")}
CASTS = {dtype: rounding_bound(8, 1, dtype) for dtype in ("float16", "bfloat16")}
_SUMS = ("queries.features.c", "tokens.features.c")  # given sums of gates


class Bounds(NamedTuple):
    """Absolute errors that are right: of the values, and of gradients by name."""

    values: Any
    gradients: dict[str, Any]


def bounds(problem: AttentionCase, d_out: Any, dtypes: Mapping[str, str]) -> Bounds:
    """For ``dtypes`` of tensors and params by name, and gradients of ``sum(d_out * result)``."""
    used = {dtype for name, dtype in dtypes.items() if ".features." not in name}
    work = "float64" if "float64" in used else "float32"
    unit = max(STEPS[work], *(CASTS.get(dtype, 0.0) for dtype in used if work == "float32"), 0.0)
    tiny = max(SMALLEST[dtype] for dtype in used)
    call = _prepared(problem, problem.params)
    group = call.q.shape[1] // call.k.shape[1]
    keys, v, bias, seen = _spread(call)
    error = unit * _size(call, keys, bias, seen) + STEPS[work] * _bias_size(problem, bias)
    scores = call.scale * call.q @ keys.mT + bias
    weights, moved = softmax(scores, seen, error)
    moved = np.where(seen, moved + unit * weights + tiny, 0)
    most = weights + moved

    reach = np.abs(d_out) @ np.abs(v).mT  # of a weight to the loss, in absolute values
    mean = np.sum(most * reach, axis=-1, keepdims=True)
    moved_mean = np.sum(moved * reach, axis=-1, keepdims=True) + unit * mean
    # Of a score's gradient, weight * (reach - mean).
    slope = moved * (reach + mean) + most * (moved_mean + 2 * unit * (reach + mean)) + tiny
    slope = np.where(seen, slope, 0)

    toward_q = abs(call.scale) * slope @ _norm(keys)
    toward_k = abs(call.scale) * slope.mT @ _norm(call.q)
    gradients = {
        "q": toward_q * _gain(call.q, problem.tensors["q"]),
        "k": _per_key_head(toward_k, group) * _gain(call.k, problem.tensors["k"]),
        "v": _per_key_head((moved + unit * most).mT @ np.abs(d_out), group) + tiny,
    }
    if summed_features(problem.scheme):
        # Sums of queries and of keys each bring a gradient, rounded before they are added.
        cast = max(UNIT[dtype] for name, dtype in dtypes.items() if name not in "qkv")
        gradients |= _through_gates(problem, slope + cast * most * (reach + mean))
    else:
        gradients |= _through_params(problem, slope, toward_q, toward_k, group)
    gradients = {name: bound + tiny for name, bound in gradients.items()}
    return Bounds((moved + unit * most) @ np.abs(v) + tiny, gradients)


def products_of(problem: AttentionCase) -> tuple[Any, Any, Any, Any]:
    """What scores are the sums of ``(B, H, Q, K, D)``, finite biases, who is seen, and values."""
    call = _prepared(problem, problem.params)
    keys, v, bias, seen = _spread(call)
    products = call.scale * call.q[:, :, :, None] * keys[:, :, None]
    return products, np.where(seen & np.isfinite(bias), bias, 0), seen & np.isfinite(bias), v


def _spread(call: Any) -> tuple[Any, Any, Any, Any]:
    """Keys and values of every head, biases and who is seen of every pair."""
    group = call.q.shape[1] // call.k.shape[1]
    keys, v = (np.repeat(a, group, axis=1) for a in (call.k, call.v))
    shape = (*call.q.shape[:3], keys.shape[2])
    bias, seen = (
        np.broadcast_to(default if a is None else a, shape)
        for a, default in zip(call.bias_and_visible(), (0.0, True), strict=True)
    )
    return keys, v, bias, seen


def _prepared(problem: AttentionCase, params: Mapping[str, Any]) -> Any:
    return AttentionCase(problem.scheme, problem.tensors, params, problem.options).prepared()


def _size(call: Any, keys: Any, bias: Any, seen: Any) -> Any:
    """Of what half precision rounds in a score: the product, and the bias below its row's highest.

    Lengths instead of products: a rotation rounds a channel by what its pair holds.
    """
    product = abs(call.scale) * _norm(call.q) @ _norm(keys).mT
    highest = np.max(np.where(seen, bias, -np.inf), axis=-1, keepdims=True)
    below = np.where(seen, np.where(np.isfinite(highest), highest, 0) - bias, 0)
    return product + below


def _bias_size(problem: AttentionCase, bias: Any) -> Any:
    """Of what the working dtype rounds in a bias: itself, or the gates in its two sums."""
    if not summed_features(problem.scheme):
        return np.abs(bias)
    given, params = problem.floats(), problem.params
    if _SUMS[0] in given:
        q, k = (np.abs(given[name]) for name in _SUMS)
        return 2 * (q[..., :, None] + k[..., None, :]) + np.abs(bias)
    each = np.abs(given["tokens.x"]) @ np.abs(params["w"]).T + np.abs(params["b"]) + 1
    return 2 * np.sum(each, axis=1)[:, :, None, None] + np.abs(bias)


def softmax(scores: Any, seen: Any, error: Any) -> tuple[Any, Any]:
    """Weights, and how far scores off by ``error`` move them, however large it is."""
    scores = np.where(seen, scores, -np.inf)
    highest = np.max(scores, axis=-1, keepdims=True)
    highest = np.where(np.isfinite(highest), highest, 0)
    total = np.sum(np.exp(scores - highest), axis=-1, keepdims=True)
    logs = scores - highest - np.log(np.where(total == 0, 1, total))
    weights = np.exp(logs)
    raised = logs + error
    top = np.max(raised, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    sums = np.sum(np.exp(raised - top), axis=-1, keepdims=True)
    off = error + np.maximum(top + np.log(np.where(sums == 0, 1, sums)), 0)  # of the sum too
    small = weights * np.expm1(np.minimum(off, 1))
    return weights, np.where(off < 1, small, np.exp(np.minimum(logs + off, 0)))


def _norm(array: Any) -> Any:
    """``(..., L, 1)``."""
    return np.sqrt(np.sum(np.square(array), axis=-1, keepdims=True))


def _gain(transformed: Any, array: Any) -> float:
    """How much longer a transform makes its vectors, and thus their gradients."""
    before, after = _norm(array), _norm(transformed)
    return max(1.0, float(np.max(after / np.where(before == 0, np.inf, before))))


def _per_key_head(array: Any, group: int) -> Any:
    batch, heads, *rest = array.shape
    return np.sum(array.reshape(batch, heads // group, group, *rest), axis=2)


def _through_gates(problem: AttentionCase, slope: Any) -> dict[str, Any]:
    """Sums over scores first, which cancel, then over tokens: no term is larger than these.

    A bias changes by at most 2 a sum, a sum by at most 1 a gate, a gate by at most 1 a unit of what
    its sigmoid takes.
    """
    given, params = problem.floats(), problem.params
    if _SUMS[0] in given:
        zero = {name: np.zeros(a.shape) for name, a in params.items()}
        sides = zip(_SUMS, (-1, -2), strict=True)
        return zero | {name: 2 * np.sum(slope, axis=axis) for name, axis in sides}
    x = given["tokens.x"]
    gates = 4 * np.sum(slope, axis=(-1, -2))  # (B, H)
    tokens = np.sum(np.abs(x), axis=1)  # (B, C)
    one = np.abs(params["w"])
    return {
        "w": np.einsum("bh,bc->hc", gates, tokens),
        "b": np.sum(gates, axis=0) * x.shape[1],
        "tokens.x": np.broadcast_to((gates @ one)[:, None, :], x.shape),
    }


def _through_params(
    problem: AttentionCase, slope: Any, toward_q: Any, toward_k: Any, group: int
) -> dict[str, Any]:
    """Errors of scores, and of transformed queries and keys, times what a param does to each."""
    found = {name: np.zeros(a.shape) for name, a in problem.params.items()}
    for name, array in problem.params.items():
        per_head = problem.scheme.param_specs()[name].per_head
        for at in np.ndindex(array.shape[1:] if per_head else array.shape):
            where = (slice(None), *at) if per_head else at
            low, high = (_prepared(problem, _stepped(problem, name, where, s)) for s in (-1, 1))
            total = _norm((high.q - low.q) / 2**-9) * toward_q
            total = np.sum(total, axis=(0, 2, 3))
            if low.bias() is not None:
                with np.errstate(invalid="ignore"):  # where the bias hides a key
                    change = np.abs(high.bias() - low.bias()) / 2**-9
                total = total + np.sum(np.nan_to_num(change) * slope, axis=(0, 2, 3))
            found[name][where] = total if per_head else np.sum(total)
    return found


def _stepped(problem: AttentionCase, name: str, where: Any, sign: int) -> dict[str, Any]:
    moved = np.array(problem.params[name], np.float64)
    moved[where] += sign * 2**-10
    return {**problem.params, name: moved}
