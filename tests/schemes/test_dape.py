"""DAPE against its formula, on several schemes."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import ROUTES
from subjects import normal

import posenc
from posenc.schemes import DAPE, CoPE, Kerple, ReRoPE, Sum
from posenc.testing import examples
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, LENGTH, HIDDEN = 4, 8, 10, 5
FLOAT64 = 4 * ATTENTION_TOL["float64"]
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
AT = np.arange(LENGTH)


def drawn(scheme):
    shapes = {name: spec.shape for name, spec in scheme.param_specs().items()}
    return {name: normal(shape, n) / 2 for n, (name, shape) in enumerate(shapes.items())}


def by_formula(params, bias=None):
    """With scores ``s + b + w2 LeakyReLU(w1 [s; b] + b1) + b2``, in float64, and the log-sum-exp.

    Without it ``b2`` would not matter: it is one number for all keys.
    """
    s = np.einsum("bhid,bhjd->bhij", Q, K) / np.sqrt(DIM)
    z, total = s, s
    if bias is not None:
        b = np.broadcast_to(bias, s.shape)
        z, total = np.concatenate([s, np.where(np.isinf(b), 0, b)], axis=1), s + b
    units = np.einsum("nc,bcij->bnij", params["w1"], z) + params["b1"][:, None, None]
    units = np.maximum(units, 0.01 * units)
    total = total + np.einsum("hn,bnij->bhij", params["w2"], units) + params["b2"][:, None, None]
    total = np.where(AT[:, None] >= AT, total, -np.inf)
    sums = np.exp(total).sum(axis=-1)
    return np.exp(total) / sums[..., None] @ V, np.log(sums)


@pytest.mark.parametrize("base", [posenc.ALiBi(HEADS), Kerple(HEADS), examples.Fence()])
def test_it_is_the_formula(base):
    scheme = DAPE(base, hidden=HIDDEN)
    params = drawn(scheme)
    own = {name[2:]: np.abs(a) for name, a in params.items() if name.startswith("0_")}
    params |= {f"0_{name}": a for name, a in own.items()}
    assert params["w1"].shape == (HIDDEN, 2 * HEADS)
    found = posenc.attention(Q, K, V, scheme, params, causal=True, return_lse=True)
    bias = posenc.bias(base, AT, AT, own, dtype=np.float64)
    for mine, expected in zip(found, by_formula(params, bias), strict=True):
        assert_near(mine, expected, FLOAT64)


def test_a_scheme_without_a_bias_gives_scores_alone():
    params = drawn(scheme := DAPE(posenc.NoPE(), HIDDEN, num_heads=HEADS))
    assert params["w1"].shape == (HIDDEN, HEADS)
    found = posenc.attention(Q, K, V, scheme, params, causal=True)
    assert_near(found, by_formula(params)[0], FLOAT64)


def test_the_name_is_dape_on_alibi():
    made = posenc.make("dape", num_heads=HEADS, head_dim=DIM, hidden=7)
    assert made == DAPE(posenc.ALiBi(HEADS), 7)
    assert made.at_length(4096) is made
    longer = DAPE(posenc.ALiBi(HEADS, interpolate_from=16), 7).at_length(64)
    assert longer == DAPE(posenc.ALiBi(HEADS, interpolate_from=16).at_length(64), 7)


def test_first_values_are_those_of_a_linear_layer():
    first = posenc.init_params(DAPE(posenc.ALiBi(8), hidden=512))
    most = {"w1": 16, "b1": 16, "w2": 512, "b2": 512}
    for name, inputs in most.items():
        assert 0.7 / np.sqrt(inputs) < np.abs(first[name]).max() <= 1 / np.sqrt(inputs)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.id in ("torch-sdpa", "jax-xla")])
def test_others_say_why_they_cannot(route):
    scheme = DAPE(posenc.ALiBi(HEADS))
    tensors = {n: a.astype(np.float32) for n, a in zip("qkv", (Q, K, V), strict=True)}
    for each, prefix in ((scheme, ""), (Sum(posenc.NoPE(), scheme), "1_")):
        params = {prefix + n: a for n, a in posenc.init_params(scheme).items()}
        with pytest.raises(NotImplementedError, match="depends on those of all heads"):
            route.attend(each, tensors, params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DAPE(CoPE(DIM), num_heads=HEADS), "adjusts scores"),
        (lambda: DAPE(ReRoPE(DIM, window=4), num_heads=HEADS), "has regions"),
        (lambda: DAPE(posenc.RoPE(DIM)), "num_heads"),
        (lambda: DAPE(posenc.ALiBi(4), num_heads=8), "num_heads=8"),
        (lambda: DAPE(posenc.ALiBi(4), hidden=0), "hidden"),
    ],
)
def test_what_cannot_be_adapted(make, message):
    with pytest.raises(ValueError, match=message):
        make()
