"""Checkpoints of other models: each family's own layout, against transformers on random weights."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import posenc
from posenc.schemes import ALiBi, Learned, RoPE, T5Bias
from posenc.weights import bloom, gptj, mpt, opt, split_qkv, t5

HF = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("torch")), reason="needs transformers and torch"
)
HEADS, DIM = 4, 8
KEY = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def tiny(name, **sizes):
    """A small random model of transformers, and its configuration."""
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=11)
    model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval().requires_grad_(False), config


@pytest.fixture(params=["torch", "numpy", "file"])
def stored(request, tmp_path):
    """A function that gives a model's weights as each kind of mapping."""

    def store(model):
        state = model.state_dict()
        if request.param == "torch":
            return state
        if request.param == "numpy":
            return {name: array.numpy() for name, array in state.items()}
        files = pytest.importorskip("safetensors.torch")
        files.save_model(model, tmp_path / "model.safetensors")
        return files.safe_open(tmp_path / "model.safetensors", "pt")

    return store


@HF
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_t5(stored, stack):
    model, config = tiny(
        "T5", d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=3, num_decoder_layers=1
    )
    params = t5(stored(model), stack)
    first = getattr(model, stack).block[0].layer[0].SelfAttention
    at = np.arange(200)
    found = posenc.bias(
        T5Bias(3, causal=stack == "decoder", scaled=False), at, at,
        {name: np.asarray(array) for name, array in params.items()},
    )  # fmt: skip
    np.testing.assert_array_equal(found[None], first.compute_bias(200, 200).numpy())
    assert config.relative_attention_num_buckets == params["table"].shape[1]


@HF
def test_opt(stored):
    import torch

    model, _ = tiny(
        "OPT", hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=20, word_embed_proj_dim=8,
    )  # fmt: skip
    params = {name: np.asarray(array) for name, array in opt(stored(model)).items()}
    found = posenc.embedding(Learned(20, 8, offset=2), np.arange(20), params)
    expected = model.decoder.embed_positions(torch.ones(1, 20, dtype=torch.int64))
    np.testing.assert_array_equal(found, expected[0].numpy())


@HF
@pytest.mark.parametrize("heads", [4, 6])
def test_bloom(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    model, config = tiny("Bloom", hidden_size=heads * 2, n_layer=1, n_head=heads)
    own = model.h[0].self_attention
    import torch

    x = torch.randn(1, 5, heads * 2)
    parts = zip(
        split_qkv(own.query_key_value.weight, heads), split_qkv(own.query_key_value.bias, heads),
        strict=True,
    )  # fmt: skip
    for (weight, bias), expected in zip(parts, own._reshape(own.query_key_value(x)), strict=True):
        found = (x @ weight.T + bias).view(1, 5, heads, 2).transpose(1, 2)
        torch.testing.assert_close(found, expected)
    added = build_alibi_tensor(torch.ones(1, 3, dtype=torch.int64), heads, torch.float32)
    slopes = (added[:, 0, 1] - added[:, 0, 0]).numpy()
    np.testing.assert_allclose(bloom(config)["slopes"], slopes, rtol=2e-7)
    assert bloom(config)["slopes"].shape == ALiBi(heads, learned=True).param_specs()["slopes"].shape


@HF
@pytest.mark.parametrize("heads", [4, 6])
def test_mpt(heads):
    import torch
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    model, config = tiny("Mpt", d_model=heads * 2, n_layers=1, n_heads=heads, max_seq_len=9)
    fused = model.blocks[0].attn.Wqkv
    x = torch.randn(1, 5, heads * 2)
    for weight, expected in zip(
        split_qkv(fused.weight, heads, "by_role"), fused(x).chunk(3, dim=2), strict=True
    ):
        torch.testing.assert_close(x @ weight.T, expected)
    added = build_mpt_alibi_tensor(heads, 9, alibi_bias_max=8)[:, 0]
    slopes = mpt(config.to_dict() | {"attn_config": {"alibi": True, "alibi_bias_max": 8}})
    np.testing.assert_allclose(slopes["slopes"], (added[:, 8] - added[:, 7]).numpy(), rtol=2e-7)


@HF
def test_gptj(stored):
    """Attention weights of the model, from projections of the other layout."""
    import torch

    model, _ = tiny("GPTJ", n_embd=HEADS * DIM, n_layer=1, n_head=HEADS, rotary_dim=4, n_inner=8)
    tokens = torch.arange(9)[None]
    expected = model(tokens, output_attentions=True).attentions[0]
    x = model.h[0].ln_1(model.wte(tokens))[0].numpy()
    weights = gptj(stored(model), HEADS, 4)
    assert sorted(weights) == ["h.0.attn.k_proj.weight", "h.0.attn.q_proj.weight"]
    q, k = (
        np.asarray(x @ np.asarray(weights[f"h.0.attn.{name}_proj.weight"]).T)
        .reshape(1, 9, HEADS, DIM)
        .swapaxes(1, 2)
        for name in "qk"
    )
    # Attention over an identity as values is the matrix of its weights.
    identity = np.broadcast_to(np.eye(9, dtype=np.float32), (1, HEADS, 9, 9))
    found = posenc.attention(q, k, identity, RoPE(DIM, rotary_dim=4), causal=True)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=5e-6)


