"""Plans beside the models of transformers: every layer's weights of a tiny random model."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from sample import long

import posenc
from posenc import presets

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.23")
pytestmark = long  # importing models takes seconds

LENGTH, HEADS, LAYERS = 11, 2, 8
TINY = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": 16,
    "vocab_size": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 1.0,  # so that scores differ
}
# name -> class, options of the configuration, options of the plan
FAMILIES = {
    "cohere2": ("cohere2.Cohere2", {"sliding_window": 4}, {"window": 4}),
    "smollm3": ("smollm3.SmolLM3", {}, {}),
    "smollm3-window": (
        "smollm3.SmolLM3",
        {"use_sliding_window": True, "sliding_window": 4},
        {"window": 4},
    ),
    "exaone4": ("exaone4.Exaone4", {"sliding_window": 4}, {"window": 4}),
    "exaone4-full": (
        "exaone4.Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS},
        {"window": None},
    ),
    "gemma3": ("gemma3.Gemma3Text", {"sliding_window": 4, "head_dim": 16}, {"window": 4}),
    "gemma4": (
        "gemma4.Gemma4Text",
        {
            "sliding_window": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
        },
        {"window": 4, "global_head_dim": 32},
    ),
}
DEFAULTS = {name: FAMILIES[name][0] for name in presets.PLANS if name in FAMILIES}


def configuration(path, **options):
    module, kind = path.split(".")
    home = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    return getattr(home, f"{kind}Config")(**options)


def heads_first(x):
    """Queries or keys ``(B, H, L, D)`` from what a layer's projection or norm gives."""
    x = x.detach()
    if x.ndim == 3:
        x = x.unflatten(-1, (HEADS, -1))
    return (x if x.shape[1] == HEADS else x.transpose(1, 2)).numpy()


def record(path, options):
    """For each layer: queries and keys before any position, the scale, and the weights."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    layers = []

    def attention(module, q, k, v, mask, scaling=None, **_):
        scores = q @ k.transpose(-1, -2) * scaling
        layers[module.layer_idx] |= {
            "scale": scaling,
            "weights": (scores + mask).softmax(-1).detach().numpy(),
        }
        return v.transpose(1, 2), None

    AttentionInterface.register("posenc_recorder", attention)
    AttentionMaskInterface.register("posenc_recorder", eager_mask)
    module, kind = path.split(".")
    config = configuration(path, **TINY, **options)
    config._attn_implementation = "posenc_recorder"
    torch.manual_seed(0)
    home = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    model = getattr(home, f"{kind}Model")(config).eval()
    for layer in model.layers:
        layers.append(found := {})
        own = layer.self_attn
        for name in ("q", "k"):
            last = getattr(own, f"{name}_norm", None) or getattr(own, f"{name}_proj")
            last.register_forward_hook(
                lambda _, __, out, name=name, found=found: found.update({name: heads_first(out)})
            )
    with torch.no_grad():
        model(torch.arange(LENGTH)[None])
    return layers


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_has_the_weights_of_the_models(name):
    path, options, sizes = FAMILIES[name]
    plan = getattr(presets, name.split("-")[0])(layers=LAYERS, head_dim=16, **sizes)
    recorded = record(path, options)
    assert len(recorded) == len(plan) == LAYERS
    values = np.broadcast_to(np.eye(LENGTH, dtype=np.float32), (1, HEADS, LENGTH, LENGTH))
    for found, scheme, window in zip(recorded, plan.schemes, plan.windows, strict=True):
        weights = posenc.attention(
            found["q"], found["k"], values, scheme, causal=True, window=window,
            scale=found["scale"],
        )  # fmt: skip
        # Angles of transformers are products in float32, off by 1e-6 here; scores are up to 30.
        np.testing.assert_allclose(weights, found["weights"], atol=1e-4)
        assert np.ptp(found["weights"][:, :, -1]) > 0.01


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_configuration(name):
    config, plan = configuration(DEFAULTS[name]), presets.PLANS[name]()
    assert len(plan) == config.num_hidden_layers
    for layer, (scheme, window) in enumerate(zip(plan.schemes, plan.windows, strict=True)):
        kind = config.layer_types[layer]
        near = kind == "sliding_attention"
        assert window == (config.sliding_window if near else None)
        rope = config.rope_parameters
        if isinstance(scheme, posenc.RoPE):
            assert scheme.base == rope.get(kind, rope)["rope_theta"]
            own = config.per_layer_config[layer] if name == "gemma4" else config
            channels = getattr(own, "head_dim", None)
            channels = channels or config.hidden_size // config.num_attention_heads
            assert scheme.head_dim == channels
