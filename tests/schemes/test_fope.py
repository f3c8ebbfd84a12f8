"""FoPE against a loop over heads, pairs and frequencies, with matrices drawn as it says."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.schemes import ClipPeriod, FoPE
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, LENGTH = 3, 16, 7
SCHEME = FoPE(HEADS, DIM, train_len=300, base=100.0, gain=0.6, seed=5)
FEW = FoPE(HEADS, DIM, train_len=40, base=1000.0)  # as many mixtures as frequencies
POS = np.asarray([0, 1, -3, 17, 299, 300, 4000])
X = normal((2, HEADS, LENGTH, DIM), 0)


def drawn(scheme, n, m):
    """The identity in every ``ceil(n / m)``-th row, and normal values of PyTorch's Xavier."""
    rng, heads = np.random.default_rng(scheme.seed), scheme.num_heads
    coef = [rng.standard_normal((heads, n, m)) for _ in range(2)]
    deviation = scheme.gain * math.sqrt(2.0 / (n * m + heads * m))
    ones = [[1.0 if j == k * math.ceil(n / m) else 0.0 for k in range(m)] for j in range(n)]
    return [np.asarray(ones) + deviation * c for c in coef]


def turned(scheme, x, pos, n, m):
    f = [scheme.base ** (-2 * k / DIM) for k in range(n)]
    assert (
        f[-1] * scheme.train_len >= 2 * math.pi > scheme.train_len * scheme.base ** (-2 * n / DIM)
    )
    sines, cosines = drawn(scheme, n, m)
    out = x.copy()
    for h, i, k in np.ndindex(HEADS, len(pos), DIM // 2):
        s, c = (1.0, 1.0) if scheme.rest == "released" else (0.0, 1.0)
        if k < m:
            s = sum(math.sin(int(pos[i]) * f[j]) * sines[h, j, k] for j in range(n))
            c = sum(math.cos(int(pos[i]) * f[j]) * cosines[h, j, k] for j in range(n))
        a, b = x[:, h, i, k], x[:, h, i, k + DIM // 2]
        out[:, h, i, k], out[:, h, i, k + DIM // 2] = a * c - b * s, a * s + b * c
    return out


@pytest.mark.parametrize("role", ["query", "key"])
@pytest.mark.parametrize(
    ("scheme", "n", "m"),
    [
        (SCHEME, 7, 4),
        (FoPE(HEADS, DIM, train_len=300, base=100.0, rest="released"), 7, 4),
        (FEW, 3, 3),
    ],
    ids=["kept", "released", "few"],
)
def test_it_is_the_formula(scheme, n, m, role):
    found = posenc.transform(scheme, X, POS, role=role)
    np.testing.assert_allclose(found, turned(scheme, X, POS, n, m), atol=1e-12)


def test_learned_matrices_start_from_the_fixed_ones_and_are_read():
    learned = FoPE(HEADS, DIM, train_len=300, base=100.0, gain=0.6, seed=5, learned=True)
    first = posenc.init_params(learned, seed=9)
    assert {name: a.shape for name, a in first.items()} == dict.fromkeys(
        ("sin_coef", "cos_coef"), (HEADS, 7, 4)
    )
    for name, expected in zip(first, drawn(SCHEME, 7, 4), strict=True):
        np.testing.assert_array_equal(first[name], expected.astype(np.float32))
    found = posenc.transform(learned, X, POS, role="key", params=first)
    np.testing.assert_allclose(found, posenc.transform(SCHEME, X, POS, role="key"), atol=1e-6)
    none = {name: np.zeros_like(a) for name, a in first.items()}
    found = posenc.transform(learned, X, POS, role="key", params=none)
    assert not np.any(found[..., [0, 3, 8, 11]])
    np.testing.assert_array_equal(found[..., 4:8], X[..., 4:8])


def test_without_a_random_part_it_is_rope_with_clipped_periods():
    fope = FoPE(HEADS, DIM, train_len=40, base=1000.0, gain=1e-12)
    rope = posenc.RoPE(DIM, base=1000.0, scaling=ClipPeriod(40))
    found = posenc.transform(fope, X, POS, role="query")
    np.testing.assert_allclose(found, posenc.transform(rope, X, POS, role="query"), atol=1e-10)


def test_the_released_padding_doubles_the_scores_of_the_other_pairs():
    """And the mixtures are the same: what is left over is one more copy of these pairs."""
    released = FoPE(HEADS, DIM, train_len=300, base=100.0, gain=0.6, seed=5, rest="released")
    q, k = X, normal(X.shape, 1)
    rest = [c for c in range(DIM) if c % (DIM // 2) >= 4]
    scores = [
        np.einsum("bhid,bhjd->bhij", *(posenc.transform(s, a, POS, role="query") for a in (q, k)))
        for s in (SCHEME, released)
    ]
    more = np.einsum("bhid,bhjd->bhij", q[..., rest], k[..., rest])
    np.testing.assert_allclose(scores[1], scores[0] + more, atol=1e-11)


def test_a_seed_gives_the_same_matrices_each_time_and_another_seed_others():
    again = pickle.loads(pickle.dumps(SCHEME))
    other = FoPE(HEADS, DIM, train_len=300, base=100.0, gain=0.6, seed=6)
    found, same, new = (posenc.transform(s, X, POS, role="key") for s in (SCHEME, again, other))
    assert again == SCHEME != other
    np.testing.assert_array_equal(found, same)
    assert np.max(np.abs(found - new)) > 0.1


def test_a_pass_makes_the_tables_once():
    tables = posenc.rotary(SCHEME, POS, dtype=np.float64)
    q, k, v = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
    pos = {"causal": True, "tokens": posenc.Tokens(pos=POS)}
    given = {"causal": True, "tokens": posenc.Tokens(pos=POS, rotary=tables)}
    one, other = (posenc.attention(q, k, v, SCHEME, **options) for options in (pos, given))
    assert_near(one, other, ATTENTION_TOL["float64"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FoPE(2, 6, train_len=6), "train_len must be at least 7, got 6"),
        (lambda: FoPE(2, 5, train_len=64), "head_dim must be even and at least 4, got 5"),
        (lambda: FoPE(2, 2, train_len=64), "head_dim must be even and at least 4, got 2"),
        (lambda: FoPE(2, 8, train_len=64, seed=-1), "seed must be at least 0"),
        (lambda: FoPE(2, 8, train_len=64, gain=0), "gain must be finite and greater than 0, got 0"),
        (lambda: FoPE(2, 8, train_len=64, rest="ones"), "unknown rest 'ones'"),
        (lambda: posenc.transform(SCHEME, X[:, :1], POS, role="key"), "repeat k and v"),
        (lambda: posenc.make("fope", num_heads=2, head_dim=8), "needs train_len"),
    ],
)
def test_wrong_options(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
