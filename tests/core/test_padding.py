"""What padding holds reaches no learned array, and how padding is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from array_api_compat import array_namespace
from frameworks import ROUTES
from hypothesis import given
from hypothesis import strategies as st
from sample import long
from subjects import HEAD_DIM, HIDDEN_DIM, SUBJECTS, heads, normal, params_of

import posenc
from posenc.apply.feature_needs import reads_hidden
from posenc.attn.padding import _reads_vectors as reads
from posenc.attn.padding import occurs_in

# The reference stands for all: tokens are set to 0 before an implementation gets them.
REFERENCES = [
    route
    for route in ROUTES
    if route.values[0] is None
    or (route.values[0].framework.differentiable and route.values[0].implementation == "reference")
]
LEARNS = {n: s for n, s in SUBJECTS.items() if s.param_specs() and reads(s)}
LENGTH = 7
# Where each call waits for a compiler, a few schemes stand for all.
CASES = [
    pytest.param(route.values[0], name, id=f"{route.id}-{name}", marks=route.marks)
    for route in REFERENCES
    for n, name in enumerate(LEARNS)
    if not str(route.id).startswith("jax") or n % 12 == 0
]


@pytest.mark.parametrize(
    ("route", "name", "padded"),
    [
        pytest.param(
            *p.values, padded, id=f"{p.id}-{padded}",
            marks=[*p.marks, *[long] * p.id.startswith("jax")],
        )
        for p in CASES
        for padded in ("both", "keys")
    ],
)  # fmt: skip
def test_nan_in_padding_reaches_no_learned_array(route, name, padded):
    scheme = LEARNS[name]
    shape = (2, heads(scheme), LENGTH, HEAD_DIM)
    tensors = {n: normal(shape, seed) for seed, n in enumerate("qkv")}
    hidden = np.arange(LENGTH) < np.array([[0], [3]])
    if padded == "both":
        options = {"tokens": posenc.positions.left_padded([LENGTH, LENGTH - 3], LENGTH)}
    else:
        options = {"tokens": posenc.Tokens(exists=~hidden), "queries": posenc.Tokens()}
    if reads_hidden(scheme):
        x = normal((2, LENGTH, HIDDEN_DIM), 5)
        options["tokens"] = replace(options["tokens"], x=x)
    d_out = normal(shape, 6)
    if padded == "keys":  # the first queries of the second row see no key
        options["causal"] = True
    results = []
    for fill in (0.0, np.nan):
        own = {
            n: np.where(hidden[:, None, :, None], fill, a)
            if n in ("qkv"[padded == "keys" :])
            else a
            for n, a in tensors.items()
        }
        results.append(route.gradients(scheme, own, params_of(scheme), d_out, **options))
    (out, gradients), (found, others) = results
    np.testing.assert_array_equal(found, out)
    for leaf, gradient in gradients.items():
        assert np.isfinite(gradient).all(), leaf
        np.testing.assert_array_equal(others[leaf], gradient, leaf)


segments = st.lists(st.integers(-3, 3) | st.sampled_from([-(2**31), 2**31 - 1]), max_size=9)


HIDDEN = [name for name, scheme in SUBJECTS.items() if reads_hidden(scheme)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", HIDDEN)
def test_nan_in_the_hidden_states_of_padding_reaches_no_token(name, side):
    scheme = SUBJECTS[name]
    tensors = {
        n: normal((2, heads(scheme), LENGTH, HEAD_DIM), seed) for seed, n in enumerate("qkv")
    }
    x, exists = normal((2, LENGTH, HIDDEN_DIM), 5), np.arange(LENGTH) >= np.array([[0], [3]])
    exists = exists if side == "left" else exists[:, ::-1]
    tokens, params = posenc.Tokens(exists=exists), params_of(scheme)
    results = []
    for fill in (0.0, np.nan):
        own = replace(tokens, x=np.where(exists[:, :, None], x, fill))
        with np.errstate(invalid="ignore"):
            out = posenc.attention(**tensors, scheme=scheme, params=params, causal=True, tokens=own)
        results.append(np.where(exists[:, None, :, None], out, 0.0))
    np.testing.assert_array_equal(*results)


@given(segments, segments)
def test_which_numbers_occur_in_others(numbers, others):
    a, b = (np.array([x, x[::-1]], dtype=np.int32).reshape(2, -1) for x in (numbers, others))
    found = occurs_in(a, b, array_namespace(a))
    np.testing.assert_array_equal(found, [np.isin(*rows) for rows in zip(a, b, strict=True)])
