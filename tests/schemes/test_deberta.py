"""DeBERTa's terms: rows by hand, and attention of both versions as transformers computes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sample import long
from subjects import normal

import posenc
from posenc.schemes import DeBERTa
from posenc.testing import assert_near
from posenc.testing.tolerances import ATTENTION_TOL, rounding_bound

HEADS, DIM, LENGTH = 2, 4, 40


def rows(scheme):
    """The row that each distance ``-max_distance .. max_distance`` reads, of queries and keys."""
    numbers = {
        name: np.broadcast_to(np.arange(1.0 * spec.shape[1])[:, None], spec.shape)
        for name, spec in scheme.param_specs().items()
    }
    one = np.ones((1, scheme.num_heads, 1, scheme.head_dim)) / scheme.head_dim
    found = posenc.features(scheme, numbers, q=one, k=one, scale=1.0)
    return [
        np.rint(array[0, 0, 0]).astype(int) for side in found for array in side.features.values()
    ]


def test_rows_are_those_of_the_formula():
    # m = 4: beyond it 4 + ceil(3 log_4(n / 4)), whose steps are at 4 * 4**(1/3) = 6.3, 10.1 and 16.
    far = [0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 8]
    before = [8 - b for b in reversed(far)]
    for found in rows(DeBERTa(HEADS, DIM, buckets=8, max_distance=17)):
        np.testing.assert_array_equal(found, [*before, *(min(15, 8 + b) for b in far[1:])])


def test_rows_of_the_released_sizes():
    """``m = 128``: steps where ``127 ln(n / 128) / ln(511 / 128)`` passes an integer."""
    found = rows(DeBERTa(1, 1))[0][512:]
    assert list(found[:130]) == [*range(256, 385), 385]
    steps = [n for n in range(129, 513) if found[n] > found[n - 1]]
    assert len(steps) == 127
    for step, n in enumerate(steps):
        before, after = (127 * math.log(i / 128) / math.log(511 / 128) for i in (n - 1, n))
        assert before <= step + 1e-9 < after
    assert (found[511], found[512], rows(DeBERTa(1, 1))[0][0]) == (511, 511, 0)


def test_without_buckets_each_distance_has_a_row():
    scheme = DeBERTa(HEADS, DIM, buckets=None, max_distance=3)
    np.testing.assert_array_equal(rows(scheme)[0], [0, 1, 2, 3, 4, 5, 5])


@pytest.mark.parametrize(("terms", "count"), [("both", 3), ("c2p", 2), ("p2c", 2)])
def test_the_score_is_that_of_the_formula(terms, count):
    heads = 4  # two read each key head
    scheme = DeBERTa(heads, DIM, buckets=None, max_distance=3, terms=terms)
    params = {name: normal((heads, 6, DIM), len(name) + ord(name[2])) for name in ("p_k", "p_q")}
    params = {name: params[name] for name in scheme.param_specs()}
    q, k = normal((1, heads, 2, DIM), 1), normal((1, 2, 9, DIM), 2)
    v = np.broadcast_to(np.eye(9), (1, 2, 9, 9))
    found = posenc.attention(
        q, k, v, scheme, params,
        tokens=posenc.Tokens(pos=np.arange(9)), queries=posenc.Tokens(pos=np.asarray([0, 6])),
    )  # fmt: skip
    for head in range(heads):
        own = k[0, head // 2]
        for row, i in enumerate((0, 6)):
            at = [min(max(i - j + 3, 0), 5) for j in range(9)]
            scores = own @ q[0, head, row]
            if "p_k" in params:
                scores = scores + params["p_k"][head, at] @ q[0, head, row]
            if "p_q" in params:
                scores = scores + np.sum(params["p_q"][head, at] * own, axis=-1)
            weights = np.exp(scores / math.sqrt(count * DIM))
            # Scores below 16, of three products of DIM channels, and a sum of 9 weights.
            bound = rounding_bound(6 * DIM + 9, 16, "float64")
            assert_near(found[0, head, row], weights / np.sum(weights), bound)


def test_sizes():
    scheme = posenc.make("deberta", num_heads=3, head_dim=8)
    assert scheme == DeBERTa(3, 8, buckets=256, max_distance=512, terms="both")
    shapes = {name: a.shape for name, a in posenc.init_params(scheme).items()}
    assert shapes == {"p_k": (3, 512, 8), "p_q": (3, 512, 8)}
    for trained, (buckets, longest) in {1: (2, 4), 64: (32, 64), 9999: (256, 512)}.items():
        made = posenc.make("deberta", num_heads=3, head_dim=8, train_len=trained)
        assert made == DeBERTa(3, 8, buckets, longest)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"buckets": 7}, "buckets must be even, got 7"),
        ({"buckets": 8, "max_distance": 5}, "max_distance must exceed buckets // 2 .* got 5"),
        ({"terms": "p2p"}, "unknown terms 'p2p'"),
    ],
)
def test_wrong_options(options, error):
    with pytest.raises(ValueError, match=error):
        DeBERTa(2, 4, **options)


@long
class TestTransformers:
    """The modules of transformers, in float64 with random weights."""

    @pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (32, 128), (8, 20), (64, 1000)])
    def test_rows_are_equal_up_to_a_distance_of_2_to_the_20(self, buckets, longest):
        torch = pytest.importorskip("torch")
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

        away = torch.arange(-(2**20), 2**20 + 1)
        theirs = make_log_bucket_position(away, buckets, longest).to(torch.long)
        theirs = np.asarray(torch.clamp(theirs + buckets, 0, 2 * buckets - 1))
        ours = rows(DeBERTa(1, 1, buckets, longest))[0]
        at = np.clip(np.asarray(away), -longest, longest) + longest
        np.testing.assert_array_equal(ours[at], theirs)

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("terms", ["both", "c2p", "p2c"])
    def test_attention_of_v2(self, terms, shared):
        torch = pytest.importorskip("torch")
        from transformers.models.deberta_v2 import configuration_deberta_v2, modeling_deberta_v2

        module, hidden, table = _module(
            torch, modeling_deberta_v2, configuration_deberta_v2.DebertaV2Config, terms,
            share_att_key=shared, position_buckets=8, max_relative_positions=20,
        )  # fmt: skip
        found, _ = module(hidden, torch.ones(2, 1, LENGTH, LENGTH), rel_embeddings=table[:16])
        q, k, v = (
            _heads(p(hidden)) for p in (module.query_proj, module.key_proj, module.value_proj)
        )
        projections = (
            {"p_k": module.key_proj, "p_q": module.query_proj}
            if shared
            else {"p_k": getattr(module, "pos_key_proj", None),
                  "p_q": getattr(module, "pos_query_proj", None)}
        )  # fmt: skip
        scheme = DeBERTa(HEADS, DIM, buckets=8, max_distance=20, terms=terms)
        params = {n: _heads(projections[n](table[None, :16]))[0] for n in scheme.param_specs()}
        _same(posenc.attention(q, k, v, scheme, params), found)

    def test_attention_of_v1(self):
        torch = pytest.importorskip("torch")
        from transformers.models.deberta import configuration_deberta, modeling_deberta

        module, hidden, table = _module(
            torch, modeling_deberta, configuration_deberta.DebertaConfig, "both",
            max_relative_positions=7,
        )  # fmt: skip
        at = torch.arange(LENGTH)
        found, _ = module(
            hidden, torch.ones(2, 1, LENGTH, LENGTH), rel_embeddings=table[:14],
            relative_pos=(at[:, None] - at)[None],
        )  # fmt: skip
        mixed = module.in_proj(hidden).reshape(2, LENGTH, HEADS, 3, DIM)
        q = _heads((mixed[..., 0, :]).flatten(2) + module.q_bias)
        k = _heads(mixed[..., 1, :].flatten(2))
        v = _heads(mixed[..., 2, :].flatten(2) + module.v_bias)
        params = {
            "p_k": _heads(module.pos_proj(table[None, :14]))[0],
            "p_q": _heads(module.pos_q_proj(table[None, :14]))[0],
        }
        scheme = DeBERTa(HEADS, DIM, buckets=None, max_distance=7)
        _same(posenc.attention(q, k, v, scheme, params), found)


def _module(torch, models, config, terms, **options):
    kinds = ["c2p", "p2c"] if terms == "both" else [terms]
    torch.manual_seed(0)
    module = models.DisentangledSelfAttention(
        config(
            hidden_size=HEADS * DIM,
            num_attention_heads=HEADS,
            pos_att_type=kinds,
            relative_attention=True,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **options,
        )
    ).double()
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.5)
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, LENGTH, HEADS * DIM, generator=draw, dtype=torch.float64)
    return module, hidden, torch.randn(40, HEADS * DIM, generator=draw, dtype=torch.float64)


def _heads(x):
    """``(B, L, H D)`` as ``(B, H, L, D)`` of NumPy."""
    return np.asarray(x.detach()).reshape(*x.shape[:2], HEADS, DIM).transpose(0, 2, 1, 3)


def _same(ours, theirs):
    found = np.asarray(theirs.detach()).reshape(2, LENGTH, HEADS, DIM).transpose(0, 2, 1, 3)
    # The root of the scale is float32 in transformers.
    assert_near(ours, found, 2 * ATTENTION_TOL["float32"])
    assert np.std(found) > 0.1
