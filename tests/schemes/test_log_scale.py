"""Log-position scaling: the factors of six models, by hand, and what Inkling's does to a bias."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import ROUTES
from sample import few_of_jax, long
from subjects import normal

import posenc
from posenc.contract.protocol import Hook
from posenc.schemes import LogScale, Sink, Sum
from posenc.testing import check_scheme
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

HEADS, DIM, LENGTH = 2, 8, 12
S = np.asarray([0.43, 2.0])
LEARNED = {"a": np.asarray([0.5, -1.0]), "b": np.asarray([2.0, 0.25])}
LOG10 = math.log(10)


def grown(ratio):
    """``1 + 0.1 ln ratio``."""
    return 1 + 0.1 * math.log(ratio)


FACTORS = [  # kind, options, params, position -> factor, or one for each head
    ("llama4", {}, {}, {0: 1, 8190: 1, 8191: grown(2), 24_574: grown(3)}),
    ("llama4", {"train_len": 4, "beta": 0.5}, {}, {2: 1, 3: 1 + 0.5 * math.log(2), -9: 1}),
    ("ministral3", {"train_len": 4}, {}, {3: 1, 4: grown(2), 4000: grown(1001)}),
    ("inkling", {"train_len": 4}, {}, {0: 1, 3: 1, 4: grown(1.25), 999: grown(250)}),
    ("rerope", {"train_len": 8}, {}, {0: 1, 7: 1, 63: 2, 8: math.log(9) / math.log(8)}),
    (
        "mistral_large4", {"num_heads": 2}, LEARNED,
        {0: [2, 0.25], 9: [2 + LOG10 / 2, 0.25 - LOG10]},
    ),
    ("ssmax", {"num_heads": 2}, {"s": S}, {0: [0, 0], 9: [0.43 * LOG10, 2 * LOG10]}),
]  # fmt: skip


def factors(scheme, params, pos, role="query"):
    """The factor of each head at each position."""
    ones = np.ones((HEADS, len(pos), 3))
    turned = posenc.transform(scheme, ones, np.asarray(pos), role=role, params=params)
    np.testing.assert_array_equal(turned, np.broadcast_to(turned[..., :1], turned.shape))
    return turned[..., 0]


@pytest.mark.parametrize(("kind", "options", "params", "expected"), FACTORS)
def test_the_factor_is_that_of_the_formula(kind, options, params, expected):
    scheme = LogScale(kind, **options)
    found = factors(scheme, params, list(expected))
    for n, factor in enumerate(expected.values()):
        np.testing.assert_allclose(found[:, n], factor, rtol=1e-15, atol=1e-15)
    assert np.all(factors(scheme, params, list(expected), role="key") == 1)


@pytest.mark.parametrize("kind", ["llama4", "inkling", "rerope"])
def test_factors_are_float32_in_half_precision(kind):
    x, pos = normal((1, 40, 8), 0).astype(np.float16), np.arange(4080, 4120)  # float16: steps of 4
    half, single = (
        posenc.transform(LogScale(kind, 16), x.astype(dtype), pos, role="query")
        for dtype in (np.float16, np.float32)
    )
    np.testing.assert_array_equal(half, single.astype(np.float16))


def test_first_values():
    first = posenc.init_params(LogScale("mistral_large4", num_heads=3))
    assert first.keys() == {"a", "b"}
    assert not np.any(first["a"])
    assert np.all(first["b"] == 1)  # no scaling at first
    np.testing.assert_allclose(posenc.init_params(LogScale("ssmax", num_heads=3))["s"], 0.43)


def test_the_catalogue_gives_each_kind_the_sizes_that_it_uses():
    sizes = {"num_heads": 4, "head_dim": 8, "train_len": 64}
    assert posenc.make("log_scale", **sizes) == LogScale("llama4", train_len=64)
    assert posenc.make("log_scale", kind="ssmax", **sizes) == LogScale("ssmax", num_heads=4)
    assert posenc.make("log_scale", num_heads=4).train_len == 8192


INKLING = LogScale("inkling", train_len=4)
TAU = 1 + 0.1 * np.log(np.maximum(1, (np.arange(LENGTH) + 1) / 4))[:, None]


def test_inkling_multiplies_the_bias_of_a_sum():
    alibi, pos = posenc.ALiBi(HEADS), np.arange(LENGTH)
    plain = posenc.bias(alibi, pos, pos, dtype=np.float64)
    for scheme in (
        Sum(alibi, INKLING),
        Sum(INKLING, Sum(posenc.RoPE(DIM), alibi)),
        Sum(alibi, Sink(INKLING, learned=False)),
        Sum(alibi, LogScale("rerope", train_len=4, scales_bias=True)),
    ):
        rerope = "rerope" in repr(scheme)
        factor = np.maximum(1, np.log(np.arange(LENGTH) + 1) / math.log(4))[:, None]
        found = posenc.bias(scheme, pos, pos, dtype=np.float64)
        np.testing.assert_allclose(found, plain * (factor if rerope else TAU), rtol=1e-14)
        # What held for the bias alone holds no more.
        assert not scheme.relative
        assert Hook.KEY_BIAS not in scheme.hooks()
    for scheme in (
        Sum(alibi, LogScale("llama4", train_len=4)),
        Sum(alibi, LogScale("inkling", train_len=4, scales_bias=False)),
        Sum(Sum(posenc.RoPE(DIM), INKLING), alibi),  # it multiplies its own sum only
    ):
        np.testing.assert_array_equal(posenc.bias(scheme, pos, pos, dtype=np.float64), plain)
        assert scheme.relative
        assert Hook.KEY_BIAS in scheme.hooks()
    t5 = posenc.T5Bias(HEADS, causal=True)
    assert Sum(t5, INKLING).constant_beyond() == (None, None) != t5.constant_beyond()


@pytest.mark.parametrize(
    "route",
    [
        pytest.param(*p.values, id=p.id, marks=long) if p.id == "torch-flex" else p
        for p in few_of_jax(ROUTES)
    ],
)
def test_inkling_in_a_sum_on_every_implementation(route):
    scheme = Sum(posenc.RoPE(DIM), INKLING, posenc.ALiBi(HEADS, slopes=[0.5, 0.125]))
    q, k, v = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
    pos = np.arange(LENGTH)
    turned = [posenc.transform(posenc.RoPE(DIM), x, pos, role="query") for x in (q, k)]
    slopes = np.asarray([0.5, 0.125])[:, None, None]
    scores = turned[0] @ np.swapaxes(turned[1], -1, -2) / math.sqrt(DIM)
    scores = TAU * (scores - slopes * np.abs(pos[:, None] - pos))
    scores = np.where(pos <= pos[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v
    out = route.attend(scheme, {"q": q, "k": k, "v": v}, {}, causal=True)
    assert_near(out, expected, ATTENTION_TOL["float32"], str(route))


@long
@pytest.mark.parametrize(
    "scheme",
    [
        *(LogScale(kind, train_len=4) for kind in ("ministral3", "inkling", "rerope")),
        *(LogScale(kind, num_heads=HEADS) for kind in ("mistral_large4", "ssmax")),
        Sum(posenc.ALiBi(HEADS), INKLING),
        Sum(posenc.T5Bias(HEADS), INKLING),
    ],
    ids=lambda scheme: getattr(scheme, "kind", str(scheme)[:20]),
)
def test_each_kind_keeps_the_laws(scheme):
    check_scheme(scheme, frameworks=["numpy"])


def test_errors():
    for kind in ("ministral3", "inkling", "rerope"):
        with pytest.raises(ValueError, match=f"train_len: kind='{kind}' needs the length"):
            LogScale(kind)
    for kind in ("ssmax", "mistral_large4"):
        with pytest.raises(ValueError, match=f"num_heads: kind='{kind}' learns a number per head"):
            LogScale(kind)
        with pytest.raises(ValueError, match=f"kind='{kind}' may be 0 or negative"):
            LogScale(kind, num_heads=2, scales_bias=True)
    with pytest.raises(ValueError, match=r"beta=0.2: kind='rerope' has none; accepted: llama4"):
        LogScale("rerope", train_len=8, beta=0.2)
    with pytest.raises(ValueError, match="train_len must be at least 2, got 1"):
        LogScale("rerope", train_len=1)
    with pytest.raises(ValueError, match=r"unknown kind 'llama'.*did you mean 'llama4'"):
        LogScale("llama")


class TestTransformers:
    """The factors of the modules of ``transformers`` (test extra), from their own code."""

    pytestmark = long
    POS = (0, 1, 62, 63, 64, 127, 1000, 131_071)

    @pytest.fixture
    def torch(self):
        pytest.importorskip("transformers")
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("model", ["ministral3", "mistral4"])
    def test_ministral(self, torch, model):
        from importlib import import_module

        module = import_module(f"transformers.models.{model}.modeling_{model}")
        theirs = module.get_llama_4_attn_scale(torch.tensor([self.POS]), 0.1, 64)
        self.same(LogScale("ministral3", train_len=64), {}, theirs.squeeze().expand(HEADS, -1))

    def test_mistral_large4(self, torch):
        from transformers.models.mistral_large4 import modeling_mistral_large4 as large

        module = large.MistralLarge4TextSoftmaxScaling(HEADS)
        module.scale.data, module.bias.data = (torch.tensor(LEARNED[n]).float() for n in "ab")
        ones = torch.ones(1, HEADS, len(self.POS), 3)
        theirs = module(ones, torch.tensor([self.POS]), head_dim_first=True)[0, ..., 0]
        self.same(LogScale("mistral_large4", num_heads=HEADS), LEARNED, theirs)

    def test_llama4(self, torch):
        from transformers.models.llama4 import configuration_llama4, modeling_llama4

        def query(tuned):
            config = configuration_llama4.Llama4TextConfig(
                hidden_size=16, head_dim=8, num_attention_heads=HEADS, num_key_value_heads=1,
                attn_temperature_tuning=tuned, floor_scale=64, attn_scale=0.1,
                num_hidden_layers=1, no_rope_layers=[0], use_qk_norm=False,
            )  # fmt: skip
            return self.seen(torch, config, modeling_llama4.Llama4TextAttention, 200)["query"]

        theirs = (query(True) / query(False))[0, :, :, 0]
        ours = factors(LogScale("llama4", train_len=64), {}, range(200))
        np.testing.assert_allclose(theirs.detach().expand(HEADS, -1), ours, rtol=1e-6)

    def test_inkling(self, torch):
        from transformers.models.inkling import configuration_inkling, modeling_inkling

        def seen(floor):
            config = configuration_inkling.InklingTextConfig(
                hidden_size=16, head_dim=8, num_attention_heads=HEADS, num_key_value_heads=1,
                d_rel=4, rel_extent=32, num_hidden_layers=1, layer_types=["hybrid"],
                log_scaling_n_floor=floor, log_scaling_alpha=0.1,
            )  # fmt: skip
            return self.seen(torch, config, modeling_inkling.InklingAttention, 200)

        scaled, plain = seen(64), seen(None)
        ours = factors(LogScale("inkling", train_len=64), {}, range(200))[0]
        for name in ("query", "position_bias"):
            theirs, whole = (np.asarray(a[name][0, 0].detach()) for a in (scaled, plain))
            np.testing.assert_allclose(theirs, whole * ours[:, None], rtol=2e-6, atol=1e-7)

    def same(self, scheme, params, theirs):
        ours = factors(scheme, params, self.POS)
        np.testing.assert_allclose(theirs.detach(), ours, rtol=1e-6)

    @staticmethod
    def seen(torch, config, attention, length):
        """What a module of ``transformers`` gives to attention: query and position bias."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        given = {}

        def capture(module, query, key, value, attention_mask, position_bias=None, **_):
            given.update(query=query, position_bias=position_bias)
            return query.transpose(1, 2), None

        ALL_ATTENTION_FUNCTIONS.register("capture", capture)
        config._attn_implementation = "capture"
        torch.manual_seed(0)
        module = attention(config, 0)
        for param in module.parameters():
            torch.nn.init.normal_(param, std=0.5)
        hidden = torch.randn(1, length, config.hidden_size)
        extra = {"conv_mask": None} if "Inkling" in attention.__name__ else {}
        extra |= {"position_embeddings": None} if "Llama" in attention.__name__ else {}
        module(hidden, attention_mask=None, **extra)
        return given
