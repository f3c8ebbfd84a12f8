"""Drawn calls of attention on every implementation of every framework, beside NumPy's float64
reference.

``pytest tests/core/test_fuzz.py -m "" --hypothesis-profile=long`` draws anew, as many more as
``tests/conftest.py`` says.
"""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from frameworks import PARTIAL
from fuzzing import Mixed, Side, fill, fillings, layouts, loops, sees
from hypothesis import event, given, settings
from hypothesis import strategies as st
from roundings import SMALLEST, UNIT, bounds
from sample import long
from subjects import normal

from posenc.attn.masks import complete_mask
from posenc.testing.attention_case import AttentionCase
from posenc.testing.framework import NumPy, frameworks

FOUND = frameworks()
NUMPY = NumPy()
TORCH = FOUND.get("torch")
# Paths of JAX that need an accelerator refuse everything here.
ROUTES = [
    (f, implementation)
    for f in FOUND.values()
    for implementation in f.implementations
    if f.name != "jax" or implementation not in PARTIAL
]


def later(framework, implementation):
    """Whether it takes long, or computes what another does in the quick part: the core's code, or
    SDPA's with a whole bias.
    """
    again = framework is TORCH and implementation in ("reference", "sdpa")
    return implementation == "flex" or again or str(framework).startswith("strict")


EAGER = [
    pytest.param(*r, id="-".join(map(str, r)), marks=[long] * later(*r))
    for r in ROUTES
    if r[0].default_compiler is None
]
COMPILED = [
    pytest.param(*r, id="-".join(map(str, r))) for r in ROUTES if r[0].default_compiler is not None
]
# (B, H, Hk, Q, K, D, Dv), with tiles of 8: one block, several, a padded one, of queries or keys.
SIZES = [
    (2, 4, 2, 20, 20, 8, 8),
    (1, 4, 4, 3, 20, 8, 8),
    (2, 4, 1, 27, 9, 4, 4),
    (2, 4, 2, 16, 25, 6, 6),
    (3, 4, 4, 8, 8, 2, 2),
    (1, 4, 2, 17, 32, 8, 5),
    (1, 4, 1, 1, 1, 4, 4),
]
SERVES = {"xla": ("float32", "bfloat16")}  # so that few examples are refused


