"""Modules with the signatures of other libraries, against those and against the definition."""

import importlib
import math
from importlib.util import find_spec

import numpy as np
import pytest
from subjects import normal

import posenc
from posenc.testing.tolerances import assert_near, rounding_bound

torch = pytest.importorskip("torch")
posenc_torch = pytest.importorskip("posenc_torch")

from posenc_torch.drop_in import (  # noqa: E402
    RotaryEmbedding,
    TorchtuneRotary,
    TransformersRotary,
    alibi_mask,
)

FAR = 1_000_000
LENGTH, HEADS, DIM = 9, 2, 16
# Theirs computes angles in float32, here up to 100 radians: 2 roundings of that.
NEAR = 2 * 100 * 2.0**-24
# Tables are within 1.5e-7, and a rotation adds two products.
EXACT = 4 * 2.0**-23


def tensor(*shape, seed=0):
    return torch.tensor(normal(shape, seed), dtype=torch.float32)


def in_float64(x, pos, base=10_000.0, layout="interleaved", turn=None, factor=1.0):
    """The formula: pair k turns by ``pos * base**(-2k/R)``, ``x (..., L, D)``."""
    x, turn = np.asarray(x, np.float64), turn or x.shape[-1]
    k = np.arange(turn // 2)
    angles = np.asarray(pos)[:, None] / factor * base ** (-2 * k / turn)
    first, second = (2 * k, 2 * k + 1) if layout == "interleaved" else (k, k + turn // 2)
    out = x.copy()
    out[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    out[..., second] = x[..., second] * np.cos(angles) + x[..., first] * np.sin(angles)
    return out


def config(kind="llama", **options):
    transformers = pytest.importorskip("transformers")
    made = {"hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    return transformers.AutoConfig.for_model(kind, **made, **options)


RULES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_it_returns_what_transformers_does_nearby(rule):
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **RULES[rule]}
    given = config(max_position_embeddings=64, rope_parameters=parameters)
    theirs = importlib.import_module("transformers.models.llama.modeling_llama")
    pos = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) + 90])
    x = tensor(2, LENGTH, HEADS * DIM)
    for dtype in (torch.float32, torch.bfloat16):
        made = TransformersRotary(given)(x.to(dtype), pos)
        expected = theirs.LlamaRotaryEmbedding(given)(x.to(dtype), pos)
        for one, other in zip(made, expected, strict=True):
            assert one.dtype == other.dtype == dtype
            bound = NEAR + (0 if dtype == torch.float32 else rounding_bound(2, 2, "bfloat16"))
            assert_near(one.double(), other.double(), bound)


def test_a_llama_with_it_computes_the_same():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 50, "intermediate_size": 32, "num_key_value_heads": HEADS}
    model = transformers.LlamaForCausalLM(config(**small)).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        model.model.rotary_emb = TransformersRotary(model.config)
        made = model(tokens).logits
    assert_near(made, expected, 100 * NEAR)  # two layers of products in float32


def test_layer_types_have_their_own_rotation():
    given = config("gemma3_text", head_dim=DIM, layer_types=["full_attention", "sliding_attention"])
    rotary, x, pos = TransformersRotary(given), tensor(1, 3, DIM), torch.arange(3)[None]
    theirs = importlib.import_module("transformers.models.gemma3.modeling_gemma3")
    for kind in given.layer_types:
        expected = theirs.Gemma3RotaryEmbedding(given)(x, pos, kind)
        for one, other in zip(rotary(x, pos, kind), expected, strict=True):
            assert_near(one, other, NEAR)
    with pytest.raises(ValueError, match=r"layer_type must be one of \['full_attention', "):
        rotary(x, pos)


