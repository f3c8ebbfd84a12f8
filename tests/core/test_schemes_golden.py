"""Numbers derived by hand from each paper's formula, not by running this library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import posenc

# One rounding of a float32 below 1, twice: of the result and of what it was computed from.
FLOAT32 = 2.0**-23
# Four roundings of a float64 below 1: math.sin's own argument pos * frequency is rounded, too.
FLOAT64 = 4 * 2.0**-53

EXPONENTS = {  # log2 of the slopes: Press et al. 2022, section 3, and its authors' code
    1: [-8],
    2: [-4, -8],
    3: [-4, -8, -2],
    4: [-2, -4, -6, -8],
    6: [-2, -4, -6, -8, -1, -3],
    8: [-1, -2, -3, -4, -5, -6, -7, -8],
    12: [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5],
    16: [-0.5 * h for h in range(1, 17)],
    20: [-0.5 * h for h in range(1, 17)] + [-0.25, -0.75, -1.25, -1.75],
}


def slopes_of(scheme):
    """The slopes as the bias shows them: of a key one step before its query."""
    return -posenc.bias(scheme, np.asarray([1]), np.asarray([0]), dtype=np.float64)[:, 0, 0]


@pytest.mark.parametrize("num_heads", EXPONENTS)
def test_alibi_slopes_of_the_paper(num_heads):
    expected = [2.0**e for e in EXPONENTS[num_heads]]
    np.testing.assert_allclose(slopes_of(posenc.ALiBi(num_heads)), expected, rtol=FLOAT64)


@pytest.mark.parametrize("num_heads", [1, 3, 8, 12])
def test_alibi_geometric_slopes(num_heads):
    expected = [2 ** (-8 * h / num_heads) for h in range(1, num_heads + 1)]
    scheme = posenc.ALiBi(num_heads, slopes="geometric")
    np.testing.assert_allclose(slopes_of(scheme), expected, rtol=FLOAT64)


def test_alibi_bias():
    found = posenc.bias(posenc.ALiBi(2), np.asarray([3, -1]), np.asarray([0, 3, 5, -4]))
    steps = np.asarray([[3, 0, 2, 7], [1, 4, 6, 3]])
    np.testing.assert_array_equal(found, [-steps / 16, -steps / 256])


def test_alibi_given_slopes_hold_their_order():
    given_slopes = np.asarray([3.0, 0.0, -0.5])
    np.testing.assert_array_equal(slopes_of(posenc.ALiBi(3, slopes=given_slopes)), given_slopes)


def test_alibi_learned_starts_from_the_fixed_slopes():
    first = posenc.init_params(posenc.ALiBi(12, learned=True))["slopes"]
    np.testing.assert_allclose(first, [2.0**e for e in EXPONENTS[12]], rtol=FLOAT32)


@pytest.mark.parametrize("num_heads", [1, 8, 12])
def test_alibi_key_bias_grows_with_the_key(num_heads):
    scheme = posenc.ALiBi(num_heads, slopes=[0.25] * num_heads)
    params = {"slopes": np.float32(0.25)}
    np.testing.assert_array_equal(
        scheme.key_bias(np.asarray([0, 1, 4]), params=params, xp=np), [0, 0.25, 1]
    )


def buckets(scheme, rel):
    """The bucket of each relative position, read from a table that counts."""
    counting = np.arange(scheme.num_buckets, dtype=np.float32)
    table = np.stack([counting + 1000 * h for h in range(scheme.num_heads)])
    found = posenc.bias(scheme, np.asarray([0]), np.asarray(rel), {"table": table})[:, 0, :]
    offsets = 1000 * np.arange(scheme.num_heads)[:, None]
    assert np.all(found - offsets == found[0]), "each head has its own row"
    return found[0].astype(int)


def exact_bucket(rel, num_buckets, max_distance, causal):
    """Raffel et al. 2020: ``floor(w ln(n/E) / ln(M/E)) >= t`` iff ``(n/E)^w >= (M/E)^t``."""
    size = num_buckets if causal else num_buckets // 2
    later = 0 if causal or rel <= 0 else size
    n = max(-rel, 0) if causal else abs(rel)
    E = size // 2
    if n < E:
        return later + n
    w, t = size - E, 0
    while E + t < size - 1 and n**w * E ** (t + 1) >= E**w * max_distance ** (t + 1):
        t += 1
    return later + E + t


# 8 * 2**(t/2) for t = 1..7 is 11.3, 16, 22.6, 32, 45.3, 64, 90.5: where buckets 9..15 begin.
FIRST_OF_BUCKET = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]


def test_t5_buckets_of_the_published_encoder():
    scheme = posenc.T5Bias(2)
    np.testing.assert_array_equal(buckets(scheme, np.negative(FIRST_OF_BUCKET)), range(16))
    lasts = np.asarray([*FIRST_OF_BUCKET[1:], 10**6]) - 1
    np.testing.assert_array_equal(buckets(scheme, -lasts), range(16))
    np.testing.assert_array_equal(buckets(scheme, lasts[1:]), range(17, 32))


def test_t5_buckets_where_half_precision_logarithms_fail():
    np.testing.assert_array_equal(buckets(posenc.T5Bias(1), [-16, -32, -90]), [10, 12, 14])


def test_t5_buckets_of_the_published_decoder():
    # 16 * 8**(t/16): 18.2 for t = 1, 45.3 for t = 8, 112.4 for t = 15
    scheme = posenc.T5Bias(1, causal=True)
    rel = [5, 0, -15, -16, -18, -19, -45, -46, -112, -113, -10_000]
    np.testing.assert_array_equal(buckets(scheme, rel), [0, 0, 15, 16, 16, 17, 23, 24, 30, 31, 31])


@given(
    st.integers(2, 40).map(lambda half: 2 * half),
    st.integers(1, 300),
    st.booleans(),
    st.lists(st.integers(-2000, 2000), min_size=1),
)
def test_t5_buckets_equal_exact_arithmetic(num_buckets, beyond, causal, rel):
    size = num_buckets if causal else num_buckets // 2
    max_distance = size // 2 + beyond
    scheme = posenc.T5Bias(2, num_buckets, max_distance, causal)
    expected = [exact_bucket(r, num_buckets, max_distance, causal) for r in rel]
    np.testing.assert_array_equal(buckets(scheme, rel), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"),
    # In (48, 81) and (54, 125) float32 logarithms of NumPy fall short of a threshold.
    [(16, 144), (32, 128), (64, 512), (2, 9), (48, 81), (54, 125)],
)
def test_t5_buckets_at_every_distance(num_buckets, max_distance, causal):
    if num_buckets == 2 and not causal:
        num_buckets = 4
    rel = range(-max_distance - 5, max_distance + 6)
    expected = [exact_bucket(r, num_buckets, max_distance, causal) for r in rel]
    found = buckets(posenc.T5Bias(1, num_buckets, max_distance, causal), list(rel))
    np.testing.assert_array_equal(found, expected)


LAYOUTS = {  # (channel, d) -> sine or cosine, and the exponent of 1 / base
    "interleaved": lambda c, d: ((math.sin, math.cos)[c % 2], 2 * (c // 2) / d),
    "concatenated": lambda c, d: ((math.sin, math.cos)[c // (d // 2)], 2 * (c % (d // 2)) / d),
    "tensor2tensor": lambda c, d: (
        (math.sin, math.cos)[c // (d // 2)],
        (c % (d // 2)) / (d // 2 - 1),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("base", [10_000.0, 7.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoids_element_by_element(layout, base, dtype):
    d, positions = 6, [0, 1, 2, 7, -3]
    scheme = posenc.Sinusoidal(d, base=base, layout=layout)
    found = posenc.embedding(scheme, np.asarray(positions), dtype=np.dtype(dtype))
    for row, pos in enumerate(positions):
        for c in range(d):
            function, exponent = LAYOUTS[layout](c, d)
            expected = function(pos / base**exponent)
            tolerance = {"float32": FLOAT32, "float64": 4 * FLOAT64}[dtype]
            assert abs(found[row, c] - expected) <= tolerance, (pos, c)


def turned(first, second, angle):
    """A pair of channels turned counterclockwise."""
    c, s = math.cos(angle), math.sin(angle)
    return first * c - second * s, second * c + first * s


@pytest.mark.parametrize("pos", [0, 1, 5, -2])
@pytest.mark.parametrize("role", ["query", "key"])
def test_rope_of_four_channels(pos, role):
    # base 10000 and D = 4: one pair turns by pos, the other by pos / 100.
    x = np.asarray([[1.0, 2.0, 3.0, 4.0]])
    (a, c), (b, d) = turned(1, 3, pos), turned(2, 4, pos / 100)
    half = posenc.transform(posenc.RoPE(4), x, np.asarray([pos]), role=role)
    np.testing.assert_allclose(half[0], [a, b, c, d], rtol=0, atol=16 * FLOAT64)
    scheme = posenc.RoPE(4, layout="interleaved")
    interleaved = posenc.transform(scheme, x, np.asarray([pos]), role=role)
    expected = [*turned(1, 2, pos), *turned(3, 4, pos / 100)]
    np.testing.assert_allclose(interleaved[0], expected, rtol=0, atol=16 * FLOAT64)


def test_partial_rope_turns_the_first_channels_as_a_whole_one_would():
    x, pos = np.asarray([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), np.asarray([3])
    found = posenc.transform(posenc.RoPE(6, rotary_dim=4), x, pos, role="query")
    (a, c), (b, d) = turned(1, 3, 3), turned(2, 4, 3 / 100)
    np.testing.assert_allclose(found[0, :4], [a, b, c, d], rtol=0, atol=16 * FLOAT64)
    np.testing.assert_array_equal(found[0, 4:], [5, 6])


def test_rope_base():
    found = posenc.transform(posenc.RoPE(4, base=16.0), np.eye(4), np.full(4, 8), role="key")
    np.testing.assert_allclose(np.diag(found), np.cos([8, 2, 8, 2]), rtol=0, atol=FLOAT64)


def test_learned_rows_begin_at_the_offset():
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    scheme = posenc.Learned(max_len=3, dim=2, offset=2)
    found = posenc.embedding(scheme, np.asarray([[0, 2], [1, 0]]), {"table": table})
    np.testing.assert_array_equal(found, [[[4, 5], [8, 9]], [[6, 7], [4, 5]]])


def test_defaults():
    assert posenc.ALiBi(3) == posenc.ALiBi(3, slopes="paper", noncausal="symmetric", learned=False)
    assert posenc.RoPE(8) == posenc.RoPE(8, base=10_000.0, layout="half", rotary_dim=None)
    assert posenc.Sinusoidal(8) == posenc.Sinusoidal(8, base=10_000.0, layout="interleaved")
    assert posenc.T5Bias(3) == posenc.T5Bias(3, num_buckets=32, max_distance=128, causal=False)
    assert posenc.Learned(3, 4) == posenc.Learned(max_len=3, dim=4, offset=0)


def test_scales():
    assert posenc.NoPE().scale(64) == 1 / 8
    assert posenc.ALiBi(2).scale(16) == 1 / 4
    assert posenc.T5Bias(2).scale(16) == 1 / 4
    assert posenc.T5Bias(2, scaled=False).scale(16) == 1
