"""``posenc_torch.hf.apply``: families that do not fit the plain path of rotary models."""

from __future__ import annotations

import copy
import pickle

import pytest
from sample import long, some

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

import hf_models  # noqa: E402

import posenc  # noqa: E402
from posenc import presets  # noqa: E402
from posenc_torch import hf  # noqa: E402

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
INKLING = {
    "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window_size": 5, "d_rel": 4, "rel_extent": 9, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "layer_types": ["hybrid_sliding", "hybrid"], "unpadded_vocab_size": 31,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 2,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# name -> configuration and its options
CASES = {
    "bloom": ("Bloom", {}),
    "codegen": ("CodeGen", {"rotary_dim": 4}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, **EXPERTS, "rope_parameters": YARN}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "rope_parameters": YARN}),
    "deepseek_v3-half": ("DeepseekV3", {**LATENT, "rope_interleave": False, "q_lora_rank": None}),
    "falcon": ("Falcon", {"alibi": False, "multi_query": True}),
    "falcon-new": (
        "Falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    # In eager mode transformers adds ALiBi to Falcon's scores twice: see docs/hf.md.
    "falcon_rw": (
        "Falcon",
        {
            "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
            "attn_implementation": "sdpa",
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **EXPERTS}),
    "gpt2": ("GPT2", {**NO_DROPOUT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neo": (
        "GPTNeo",
        {
            "attention_types": [[["global", "local"], 1]], "window_size": 4, "num_layers": 2,
            "hidden_size": 32, "num_heads": 4,
        },
    ),
    "gptj": ("GPTJ", {"rotary_dim": 4}),
    "inkling": ("InklingText", {**INKLING, "log_scaling_n_floor": 4, "log_scaling_alpha": 0.5}),
    "inkling2": ("Inkling2Text", {**INKLING, "log_scaling_n_floor": 4}),
    "minicpm3": ("MiniCPM3", LATENT),
    "mistral4": (
        "Mistral4",
        {**LATENT, **EXPERTS, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5},
         "auto": "Mistral4ForCausalLM"},
    ),
    "mpt": ("Mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    "opt": ("OPT", {"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 16}),
    "youtu": ("Youtu", LATENT),
}  # fmt: skip
QUICK = ("bloom", "deepseek_v3", "gptj", "opt")


@pytest.mark.parametrize("check", hf_models.CHECKS)
@pytest.mark.parametrize("name", some(CASES, QUICK, long))
def test_a_model_keeps_its_logits(name, check):
    kind, options = CASES[name]
    check(*hf_models.pair(kind, **options))


@long
@pytest.mark.parametrize(
    "name", ["deepseek_v3", "falcon", "gpt2", "gpt_neo", "gptj", "inkling", "mpt"]
)
def test_a_mask_of_the_caller(name):
    kind, options = CASES[name]
    model, ours = hf_models.pair(kind, **options)
    mask = torch.full((2, 1, hf_models.LENGTH, hf_models.LENGTH), -1e30).triu(1)
    mask[:, :, 7:, 2:4] = -1e30
    with torch.no_grad():
        got, want = (m(hf_models.tokens(), attention_mask=mask).logits for m in (ours, model))
    hf_models.close(got, want)


@pytest.mark.parametrize("name", some(("bloom", "falcon", "gptj", "mpt"), ("gptj",), long))
def test_it_can_be_pickled(name):
    kind, options = CASES[name]
    model, ours = hf_models.pair(kind, **options)
    hf_models.check_full(model, pickle.loads(pickle.dumps(ours)))


@long
@pytest.mark.parametrize("name", ["gptj", "inkling", "opt"])
def test_tokens_are_taken_back(name):
    """Assisted generation drops guesses that were wrong from the cache."""
    kind, options = CASES[name]
    ids = hf_models.tokens(rows=1)
    ids = torch.cat([ids, ids[:, :6]], dim=1)
    guesses = {"prompt_lookup_num_tokens": 2, "max_new_tokens": 8, "do_sample": False}
    model, ours = hf_models.pair(kind, **options)
    assert ours.generate(ids, **guesses).tolist() == model.generate(ids, **guesses).tolist()