def test_an_interleaved_table_repeats_each_angle():
    cos, _ = TransformersRotary(posenc.RoPE(8, layout="interleaved"))(
        tensor(1, 5, 8), torch.arange(5)[None]
    )
    assert torch.equal(cos[..., 0::2], cos[..., 1::2])
    cos, _ = TransformersRotary(posenc.RoPE(8))(tensor(1, 5, 8), torch.arange(5)[None])
    assert torch.equal(cos[..., :4], cos[..., 4:])
    with pytest.raises(
        TypeError, match=r"a configuration of transformers or a posenc\.RoPE, got int"
    ):
        TransformersRotary(8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchtune's own
@pytest.mark.parametrize("start", [0, FAR])
def test_torchtune(start):
    x, pos = tensor(2, LENGTH, HEADS, DIM), torch.arange(LENGTH) + start
    rotary = TorchtuneRotary(DIM, 64, base=500)
    made = rotary(x, input_pos=pos.expand(2, -1))
    expected = in_float64(x.transpose(1, 2), pos, base=500.0).swapaxes(1, 2)
    assert_near(made.double(), expected, EXACT * float(x.abs().max()))
    if not start:
        assert torch.equal(rotary(x), made)
    if find_spec("torchtune") and not start:
        theirs = importlib.import_module("torchtune.modules").RotaryPositionalEmbeddings
        assert_near(made, theirs(DIM, 64, base=500)(x, input_pos=pos.expand(2, -1)), NEAR)


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, {}),
        ({"theta": 500.0}, {"base": 500.0}),
        ({"interpolate_factor": 4.0}, {"factor": 4.0}),
        ({"theta_rescale_factor": 4.0}, {"base": 10_000 * 4 ** (8 / 6)}),
    ],
    ids=["plain", "theta", "interpolated", "rescaled"],
)
@pytest.mark.parametrize("start", [0, FAR])
def test_rotary_embedding_torch(options, formula, start):
    """8 of 16 channels turn."""
    x, pos = tensor(1, HEADS, LENGTH, DIM), np.arange(LENGTH) + start
    rotary = RotaryEmbedding(8, **options)
    made = rotary.rotate_queries_or_keys(x, offset=start)
    expected = in_float64(x, pos, **formula, turn=8)
    assert_near(made.double(), expected, EXACT * float(x.abs().max()))
    swapped = rotary.rotate_queries_or_keys(x.transpose(1, 2), seq_dim=-3, offset=start)
    assert torch.equal(swapped.transpose(1, 2), made)
    own = RotaryEmbedding(8, **options, seq_before_head_dim=True)
    assert torch.equal(own.rotate_queries_or_keys(x.transpose(1, 2), offset=start), swapped)
    q, k = rotary.rotate_queries_with_cached_keys(x[:, :, -2:], x)
    assert torch.equal(q, k[:, :, -2:])
    if find_spec("rotary_embedding_torch") and not start:
        theirs = importlib.import_module("rotary_embedding_torch").RotaryEmbedding(8, **options)
        assert_near(made, theirs.rotate_queries_or_keys(x).detach(), NEAR)


def test_what_rotary_embedding_refuses():
    with pytest.raises(ValueError, match="one of them must be 1"):
        RotaryEmbedding(8, interpolate_factor=2.0, theta_rescale_factor=2.0)
    x = tensor(1, HEADS, 3, DIM)
    with pytest.raises(ValueError, match="q has 3 tokens, more than the 2 of k"):
        RotaryEmbedding(8).rotate_queries_with_cached_keys(x, x[:, :, :2])


@pytest.mark.parametrize("q_len", [LENGTH, 2])
def test_alibi_as_a_mask(q_len):
    q, k, v = (tensor(1, HEADS, n, DIM, seed=s) for s, n in enumerate((q_len, LENGTH, LENGTH)))
    mask = alibi_mask(HEADS, q_len, LENGTH)
    assert mask.shape == (1, HEADS, q_len, LENGTH)
    made = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scheme = posenc.ALiBi(HEADS)
    expected = posenc_torch.attention(q.double(), k.double(), v.double(), scheme, causal=True)
    assert_near(made.double(), expected, 32 * 2.0**-24)  # 16 products, a softmax, 9 values
    with pytest.raises(TypeError, match=r"dtype must be .* floating-point .* got torch\.int32"):
        alibi_mask(HEADS, LENGTH, dtype=torch.int32)
    with pytest.raises(ValueError, match="k_len must be at least 1, got -1"):
        alibi_mask(HEADS, 2, -1)
    both = alibi_mask(HEADS, LENGTH, causal=False, dtype=torch.float64)
    slope = 2.0 ** (-8 / HEADS)
    assert math.isclose(both[0, 0, 0, 3], -3 * slope)
    assert torch.equal(both, both.transpose(-1, -2))
