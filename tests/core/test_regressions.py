"""What drawn calls found, each in its smallest form."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from frameworks import PARTIAL
from sample import few_of_jax, long, some
from subjects import normal

import posenc
from posenc import Tokens
from posenc.testing.attention_case import AttentionCase
from posenc.testing.framework import NumPy, frameworks, readonly
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

FOUND = frameworks()
ROUTES = few_of_jax(
    pytest.param(f, name, id=f"{f}-{name}")
    for f in FOUND.values()
    for name in f.implementations
    if name not in PARTIAL
)
DIFFERENTIABLE = [route for route in ROUTES if route.values[0].differentiable]
FAR = 2**30


def problem(scheme, q_len, k_len, **options):
    """Two heads of four channels."""
    sizes = {"q": q_len, "k": k_len, "v": k_len}
    tensors = {n: normal((1, 2, size, 4), i) for i, (n, size) in enumerate(sizes.items())}
    return AttentionCase(scheme, tensors, options=options)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize(("framework", "implementation"), ROUTES)
def test_a_window_wider_than_any_distance_hides_nothing(framework, implementation, window):
    without = problem(posenc.NoPE(), 20, 20).attend(NumPy(), "reference", dtype="float64")
    found = problem(posenc.NoPE(), 20, 20, window=window).attend(framework, implementation)
    assert_near(found, without, ATTENTION_TOL["float32"])


@pytest.mark.parametrize("dtype", some(["float16", "bfloat16", "float32"], ["float16"], long))
@pytest.mark.parametrize(("framework", "implementation"), DIFFERENTIABLE)
def test_a_row_that_sees_nothing_has_finite_gradients_whatever_its_bias(
    framework, implementation, dtype
):
    scheme = posenc.ALiBi(2, slopes=[-0.5, -0.5])  # biases of 2**19, more than float16 holds
    places = {
        "tokens": Tokens(pos=np.asarray([0]), seg=np.asarray([0])),
        "queries": Tokens(pos=np.asarray([2**20, 2**20]), seg=np.asarray([0, 1])),
    }
    call = problem(scheme, 2, 1, **places)
    try:
        out, gradients = call.gradients(
            framework, implementation, np.ones((1, 2, 2, 4)), dtype=dtype
        )
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    assert not np.any(out[:, :, 1])
    assert not np.any(gradients["q"])  # one key, whose weight is 1 or 0
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize(("framework", "implementation"), ROUTES)
def test_the_farthest_positions_that_are_accepted_are_far(framework, implementation):
    scheme = posenc.ALiBi(2, slopes=[1.0, 1.0])
    low, high = -FAR, FAR - 1
    places = {
        "tokens": Tokens(pos=np.asarray([high, low], "int32")),
        "queries": Tokens(pos=np.asarray([high], "int32")),
    }
    call = problem(scheme, 1, 2, **places)
    assert_near(
        call.attend_eagerly(framework, implementation),
        call.tensors["v"][:, :, :1],
        ATTENTION_TOL["float32"],
    )
    if framework.name.startswith("strict"):  # on a device whose values cannot be seen
        return
    at = places["queries"]
    beyond = problem(scheme, 1, 1, tokens=at, queries=Tokens(pos=at.pos + 1))
    with pytest.raises(ValueError, match=r"accepted: -2\*\*30"):
        beyond.attend_eagerly(framework, implementation)


@pytest.mark.parametrize("backend", ["numpy", *(n for n in ("torch", "jax") if n in FOUND)])
def test_segments_that_are_far_apart_are_not_the_same(backend):
    attention = posenc.attention if backend == "numpy" else backend_attention(backend)
    q = np.ones((1, 1, 1, 2), "float32")
    kv = np.asarray([[[[1.0, 1.0]], [[2.0, 2.0]]]], "float32")
    own = np.swapaxes(kv, 1, 2)
    seg = {
        "tokens": Tokens(seg=np.asarray([0, 2**32])),
        "queries": Tokens(seg=np.asarray([0])),
    }
    if backend == "jax":  # (B, L, H, D); it may refuse what does not fit its integers
        try:
            found = attention(q, kv, kv, posenc.NoPE(), **seg)
        except ValueError as error:
            assert "tokens.seg" in str(error)  # noqa: PT017
            return
    else:
        array = FOUND[backend].array
        found = attention(*(array(a, "float32") for a in (q, own, own)), posenc.NoPE(), **seg)
    np.testing.assert_array_equal(np.asarray(found).ravel(), [1, 1])


def backend_attention(name):
    return __import__(f"posenc_{name}").attention


@pytest.mark.parametrize(("framework", "implementation"), ROUTES)
def test_numpy_arrays_that_nobody_may_write_to(framework, implementation):
    if framework.name not in ("numpy", "torch", "jax"):
        pytest.skip("it takes no NumPy arrays")
    scheme, pos = posenc.T5Bias(2), np.broadcast_to(np.arange(3), (2, 3))
    params = {name: readonly(a) for name, a in posenc.init_params(scheme).items()}
    tensors = {n: framework.array(normal((2, 2, 3, 4), i), "float32") for i, n in enumerate("qkv")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a view on such an array
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        options = {"scheme": scheme, "params": params, "tokens": Tokens(pos=pos)}
        with framework.precision_scope(["float32"]):
            out = framework.attend(implementation, tensors, **options)
    assert tuple(out.shape) == (2, 2, 3, 4)
