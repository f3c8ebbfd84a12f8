"""``posenc_torch.hf.apply``: tiny random models of transformers keep their logits."""

from __future__ import annotations

import copy

import pytest
from sample import long, some

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

import hf_models  # noqa: E402

import posenc  # noqa: E402
from posenc_torch import hf  # noqa: E402

WINDOW = {"sliding_window": 5}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 16,
}  # fmt: skip
GEMMA4 = {
    **WINDOW, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 2,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
PER_TYPE = {"full_attention": YARN, "sliding_attention": PLAIN}
# name -> configuration and its options
CASES = {
    "cohere2": ("Cohere2", {**WINDOW, "num_hidden_layers": 4}),
    "exaone4": ("Exaone4", {**WINDOW, "num_hidden_layers": 4}),
    "gemma2": ("Gemma2", {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 9}),
    "gemma3": ("Gemma3Text", {**WINDOW, "head_dim": 16, "num_hidden_layers": 6}),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-shared-keys": (
        "Gemma4Text",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 31,
        },
    ),
    "gemma4_unified": ("Gemma4UnifiedText", GEMMA4),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_oss": ("GptOss", {**WINDOW, **EXPERTS, "head_dim": 16, "rope_parameters": YARN}),
    "kolibri1": (
        "Kolibri1",
        {
            **WINDOW,
            "head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 5,
        },
    ),
    "llama": ("Llama", {}),
    "llama-dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": 8,
        },
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama4": (
        "Llama4Text",
        {
            "attention_chunk_size": 5,
            "head_dim": 16,
            "floor_scale": 3,
            "attn_scale": 0.5,
            "num_hidden_layers": 4,
            "moe_layers": [],
            "intermediate_size_mlp": 32,
            "num_local_experts": 2,
        },
    ),
    "ministral3": (
        "Ministral3",
        {**WINDOW, "head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    ),
    "mistral": ("Mistral", WINDOW),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**WINDOW, "num_hidden_layers": 4, "rope_parameters": PER_TYPE}),
    "phi3": ("Phi3", WINDOW),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "qwen2": ("Qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
ROUTED = {**MOE, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
LONGER = {**WINDOW, "num_hidden_layers": 4}
ALIKE = {  # more families, of which two checks are enough
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "bitnet": ("BitNet", {}),
    "cohere": ("Cohere", {}),
    "cohere2_moe": ("Cohere2Moe", {**MOE, **LONGER}),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {**MOE, "moe_num_experts": 2, "moe_k": 1}),
    "exaone_moe": ("ExaoneMoe", {**MOE, **LONGER}),
    "flex_olmo": ("FlexOlmo", MOE),
    "gemma": ("Gemma", {"head_dim": 16}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4_moe": ("Glm4Moe", {**ROUTED, "head_dim": 16}),
    "granite": ("Granite", {"attention_multiplier": 0.3}),
    "granitemoe": ("GraniteMoe", {**EXPERTS, "attention_multiplier": 0.3}),
    "helium": ("Helium", {"head_dim": 8}),
    "internlm3": ("InternLM3", {"head_dim": 16}),
    "jais2": ("Jais2", {"head_dim": 16}),
    "minimax_m2": ("MiniMaxM2", {**EXPERTS, "head_dim": 16, "rotary_dim": 8}),
    "mixtral": ("Mixtral", {**EXPERTS, **WINDOW}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {"clip_qkv": 0.7}),
    "olmoe": ("Olmoe", MOE),
    "persimmon": ("Persimmon", {}),
    "phi": ("Phi", {}),
    "phimoe": ("Phimoe", {**EXPERTS, **WINDOW}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **MOE, **WINDOW, "shared_expert_intermediate_size": 16, "use_sliding_window": True,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**MOE, **WINDOW, "head_dim": 16, "use_sliding_window": True}),
    "seed_oss": ("SeedOss", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "solar_open": ("SolarOpen", {**ROUTED, "head_dim": 16}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", WINDOW),
    "vaultgemma": ("VaultGemma", {**LONGER, "head_dim": 16}),
}  # fmt: skip
QUICK = ("gemma3", "gpt_oss", "llama")
DIFFERENT = {
    # Angles of cached keys stay those of the length at which they were computed; here all turn by
    # the present length, as without a cache: test_dynamic_angles_are_those_without_a_cache.
    ("llama-dynamic", "check_generation"),
    # Its temperature counts padding: test_llama4_does_not_count_padding.
    ("llama4", "check_left_padded"),
    ("llama4", "check_generation"),
}


EVERY = [(n, c) for n in CASES for c in hf_models.CHECKS if (n, c.__name__) not in DIFFERENT]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check.__name__}", marks=[long] * (name not in QUICK))
        for name, check in EVERY
    ],
)
def test_a_model_keeps_its_logits(name, check):
    kind, options = CASES[name]
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    check(*hf_models.pair(kind, **options))


