"""Transformer-XL's term: by hand, and XLNet's scores as transformers computes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sample import long
from subjects import normal

import posenc
from posenc.schemes import TransformerXL
from posenc.testing import assert_near
from posenc.testing.tolerances import rounding_bound

HEADS, DIM, WIDTH = 2, 4, 6
SHAPES = {"u": (HEADS, DIM), "v": (HEADS, DIM), "w": (HEADS, DIM, WIDTH)}
PARAMS = {name: normal(shape, n) for n, (name, shape) in enumerate(SHAPES.items())}
AT, KEYS = [0, 5, 9], range(8)
# Scores below 32, of products of DIM and WIDTH channels, and weights of 8 keys.
BOUND = rounding_bound(4 * (DIM + WIDTH) + 16, 32, "float64")


def sinusoid(n):
    """``[sin(n f), cos(n f)]``, all sines first."""
    angles = [n / 10_000 ** (2 * c / WIDTH) for c in range(WIDTH // 2)]
    return np.asarray([*map(math.sin, angles), *map(math.cos, angles)])


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_the_score_is_that_of_the_formula(bidirectional, scale):
    scheme = TransformerXL(HEADS, DIM, WIDTH, max_distance=3, bidirectional=bidirectional)
    q, k = normal((1, HEADS, 3, DIM), 7), normal((1, HEADS, 8, DIM), 8)
    v = np.broadcast_to(np.eye(8), (1, HEADS, 8, 8))
    found = posenc.attention(
        q, k, v, scheme, PARAMS, scale=scale,
        tokens=posenc.Tokens(pos=np.asarray(KEYS)), queries=posenc.Tokens(pos=np.asarray(AT)),
    )  # fmt: skip
    for head in range(HEADS):
        u, bias, w = (PARAMS[name][head] for name in "uvw")
        for row, i in enumerate(AT):
            query, scores = q[0, head, row], []
            for j in KEYS:
                far = min(3, i - j) if i >= j else max(-3, i - j) * bidirectional
                content = (query + u) @ k[0, head, j]
                scores.append(content + (query + bias) @ w @ sinusoid(far))
            weights = np.exp(np.asarray(scores) * (scale or 0.5))
            assert_near(found[0, head, row], weights / np.sum(weights), BOUND)


def test_sizes_and_first_values():
    sizes = {"num_heads": 3, "head_dim": 8}
    assert posenc.make("transformer_xl", **sizes) == TransformerXL(3, 8, 24, max_distance=1024)
    assert posenc.make("transformer_xl", **sizes, max_len=64).max_distance == 63
    assert posenc.make("transformer_xl", **sizes, max_len=2**20).max_distance == 1024
    first = posenc.init_params(TransformerXL(3, 8, 24))
    assert {name: a.shape for name, a in first.items()} == {
        "u": (3, 8), "v": (3, 8), "w": (3, 8, 24)
    }  # fmt: skip


def test_wrong_options():
    with pytest.raises(ValueError, match="max_distance must be at least 1, got 0"):
        TransformerXL(2, 4, 6, max_distance=0)
    with pytest.raises(ValueError, match="dim must be even, got 5"):
        TransformerXL(2, 4, 5)
    q = np.zeros((1, 2, 3, 8))
    with pytest.raises(ValueError, match="8 channels, the scheme head_dim=4"):
        posenc.attention(q, q, q, TransformerXL(HEADS, DIM, WIDTH), PARAMS)


@long
@pytest.mark.parametrize("kind", ["bi", "uni"])
@pytest.mark.parametrize("clamp", [-1, 5])
def test_the_weights_are_those_of_xlnet(kind, clamp):
    """Memory of 7 tokens before 9 of the segment; one sentence, so that no term tells two apart."""
    torch = pytest.importorskip("torch")
    from transformers.models.xlnet import configuration_xlnet, modeling_xlnet

    length, memory = 9, 7
    config = configuration_xlnet.XLNetConfig(
        d_model=HEADS * DIM, n_head=HEADS, d_inner=8, n_layer=1, attn_type=kind, clamp_len=clamp,
        vocab_size=3, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = modeling_xlnet.XLNetModel(config).double().eval()
    layer = model.layer[0].rel_attn
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.5)
    hidden = torch.randn(length, 2, config.d_model, dtype=torch.float64)
    past = torch.randn(memory, 2, config.d_model, dtype=torch.float64)
    at = torch.arange(length)[:, None] + memory
    later = (torch.arange(memory + length) > at) & torch.tensor(kind == "uni")
    r = model.relative_positional_encoding(length, memory + length, bsz=2).double()
    *_, theirs = layer(
        hidden, None, later[..., None, None].double(), None, r, None, mems=past,
        output_attentions=True,
    )  # fmt: skip

    whole = torch.cat([past, hidden])
    q, k = (
        np.asarray(torch.einsum("lbc,chd->bhld", x, w).detach())
        for x, w in ((hidden, layer.q), (whole, layer.k))
    )
    params = {"u": layer.r_w_bias, "v": layer.r_r_bias, "w": layer.r.permute(1, 2, 0)}
    scheme = TransformerXL(
        HEADS, DIM, HEADS * DIM, bidirectional=kind == "bi",
        max_distance=clamp if clamp > 0 else memory + length,
    )  # fmt: skip
    ours = posenc.attention(
        q, k, np.broadcast_to(np.eye(memory + length), (2, HEADS, memory + length, 16)), scheme,
        {name: np.asarray(a.detach()) for name, a in params.items()}, causal=kind == "uni",
    )  # fmt: skip
    found = np.asarray(theirs.detach()).transpose(2, 3, 0, 1)
    # Angles of up to 16 are float32 in XLNet: of 8 channels, projected by weights below 8.
    assert_near(ours, found, rounding_bound(8, 16 * 8, "float32"))
    assert np.std(found) > 0.01
