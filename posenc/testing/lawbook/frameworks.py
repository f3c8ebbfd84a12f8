"""Laws of the core on one framework: its arrays have the same values as NumPy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

import posenc
from posenc.apply.bias import bias_tile
from posenc.apply.feature_needs import has_features
from posenc.apply.shapes import as_column, as_row, prepare_params
from posenc.apply.transform import has_transform
from posenc.contract.operations import device
from posenc.contract.params import head_views, tile_views
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme, Role
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Framework, Function, Host, NumPy
from posenc.testing.law import law, require, require_equal
from posenc.testing.places import Where, of_pairs, of_tokens
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tolerances import DERIVATIVE_TOL, REDUCTION_FACTOR, VALUE_TOL, assert_near

_PARAM = "param:"
_KEPT = 64  # functions whose compiled programs are kept
_LENGTH = 6
_LAYERS = 3
_STEP = 1e-6  # short, to seldom cross a kink; the rounding 1e-16 / 1e-6 is below the tolerance
Arrays = dict[str, Array]


def _side(a: Arrays, role: Role) -> dict[str, Array]:
    """Features of one side, and places, as a bias reads them."""
    prefix = f"{role}:"
    features = {n.removeprefix(prefix): v for n, v in a.items() if n.startswith(prefix)}
    if "places" in a:
        features["places"] = a["places"][:, None, :, :]
    return features


def _bias(scheme: PositionScheme, a: Arrays, params: Arrays, xp: Namespace) -> Array | None:
    own, work = prepare_params(scheme, params, like=a["pos"], dtype=None, xp=xp)
    at, query, key = (as_column(a["pos"]), as_row(a["pos"])), _side(a, "query"), _side(a, "key")
    tile = bias_tile(scheme, *at, own, query=query, key=key, dtype=work, xp=xp)
    if tile is None:
        return None
    # Broadcast: a bias that reads one side only has fewer axes.
    (batch, length), here = a["pos"].shape, device(tile)
    return tile + xp.zeros((batch, 1, length, length), dtype=tile.dtype, device=here)


def _key_bias(scheme: PositionScheme, a: Arrays, params: Arrays, xp: Namespace) -> Array | None:
    if Hook.KEY_BIAS not in scheme.hooks():
        return None
    own, work = prepare_params(scheme, params, like=a["pos"], dtype=None, xp=xp)
    key = tile_views(_side(a, "key"), "key", xp=xp)
    views = head_views(scheme, own, dtype=work, xp=xp, key=key)
    return scheme.key_bias(as_row(a["pos"]), params=views, xp=xp)


def _transform(scheme: PositionScheme, a: Arrays, params: Arrays, xp: Namespace) -> Array:
    def of(role: Role) -> Arrays:
        reads = has_transform(scheme) and has_features(scheme)
        return {n: f for n, f in _side(a, role).items() if n != "places"} if reads else {}

    return xp.concat(
        [
            posenc.transform(
                scheme, a["x"], a["pos"], role=role, params=params, places=a.get("places"), xp=xp,
                features=of(role),
            )
            for role in _ROLES
        ]
    )  # fmt: skip


def _embedding(scheme: PositionScheme, a: Arrays, params: Arrays, xp: Namespace) -> Array | None:
    return posenc.embedding(scheme, a["pos"], params, places=a.get("places"), xp=xp)


def _features(scheme: PositionScheme, a: Arrays, params: Arrays, xp: Namespace) -> Array | None:
    """All features of both sides, flattened into one array."""
    tokens = Tokens(a["pos"], a["seg"], a.get("places"), x=a["hidden"])
    sides = posenc.features(scheme, params, tokens, q=a["x"], k=a["x"], xp=xp)
    both = [side.features or {} for side in sides]
    flat = [xp.reshape(own[name], (-1,)) for own in both for name in sorted(own)]
    return xp.concat(flat) if flat else None


_ROLES: tuple[Role, Role] = ("query", "key")
_PARTS: Mapping[str, Callable[..., Array | None]] = {
    "bias": _bias,
    "key_bias": _key_bias,
    "transform": _transform,
    "embedding": _embedding,
    "features": _features,
}


def _function(case: SchemeCase, part: str) -> Function:
    scheme: Any = case.scheme  # hashable, which PositionScheme does not declare
    return _part(scheme, part)


@lru_cache(_KEPT)
def _part(scheme: Any, part: str) -> Function:
    """A function of arrays only, the same object each time, so that it is compiled once."""

    def apply(xp: Namespace, arrays: Arrays) -> Array | None:
        params = {n.removeprefix(_PARAM): a for n, a in arrays.items() if n.startswith(_PARAM)}
        return _PARTS[part](scheme, arrays, params, xp)

    return apply


def _arrays(case: SchemeCase, dtype: str, length: int = _LENGTH) -> dict[str, Host]:
    """Arrays with positions near 0 and at the ends of the range, in dtypes of every framework."""
    rng = np.random.default_rng(6)
    pos = np.stack([case.draw_positions(rng, length) for _ in range(2)])
    pos[:, 0] = case.positions
    shape = (2, case.heads, length, case.head_dim)
    own = {_PARAM + name: value.astype(dtype) for name, value in case.params.items()}
    for role in _ROLES:
        tokens = case.tokens(pos, role)
        own |= {f"{role}:{name}": a.astype(dtype) for name, a in tokens.features.items()}
        if tokens.places is not None:
            own["places"] = tokens.places.astype(np.int32)
    return {
        "pos": pos.astype(np.int32),
        "seg": (pos % 2).astype(np.int32),
        "x": case.normal(shape, 0).astype(dtype),
        "hidden": case.normal((2, length, case.hidden_dim), 1).astype(dtype),
        **own,
    }


@law("framework")
def answers_as_numpy_does(case: SchemeCase, framework: Framework) -> None:
    """Every part of a scheme has NumPy's values, and the dtype and device of its arguments."""
    for dtype in [name for name in ("float32", "float64") if name in framework.dtypes]:
        arrays = _arrays(case, dtype)
        for part in _PARTS:
            _require_values_of_numpy(case, framework, part, arrays, f"{part} in {dtype}")
    if has_transform(case.scheme):  # a decoded token per sequence, each at its own position
        single = _arrays(case, "float32", length=1)
        what = "transform of one token per sequence"
        _require_values_of_numpy(case, framework, "transform", single, what)


