"""Laws of attention on one path: the values and the gradients of the definition."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

import posenc
from posenc.evaluate import is_gated
from posenc.testing.framework import Framework, Host, NumPy
from posenc.testing.law import law, require
from posenc.testing.lawbook.frameworks import gradients_of_embedding
from posenc.testing.problem import Problem
from posenc.testing.subject import Subject
from posenc.testing.tolerances import DIFFERENCES, PATHS, SUMMED, assert_near

_QUERIES, _KEYS = 9, 12
_LONG, _WINDOW = 20, 10  # several tiles of 8, and a window over the edge of one
_STEP = 1e-5


def _everything(subject: Subject) -> Problem:
    """Positions in any order, with gaps, segments, a window, shared keys, rows that see nothing."""
    rng = np.random.default_rng(7)
    low, high = max(-20, subject.reach[0]), min(40, subject.reach[1])

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
    return subject.problem(subject.tensors(_QUERIES, _KEYS, grouped=True), **options)


def _served(subject: Subject, framework: Framework, path: str) -> Problem:
    """The hardest call that a path takes at all."""
    problem = _everything(subject)
    try:
        problem.attend(framework, path)
    except NotImplementedError:
        if path == "reference":
            raise
        return subject.problem(subject.tensors(_KEYS), causal=True)
    return problem


def reference(problem: Problem) -> Host:
    """The definition in float64, on NumPy."""
    return problem.attend(NumPy(), "reference", dtype="float64")


@law("path")
def path_equals_the_reference(subject: Subject, framework: Framework, path: str) -> None:
    """Attention is ``softmax(scale * q @ k.T + bias) @ v`` over what a query may see."""
    long, seg = subject.tensors(_LONG, batch=1), np.repeat([0, 1], [8, _LONG - 8])
    problems = {
        "causal": subject.problem(subject.tensors(_KEYS), causal=True),
        "window": subject.problem(long, causal=True, window=_WINDOW),
        "segments": subject.problem(long, q_seg=seg, k_seg=seg),
        "everything": _everything(subject),
    }
    refused = []
    for name, problem in problems.items():
        try:
            found = problem.attend(framework, path)
        except NotImplementedError as reason:
            if path == "reference":
                raise
            refused.append(reason)
            continue
        assert_near(found, reference(problem), PATHS["float32"], name)
    if len(refused) == len(problems):
        raise refused[0]


@law("path")
def path_equals_the_reference_in_other_floats(
    subject: Subject, framework: Framework, path: str
) -> None:
    """Attention of float64 is right to float64, that of half precision to its own rounding."""
    problem, refused = _served(subject, framework, path), []
    expected = reference(problem)
    dtypes = [name for name in framework.dtypes if name != "float32"]
    for dtype in dtypes:
        try:
            found = problem.attend(framework, path, dtype=dtype)
        except NotImplementedError as reason:
            if path == "reference":
                raise
            refused.append(reason)
            continue
        assert_near(found, expected, PATHS[dtype], dtype)
    if dtypes and len(refused) == len(dtypes):
        raise refused[0]


@law("gradient")
def gradients_are_derivatives(subject: Subject, framework: Framework, path: str) -> None:
    """The gradient of every argument is how attention changes with it."""
    problem = _served(subject, framework, path)
    d_out = subject.normal(problem.tensors["q"].shape, 9)
    _, found = problem.gradients(framework, path, d_out)
    arrays = {**problem.tensors, **problem.params}
    require(found.keys() == arrays.keys(), f"gradients of {list(found)}, not of {list(arrays)}")
    for seed, (name, array) in enumerate(arrays.items()):
        require(np.all(np.isfinite(found[name])), f"gradient of {name} is not finite")
        direction = np.random.default_rng(seed).standard_normal(array.shape)
        along = float(np.sum(found[name] * direction))
        expected = _slope(problem, name, direction, d_out)
        size = max(1.0, float(np.linalg.norm(found[name]) * np.linalg.norm(direction)))
        assert_near(along / size, expected / size, DIFFERENCES, f"derivative along {name}")


def _slope(problem: Problem, name: str, direction: Host, d_out: Host) -> float:
    """The derivative of ``sum(d_out * attention)`` along a direction, from two values."""
    values = []
    for step in (_STEP, -_STEP):
        moved = [
            {n: a + step * direction if n == name else a for n, a in own.items()}
            for own in (problem.tensors, problem.params)
        ]
        varied = replace(problem, tensors=moved[0], params=moved[1])
        values.append(float(np.sum(d_out * reference(varied))))
    return (values[0] - values[1]) / (2 * _STEP)


@law("gradient")
def gradient_reaches_every_param(subject: Subject, framework: Framework, path: str) -> None:
    """Training moves every learned array that attention can see, and every head's part of one."""
    specs = subject.scheme.param_specs()
    if not specs:
        return
    problem = subject.problem(subject.tensors(_KEYS), causal=True)
    d_out = subject.normal((2, subject.heads, _KEYS, subject.head_dim), 9)
    _, found = problem.gradients(framework, path, d_out)
    embedded = gradients_of_embedding(subject, framework)
    for name, spec in specs.items():
        moved = np.asarray(found[name] != 0) | (embedded.get(name, 0.0) != 0)
        each = moved.reshape(spec.shape[0], -1) if spec.per_head else moved.reshape(1, -1)
        still = [head for head, own in enumerate(each) if not np.any(own)]
        still = [head for head in still if not _unseen(problem, name, head)]
        where = f" of heads {still}" if spec.per_head else ""
        require(not still, f"no gradient reaches {name}{where}")


def _unseen(problem: Problem, name: str, head: int) -> bool:
    """Whether a learned array moves the bias by as much at every key of a query, and nothing else:
    softmax cannot see that, as the last offset of FIRE's network.
    """
    if is_gated(problem.scheme):
        return False
    wide = {each: array.astype(np.float64) for each, array in problem.params.items()}
    other, per_head = np.array(wide[name]), problem.scheme.param_specs()[name].per_head
    other[head if per_head else ...] += 0.25
    moved, at = replace(problem, params={**wide, name: other}), np.arange(_KEYS)
    here, there = (posenc.bias(problem.scheme, at, at, own) for own in (wide, moved.params))
    if here is None or np.array_equal(here, np.asarray(there)):
        return False
    return bool(np.allclose(reference(moved), reference(problem), rtol=0, atol=PATHS["float64"]))


@law("compiler")
def compiled_attention_equals_eager(subject: Subject, framework: Framework, compiler: str) -> None:
    """Attention and its gradients are the same compiled, on every path."""
    problem = _everything(subject)
    d_out = subject.normal((2, subject.heads, _QUERIES, subject.head_dim), 9)
    for path in framework.paths:
        with suppress(NotImplementedError):  # the law of each path says so
            eager = problem.eagerly(framework, path)
            found = problem.attend(framework, path, compiler=compiler)
            assert_near(found, eager, PATHS["float32"], path)
            if not framework.differentiable:
                continue
            expected = problem.gradients(framework, path, d_out)[1]
            _, gradients = problem.gradients(framework, path, d_out, compiler=compiler)
            for name, gradient in gradients.items():
                summed = SUMMED if name in subject.params or name == "x" else 1
                what = f"gradient of {name} on {path}"
                assert_near(gradient, expected[name], summed * PATHS["float32"], what)
