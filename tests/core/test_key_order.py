"""Keys in the order of positions give what keys in any order do."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.attn.arguments import Arguments
from posenc.attn.key_order import with_ordered_keys
from posenc.attn.prepare import prepare
from posenc.attn.reference import dense
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

B, H, L, C = 2, 4, 12, 8
Q, K = normal((B, H, L, C), 0), normal((B, 2, L, C), 1)
RNG = np.random.default_rng(3)
ROWS = np.stack([RNG.permutation(L), RNG.permutation(L)])
SEGMENTS = np.array([1, 0, 0, 1, 2, 2, 0, 1, 2, 0, 1, 0])
IN_SEGMENT = np.array([np.sum(SEGMENTS[:n] == SEGMENTS[n]) for n in range(L)])
CALLS = {
    "positions": {"tokens": posenc.Tokens(pos=ROWS[0] // 2)},
    "of each row": {"tokens": posenc.Tokens(pos=ROWS)},
    "segments": {"tokens": posenc.Tokens(pos=ROWS[0], seg=SEGMENTS)},
    "segments of each row": {"tokens": posenc.Tokens(pos=ROWS[0], seg=SEGMENTS[ROWS])},
    "places": {"tokens": posenc.Tokens(places=ROWS[1])},
    "a mask and a bias": {
        "tokens": posenc.Tokens(pos=ROWS), "mask": RNG.random((1, H, L, L)) < 0.8,
        "bias": normal((B, 1, L, L), 4),
    },
}  # fmt: skip


def call_of(options):
    options = dict(options)
    x = normal((B, L, 3), 5)
    options["tokens"] = posenc.Tokens(
        x=x, **{n: getattr(options["tokens"], n) for n in ("pos", "seg", "places")}
    )
    scheme = posenc.schemes.Sum(posenc.make("fox", num_heads=H, hidden_dim=3), posenc.ALiBi(H))
    params = posenc.init_params(scheme)
    return prepare(Q, K, K, scheme, params, True, Arguments(**options), xp=xp)


@pytest.mark.parametrize("case", CALLS)
def test_the_order_of_keys_in_memory_does_not_matter(case):
    call = call_of(CALLS[case])
    ordered = with_ordered_keys(call)
    assert ordered is not call
    at = np.broadcast_to(ordered.key.encoded_pos, (B, L))
    seg = np.broadcast_to(0 if ordered.key.seg is None else ordered.key.seg, (B, L))
    later = (at[:, 1:] >= at[:, :-1]) | (seg[:, 1:] != seg[:, :-1])
    assert np.all(later & (seg[:, 1:] >= seg[:, :-1]))
    for found, expected in zip(dense(ordered), dense(call), strict=True):
        assert_near(found, expected, ATTENTION_TOL["float64"])


@pytest.mark.parametrize(
    "tokens",
    [
        posenc.Tokens(),
        posenc.Tokens(seg=SEGMENTS),
        posenc.Tokens(pos=np.arange(L) // 3),
        posenc.Tokens(pos=IN_SEGMENT, seg=SEGMENTS),
    ],
    ids=["default", "segments", "equal positions", "interleaved segments"],
)
def test_keys_in_order_stay_as_they_are(tokens):
    call = call_of({"tokens": tokens})
    assert with_ordered_keys(call) is call