def test_rows_by_hand():
    rows = np.arange(12)  # two heads of two
    apart = [part.tolist() for part in split_qkv(rows, 2)]
    assert apart == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert [part.tolist() for part in split_qkv(rows, 2, "by_role")] == rows.reshape(3, 4).tolist()


@HF
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_falcon_with_heads_that_share_keys(kv_heads):
    import torch

    model, _ = tiny(
        "Falcon", hidden_size=HEADS * DIM, num_hidden_layers=1, num_attention_heads=HEADS,
        new_decoder_architecture=True, num_kv_heads=kv_heads,
    )  # fmt: skip
    own, x = model.h[0].self_attention, torch.randn(1, 5, HEADS * DIM)
    expected = own._split_heads(own.query_key_value(x))
    parts = split_qkv(own.query_key_value.weight, HEADS, num_kv_heads=kv_heads)
    for weight, want in zip(parts, expected, strict=True):
        found = (x @ weight.T).unflatten(-1, (-1, DIM))
        # The module repeats each head of keys for its queries.
        torch.testing.assert_close(
            found.repeat_interleave(want.shape[2] // found.shape[2], 2), want
        )


@HF
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_phi3_with_heads_that_share_keys(kv_heads):
    import torch

    model, _ = tiny(
        "Phi3", hidden_size=HEADS * DIM, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=kv_heads, intermediate_size=8, pad_token_id=0,
    )  # fmt: skip
    fused = model.layers[0].self_attn.qkv_proj
    sizes = [HEADS * DIM, kv_heads * DIM, kv_heads * DIM]
    parts = split_qkv(fused.weight, HEADS, "by_role", num_kv_heads=kv_heads)
    for part, want in zip(parts, fused.weight.split(sizes), strict=True):
        torch.testing.assert_close(part, want)


def test_names_may_have_a_prefix_and_layers_tables_of_their_own():
    table = np.arange(6.0).reshape(2, 3)
    weights = {f"transformer.encoder.{KEY}": table}
    weights["encoder." + KEY.replace("block.0", "block.3")] = 2 * table
    np.testing.assert_array_equal(t5(weights)["table"], table.T)
    np.testing.assert_array_equal(t5(weights, layer=3)["table"], 2 * table.T)
    assert t5(weights)["table"].flags["C_CONTIGUOUS"]


NONE = {"shared.weight": np.zeros((2, 2))}
BLOOM = {"model_type": "bloom", "n_head": 4, "n_layer": 1}
WRONG = {
    "no-table": (lambda: t5(NONE), ValueError, "no encoder.block.0.*bias.weight; they have shared"),
    "nothing": (lambda: opt({}), ValueError, "no decoder.embed_positions.weight; .* nothing"),
    "a-list": (lambda: opt([1]), TypeError, "weights must be a state dict .* got list"),
    "stack": (lambda: t5(NONE, "both"), ValueError, "unknown stack 'both'"),
    "layer": (lambda: t5(NONE, layer=-1), ValueError, "layer must be at least 0"),
    "two-models": (
        lambda: t5({f"{a}.encoder.{KEY}": np.zeros((2, 2)) for a in "ab"}), ValueError,
        "must have one encoder.block.0.*got .*a.encoder.*b.encoder",
    ),
    "one-axis": (
        lambda: t5({f"encoder.{KEY}": np.zeros(3)}), ValueError,
        r"encoder.block.0.*shape \(num_buckets, H\), got \(3,\)",
    ),
    "rows": (
        lambda: gptj({"h.0.attn.q_proj.weight": np.zeros((9, 2))}, 4), ValueError,
        r"h.0.attn.q_proj.weight: .*num_heads=4 rows, got shape \(9, 2\)",
    ),
    "another-model": (lambda: mpt(BLOOM), ValueError, "must be that of a 'mpt', got .*'bloom'"),
    "no-model-type": (lambda: bloom({"n_head": 4}), ValueError, "'bloom', got model_type None"),
    "without-alibi": (
        lambda: mpt({"model_type": "mpt", "n_heads": 4, "n_layers": 1, "d_model": 8,
                     "max_seq_len": 8, "attn_config": {"alibi": False}}),
        ValueError, "with ALiBi, .*Learned",
    ),
    "no-config": (lambda: bloom("bloom"), TypeError, "config must be"),
    "fused-rows": (
        lambda: split_qkv(np.zeros(8), 2), ValueError, r"multiple of 6 rows, got .*\(8,\)",
    ),
    "fused-groups": (
        lambda: split_qkv(np.zeros((12, 2)), 2), ValueError,
        r"num_kv_heads is missing: weight has 12 rows, not 3 \* 2 inputs",
    ),
    "fused-kv-heads": (
        lambda: split_qkv(np.zeros((12, 4)), 4, num_kv_heads=3), ValueError,
        "num_kv_heads must divide num_heads=4, got 3",
    ),
    "order": (lambda: split_qkv(np.zeros(6), 2, "roles"), ValueError, "unknown order 'roles'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_what_is_wrong(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()