def _require_values_of_numpy(
    case: SchemeCase, framework: Framework, part: str, arrays: dict[str, Host], what: str
) -> None:
    """Raise unless a part of the scheme has NumPy's values, dtype and device."""
    function = _function(case, part)
    # NumPy gets 64-bit positions, so that an overflow in 32 bits shows.
    full = {n: a.astype(np.int64) if n in ("pos", "places") else a for n, a in arrays.items()}
    expected = NumPy().evaluate(function, full)
    actual = framework.evaluate(function, arrays, compiler=framework.default_compiler)
    if expected is None or actual is None:
        require(actual is expected, f"{what}: None on one of two frameworks only")
        return
    require(actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}")
    require(not actual.device_changed, f"{what}: on another device than its arguments")
    tolerance, where = VALUE_TOL[expected.dtype], _place(part, arrays["pos"])
    assert_near(actual.values, expected.values, tolerance, what, where=where)


def _place(part: str, pos: Host) -> Where:
    """Names places in the result of a part."""
    if part == "bias":
        return of_pairs(pos, pos)
    if part == "transform":  # queries come first, then keys
        return of_tokens("query or key", np.concatenate([pos, pos]))
    return str


@law("framework")
def a_pass_changes_nothing(case: SchemeCase, framework: Framework) -> None:
    """In a pass over several layers, values and gradients are those of calls alone, to the bit."""
    if not framework.differentiable:
        return
    seg = np.repeat([0, 1], [_LENGTH - 2, 2])
    packed = Tokens(np.arange(_LENGTH) - (_LENGTH - 2) * seg, seg)
    for what, tokens in {"causal": Tokens(), "packed": packed}.items():
        call = case.call(case.tensors(_LENGTH), causal=True, tokens=tokens)
        shape = (*call.tensors["q"].shape[:3], call.tensors["v"].shape[3])
        d_out = case.normal(shape, 11)
        alone, own = call.gradients(framework, "auto", d_out)
        together, shared = call.gradients(framework, "auto", d_out, layers=_LAYERS)
        require_equal(together, alone, f"{what}: values of layer {_LAYERS}")
        for name, gradient in own.items():
            require_equal(shared[name], gradient, f"{what}: gradient of {name}")