def times(count: int):
    """So many examples in the profile of the suite, which has 20 a test; as many times more in one
    that has more."""
    return settings(max_examples=max(1, count * settings().max_examples // 20))


def assert_within(found, expected, bound, what="values"):
    """Elementwise; 0 where the bound is."""
    assert found.shape == expected.shape, what
    assert np.all(np.isfinite(found)), f"{what}: not finite"
    excess = np.abs(found - expected) - bound
    at = np.unravel_index(np.argmax(excess), excess.shape)
    message = f"{what}: {found[at]:.9g} at {at}, not {expected[at]:.9g} within {bound[at]:.1e}"
    assert excess[at] <= 0, message


def check(problem: AttentionCase, framework, implementation: str, dtype: str, dtypes=None):
    """Values, and gradients where the framework has them; ``dtypes`` by name if they differ."""
    plain = AttentionCase(problem.scheme, problem.tensors, problem.params, problem.options)
    values = plain.attend(NUMPY, "reference", dtype="float64")
    d_out = normal(values.shape, 9)
    wide = "float64" if dtype == "float64" else "float32"  # of params, in a problem
    own = dict.fromkeys(plain.floats(), dtype) if dtypes is None else dtypes
    dtypes = own | dict.fromkeys(problem.params, wide)
    bound = bounds(plain, d_out, dtypes)
    try:
        if (
            not framework.differentiable or implementation == "flex"
        ):  # which has no gradients on a CPU
            found = problem.attend(framework, implementation, dtype=dtype)
            assert_within(found, values, rounded(bound.values, values, dtype))
            return
        out, found = problem.gradients(framework, implementation, d_out, dtype=dtype)
    except NotImplementedError as reason:
        event(f"refused: {str(reason)[:60]}")
        return
    assert_within(out, values, rounded(bound.values, values, dtype))
    if TORCH is None:
        check_differences(plain, d_out, found, bound.gradients)
        return
    expected = plain.gradients(TORCH, "reference", d_out, dtype="float64")[1]
    assert found.keys() == expected.keys() == bound.gradients.keys()
    for name, gradient in expected.items():
        allowed = rounded(bound.gradients[name], gradient, dtypes[name])
        assert_within(found[name], gradient, allowed, f"gradient of {name}")


def rounded(bound, expected, dtype):
    """A result is rounded to its own dtype at last, which may be below that of the call."""
    return bound + UNIT[dtype] * np.abs(expected) + SMALLEST[dtype]


def check_differences(problem: AttentionCase, d_out, found, bound):
    """Gradients along one direction each, beside central differences of the reference."""
    given = problem.floats()
    for name in found:
        direction = np.sign(normal(given[name].shape, 10) + 1e-3)
        size = np.max(np.abs(found[name]), initial=1)
        step = 1e-4 / size  # a change of the loss of about 1e-4

        def loss(move, name=name, direction=direction):
            moved = problem.with_float(name, given[name].astype(np.float64) + move * direction)
            return np.sum(d_out * moved.attend(NUMPY, "reference", dtype="float64"))

        slope = (loss(step) - loss(-step)) / (2 * step)
        # The square of the step times a third derivative; the loss is rounded at 1e-15 of its size.
        allowed = np.sum(bound[name]) + 1e-5 * size + 1e-11 * np.sum(np.abs(d_out)) / step * 1e-3
        assert abs(np.sum(found[name] * direction) - slope) <= allowed, name


@times(100)
@given(layouts(longest=7), fillings)
def test_the_reference_is_its_definition(layout, filling):
    problem = fill(layout, filling)
    found = problem.attend(NUMPY, "reference", dtype="float64")
    dtypes = dict.fromkeys(problem.floats(), "float64")
    bound = bounds(problem, np.zeros_like(found), dtypes)
    assert_within(found, loops(problem), bound.values)


@pytest.mark.parametrize(("framework", "implementation"), EAGER)
@times(60)
@given(st.data())
def test_an_implementation_equals_the_reference(framework, implementation, data):
    problem = fill(data.draw(layouts()), data.draw(fillings))
    check(problem, framework, implementation, data.draw(st.sampled_from(framework.dtypes)))


def no_compiled_calls_left():
    """What JAX compiled is kept for good, and each example compiles something else."""
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()


@long
@pytest.mark.parametrize(("framework", "implementation"), COMPILED)
@times(6)
@given(st.data())
def test_a_compiled_implementation_equals_the_reference(framework, implementation, data):
    layout = data.draw(layouts(sizes=SIZES))
    dtype = data.draw(st.sampled_from(SERVES.get(implementation, framework.dtypes)))
    for filling in data.draw(st.lists(fillings, min_size=1, max_size=4)):  # compiled once for all
        check(fill(layout, filling), framework, implementation, dtype)
    no_compiled_calls_left()


@long
@pytest.mark.skipif("jax" not in FOUND, reason="jax is not installed")
@times(100)
@given(layouts(kinds=("nope",)).filter(lambda layout: not layout.pos))
def test_blocks_that_jax_leaves_out_hold_nothing_to_see(layout):
    blocks = importlib.import_module("posenc_jax.chunked.blocks")
    o = dict(layout.options)
    sizes = {"q_len": layout.q_len, "k_len": layout.k_len, "q_block": 8, "k_block": 8}
    mask = complete_mask(o["causal"], o["window"], o["mask"])
    tiling = blocks.Tiling(
        layout.scheme, scale=1.0, softcap=None, mask=mask, dtype="float32",
        aligned=True, has_table=False, by_pair=(), heads=1, skips=False, **sizes,
    )  # fmt: skip
    q, k = np.arange(layout.k_len - layout.q_len, layout.k_len), np.arange(layout.k_len)
    seen = np.asarray([[sees(Side(i, 0, 1), Side(j, 0, 1), o) for j in k] for i in q])
    for i, j in {(int(i), int(j)) for i, j in np.argwhere(seen) // 8}:
        for (first, end), at in ((tiling.key_blocks(i), j), (tiling.query_blocks(j), i)):
            assert first <= at < end


@pytest.mark.parametrize(("framework", "implementation"), EAGER)
@times(20)
@given(st.data())
def test_tensors_of_several_dtypes(framework, implementation, data):
    check_mixed(data, framework, implementation, data.draw(layouts()))


@long
@pytest.mark.parametrize(("framework", "implementation"), COMPILED)
@times(3)
@given(st.data())
def test_tensors_of_several_dtypes_compiled(framework, implementation, data):
    check_mixed(data, framework, implementation, data.draw(layouts(sizes=SIZES)))


def check_mixed(data, framework, implementation, layout):
    problem = fill(layout, data.draw(fillings))
    names = [n for n in problem.floats() if n not in problem.params]
    dtypes = {n: data.draw(st.sampled_from(framework.dtypes)) for n in names}
    mixed = Mixed(problem.scheme, problem.tensors, problem.params, problem.options, dtypes)
    check(mixed, framework, implementation, dtypes["q"], dtypes)