@long
@pytest.mark.parametrize("check", [hf_models.check_generation, hf_models.check_training])
@pytest.mark.parametrize("name", ALIKE)
def test_more_families_keep_their_logits(name, check):
    kind, options = ALIKE[name]
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    check(*hf_models.pair(kind, **options))


@long
@pytest.mark.parametrize("name", ALIKE)
def test_older_keys_say_which_layers_have_a_window(name):
    kind, options = ALIKE[name]
    config = getattr(transformers, f"{kind}Config")(**{**hf_models.TINY, **options})
    older = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    assert posenc.presets.from_hf_config(older) == posenc.presets.from_hf_config(config)


def pair(name):
    kind, options = CASES[name]
    return hf_models.pair(kind, **options)


@long
def test_dynamic_angles_are_those_without_a_cache():
    kind, options = CASES["llama-dynamic"]
    # In deeper layers keys come from hidden states, which depend on the length at their time.
    model, ours = hf_models.pair(kind, **{**options, "num_hidden_layers": 1})
    ids, last = hf_models.tokens(), []
    with torch.no_grad():
        for each in (model, ours):
            cache = transformers.DynamicCache(config=each.config)
            for part in ids[:, :10], ids[:, 10:11], ids[:, 11:]:
                logits = each(part, past_key_values=cache).logits
            last.append(logits[:, -1])
        want = model(ids, use_cache=False).logits[:, -1]
    hf_models.close(last[1], want)
    assert not torch.allclose(last[0], want, atol=1e-3)


def test_far_positions_are_exact():
    """Angles of transformers are float32, which rounds 131072 radians by up to 0.004."""
    model, ours = hf_models.pair("Llama", head_dim=64)
    exact, ids = copy.deepcopy(ours).double(), hf_models.tokens()
    positions = torch.arange(12)[None] + 131072
    with torch.no_grad():
        want = exact(ids, position_ids=positions).logits
        hf_models.close(ours(ids, position_ids=positions).logits, want)
        assert not torch.allclose(model(ids, position_ids=positions).logits.double(), want, 0, 1e-4)


@long
def test_llama4_does_not_count_padding():
    model, ours = pair("llama4")
    ids, mask = hf_models.padded(left=True)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        got = ours(ids, attention_mask=mask, position_ids=positions).logits
        for row, real in enumerate(mask.bool()):
            hf_models.close(got[row, real], model(ids[row, real][None]).logits[0])


@pytest.mark.parametrize("name", ["gemma3", pytest.param("gemma4-shared-keys", marks=long)])
@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": "static"}, {"num_beams": 2}],
    ids=["static", "beams"],
)
def test_other_caches(name, options):
    hf_models.check_generation(*pair(name), **options)


@long
@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 3},  # crops the cache
        {"prefill_chunk_size": 4},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=["assisted", "chunks", "samples"],
)
@pytest.mark.parametrize("name", ["gemma3", "gemma4-shared-keys", "gpt_oss", "llama"])
def test_other_ways_to_generate(name, options):
    ids, out = torch.tensor([[5, 6, 7, 8] * 3 + [5, 6]]), []
    for model in pair(name):
        torch.manual_seed(0)
        out.append(model.generate(ids, max_new_tokens=12, **{"do_sample": False, **options}))
    assert out[0].tolist() == out[1].tolist()


def test_a_cache_that_was_cropped():
    model, ours = pair("llama")
    ids, last = hf_models.tokens(), []
    for each in (model, ours):
        cache = transformers.DynamicCache(config=each.config)
        with torch.no_grad():
            each(ids, past_key_values=cache)
            cache.crop(-4)
            last.append(each(ids[:, 8:], past_key_values=cache).logits)
    hf_models.close(last[1], last[0])


def test_a_static_cache_without_a_mask():
    model, ours = pair("gemma3")
    ids = hf_models.tokens()
    cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        got = [ours(part, past_key_values=cache).logits for part in ids.split(4, 1)]
        hf_models.close(torch.cat(got, 1), model(ids).logits)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=long)])
def test_positions_of_the_caller(name):
    """Packed documents, whose positions begin again, and positions that skip some."""
    model, ours = pair(name)
    ids = hf_models.tokens()
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    skipping = torch.arange(12)[None] * 3 + 2
    # Without a cache, transformers takes every skip for the beginning of a document.
    for positions, cached in ((packed, False), (skipping, True)):
        with torch.no_grad():
            got, want = (
                m(ids, position_ids=positions, use_cache=cached).logits for m in (ours, model)
            )
        hf_models.close(got, want)


def test_masks_of_the_caller():
    """Booleans and terms of the scores, ``(B, 1, Q, K)``."""
    model, ours = pair("llama")
    ids = hf_models.tokens()
    sees = torch.ones(12, 12, dtype=torch.bool).tril() | (torch.arange(12) < 4)
    term = torch.where(sees, torch.linspace(-1, 1, 12), torch.finfo(torch.float32).min)
    for mask in (sees, term, sees[8:9]):  # the last is the same for all queries
        both = mask.expand(2, 1, -1, 12)
        as_term = both if both.dtype != torch.bool else torch.where(both, 0.0, term.min())
        with torch.no_grad():
            hf_models.close(
                ours(ids, attention_mask=both).logits, model(ids, attention_mask=as_term).logits
            )


