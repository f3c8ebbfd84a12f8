"""What the definition says of a case, in float64, and how far rounding may lead from it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

import posenc
from posenc.contract.protocol import Hook, SchemeWarning
from posenc.schemes.sandwich import Sandwich
from posenc.testing.tolerances import attention_bound, rounding_bound
from posenc.vectors.cases import Case
from posenc.vectors.inputs import Array

DTYPES = ("float64", "float32", "bfloat16", "float16")
_ROTATION, _ANGLE, _BIAS = 8, 4, 16  # roundings
_REACH = 30.0  # of a bias; a key whose score is this much lower has no weight
_REASONS = {
    "rotation": (
        f"absolute: {_ROTATION} roundings of the largest number, for cosine, sine, two products, a "
        "factor and a sum, doubled for a second library; per_position: a float32 angle has "
        f"{_ANGLE} roundings, relative to its position"
    ),
    "embedding": (
        f"absolute: {_ROTATION} roundings of the largest number; per_position: a float32 angle has "
        f"{_ANGLE} roundings, relative to its position"
    ),
    "bias": (
        f"absolute and relative: {_BIAS} roundings of 1 and of the bias; per_position: the angles "
        "of a sum of cosines, relative to the distance"
    ),
    "attention": (
        "absolute: one rounding of the scores for each product, sum and rotated channel, and one "
        "of the result for each weight and value, times the largest value; and the roundings of "
        "biases and angles"
    ),
}


def context_length(case: Case) -> int:
    """The length that the scheme is told, on which dynamic scalings depend."""
    names = ("pos", "q_pos", "k_pos", "places")
    return 1 + max(int(np.max(case.inputs[name])) for name in names if name in case.inputs)


def answer(case: Case, dtype: str = "float64") -> dict[str, Array]:
    """Results by name, of inputs and params in ``dtype``: ``out``, or ``query`` and ``key``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SchemeWarning)
        return _ANSWERS[case.kind](case, dtype)


def _rotation(case: Case, dtype: str) -> dict[str, Array]:
    scheme, x = case.scheme.at_length(context_length(case)), case.inputs["x"].astype(dtype)
    given: dict[str, Any] = {"params": _params(case, dtype), **_places(case)}
    pos = given.pop("pos")
    return {
        "query": np.asarray(posenc.transform(scheme, x, pos, role="query", **given)),
        "key": np.asarray(posenc.transform(scheme, x, pos, role="key", **given)),
    }


def _bias(case: Case, dtype: str) -> dict[str, Array]:
    scheme = case.scheme.at_length(context_length(case))
    q_pos, k_pos = case.inputs["q_pos"], case.inputs["k_pos"]
    found = posenc.bias(scheme, q_pos, k_pos, _params(case, dtype), dtype=np.dtype(dtype))
    bias = np.asarray(found)
    return {"out": np.broadcast_to(bias, (case.sizes["num_heads"], *bias.shape[-2:]))}


def _embedding(case: Case, dtype: str) -> dict[str, Array]:
    given = _places(case)
    pos = given.pop("pos")
    found = posenc.embedding(case.scheme, pos, _params(case, dtype), dtype=np.dtype(dtype), **given)
    return {"out": np.asarray(found)}


def _attention(case: Case, dtype: str) -> dict[str, Array]:
    at = case.inputs
    hidden = at["hidden"].astype(dtype) if "hidden" in at else None
    vectors: dict[str, Any] = {name: at[name].astype(dtype) for name in "qkv"}
    found = posenc.attention(
        **vectors,
        scheme=case.scheme.at_length(context_length(case)),
        params=_params(case, dtype),
        causal=True,
        tokens=posenc.Tokens(at["pos"], places=at.get("places"), x=hidden),
        implementation="reference",
    )
    return {"out": np.asarray(found)}


_ANSWERS = {
    "rotation": _rotation, "bias": _bias, "embedding": _embedding, "attention": _attention,
}  # fmt: skip


def _params(case: Case, dtype: str) -> dict[str, Array]:
    return {name: np.asarray(array, dtype) for name, array in case.params.items()}


def _places(case: Case) -> dict[str, Array]:
    """``pos``, and ``places`` if the scheme has several axes."""
    if "places" in case.inputs:
        return {"pos": case.inputs["places"][..., 0], "places": case.inputs["places"]}
    return {"pos": case.inputs["pos"]}


def tolerances(case: Case, results: dict[str, Array]) -> dict[str, dict[str, float]]:
    """By dtype: ``absolute + relative * |expected| + per_position * |position|``."""
    return {dtype: _tolerance(case, results, dtype) for dtype in DTYPES}


def reason(case: Case) -> str:
    """Why the tolerances are as they are."""
    return _REASONS[case.kind]


def _tolerance(case: Case, results: dict[str, Array], dtype: str) -> dict[str, float]:
    angle = rounding_bound(_ANGLE, 1, wide(dtype))
    if case.kind == "attention":
        return {"absolute": _of_attention(case, dtype, angle), "relative": 0.0, "per_position": 0.0}
    if case.kind == "bias":
        unit, per_position = rounding_bound(_BIAS, 1, dtype), 0.0
        if isinstance(case.scheme, Sandwich):
            terms = max(case.scheme.constants()["strength"]) * case.scheme.dim / 2
            unit, per_position = unit * terms, terms * angle
        return {"absolute": unit, "relative": unit, "per_position": per_position}
    arrays = (*results.values(), case.inputs.get("x", np.ones(1)))
    size = max(float(np.max(np.abs(array))) for array in arrays)
    turns = Hook.ROTARY in case.scheme.hooks() or (case.kind == "embedding" and not case.params)
    return {
        "absolute": 2 * size * rounding_bound(_ROTATION, 1, dtype),
        "relative": 0.0,
        "per_position": 2 * size * angle if turns else 0.0,
    }


def wide(dtype: str) -> str:
    """The dtype of angles and biases: half precision keeps them in float32."""
    return "float64" if dtype == "float64" else "float32"


def _of_attention(case: Case, dtype: str, angle: float) -> float:
    q, k, v = (case.inputs[name] for name in "qkv")
    norms = (float(np.max(np.linalg.norm(a, axis=-1))) for a in (q, k))
    score = abs(case.scheme.scale(q.shape[-1])) * math.prod(norms)
    score *= float(getattr(case.scheme, "attention_factor", 1.0)) ** 2
    far = context_length(case)
    bound = attention_bound(dtype, channels=q.shape[-1], keys=k.shape[2], score=score)
    bound += 2 * score * far * angle + rounding_bound(_BIAS, _REACH, wide(dtype))
    return bound * max(1.0, float(np.max(np.abs(v))))
