"""Axial RoPE: rope-vit's formula, image parts of transformers, and text."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks_installed import require
from sample import long
from subjects import normal

import posenc
from posenc.positions import grid
from posenc.schemes import AxialRoPE
from posenc.testing.tolerances import rounding_bound

PLACES = grid(3, 5)


def turned(scheme, x, places, role="query"):
    return posenc.transform(scheme, x, np.zeros(len(places), int), role=role, places=places)


def test_it_is_the_formula_of_rope_vit():
    """``theta**(-4k/D)``; x, the column, turns the first pairs; pairs are neighbours."""
    dim, width = 16, 5
    x = normal((2, 15, dim), 0)
    cell = np.arange(15)
    column, row = cell % width, cell // width
    frequencies = 100.0 ** (-4 * np.arange(dim // 4) / dim)
    angle = np.concatenate([np.outer(column, frequencies), np.outer(row, frequencies)], axis=-1)
    complexes = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    expected = np.stack([complexes.real, complexes.imag], axis=-1).reshape(x.shape)
    found = turned(AxialRoPE(dim), x, grid(3, width)[:, ::-1])
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding_bound(60, 4, "float64"))


@long  # importing models takes seconds
def test_it_is_the_image_part_of_qwen2_vl():
    if not (require("torch") and require("transformers")):
        pytest.skip("not installed: torch or transformers")
    import torch
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import (
        Qwen2VLVisionRotaryEmbedding,
        apply_rotary_pos_emb_vision,
    )

    config = Qwen2VLVisionConfig(embed_dim=64, hidden_size=64, num_heads=2)
    rotary, places = Qwen2VLVisionRotaryEmbedding(config), torch.tensor(PLACES)
    x = torch.tensor(normal((len(PLACES), 2, 32), 1, "float32"))
    cos, sin = rotary(x, places)
    theirs = apply_rotary_pos_emb_vision(x, x, cos, sin)[0].transpose(0, 1)
    scheme = AxialRoPE(32, base=10_000.0, layout="half")
    ours = turned(scheme, x.transpose(0, 1).numpy(), PLACES)
    # Angles up to 4 are products of float32 there.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=rounding_bound(16, 4))


@pytest.mark.parametrize("axes", [1, 2, 4])
def test_text_is_several_ropes_side_by_side(axes):
    x, pos = normal((1, 6, 16), 2, "float32"), np.asarray([0, 1, 7, 2**24, -5, 2**30 - 1])
    found = posenc.transform(AxialRoPE(16, axes), x, pos, role="key")
    part = 16 // axes
    rope = posenc.RoPE(part, base=100.0, layout="interleaved")
    for n in range(axes):
        own = slice(n * part, (n + 1) * part)
        apart = posenc.transform(rope, x[..., own], pos, role="key")
        np.testing.assert_array_equal(found[..., own], apart)


def test_errors():
    with pytest.raises(ValueError, match="head_dim must be a multiple of 4, got 6"):
        AxialRoPE(6)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 6, got 8: each of axes=3"):
        AxialRoPE(8, axes=3)
    with pytest.raises(ValueError, match="axes must be at least 1, got 0"):
        AxialRoPE(8, axes=0)
    with pytest.raises(ValueError, match="x has 16 channels, the scheme head_dim=8"):
        turned(AxialRoPE(8), normal((1, 15, 16), 0), PLACES)