@pytest.mark.parametrize("name", some(("bloom", "gpt2", "opt", "t5"), ("opt",), long))
def test_half_precision(name):
    more = {}
    if name == "t5":
        model, _ = t5("T5", num_decoder_layers=2)
        more = {"decoder_input_ids": hf_models.tokens()}
    else:
        kind, options = CASES[name]
        model = hf_models.tiny(kind, **options)
    ids = hf_models.tokens()
    with torch.no_grad():
        exact = model(ids, **more).logits
        theirs = model.bfloat16()(ids, **more).logits
        ours = hf.apply(model)(ids, **more).logits
    assert ours.dtype == torch.bfloat16
    wrong, usual = ((x - exact).abs().mean() for x in (ours, theirs))
    assert wrong < 1.3 * usual


SWAPPED = {  # a family and its own scheme, given as if it were another
    "falcon_rw": lambda: presets.falcon_rw(num_heads=4, head_dim=8),
    "gpt2": lambda: presets.gpt2(dim=32, max_len=64),
    "mpt": lambda: presets.mpt(num_heads=4),
}


@pytest.mark.parametrize("name", some(SWAPPED, ("gpt2",), long))
def test_the_same_scheme_swapped_in(name):
    """Nothing is left of the model's own positions; ``remove`` brings them back."""
    kind, options = CASES[name]
    model, ours = hf_models.pair(kind, **options)
    hf.apply(ours, SWAPPED[name]())
    if name == "gpt2":
        torch.nn.init.zeros_(ours.posenc[0].table)
        ids = hf_models.tokens(rows=1)
        alone = ours(ids[:, :1]).logits[:, -1]
        assert not torch.allclose(alone, model(ids[:, :1]).logits[:, -1], atol=1e-3)
        ours.posenc[0].table.data.copy_(model.transformer.wpe.weight)
    hf_models.check_full(model, ours)
    hf_models.check_generation(model, ours)
    hf_models.check_full(model, hf.remove(ours))
    assert ours.state_dict().keys() == model.state_dict().keys()


T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}  # fmt: skip


def t5(name, **options):
    """A random model that translates, and a copy whose positions posenc computes."""
    return hf_models.pair(name, auto="AutoModelForSeq2SeqLM", **{**T5, **options})


@pytest.mark.parametrize("name", some(("T5", "MT5", "UMT5"), ("T5",), long))
def test_an_encoder_with_its_decoder(name):
    model, ours = t5(name, num_hidden_layers=3, num_decoder_layers=2)
    hf_models.check_training(model, ours)
    hf_models.check_generation(model, ours)
    ids, mask = hf_models.padded(left=True)
    with torch.no_grad():
        for more in ({}, {"decoder_attention_mask": mask}):
            call = {"attention_mask": mask, "decoder_input_ids": ids, **more}
            got, want = (m(ids, **call).logits for m in (ours, model))
            hf_models.close(got[mask.bool()], want[mask.bool()])
        call = {"attention_mask": mask[:, :7], "decoder_input_ids": ids}  # longer than the source
        hf_models.close(ours(ids[:, :7], **call).logits, model(ids[:, :7], **call).logits)


def test_attention_to_an_encoder_in_gpt2():
    model, ours = hf_models.pair("GPT2", **NO_DROPOUT, add_cross_attention=True)
    ids, mask = hf_models.padded(left=False)
    call = {"encoder_hidden_states": torch.randn(2, 7, 32), "encoder_attention_mask": mask[:, 5:]}
    with torch.no_grad():
        hf_models.close(ours(ids, **call).logits, model(ids, **call).logits)


