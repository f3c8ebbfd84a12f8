"""``posenc_torch.hf.apply``: drawn configurations, with keys that the model may not read."""

from __future__ import annotations

import copy
import random
import runpy
from contextlib import suppress
from pathlib import Path

import pytest
from sample import long

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

import hf_models  # noqa: E402

from posenc_torch import hf  # noqa: E402

ROTARY, OTHERS = (
    runpy.run_path(str(Path(__file__).with_name(f"test_hf_{name}.py")))
    for name in ("apply", "families")
)
# These need models of their own kinds, or have departures that docs/hf.md lists.
OTHERWISE = {"inkling", "inkling2", "t5", "llama4", "llama-dynamic"}
FAMILIES = {
    name: case
    for cases in (ROTARY["CASES"], ROTARY["ALIKE"], OTHERS["CASES"])
    for name, case in cases.items()
    if name not in OTHERWISE
}
KEYS = {
    "attention_chunk_size": [4],
    "layer_types": [["sliding_attention"], ["sliding_attention", "full_attention"]],
    "max_window_layers": [1],
    "no_rope_layer_interval": [2],
    "no_rope_layers": [[0, 1]],
    "original_max_position_embeddings": [16, 32],
    "partial_rotary_factor": [0.25, 0.5],
    "rope_interleave": [False, True],
    "rope_theta": [500.0],
    "rotary_dim": [4],
    "rotary_emb_base": [500.0],
    "rotary_pct": [0.25, 0.5],
    "sliding_window": [3, 5],
    "sliding_window_pattern": [2],
    "use_sliding_window": [False, True],
}
PER_LAYER = ("layer_types", "no_rope_layers")


def drawn(seed):
    """Name of a configuration, its options, and the kind of call."""
    draw = random.Random(seed)
    kind, options = FAMILIES[draw.choice(sorted(FAMILIES))]
    options, layers = copy.deepcopy(options), options.get("num_hidden_layers", 2)
    for key in draw.sample(sorted(KEYS), draw.randint(1, 4)):
        value = draw.choice(KEYS[key])
        if key in PER_LAYER:
            value = (value * layers)[:layers]
        options.setdefault(key, value)
    return kind, options, draw.choice((whole, padded, cached))


def whole(model):
    return model(hf_models.tokens(), use_cache=False).logits


def padded(model):
    ids, mask = hf_models.padded(left=True)
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(ids, attention_mask=mask, position_ids=at, use_cache=False).logits[mask.bool()]


def cached(model):
    cache = transformers.DynamicCache(config=model.config)
    parts = hf_models.tokens().split(4, 1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


def check(kind, options, call):
    """The logits of the model, unless transformers cannot make or call it."""
    with torch.no_grad():
        try:
            model = hf_models.tiny(kind, **copy.deepcopy(options))  # which transformers changes
            ours = copy.deepcopy(model)
            want = call(model)
        except Exception as error:
            pytest.skip(f"transformers: {type(error).__name__}")
        if "kv_lora_rank" in options and "partial_rotary_factor" in options:
            # YaRN makes fewer angles there than the class rotates channels.
            with suppress(ValueError):
                hf_models.close(call(hf.apply(ours)), want)
            return
        hf_models.close(call(hf.apply(ours)), want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=long) for n in range(8, 240))])
def test_drawn_configurations_keep_their_logits(seed):
    check(*drawn(seed))


PER_TYPE = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                       "original_max_position_embeddings": 16},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
NEAR = {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"partial_rotary_factor": 0.5}),
        ("Llama", {"rotary_pct": 0.5}),
        ("Llama", {"rotary_dim": 4}),
        ("Llama", {"rope_interleave": True}),
        ("Llama", NEAR),
        ("Mistral", {**NEAR, "layer_types": ["full_attention"] * 2}),
        ("GPTJ", {"rotary_dim": 4, "rope_theta": 500.0}),
        ("DeepseekV2", {**OTHERS["CASES"]["deepseek_v2"][1], "rope_interleave": False}),
        (
            "Gemma3Text",
            {
                **ROTARY["CASES"]["gemma3"][1],
                "rope_parameters": PER_TYPE,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(sorted(given)[-2:]),
)
def test_keys_that_the_class_does_not_read(kind, options):
    check(kind, options, whole)


def test_a_model_that_turned_by_a_longer_text():
    """Dynamic NTK keeps the frequencies of the longest text; the configuration has the first."""
    kind, options = ROTARY["CASES"]["llama-dynamic"]
    model = hf_models.tiny(kind, **copy.deepcopy(options))
    with torch.no_grad():
        want = whole(model)
        hf_models.close(whole(hf.apply(model)), want)


def test_frequencies_that_the_configuration_does_not_describe():
    model = hf_models.tiny("Llama")
    rotary_module = model.model.rotary_emb
    rotary_module.original_inv_freq.mul_(0.5)
    with pytest.raises(ValueError, match="layer 0 of 'llama' turns by frequencies"):
        hf.apply(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_in_half_precision(dtype):
    hf.apply(hf_models.tiny("Llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5},
                            head_dim=128).to(dtype))  # fmt: skip


def test_factors_of_phimoe_stand_for_its_own():
    factors = {"short_mscale": 1.25, "long_mscale": 1.25}
    rope = {**copy.deepcopy(ROTARY["LONGROPE"]), **factors}
    check("Phimoe", {**ROTARY["EXPERTS"], "rope_parameters": rope}, whole)
