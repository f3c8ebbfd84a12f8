"""Plans beside the models of transformers: every layer's weights of a tiny random model."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from sample import long

import posenc
from posenc import presets
from posenc.schemes import Sum

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
    "irope": (
        "llama4.Llama4Text",
        {
            "attention_chunk_size": 4,
            "head_dim": 16,
            "floor_scale": 3,
            "attn_scale": 0.5,
            "use_qk_norm": False,
            "moe_layers": [],
            "intermediate_size_mlp": 16,
        },
        {"chunk": 4, "train_len": 3, "beta": 0.5},
    ),
}
MORE = {  # families that have no function, only from_hf_config: class and options
    "gemma2": ("gemma2.Gemma2", {"sliding_window": 4, "head_dim": 16}),
    "gemma4_unified": (
        "gemma4_unified.Gemma4UnifiedText",
        {"sliding_window": 4, "head_dim": 16, "global_head_dim": 32},
    ),
    "gpt_oss": (
        "gpt_oss.GptOss",
        {"sliding_window": 4, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "kolibri1": (
        "kolibri1.Kolibri1",
        {"sliding_window": 4, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1},
    ),
    "llama": ("llama.Llama", {}),
    "ministral3": (
        "ministral3.Ministral3",
        {
            "sliding_window": 4,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 3,
                "max_position_embeddings": 12,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mistral": ("mistral.Mistral", {"sliding_window": 4}),
    "olmo2": ("olmo2.Olmo2", {}),
    "olmo3": ("olmo3.Olmo3", {"sliding_window": 4}),
    "phi3": ("phi3.Phi3", {"sliding_window": 4}),
    "qwen2": (
        "qwen2.Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 5},
    ),
    "qwen3": ("qwen3.Qwen3", {"head_dim": 16}),
}
PATHS = {name: path for name, (path, *_) in {**FAMILIES, **MORE}.items()} | {
    "irope": "llama4.Llama4Text",
    "mistral_large4": "mistral_large4.MistralLarge4Text",
}
DEFAULTS = {name: PATHS[name] for name in presets.PLANS if name in PATHS}


def configuration(path, **options):
    module, kind = path.split(".")
    home = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    return getattr(home, f"{kind}Config")(**options)


def without_types(config):
    """A dictionary that says which layers have a window by older keys alone."""
    return {key: value for key, value in config.to_dict().items() if key != "layer_types"}


def heads_first(x):
    """Queries or keys ``(B, H, L, D)`` from what a layer's projection or norm gives."""
    x = x.detach()
    if x.ndim == 3:
        x = x.unflatten(-1, (HEADS, -1))
    return (x if x.shape[1] == HEADS else x.transpose(1, 2)).numpy()


def listen(module, found, parts):
    """Put ``parts`` of what a module returns into ``found``, as heads."""
    module.register_forward_hook(
        lambda _, __, out: found.update({n: heads_first(x) for n, x in parts(out).items()})
    )


def listen_to_projections(own, found):
    """Queries and keys of one layer, before any position."""
    if hasattr(own, "kv_b_proj"):
        listen_to_latents(own, found)
    elif hasattr(own, "qkv_proj"):
        listen(own.qkv_proj, found, lambda out: dict(zip("qk", out.chunk(3, -1), strict=False)))
    else:
        for name in "qk":
            last = getattr(own, f"{name}_norm", None) or getattr(own, f"{name}_proj")
            listen(last, found, lambda out, name=name: {name: out})


def listen_to_latents(own, found):
    """The same for latent attention; the rotated channels, the model's last, come first."""
    fixed, rank = own.qk_nope_head_dim, own.kv_lora_rank

    def queries(out):
        q = out.unflatten(-1, (HEADS, -1))
        return {"q": torch.cat([q[..., fixed:], q[..., :fixed]], -1)}

    def rotated(out):
        return {"k": out[:, :, None, rank:].expand(-1, -1, HEADS, -1)}

    def keys(out):
        k = out[:, 0].unflatten(-1, (HEADS, -1))[..., :fixed].transpose(1, 2)
        return {"k": torch.cat([torch.from_numpy(found["k"]), k], -1)}

    listen(own.q_proj, found, queries)
    listen(own.kv_a_proj_with_mqa, found, rotated)
    listen(own.kv_b_proj, found, keys)