@law("framework")
def gradients_of_the_bias_are_finite(case: SchemeCase, framework: Framework) -> None:
    """The gradient of a bias is finite at any pair of positions, visible or not."""
    if not framework.differentiable or not case.params:
        return
    arrays, function = _arrays(case, "float32"), _function(case, "bias")
    answer = framework.evaluate(function, arrays, compiler=framework.default_compiler)
    if answer is None:
        return
    # Masked pairs get no gradient.
    d_out = np.where(np.isfinite(answer.values), 1e-3, 0.0)
    _, gradients = framework.gradients(function, arrays, d_out)
    for name, gradient in gradients.items():
        what = name.removeprefix(_PARAM)
        require(np.all(np.isfinite(gradient)), f"gradient of {what} at {arrays['pos']}")


@law("framework")
def gradients_of_parts_are_derivatives(case: SchemeCase, framework: Framework) -> None:
    """Gradients of every part by every learned array equal finite differences, near and far."""
    if not framework.differentiable or not case.params:
        return
    arrays = _arrays(case, "float32")
    scheme: Any = case.scheme
    parts = _present(case, arrays)
    if not parts:
        return
    whole, wide = _concatenated(scheme, parts), _widened(arrays)
    directions = {
        name: _direction(array, seed) for seed, (name, array) in enumerate(_learned(arrays).items())
    }
    derivatives = {name: _finite_difference(whole, wide, name, d) for name, d in directions.items()}
    # Weight all numbers alike, however fast they change; leave out masked ones.
    largest = np.max([np.abs(derivative) for derivative in derivatives.values()], axis=0)
    d_out = case.normal(largest.shape, 9) / np.maximum(1, largest)
    d_out = np.where(np.isfinite(largest), d_out, 0.0)
    derivatives = {
        name: np.where(d_out == 0, 0.0, derivative) for name, derivative in derivatives.items()
    }

    def wrong(d_out: Host) -> str:
        """Message about a wrong gradient of ``sum(d_out * parts)``; empty if all are right."""
        _, gradients = framework.gradients(whole, arrays, d_out)
        for name, derivative in derivatives.items():
            along = float(np.sum(gradients[name].astype(np.float64) * directions[name]))
            terms = d_out * derivative
            allowed = REDUCTION_FACTOR * DERIVATIVE_TOL * max(1.0, float(np.linalg.norm(terms)))
            if not abs(along - np.sum(terms)) <= allowed:
                change = f"{np.sum(terms):.6g}, the gradient says {along:.6g}"
                return f"along {name.removeprefix(_PARAM)} it changes by {change}"
        return ""

    if message := wrong(d_out):
        raise AssertionError(f"{_where(d_out, wrong, case, arrays)}: {message}")


def _where(
    d_out: Host, wrong: Callable[[Host], str], case: SchemeCase, arrays: Mapping[str, Host]
) -> str:
    """One output whose gradient is wrong, found by bisection; else the first output."""
    some = np.flatnonzero(d_out)
    while some.size > 1:
        halves = np.array_split(some, 2)
        alone = [half for half in halves if wrong(d_out * np.isin(np.arange(d_out.size), half))]
        if not alone:
            break
        some = alone[0]
    at, numpy, wide = int(some[0]), NumPy(), _widened(arrays)
    for part in _present(case, arrays):
        answer = numpy.evaluate(_function(case, part), wide)
        assert answer is not None
        if at < answer.values.size:
            index = tuple(int(i) for i in np.unravel_index(at, answer.values.shape))
            return f"{part} at {index} of positions {arrays['pos'].tolist()}"
        at -= answer.values.size
    raise AssertionError("no part has this number")


def _learned(arrays: Mapping[str, Host]) -> dict[str, Host]:
    return {name: a for name, a in arrays.items() if name.startswith(_PARAM)}


def _widened(arrays: Mapping[str, Host]) -> dict[str, Host]:
    """The same values in 64 bits."""
    kinds = {"f": np.float64, "i": np.int64}
    return {name: array.astype(kinds[array.dtype.kind]) for name, array in arrays.items()}


def _direction(array: Host, seed: int) -> Host:
    return np.asarray(np.random.default_rng(seed).standard_normal(array.shape))


