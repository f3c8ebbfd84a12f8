"""``posenc.rotary``: wrong ones are errors, and ``Positions`` make as few as layers allow."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import posenc
from posenc.layers import LayerPlan
from posenc.schemes import LearnedRoPE, MixedRoPE, PoPE, ReRoPE, Sum

ROPE, AT = posenc.RoPE(8), np.arange(5)
X = np.random.default_rng(0).standard_normal((2, 4, 5, 8)).astype(np.float32)
MADE = posenc.rotary(ROPE, AT)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (posenc.rotary(posenc.RoPE(8, base=5e5), AT), ValueError, r"made for RoPE\(.*500000"),
        (posenc.rotary(ROPE, np.arange(4)), ValueError, r"tables \(4, 4\).*other positions"),
        (posenc.rotary(ROPE, np.zeros((3, 5), int)), ValueError, r"tables \(3, 1, 5, 4\)"),
        (posenc.rotary(ROPE, AT, dtype=np.float64), ValueError, "holds float64, but float32"),
        ({"sin": 0}, TypeError, r"posenc.rotary\(scheme, pos\), got dict"),
    ],
)
def test_a_wrong_rotary_is_an_error(wrong, error, message):
    with pytest.raises(error, match="rotary of keys.*" + message):
        posenc.transform(ROPE, X, AT, role="key", rotary=wrong)
    if "float64" not in message:  # the reference computes in float64 if an argument is
        with pytest.raises(error, match="rotary of queries.*" + message):
            posenc.attention(X, X, X, ROPE, queries=posenc.Tokens(rotary=wrong))


def test_schemes_and_calls_without_a_transform_take_no_rotary():
    assert posenc.rotary(posenc.NoPE(), AT) is None
    for other in (posenc.NoPE(), ReRoPE(8, window=2)):
        with pytest.raises(ValueError, match="rotary of keys was made for RoPE"):
            posenc.attention(X, X, X, other, tokens=posenc.Tokens(rotary=MADE))


def test_transformed_keys_read_no_rotary():
    """That of the tokens is the queries' alone, or nobody's if these have their own."""
    keys = posenc.transform(ROPE, X, AT, role="key")
    tokens, queries = posenc.Tokens(pos=AT, rotary=MADE), posenc.Tokens(pos=AT, rotary=MADE)
    whole = posenc.attention(X, X, X, ROPE, tokens=posenc.Tokens(pos=AT))
    elsewhere = replace(tokens, rotary=posenc.rotary(ROPE, np.arange(9)))
    for given in ({"tokens": tokens}, {"tokens": elsewhere, "queries": queries}):
        found = posenc.attention(X, keys, X, ROPE, k_transformed=True, **given)
        assert_array_equal(found, whole)
    with pytest.raises(ValueError, match=r"rotary of queries .*tables \(9, 4\)"):
        posenc.attention(X, keys, X, ROPE, k_transformed=True, tokens=elsewhere)


@pytest.mark.parametrize("shape", [(5, 8), (4, 5, 8), (2, 4, 5, 8), (2, 3, 4, 5, 8)])
def test_a_rotary_fits_vectors_of_any_number_of_axes(shape):
    x = np.resize(X, shape)
    for at in (AT, np.stack([AT, AT + 3]))[: 1 if shape[0] != 2 else 2]:
        turned = posenc.transform(ROPE, x, at, role="key", rotary=posenc.rotary(ROPE, at))
        assert_array_equal(turned, posenc.transform(ROPE, x, at, role="key"))
    batch = np.resize(X, (2, 5, 8)), np.stack([AT, AT + 3])
    turned = posenc.transform(ROPE, *batch, role="key", rotary=posenc.rotary(ROPE, batch[1]))
    assert_array_equal(turned, posenc.transform(ROPE, *batch, role="key"))


def test_a_transform_of_its_own_gets_no_rotary_of_another():
    class Doubled(posenc.RoPE):
        def transform(self, x, pos, *, role, params, xp):
            return super().transform(x, 2 * pos, role=role, params=params, xp=xp)

    assert posenc.rotary(Doubled(8), AT) is None
    turned = posenc.transform(Doubled(8), X, AT, role="key")
    assert_array_equal(turned, posenc.transform(ROPE, X, 2 * AT, role="key"))


def test_layers_share_a_rotary_unless_it_reads_their_own_arrays():
    fixed, summed = posenc.RoPE(8), Sum(posenc.RoPE(8), posenc.T5Bias(4))
    assert LayerPlan.of([fixed, summed], 4).rotary_layers == (0, 1, 0, 1)
    pope, learned = PoPE(4, 8), LearnedRoPE(8)  # phases belong to keys; layers share frequencies
    assert LayerPlan.of([pope, learned], 4).rotary_layers == (0, 1, 0, 1)
    assert LayerPlan.of(MixedRoPE(4, 8), 3).rotary_layers == (0, 1, 2)


@pytest.mark.parametrize("queries", [7, 3])
def test_angles_of_each_query_head_need_as_many_keys(queries):
    scheme = posenc.schemes.FoPE(num_heads=4, head_dim=8, train_len=16)
    k = np.zeros((2, 2, 7, 8))
    with pytest.raises(ValueError, match=r"4 heads .*; repeat k and v"):
        posenc.attention(np.zeros((2, 4, queries, 8)), k, k, scheme, causal=True)
