"""M-RoPE: which axis turns each pair, text, and the models of transformers."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks_installed import require
from sample import long
from subjects import normal

import posenc
from posenc.schemes import MRoPE, YaRN
from posenc.testing.tolerances import rounding_bound

# The axis of each pair, written out: time 0, height 1, width 2.
OF_PAIRS = {
    "chunked": ((3, 2, 3), [0, 0, 0, 1, 1, 2, 2, 2]),
    "interleaved": ((4, 2, 2), [0, 1, 2, 0, 1, 2, 0, 0]),
    "ernie": ((3, 3, 2), [1, 2, 1, 2, 1, 2, 0, 0]),
}
FAR = np.asarray([0, 1, 7, 2**24, -5, 2**30 - 1])


def turned(scheme, x, places, role="query"):
    return posenc.transform(scheme, x, np.zeros(len(places), int), role=role, places=places)


@pytest.mark.parametrize("layout", OF_PAIRS)
def test_each_pair_turns_by_its_axis(layout):
    sections, axis_of = OF_PAIRS[layout]
    scheme = MRoPE(20, sections, layout, base=50.0, rotary_dim=16)
    places = np.random.default_rng(0).integers(-9, 40, (7, 3))
    x = normal((2, 7, 20), 1)
    angle = places[:, axis_of] * 50.0 ** (-np.arange(8) / 8)
    first, second = (
        (slice(0, 16, 2), slice(1, 16, 2)) if layout == "ernie" else (slice(8), slice(8, 16))
    )
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    expected = np.array(x)
    expected[..., first], expected[..., second] = z.real, z.imag
    bound = rounding_bound(4 * 40, 4, "float64")
    np.testing.assert_allclose(turned(scheme, x, places), expected, rtol=0, atol=bound)


def test_hunyuan_shares_out_channels():
    """Sections of (1, 1) pairs are 2 channels each: pair 0 is channels 0 and 2, of two axes."""
    x = np.asarray([[1.0, 2.0, 3.0, 4.0]])
    scheme = MRoPE(4, (1, 1), "hunyuan", base=2500.0)  # frequencies 1 and 0.02
    # Angles by channel: place[0] * (1, 0.02), then place[1] * (1, 0.02).
    places = np.asarray([[5, 3]])
    t = [5, 0.1, 3, 0.06]
    expected = [
        1 * np.cos(t[0]) - 3 * np.sin(t[0]), 2 * np.cos(t[1]) - 4 * np.sin(t[1]),
        3 * np.cos(t[2]) + 1 * np.sin(t[2]), 4 * np.cos(t[3]) + 2 * np.sin(t[3]),
    ]  # fmt: skip
    np.testing.assert_allclose(turned(scheme, x, places)[0], expected, rtol=1e-14)


@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 64), YaRN(4.0, 64, apply_to="scale")])
@pytest.mark.parametrize("layout", ["chunked", "interleaved", "ernie", "hunyuan"])
def test_equal_coordinates_are_rope(layout, scaling):
    scheme = MRoPE(24, layout=layout, scaling=scaling)
    x = normal((1, len(FAR), 24), 2, "float32")
    places = np.stack([FAR] * scheme.axes, axis=-1)
    rope = posenc.RoPE(24, layout="interleaved" if layout == "ernie" else "half", scaling=scaling)
    assert scheme.rope == rope
    expected = posenc.transform(rope, x, FAR, role="key")
    np.testing.assert_array_equal(turned(scheme, x, places, "key"), expected)
    np.testing.assert_array_equal(posenc.transform(scheme, x, FAR, role="key"), expected)
    assert scheme.scale(24) == rope.scale(24)


@pytest.mark.parametrize("layout", OF_PAIRS)
def test_each_axis_is_as_exact_as_rope(layout):
    """Bitwise: RoPE turns the pairs of an axis likewise at that coordinate, near or far."""
    sections, axis_of = OF_PAIRS[layout]
    scheme, x = MRoPE(16, sections, layout), normal((1, len(FAR), 16), 3, "float32")
    places = np.stack([FAR, np.roll(FAR, 1), np.roll(FAR, 2)], axis=-1)
    found = turned(scheme, x, places)
    for axis in range(3):
        alone = posenc.transform(scheme.rope, x, places[:, axis], role="query")
        pairs = np.flatnonzero(np.asarray(axis_of) == axis)
        own = [2 * pairs, 2 * pairs + 1] if layout == "ernie" else [pairs, pairs + 8]
        np.testing.assert_array_equal(found[..., own], alone[..., own])


@pytest.mark.parametrize("pairs", [1, 2, 3, 5, 16, 32, 64, 100])
def test_sections_have_the_proportions_of_the_models(pairs):
    released = {
        "chunked": (16, 24, 24), "interleaved": (24, 20, 20), "ernie": (22, 22, 20),
        "hunyuan": (16, 16, 16, 16),
    }  # fmt: skip
    for layout, sections in released.items():
        scheme = MRoPE(2 * pairs, layout=layout)
        assert sum(scheme.sections) == pairs
        if pairs == 64:
            assert scheme.sections == sections


def test_a_longer_context_changes_the_scaling_alone():
    scheme = MRoPE(16, (2, 3, 3), scaling=posenc.schemes.DynamicNTK(4.0, 64))
    longer = scheme.at_length(256)
    assert longer.rope == scheme.rope.at_length(256) != scheme.rope
    assert longer.sections == scheme.sections


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sections": (2, 3, 4)}, r"sections must add up to 8, .*, got \(2, 3, 4\)"),
        ({"sections": ()}, "sections must add up to 8"),
        ({"sections": (9, -1)}, "sections must be at least 0, got -1"),
        ({"sections": (4.0, 4)}, "sections must be a number of pairs for each axis"),
        ({"sections": 8}, "sections must be a number of pairs for each axis, got 8"),
        ({"sections": (2, 4, 2), "layout": "interleaved"}, "at most a part 1/3 of all"),
        ({"sections": (3, 2, 3), "layout": "interleaved"}, "at most a part 1/3 of all"),
        ({"sections": (2, 3, 3), "layout": "ernie"}, "as many pairs for height as for width"),
        ({"layout": "hunyuan", "pairing": "interleaved"}, "pairing must be 'half'"),
        ({"layout": "mixed"}, "layout"),
        ({"pairing": "chunked"}, "pairing"),
    ],
)
def test_errors(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MRoPE(16, **given)


SECTIONS = {"mrope_section": [2, 3, 3], "rope_theta": 5e5, "rope_type": "default"}


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        (SECTIONS, {}, MRoPE(16, (2, 3, 3), base=5e5)),
        (
            {**SECTIONS, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            {},
            MRoPE(16, (4, 2, 2), "interleaved", 5e5),
        ),
        (
            {"model_type": "qwen2_vl", "hidden_size": 64, "num_attention_heads": 4,
             "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            {},
            MRoPE(16, (2, 3, 3), base=1e6),
        ),
        (
            {"text_config": {"model_type": "glm4v_text", "head_dim": 32, "rope_parameters":
                             {**SECTIONS, "partial_rotary_factor": 0.5}}},
            {},
            MRoPE(32, (2, 3, 3), base=5e5, rotary_dim=16, pairing="interleaved"),
        ),
        (
            {"xdrope_section": [2.0, 2.0, 2.0, 2.0], "rope_theta": 1e4, "type": "xdrope",
             "alpha": 1000.0, "factor": 1.0},
            {},
            MRoPE(16, (2, 2, 2, 2), "hunyuan", scaling=posenc.schemes.NTK(1000.0)),
        ),
        (
            {**SECTIONS, "mrope_section": [3, 3, 2]},
            {"layout": "ernie"},
            MRoPE(16, (3, 3, 2), "ernie", 5e5),
        ),
    ],
)  # fmt: skip
def test_configurations(given, options, expected):
    head_dim = None if "text_config" in given or "hidden_size" in given else 16
    found = MRoPE.from_hf(given, head_dim=head_dim, **options)
    assert found.rope == expected.rope
    assert (found.sections, found.layout) == (expected.sections, expected.layout)


def test_a_configuration_without_sections():
    with pytest.raises(ValueError, match="mrope_section is missing; without it, use RoPE"):
        MRoPE.from_hf({"rope_theta": 1e4}, head_dim=16)
    with pytest.raises(ValueError, match="one RoPE for all layers, got NoPE"):
        MRoPE.from_hf(None, head_dim=16)


# model, prefix of its classes, sections, what its configuration has besides
MODELS = {
    "qwen2_vl": ("Qwen2VL", [4, 6, 6], {}),
    "qwen2_5_vl": ("Qwen2_5_VL", [4, 6, 6], {}),
    "qwen3_vl": ("Qwen3VLText", [6, 5, 5], {"head_dim": 32}),
    "glm4v": ("Glm4vText", [2, 3, 3], {"partial_rotary_factor": 0.5}),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeText", [6, 6, 4], {}),
    "hunyuan_vl": ("HunYuanVL", [4, 4, 4, 4], {"head_dim": 32}),
}


@long  # importing models takes seconds
@pytest.mark.parametrize("model", MODELS)
def test_it_is_the_rotation_of_transformers(model):
    if not (require("torch") and require("transformers")):
        pytest.skip("not installed: torch or transformers")
    import importlib

    import torch

    prefix, sections, more = MODELS[model]
    home = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    kind = getattr(configuration, f"{prefix.removesuffix('Text')}TextConfig")
    own = {key: value for key, value in more.items() if key == "head_dim"}
    rest = {key: value for key, value in more.items() if key != "head_dim"}
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **rest}
    config = kind(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, rope_parameters=parameters,
        **own,
    )  # fmt: skip
    rotary = getattr(home, f"{prefix}RotaryEmbedding")(config)
    scheme = MRoPE.from_hf(config.to_dict())
    places = np.random.default_rng(0).integers(0, 40, (2, 9, scheme.axes))
    x = normal((2, 2, 9, 32), 1, "float32")
    cos, sin = rotary(torch.tensor(x), torch.tensor(places).permute(2, 0, 1))
    theirs = home.apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin)
    ours = posenc.transform(scheme, x, np.zeros((2, 9), int), role="query", places=places)
    # Angles up to 40 are products of float32 there, of frequencies with four roundings.
    bound = rounding_bound(4 + 40 * 5, 4)
    for of_theirs in theirs:
        np.testing.assert_allclose(ours, of_theirs, rtol=0, atol=bound)
    other = np.roll(places, 1, axis=-1)
    swapped = posenc.transform(scheme, x, np.zeros((2, 9), int), role="query", places=other)
    assert np.abs(swapped - ours).max() > 0.1
