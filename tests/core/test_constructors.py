"""Schemes refuse wrong fields where they are made, and name them."""

from __future__ import annotations

import math

import numpy as np
import pytest

import posenc

WRONG = {
    "alibi-none": (posenc.ALiBi, {"num_heads": 0}, ValueError, "num_heads"),
    "alibi-float": (posenc.ALiBi, {"num_heads": 2.0}, TypeError, "num_heads"),
    "alibi-bool": (posenc.ALiBi, {"num_heads": True}, TypeError, "num_heads"),
    "alibi-rule": (posenc.ALiBi, {"num_heads": 2, "slopes": "papr"}, ValueError, "'paper'"),
    "alibi-few": (posenc.ALiBi, {"num_heads": 2, "slopes": [1.0]}, ValueError, "slopes"),
    "alibi-nan": (posenc.ALiBi, {"num_heads": 1, "slopes": [math.nan]}, ValueError, "slopes"),
    "alibi-inf": (posenc.ALiBi, {"num_heads": 1, "slopes": [math.inf]}, ValueError, "slopes"),
    "alibi-number": (posenc.ALiBi, {"num_heads": 1, "slopes": 0.5}, TypeError, "slopes"),
    "alibi-side": (posenc.ALiBi, {"num_heads": 1, "noncausal": "left"}, ValueError, "noncausal"),
    "rope-odd": (posenc.RoPE, {"head_dim": 7}, ValueError, "head_dim must be even"),
    "rope-none": (posenc.RoPE, {"head_dim": 0}, ValueError, "head_dim"),
    "rope-base": (posenc.RoPE, {"head_dim": 8, "base": 0.0}, ValueError, "base"),
    "rope-base-nan": (posenc.RoPE, {"head_dim": 8, "base": math.nan}, ValueError, "base"),
    "rope-base-text": (posenc.RoPE, {"head_dim": 8, "base": "1e4"}, TypeError, "base"),
    "rope-layout": (posenc.RoPE, {"head_dim": 8, "layout": "Half"}, ValueError, "'half'"),
    "rope-partial-odd": (posenc.RoPE, {"head_dim": 8, "rotary_dim": 3}, ValueError, "rotary_dim"),
    "rope-partial-wide": (posenc.RoPE, {"head_dim": 8, "rotary_dim": 10}, ValueError, "rotary_dim"),
    "rope-partial-none": (posenc.RoPE, {"head_dim": 8, "rotary_dim": 0}, ValueError, "rotary_dim"),
    "sinusoidal-odd": (posenc.Sinusoidal, {"dim": 5}, ValueError, "dim must be even"),
    "sinusoidal-layout": (posenc.Sinusoidal, {"dim": 4, "layout": "flat"}, ValueError, "layout"),
    "sinusoidal-base": (posenc.Sinusoidal, {"dim": 4, "base": -1}, ValueError, "base"),
    "sinusoidal-two": (posenc.Sinusoidal, {"dim": 2, "layout": "tensor2tensor"}, ValueError, "dim"),
    "learned-none": (posenc.Learned, {"max_len": 0, "dim": 2}, ValueError, "max_len"),
    "learned-dim": (posenc.Learned, {"max_len": 2, "dim": 0}, ValueError, "dim"),
    "learned-offset": (
        posenc.Learned,
        {"max_len": 2, "dim": 2, "offset": -1},
        ValueError,
        "offset",
    ),
    "t5-none": (posenc.T5Bias, {"num_heads": 0}, ValueError, "num_heads"),
    "t5-odd": (posenc.T5Bias, {"num_heads": 2, "num_buckets": 9}, ValueError, "num_buckets"),
    "t5-few": (posenc.T5Bias, {"num_heads": 2, "num_buckets": 2}, ValueError, "num_buckets"),
    "t5-near": (posenc.T5Bias, {"num_heads": 2, "max_distance": 8}, ValueError, "max_distance"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_field_is_named(wrong):
    kind, fields, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        kind(**fields)


def test_numpy_integers_count():
    assert posenc.RoPE(np.int64(8)).head_dim == 8


def test_smallest_of_all():
    assert posenc.T5Bias(1, num_buckets=2, max_distance=2, causal=True).num_buckets == 2
    assert posenc.T5Bias(1, num_buckets=4, max_distance=2).num_buckets == 4
    pos = np.arange(3)
    assert posenc.embedding(posenc.Sinusoidal(2), pos).shape == (3, 2)
    assert posenc.bias(posenc.ALiBi(1), pos, pos).shape == (1, 3, 3)