def test_a_mask_of_the_caller_while_decoding():
    """It is whole, whatever the windows of the model are."""
    model, ours = pair("gemma3")
    ids, last = hf_models.tokens(), []
    term = torch.where(torch.arange(12) == 3, torch.finfo(torch.float32).min, 0.0)
    for each, mask in ((model, term), (ours, term), (ours, term == 0)):
        cache = transformers.DynamicCache()
        call = {"attention_mask": mask.expand(2, 1, 1, 12), "position_ids": torch.full((2, 1), 11)}
        with torch.no_grad():
            each(ids[:, :11], past_key_values=cache)
            last.append(each(ids[:, 11:], past_key_values=cache, **call).logits)
    hf_models.close(last[1], last[0])
    hf_models.close(last[2], last[0])


@pytest.mark.parametrize("name", some(("llama", "llama4", "gemma3"), ("llama4",), long))
def test_gradient_checkpointing_of_two_passes(name):
    _, ours = pair(name)
    at, mask = torch.arange(12)[None] + torch.tensor([[1], [3]]), torch.ones(2, 12)
    calls = [{"position_ids": at * step, "attention_mask": mask} for step in (1, 2)]
    hf_models.check_checkpointing(ours, *calls)


def test_positions_that_are_changed_in_place():
    """Dynamic NTK depends on the highest."""
    _, ours = pair("llama-dynamic")
    ids, positions = hf_models.tokens(), torch.arange(12)[None] + 0
    with torch.no_grad():
        ours(ids, position_ids=positions, use_cache=False)
        positions += 30
        got = ours(ids, position_ids=positions, use_cache=False).logits
        hf_models.close(got, ours(ids, position_ids=positions + 0, use_cache=False).logits)


@long
def test_gradient_checkpointing():
    model, ours = pair("gemma3")
    for each in (model, ours):
        getattr(each, "activation_checkpointing_enable", each.gradient_checkpointing_enable)()
    hf_models.check_training(model, ours)


@long
def test_tokens_of_an_image_see_each_other():
    """The text model of a multi-modal one; the mask of images is the model's."""
    text = {k: v for k, v in hf_models.TINY.items() if k != "attn_implementation"}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config={**text, **WINDOW, "head_dim": 16, "num_hidden_layers": 6},
        vision_config=vision, mm_tokens_per_image=4, image_token_index=30, boi_token_index=29,
        eoi_token_index=28, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    ours = hf.apply(copy.deepcopy(model))
    ids = hf_models.tokens() % 27
    ids[:, 3:7] = 30
    options = {"pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": (ids == 30).long()}
    with torch.no_grad():
        hf_models.close(ours(ids, **options).logits, model(ids, **options).logits)
    options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    assert ours.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()


@long
def test_it_compiles_to_one_graph():
    """Without a cache, which makes graph breaks where it gets further layers."""
    model, ours = hf_models.pair("Llama", num_hidden_layers=1)
    compiled, ids = torch.compile(ours, backend="eager", fullgraph=True), hf_models.tokens()
    call = {"position_ids": torch.arange(12)[None] + torch.tensor([[0], [4]]), "use_cache": False}
    call["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        hf_models.close(compiled(ids, **call).logits, model(ids, **call).logits)


def test_other_models_with_the_configuration():
    """They stay as they are; one that is made from ours cannot attend by itself."""
    model = hf_models.tiny("Llama")
    other = type(model)(model.config).eval()
    ids = hf_models.tokens()
    with torch.no_grad():
        before = other(ids).logits
        hf.apply(model)
        assert torch.equal(other(ids).logits, before)
        with pytest.raises(RuntimeError, match="of no model that was given to"):
            type(model)(model.config)(ids)
    bloom = hf.apply(hf_models.tiny("Bloom"))  # attention of which is code of its own
    with pytest.raises(ValueError, match="is not supported"):
        type(bloom)(bloom.config)


def test_a_part_of_a_model():
    model, ours = pair("llama")
    ids = hf_models.tokens()
    hf.apply(hf.remove(ours).model)
    with torch.no_grad():
        hf_models.close(hf.apply(ours)(ids).logits, model(ids).logits)
        with pytest.raises(ValueError, match="model is part of one that was given to apply"):
            hf.apply(ours.model)
        hf.apply(hf.remove(ours).model)
        assert torch.equal(hf.remove(ours)(ids).logits, model(ids).logits)


def test_it_is_undone():
    model, ours = pair("llama")
    ids = hf_models.tokens()
    keys = model.state_dict().keys()
    with torch.no_grad():
        hf.apply(hf.apply(ours, posenc.ALiBi(4, learned=True)), posenc.NoPE())
        assert ours.state_dict().keys() == keys
        assert not torch.allclose(ours(ids).logits, model(ids).logits, atol=0.1)
        hf.remove(ours)
        assert torch.equal(ours(ids).logits, model(ids).logits)