AXES = {  # name -> configuration, options of its text, options of its image tower
    "ernie4_5_vl": (
        "Ernie4_5_VLMoe", {"mrope_section": [3, 3, 2]}, {"moe_num_experts": 2, "moe_k": 1},
    ),
    "glm4v": ("Glm4v", {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}, {}),
    "glm4v_moe": (
        "Glm4vMoe", {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}, EXPERTS,
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", {"mrope_section": [2, 3, 3]}, {}),
    "qwen2_vl": ("Qwen2VL", {"mrope_section": [2, 3, 3]}, {}),
    "qwen3_vl": ("Qwen3VL", {"mrope_section": [4, 2, 2]}, {}),
    "qwen3_vl_moe": (
        "Qwen3VLMoe", {"mrope_section": [4, 2, 2]},
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some(AXES, ("qwen3_vl",), long))
def test_a_model_of_text_and_images(name):
    """The image's tokens have coordinates; what it shows is no matter of positions."""
    kind, rope, more = AXES[name]
    rope = {"rope_type": "default", "rope_theta": 1e4, **rope}
    text = {**hf_models.TINY, "head_dim": 16, "hidden_size": 64, "rope_parameters": rope, **more}
    tower = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    model, ours = hf_models.pair(
        kind, auto="AutoModelForImageTextToText", text_config=text, vision_config=tower
    )
    kinds = torch.zeros(2, hf_models.LENGTH, dtype=torch.long)
    kinds[:, 5:9] = 1
    image = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": kinds}
    hf_models.check_full(model, ours)
    hf_models.check_generation(model, ours, **image)
    hf_models.check_checkpointing(ours, image, {})
    kinds = kinds.flip(1)  # padding is on the right
    hf_models.check_training(model, ours, **{**image, "mm_token_type_ids": kinds})


@long
def test_where_transformers_departs_from_the_released_code():
    """If it stops, the row of docs/hf.md goes."""
    kind, options = CASES["falcon_rw"]
    eager, _ = hf_models.pair(kind, **{**options, "attn_implementation": "eager"})
    twice = posenc.ALiBi(
        4, slopes=[2 * m for m in presets.falcon_rw(num_heads=4, head_dim=8).slopes]
    )
    hf_models.check_full(eager, hf.apply(copy.deepcopy(eager), twice))
    kind, options = CASES["mpt"]
    attention = {**options["attn_config"], "alibi_bias_max": 4}
    model, ours = hf_models.pair(kind, attn_config=attention)
    with pytest.raises(AssertionError):
        hf_models.check_full(model, ours)
    hf_models.check_full(model, hf.apply(ours, presets.mpt(num_heads=4)))


def test_what_is_refused():
    model = hf_models.tiny("Mpt", attn_config={"alibi": False})
    with pytest.raises(ValueError, match="learned_pos_emb=True: MPT has no such table"):
        hf.apply(model)
    model = hf.apply(hf_models.tiny("GPTJ", rotary_dim=4, attn_pdrop=0.5)).train()
    with pytest.raises(NotImplementedError, match=r"dropout=0\.5"):
        model(hf_models.tokens())
    model = hf_models.tiny("HunYuanDenseV1", head_dim=8)
    with pytest.raises(ValueError, match="'hunyuan_v1_dense' is not served: it norms"):
        hf.apply(model)
    with torch.device("meta"):
        model = hf_models.tiny("HYV4", **LATENT, n_routed_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="'hy_v4' is not served: transformers turns halves"):
        hf.apply(model)


@long
def test_attention_to_keys_that_an_indexer_chooses():
    text = {
        **hf_models.TINY, **LATENT, "num_hidden_layers": 4, "index_topk": 5, "index_n_heads": 2,
        "index_head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16, "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1], "indexer_types": ["full", "full", "shared", "full"],
    }  # fmt: skip
    tower = {"model_type": "pixtral", "num_hidden_layers": 1, "hidden_size": 16}
    tower |= {"num_attention_heads": 2, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    model = hf_models.tiny(
        "MistralLarge4", auto="AutoModelForImageTextToText", text_config=text, vision_config=tower
    )
    torch.nn.init.normal_(model.model.language_model.rotary_emb.alpha, std=0.5)
    ours = hf.apply(copy.deepcopy(model))
    for check in hf_models.CHECKS:
        check(model, ours)
