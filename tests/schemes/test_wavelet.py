"""Wavelets of distance: by hand, by the paper's formula, where they end, wrong options."""

from __future__ import annotations

import math

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.schemes import Wavelet
from posenc.testing.tolerances import ATTENTION_TOL, FLOAT32_TOL, assert_near

HEADS, DIM, LENGTH = 2, 6, 9
SCHEME = Wavelet(DIM, scales=2)
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
FLOAT64 = 4 * ATTENTION_TOL["float64"]  # either is rounded, of twice the products


def by_formula(scheme, k=K, v=V, pos=None, causal=True):
    """Equations 10 to 14, one pair after the other."""
    pos, out = np.arange(LENGTH) if pos is None else pos, np.zeros_like(Q)
    a = [scheme.min_scale * 2**n for n in range(scheme.scales)]
    pairs = [(scale, b) for scale in a for b in range(DIM // scheme.scales)]
    most = scheme.max_distance or 10**6
    for b, h, i in np.ndindex(Q.shape[:3]):
        g, weights = h // (HEADS // k.shape[1]), np.zeros(LENGTH)
        for j in range(LENGTH):
            n = min(most, pos[i] - pos[j])
            n = max(-most, n) if scheme.bidirectional else max(0, n)
            t = np.array([(n - shift) / scale for scale, shift in pairs])
            ricker = scheme.wavelet == "ricker"
            p = (1 - t**2) * np.exp(-(t**2) / 2) if ricker else np.exp(-(t**2))
            if not causal or pos[j] <= pos[i]:
                weights[j] = math.exp(Q[b, h, i] @ (k[b, g, j] + p) / math.sqrt(DIM))
        out[b, h, i] = weights / weights.sum() @ v[b, g]
    return out


def test_wavelets_by_hand():
    """Scales 1 and 2, shifts 0 and 1, of three tokens: a query reads one channel, times 2."""
    n0 = [1, 0, 1, 0.75 * math.exp(-1 / 8)]  # psi at 0, -1, 0, -1/2
    n1 = [0, 1, 0.75 * math.exp(-1 / 8), 1]  # at 1, 0, 1/2, 0
    n2 = [-3 * math.exp(-2), 0, 0, 0.75 * math.exp(-1 / 8)]  # at 2, 1, 1, 1/2
    assert abs(n2[0] + 0.4060058497) < 1e-10
    q = 2 * np.eye(4, dtype=np.float32)[None, :, None, :]
    q = np.broadcast_to(q, (1, 4, 3, 4))
    v = np.broadcast_to(np.eye(3, dtype=np.float32), (1, 4, 3, 3))
    found = posenc.attention(q, np.zeros_like(q), v, Wavelet(4, scales=2), causal=True)[0, :, 2]
    rows = np.exp(np.array([n2, n1, n0]).T)  # 2 psi / sqrt(4)
    assert_near(found, rows / rows.sum(axis=1, keepdims=True), FLOAT32_TOL)


@pytest.mark.parametrize("case", ["in order", "shuffled", "grouped", "gaussian", "both", "clipped"])
def test_it_is_the_formula(case):
    scheme, k, v, pos = SCHEME, K, V, None
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
    if case == "grouped":
        k, v = k[:, :1], v[:, :1]
    if case == "gaussian":
        scheme = Wavelet(DIM, scales=3, min_scale=1.5, wavelet="gaussian")
    if case in ("both", "clipped"):
        reach = 3 if case == "clipped" else None
        scheme = Wavelet(DIM, scales=2, max_distance=reach, bidirectional=case == "both")
    causal, tokens = case != "both", posenc.Tokens(pos=pos)
    found = posenc.attention(Q, k, v, scheme, causal=causal, tokens=tokens)
    assert_near(found, by_formula(scheme, k, v, pos, causal), FLOAT64, case)


@pytest.mark.parametrize("wavelet", ["ricker", "gaussian"])
def test_far_keys_have_no_bias(wavelet):
    """Every wavelet has ended where the table of a query does."""
    scheme, k = Wavelet(DIM, scales=2, wavelet=wavelet), np.zeros_like(K)
    near = posenc.attention(Q, k, V, scheme, causal=True)
    assert np.any(abs(near - posenc.attention(Q, k, V, posenc.NoPE(), causal=True)) > 0.01)
    (r,) = posenc.features(scheme, tokens=posenc.Tokens(), q=Q, k=K)[0].features.values()
    assert r.shape[-1] == {"ricker": 20, "gaussian": 14}[wavelet] + 2 + 1
    assert abs(r[..., -1]).max() < 2.0**-60 < abs(r[..., 9]).max()


def test_the_papers_sizes():
    scheme = Wavelet(128)
    (r,) = posenc.features(
        scheme, tokens=posenc.Tokens(), q=np.eye(128)[None, None], k=np.eye(128)[None, None]
    )[0].features.values()
    assert r.shape == (1, 1, 128, 1296)
    assert len(np.unique(r[0, 0], axis=0)) == 128
    # Channel 16 n + b is highest at distance b.
    np.testing.assert_array_equal(r[0, 0].argmax(axis=-1), np.tile(np.arange(16), 8))


def test_sizes():
    assert posenc.make("wavelet", head_dim=64) == Wavelet(64)
    assert posenc.make("wavelet", head_dim=12) == Wavelet(12, scales=4)
    assert posenc.make("wavelet", head_dim=8, max_len=64) == Wavelet(8, max_distance=63)
    assert posenc.make("wavelet", head_dim=64, scales=16, max_len=64).scales == 16


def test_wrong_options():
    with pytest.raises(ValueError, match="head_dim=10 must be a multiple of scales, got scales=8"):
        Wavelet(10)
    with pytest.raises(ValueError, match=r"max_distance must be given: .* reaches 327683 tokens"):
        Wavelet(64, scales=16)
    assert Wavelet(64, scales=16, max_distance=4096).max_distance == 4096
    q = np.zeros((1, 2, 3, 8))
    with pytest.raises(ValueError, match="q has 8 channels, the scheme head_dim=6"):
        posenc.attention(q, q, q, SCHEME)