def record(config, change=lambda model: None):
    """For each layer: queries and keys before any position, and the weights of its attention."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModel
    from transformers.masking_utils import eager_mask

    layers = []

    def attention(module, q, k, v, mask, scaling=None, s_aux=None, softcap=None, **_):
        scores = q @ k.transpose(-1, -2) * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        sink = torch.full((HEADS,), -torch.inf) if s_aux is None else s_aux
        sink = sink[None, :, None, None].expand(1, HEADS, LENGTH, 1)
        weights = torch.cat([scores + mask, sink], -1).softmax(-1)[..., :-1]
        layers[module.layer_idx] |= {
            "weights": weights.detach().numpy(),
            "given": {"scale": scaling, "softcap": softcap},
            "params": {} if s_aux is None else {"sink": s_aux.detach().numpy()},
        }
        return v.transpose(1, 2), None

    AttentionInterface.register("posenc_recorder", attention)
    AttentionMaskInterface.register("posenc_recorder", eager_mask)
    config._attn_implementation = "posenc_recorder"
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    change(model)
    for layer in model.layers:
        layers.append(found := {})
        listen_to_projections(layer.self_attn, found)
    with torch.no_grad():
        model(torch.arange(LENGTH)[None])
    return layers


def check(plan, recorded):
    """Each layer of the plan gives the weights of the model's layer."""
    assert len(recorded) == len(plan) == LAYERS
    values = np.broadcast_to(np.eye(LENGTH, dtype=np.float32), (1, HEADS, LENGTH, LENGTH))
    for found, scheme, window in zip(recorded, plan.schemes, plan.windows, strict=True):
        weights = posenc.attention(
            found["q"], found["k"], values, scheme, found["params"], causal=True, window=window,
            **found["given"],
        )  # fmt: skip
        # Angles of transformers are products in float32, off by 1e-6 here; scores are up to 30.
        np.testing.assert_allclose(weights, found["weights"], atol=1e-4)
        assert np.ptp(found["weights"][:, :, -1]) > 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_has_the_weights_of_the_models(name):
    path, options, sizes = FAMILIES[name]
    plan = getattr(presets, name.split("-")[0])(layers=LAYERS, head_dim=16, **sizes)
    config = configuration(path, **TINY, **options)
    check(plan, record(config))
    assert presets.from_hf_config(config) == presets.from_hf_config(config.to_dict()) == plan
    assert presets.from_hf_config(without_types(config)) == plan


@pytest.mark.parametrize("name", MORE)
def test_a_configuration_has_the_weights_of_its_model(name):
    path, options = MORE[name]
    config = configuration(path, **TINY, **options)
    plan = presets.from_hf_config(config)
    check(plan, record(config))
    assert presets.from_hf_config(without_types(config)) == plan


def test_mistral_large4_scales_and_turns_as_the_model():
    """Without the choice of keys by an indexer, which is not a matter of positions."""
    config = configuration(
        "mistral_large4.MistralLarge4Text", **TINY, n_routed_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, index_head_dim=16, index_n_heads=2,
    )  # fmt: skip
    plan = presets.mistral_large4(layers=LAYERS, num_heads=HEADS, head_dim=16)
    assert presets.from_hf_config(config) == plan
    rng = np.random.default_rng(0)
    alpha, a, b = (rng.uniform(-1, 1, n).astype(np.float32) for n in (4, HEADS, HEADS))

    def set_learned_numbers(model):
        model.rotary_emb.alpha.copy_(torch.from_numpy(alpha))
        for layer in model.layers:
            scale = layer.self_attn.softmax_scaling
            scale.load_state_dict({"scale": torch.from_numpy(a), "bias": torch.from_numpy(b)})

    recorded = record(config, set_learned_numbers)
    for found, scheme in zip(recorded, plan.schemes, strict=True):
        both = {"0_log_scale": alpha, "1_a": a, "1_b": b}
        found["params"] = both if isinstance(scheme, Sum) else {"a": a, "b": b}
        assert found["given"]["scale"] == scheme.scale(16)
    check(plan, recorded)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_configuration(name):
    config, plan = configuration(DEFAULTS[name]), presets.PLANS[name]()
    assert len(plan) == config.num_hidden_layers
    assert presets.from_hf_config(config) == plan
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