def _finite_difference(
    whole: Function, wide: Mapping[str, Host], name: str, direction: Host
) -> Host:
    """Central difference of each number along a direction, in float64.

    NaN where it is -inf, and where half the step gives another difference: far away a learned
    frequency turns a vector many times within a step.
    """

    def difference(step: float) -> Host:
        ends = []
        for side in (step, -step):
            answer = NumPy().evaluate(whole, {**wide, name: wide[name] + side * direction})
            assert answer is not None
            ends.append(answer.values)
        return np.asarray((ends[0] - ends[1]) / (2 * step))

    with np.errstate(invalid="ignore"):
        derivative, nearer = difference(_STEP), difference(_STEP / 2)
        agreed = np.abs(derivative - nearer) <= DERIVATIVE_TOL * np.maximum(1, np.abs(nearer))
    return np.where(agreed, nearer, np.nan)


@law("framework")
def arguments_stay_as_they_were(case: SchemeCase, framework: Framework) -> None:
    """No part of a scheme writes to its arguments."""
    for part in _PARTS:
        arrays = _arrays(case, "float32")
        answer = framework.evaluate(_function(case, part), arrays)
        require(not (answer and answer.mutated), f"{part} changes {answer and answer.mutated}")


@law("framework")
def half_precision_rounds_once(case: SchemeCase, framework: Framework) -> None:
    """A transform in half precision equals the one in float32, rounded once."""
    function = _function(case, "transform")
    arrays = _arrays(case, "float32")
    wide = framework.evaluate(function, arrays, compiler=framework.default_compiler)
    assert wide is not None
    for dtype in [name for name in ("float16", "bfloat16") if name in framework.dtypes]:
        with np.errstate(over="ignore"):  # to infinity, as rounding does
            actual = framework.evaluate(
                function, arrays, cast={"x": dtype}, compiler=framework.default_compiler
            )
            rounded = framework.evaluate(_itself, {"x": wide.values}, cast={"x": dtype})
        assert actual is not None
        require(actual.dtype == dtype, f"transform of {dtype} returns {actual.dtype}")
        assert rounded is not None
        # Queries come first, then keys, each (2, H, L, D).
        require_equal(
            actual.values, rounded.values, f"{dtype}, queries and keys at {arrays['pos']}"
        )


def _itself(xp: Namespace, arrays: Arrays) -> Array:
    return arrays["x"]


@law("compiler")
def compiled_equals_eager(case: SchemeCase, framework: Framework, compiler: str) -> None:
    """Compiled bias, transform, embedding and features equal eager ones, for traced positions."""
    arrays = _arrays(case, "float32")
    parts = _present(case, arrays)
    scheme: Any = case.scheme
    whole = _concatenated(scheme, parts)
    eager = framework.evaluate(whole, arrays)
    actual = framework.evaluate(whole, arrays, compiler=compiler)
    assert eager is not None
    assert actual is not None
    require(actual.dtype == eager.dtype, f"{actual.dtype}, not {eager.dtype}")
    assert_near(actual.values, eager.values, VALUE_TOL["float32"], " and ".join(parts))


def _present(case: SchemeCase, arrays: Mapping[str, Host]) -> tuple[str, ...]:
    """The parts that do not return None."""
    numpy = NumPy()
    return tuple(
        part for part in _PARTS if numpy.evaluate(_function(case, part), arrays) is not None
    )


@lru_cache(_KEPT)
def _concatenated(scheme: Any, parts: tuple[str, ...]) -> Function:
    """All parts, flattened into one array, so that they compile once."""
    # Outside of what is compiled: PyTorch warns of a function with a cache.
    functions = [_part(scheme, part) for part in parts]

    def apply(xp: Namespace, arrays: Arrays) -> Array:
        values = [function(xp, arrays) for function in functions]
        return xp.concat([xp.reshape(array, (-1,)) for array in values])

    return apply


def gradients_of_embedding(case: SchemeCase, framework: Framework) -> dict[str, Host]:
    """Gradients of params through the embedding, by name; none without one."""
    arrays = _arrays(case, "float32")
    function = _function(case, "embedding")
    actual = framework.evaluate(function, arrays, compiler=framework.default_compiler)
    if actual is None:
        return {}
    d_out = case.normal(actual.values.shape, 8)
    _, gradients = framework.gradients(function, arrays, d_out)
    return {name.removeprefix(_PARAM): a for name, a in gradients.items() if _PARAM in name}
