"""The core on arrays without data, on positions of any dtype, in a dtype that is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import HAS
from sample import long, some
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc.apply.feature_needs import reads_features
from posenc.apply.transform import has_transform
from posenc.testing import SchemeCase, assert_near
from posenc.testing.examples import HEAD_DIM, HIDDEN_DIM
from posenc.testing.tolerances import FLOAT32_TOL

POS = np.asarray([[0, 1, 2, 3, 40, 5], [9, 0, 7, 7, 3, 63]])

ONE_OF_EACH = {type(scheme): name for name, scheme in SUBJECTS.items()}.values()

COMPILED = ("t5", "rope", "learned", "fox")


def tokens_of(a):
    return posenc.Tokens(pos=a["pos"], seg=a["seg"], x=a["x"])


def of_bias(scheme, a, params):
    return None if reads_features(scheme) else posenc.bias(scheme, a["pos"], a["pos"], params)


def of_transform(scheme, a, params):
    q, found = a["q"], {}
    if has_transform(scheme):
        found = posenc.features(scheme, params, tokens_of(a), q=q, k=q)[0].features
    return posenc.transform(scheme, q, a["pos"], role="query", params=params, features=found)


def of_embedding(scheme, a, params):
    return posenc.embedding(scheme, a["pos"], params)


def of_features(scheme, a, params):
    sides = posenc.features(scheme, params, tokens_of(a), q=a["q"], k=a["k"])
    return next((found for side in sides for found in (side.features or {}).values()), None)


def of_attention(scheme, a, params):
    vectors = {name: a[name] for name in "qkv"}
    return posenc.attention(
        **vectors, scheme=scheme, params=params, causal=True, tokens=tokens_of(a)
    )


FUNCTIONS = [of_attention, of_bias, of_embedding, of_features, of_transform]


def arguments(scheme, dtype):
    count = heads(scheme)
    shared = 1 if SchemeCase(scheme).shares_keys else count
    return {
        "q": normal((2, count, 6, HEAD_DIM), 0, dtype),
        "k": normal((2, shared, 6, HEAD_DIM), 1, dtype),
        "v": normal((2, shared, 6, HEAD_DIM), 2, dtype),
        "x": normal((2, 6, HIDDEN_DIM), 3, dtype),
        "pos": POS,
        "seg": POS % 2,
        **{f"param:{name}": value for name, value in params_of(scheme, dtype=dtype).items()},
    }


def applied(function, scheme):
    """``function`` on a flat mapping of arrays, params among them."""

    def run(arrays):
        params = {n.removeprefix("param:"): a for n, a in arrays.items() if n.startswith("param:")}
        return function(scheme, arrays, params)

    return run


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@pytest.mark.parametrize("subject", some(SUBJECTS, ONE_OF_EACH, long))
def test_shapes_and_dtypes_without_data(subject):
    import torch

    scheme = SUBJECTS[subject]
    arrays = arguments(scheme, "float32")
    meta = {name: torch.tensor(a, device="meta") for name, a in arrays.items()}
    for function in FUNCTIONS:
        expected = applied(function, scheme)(arrays)
        found = applied(function, scheme)(meta)
        if expected is None:
            assert found is None, function
            continue
        assert found.device.type == "meta", function
        assert found.shape == expected.shape, function
        assert found.dtype == getattr(torch, str(expected.dtype)), function


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@pytest.mark.parametrize("subject", SUBJECTS)
def test_torch_inputs_stay_as_they_were(subject):
    import torch

    scheme = SUBJECTS[subject]
    arrays = {n: torch.tensor(a) for n, a in arguments(scheme, "float32").items()}
    versions = {name: a._version for name, a in arrays.items()}
    for function in FUNCTIONS:
        applied(function, scheme)(arrays)
        assert versions == {name: a._version for name, a in arrays.items()}, function


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@pytest.mark.parametrize("subject", some(SUBJECTS, COMPILED))
def test_torch_compiles_what_users_call(subject):
    """In one graph and without a warning, which pytest turns into an error."""
    import torch

    scheme = SUBJECTS[subject]
    arrays = {n: torch.tensor(a) for n, a in arguments(scheme, "float64").items()}
    for function in FUNCTIONS:
        run = applied(function, scheme)
        expected = run(arrays)
        torch.compiler.reset()  # it counts all programs of ``run`` as one function's
        found = torch.compile(run, fullgraph=True, backend="eager")(arrays)
        assert (found is None) == (expected is None), function
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
@pytest.mark.parametrize("subject", ["alibi", "t5", "kerple_log", "tide", "both"])
def test_positions_of_any_integer_dtype(subject, dtype):
    scheme, pos = SUBJECTS[subject], np.asarray([100, 3, 0, 127])
    found = posenc.bias(scheme, pos.astype(dtype), pos.astype(dtype), params_of(scheme))
    np.testing.assert_array_equal(found, posenc.bias(scheme, pos, pos, params_of(scheme)))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_result_can_be_asked_for_in_a_dtype(subject):
    scheme, params = SUBJECTS[subject], params_of(SUBJECTS[subject])
    for function in (of_bias, of_embedding):
        wide = applied(function, scheme)(arguments(scheme, "float64"))
        if wide is None:
            continue
        pos = POS if function is of_embedding else (POS, POS)
        run = posenc.embedding if function is of_embedding else posenc.bias
        found = run(scheme, *([pos] if run is posenc.embedding else pos), params, dtype=np.float64)
        assert found.dtype == np.float64
        assert_near(found, wide, FLOAT32_TOL)  # params were rounded to float32 in one of them
