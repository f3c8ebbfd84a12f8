"""Bias and mask by distance, in one array, against bias and mask of each pair."""

from __future__ import annotations

import math
from functools import cache

import pytest
from frameworks import HAS
from subjects import SUBJECTS, heads, normal, params_of

from posenc.testing.examples import HEAD_DIM

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import array_api_compat.torch as xp
import torch

import posenc
import posenc_torch
from posenc.apply.bias import has_bias
from posenc.apply.feature_needs import reads_features
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc_torch.diagonals import mask_of, mask_table

RELATIVE = {
    name: scheme
    for name, scheme in SUBJECTS.items()
    if scheme.relative and has_bias(scheme) and not reads_features(scheme)
} | {"nope": posenc.NoPE()}
CALLS = [  # queries, keys, and options
    (7, 7, {"causal": True}),
    (7, 7, {}),
    (3, 9, {"causal": True}),
    (1, 9, {"causal": True}),
    (1, 9, {"window": (4, None)}),
    (6, 9, {"window": (2, 1)}),
    (6, 9, {"causal": True, "window": 4}),
    (5, 5, {"window": (None, 20)}),
]


def prepared(scheme, q_len, k_len, params=None, **options):
    q, k = (
        torch.tensor(normal((1, heads(scheme), n, HEAD_DIM), n), dtype=torch.float32)
        for n in (q_len, k_len)
    )
    params = params or {n: torch.tensor(a) for n, a in params_of(scheme).items()}
    causal = options.pop("causal", False)
    return prepare(q, k, k, scheme, params, causal, Arguments(**options), xp=xp)


@cache
def rounds_by_shape(scheme):
    """Whether a bias alone has other bits than among others, as PyTorch's powers have."""
    pos, params = torch.arange(9), {n: torch.tensor(a) for n, a in params_of(scheme).items()}
    if not has_bias(scheme):
        return False
    whole = posenc.bias(scheme, pos, pos, params)
    alone = [posenc.bias(scheme, pos[i : i + 1], pos[:1], params)[:, 0, 0] for i in pos]
    return not torch.equal(torch.stack(alone, dim=-1), whole[:, :, 0])


@pytest.mark.parametrize("name", RELATIVE)
def test_the_array_is_bias_and_mask_of_each_pair(name):
    for q_len, k_len, options in CALLS:
        call = prepared(RELATIVE[name], q_len, k_len, **options)
        shape = (1, heads(call.scheme), q_len, k_len)
        array, bias, visible = mask_of(mask_table(call), q_len, k_len), call.bias(), call.visible()
        wanted = torch.zeros(shape) if bias is None else bias.expand(shape)
        wanted = wanted if visible is None else torch.where(visible, wanted, -math.inf)
        if rounds_by_shape(call.scheme):  # two powers, each within two ulp
            rounding = 4 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(array.expand(shape), wanted, rtol=rounding, atol=0)
        else:
            assert torch.equal(array.expand(shape), wanted)


def test_rows_without_a_key_are_left_to_pairs():
    scheme = posenc.T5Bias(3, causal=True)
    table = torch.zeros(3, 32)
    table[1, 0] = -math.inf  # distance 0: of head 1, the first query sees no key
    assert mask_table(prepared(scheme, 5, 5, {"table": table}, causal=True)) is None


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": posenc.Tokens(pos=torch.arange(5))},
        {"mask": posenc.window(2, first=1)},
        {"tokens": posenc.Tokens(seg=torch.zeros(5, dtype=torch.int64))},
        {"tokens": posenc.Tokens(exists=torch.ones(5, dtype=torch.bool))},
        {"tokens": posenc.Tokens(places=torch.arange(5))},
        {"mask": lambda q, k: k <= q},
        {"mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)},
        {"bias": torch.zeros(1, 1, 5, 5)},
        {"softcap": 30.0},
    ],
    ids=["pos", "first", "seg", "exists", "places", "function", "booleans", "bias", "softcap"],
)
def test_what_depends_on_more_than_the_distance_is_left_to_pairs(options):
    assert mask_table(prepared(posenc.ALiBi(3), 5, 5, **options)) is None


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA under vmap
def test_values_are_not_read_under_vmap():
    scheme = SUBJECTS["alibi-asymmetric"]
    q = torch.tensor(normal((2, 1, heads(scheme), 5, HEAD_DIM), 0))
    attend = lambda q: posenc_torch.attention(q, q, q, scheme, implementation="sdpa")  # noqa: E731
    wanted = torch.stack([attend(one) for one in q])
    torch.testing.assert_close(torch.func.vmap(attend)(q), wanted)
