"""``posenc.weights``: converted projections with the other layout give the same scores."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from float32_frequencies import relative_error
from frameworks import FRAMEWORKS

import posenc
from posenc.schemes import RoPE
from posenc.testing.tolerances import ATTENTION_TOL, rounding_bound
from posenc.weights import half_to_interleaved, interleaved_to_half


def test_rows_by_hand():
    rows = np.arange(12)  # two heads of six, of which four rotate
    assert half_to_interleaved(rows, 2, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert half_to_interleaved(np.arange(6), 1).tolist() == [0, 3, 1, 4, 2, 5]
    assert interleaved_to_half(np.arange(6), 1).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_library_and_back(name):
    framework = FRAMEWORKS[name]
    for shape, rotary_dim in (((24,), None), ((24, 5), 6)):
        weight = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        converted = half_to_interleaved(framework.array(weight, "float32"), 3, rotary_dim)
        assert type(converted) is type(framework.array(weight, "float32"))
        expected = half_to_interleaved(weight, 3, rotary_dim)
        np.testing.assert_array_equal(framework.host(converted), expected)
        back = interleaved_to_half(converted, 3, rotary_dim)
        np.testing.assert_array_equal(framework.host(back), weight)


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_scores_of_the_other_layout_are_the_same(rotary_dim):
    rng, (heads, dim, length) = np.random.default_rng(0), (2, 8, 5)
    x = rng.standard_normal((length, 6))
    weights, biases = (
        rng.standard_normal((2, heads * dim, 6)),
        rng.standard_normal((2, heads * dim)),
    )

    def scores(rope, convert):
        q, k = (
            posenc.transform(
                rope, (x @ convert(w).T + convert(b)).reshape(length, heads, dim).swapaxes(0, 1),
                np.arange(length), role=role,
            )
            for w, b, role in zip(weights, biases, ("query", "key"), strict=True)
        )  # fmt: skip
        return q @ k.swapaxes(1, 2)

    half = RoPE(dim, rotary_dim=rotary_dim)
    expected = scores(half, lambda rows: rows)
    found = scores(
        replace(half, layout="interleaved"),
        lambda rows: half_to_interleaved(rows, heads, rotary_dim),
    )
    # The same products, added in another order.
    bound = rounding_bound(2 * dim, dim * np.abs(x).max() ** 2 * 36, "float64")
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((np.zeros((9, 2)), 2), r"a multiple of num_heads=2 rows, got shape \(9, 2\)"),
        ((np.zeros(()), 1), "weight must have a multiple"),
        ((np.zeros(6), 2), "head_dim must be even and at most 3, the rows per head, got 3"),
        ((np.zeros(8), 2, 3), "rotary_dim must be even and at most 4, the rows per head, got 3"),
        ((np.zeros(8), 2, 6), "rotary_dim must be even and at most 4, the rows per head, got 6"),
        ((np.zeros(8), 0), "num_heads must be at least 1"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        half_to_interleaved(*arguments)


@pytest.mark.long
@pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("torch")), reason="needs transformers and torch"
)
def test_a_llama_of_transformers_runs_with_interleaved_weights():
    import torch
    from transformers import LlamaConfig, LlamaModel

    heads, kv_heads, length = 4, 2, 20
    config = LlamaConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=50, max_position_embeddings=64,
        attn_implementation="eager", attention_bias=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16},
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(50, (1, length))
    with torch.no_grad():
        expected = model(tokens, output_attentions=True).attentions[0]
        layer = model.layers[0]
        x, own = layer.input_layernorm(model.embed_tokens(tokens)), layer.self_attn

        def project(linear, heads):
            weight, bias = (half_to_interleaved(p, heads) for p in (linear.weight, linear.bias))
            return (x @ weight.T + bias).view(1, length, heads, 8).transpose(1, 2).numpy()

        q, k = project(own.q_proj, heads), project(own.k_proj, kv_heads)
    rope = replace(RoPE.from_hf(config.to_dict()), layout="interleaved")
    # Attention over an identity as values is the matrix of its weights.
    identity = np.broadcast_to(np.eye(length, dtype=np.float32), (1, kv_heads, length, length))
    found = posenc.attention(q, k, identity, rope, causal=True)
    largest = np.abs(q).max() * np.abs(k).max() * 8
    # Attention's bound, which is for scores of at most 8, and that of transformers' angles.
    bound = ATTENTION_TOL["float32"] * max(1, largest / 8)
    bound += length * relative_error(500.0) * largest
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=bound)
    wrong = posenc.attention(q, k, identity, replace(rope, layout="half"), causal=True)
    assert np.abs(wrong - expected.numpy()).max() > 10 * bound
