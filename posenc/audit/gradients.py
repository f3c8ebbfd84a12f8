"""Gradients of a candidate, against those of the definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import posenc
from posenc.audit import conventions
from posenc.audit.arguments import expected_shape, integers, leaf_of
from posenc.audit.difference import first_place
from posenc.audit.gold import Question, allowed, answer, at_length, drawn, rotation_gradient
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Framework, Host


@dataclass(frozen=True)
class Slope:
    """How far gradients are from the right ones; ``message`` is empty where they agree."""

    error: float
    tolerance: float
    message: str = ""
    where: Mapping[str, int] = field(default_factory=dict)


def check_gradients(
    f: Callable[..., Any], question: Question, arrays: Framework, dtype: str
) -> Slope | None:
    """Compare gradients by vectors and learned arrays; None where there are none to compare.

    Raises
    ------
    NotCalledError, CannotExpressError
        As ``conventions.gradients``.
    """
    if not question.vectors and not question.params:
        return None
    d_out = drawn(expected_shape(question), 11)
    found = conventions.gradients(f, question, arrays, dtype, d_out)
    gold = gold_gradients(question, arrays, d_out)
    largest = Slope(0.0, 1.0)
    for name, expected in gold.items():
        tolerance = gradient_tolerance(question, expected, d_out)
        error = np.abs(found[name] - expected)
        error = np.where(np.isnan(error), np.inf, error)
        worst = np.unravel_index(np.argmax(error / tolerance), error.shape)
        measured = Slope(float(error[worst]), float(tolerance[worst]))
        if measured.error > measured.tolerance:
            message = f"The gradient by {name} is not that of the definition. "
            message += gradient_fault(question, found[name], expected, d_out)
            return replace(
                measured, message=message, where=_where(question, name, error, tolerance)
            )
        if measured.error / measured.tolerance >= largest.error / largest.tolerance:
            largest = measured
    return largest


def _where(question: Question, name: str, error: Host, tolerance: Host) -> dict[str, int]:
    """The first wrong number of a gradient by vectors."""
    if name not in question.vectors:
        return {}
    keys = question.q_pos if question.k_pos is None or name == "q" else question.k_pos
    return first_place(question.change(q_pos=keys), error > tolerance)[0]


def gradient_fault(question: Question, own: Host, right: Host, d_out: Host) -> str:
    """What explains a wrong gradient."""
    if not np.all(np.isfinite(own)):
        return "Numbers of it are NaN or infinite."
    if not np.any(own):
        return "It is zero: the backward pass is missing, or cut off by a detach."
    if question.kind == "rotation":
        forward = answer(question.change(vectors={"x": d_out}))
        tolerance = gradient_tolerance(question, right, d_out)
        if np.all(np.abs(own - forward) <= tolerance):
            return "The backward pass rotates the same way as the forward pass, not back."
        if np.all(np.abs(own - d_out) <= tolerance):
            return "The backward pass does not rotate at all."
    ratio = float(np.sum(own * right) / np.sum(right * right))
    if np.allclose(own, ratio * right, atol=1e-4 * float(np.max(np.abs(right)))):
        return f"It is {ratio:.4g} times the right one."
    return f"It differs by up to {float(np.max(np.abs(own - right))):.2g}."


def gradient_tolerance(question: Question, gold: Host, d_out: Host) -> Host:
    """How far a gradient in float32 may be from the gold.

    A rotation's gradient is a rotation, so its tolerance is the same. Others sum over all tokens,
    each with the roundings of the values, forward and backward.
    """
    if question.kind == "rotation":
        return np.asarray(allowed(question.change(vectors={"x": d_out}), gold, "float32"))
    value = float(np.max(allowed(question, np.ones((1, 1, 1)), "float32")))
    size = max(1.0, float(np.max(np.abs(gold), initial=0)))
    return np.full(gold.shape, 4 * value * size * np.sqrt(d_out.shape[-2]))


def gold_gradients(question: Question, arrays: Framework, d_out: Host) -> dict[str, Host]:
    """The gradients of the definition: by linearity, or by the framework in float64."""
    if question.kind == "rotation" and not question.params:
        turned = rotation_gradient(question, d_out)
        if turned is not None:
            return {"x": turned}
    leaves = conventions.leaves_of(question)

    def run(native: Mapping[str, Any]) -> Any:
        return defined(question, arrays, native)

    return conventions.pulled(run, leaves, arrays, "float64", d_out)


def defined(question: Question, arrays: Framework, native: Mapping[str, Any]) -> Any:
    """The definition of a question on arrays of a framework."""
    params = {name: native[leaf_of(question, name)] for name in question.params}
    keys = question.q_pos if question.k_pos is None else question.k_pos
    q_at, k_at = (integers(arrays, pos) for pos in (question.q_pos, keys))
    scheme = at_length(question.scheme, keys)
    if question.kind == "rotation":
        return posenc.transform(scheme, native["x"], q_at, role="query", params=params)
    if question.kind == "bias":
        return posenc.bias(scheme, q_at, k_at, params)
    if question.kind == "embedding":
        return posenc.embedding(scheme, q_at, params)
    return posenc.attention(
        native["q"], native["k"], native["v"], scheme, params, question.causal,
        window=question.window, tokens=Tokens(k_at), queries=Tokens(q_at),
        implementation="reference",
    )  # fmt: skip
