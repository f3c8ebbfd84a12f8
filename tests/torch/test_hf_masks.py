"""``posenc_torch.hf.apply``: masks, padding and positions of unusual calls."""

from __future__ import annotations

import copy

import pytest
from sample import long, some

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

import hf_models  # noqa: E402

import posenc  # noqa: E402
from posenc import schemes  # noqa: E402
from posenc_torch import hf  # noqa: E402

NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
CHUNKS = {
    "attention_chunk_size": 5, "head_dim": 16, "num_hidden_layers": 4, "moe_layers": [],
    "intermediate_size_mlp": 32, "num_local_experts": 2,
}  # fmt: skip
MODELS = {
    "codegen": ("CodeGen", {"rotary_dim": 4}),
    "falcon": ("Falcon", {"alibi": False}),
    "gpt2": ("GPT2", {}),
    "gpt_neo": ("GPTNeo", {**NEO, "window_size": 5}),
    "gptj": ("GPTJ", {"rotary_dim": 4}),
    "llama": ("Llama", {}),
    "llama4": ("Llama4Text", CHUNKS),
    "mistral": ("Mistral", {"sliding_window": 3}),
    "opt": ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 32}),
    "qwen2": ("Qwen2", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}),
}
ALIBI = {"bloom": ("Bloom", {}), "mpt": ("Mpt", {})}


@pytest.mark.parametrize("by_config", [False, True], ids=["argument", "configuration"])
@pytest.mark.parametrize("name", some(MODELS, ("gptj", "llama", "llama4", "mistral"), long))
def test_is_causal_is_obeyed(name, by_config):
    kind, options = MODELS[name]
    both, ids = hf_models.pair(kind, **options), hf_models.tokens()
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    call = {} if by_config else {"is_causal": False}
    for each in both if by_config else ():
        each.config.is_causal = False
    with torch.no_grad():
        for given in (None, mask):
            got, want = (
                each(ids, attention_mask=given, use_cache=False, **call).logits
                for each in reversed(both)
            )
            seen = mask.bool() if given is not None else ...
            hf_models.close(got[seen], want[seen])


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_refused_without_a_causal_mask(name):
    kind, options = ALIBI[name]
    model = hf_models.tiny(kind, **options)
    other = hf.apply(copy.deepcopy(model), posenc.ALiBi(4))
    other.config.is_causal = False
    other(hf_models.tokens(), use_cache=False)
    ours = hf.apply(model)
    ours.config.is_causal = False
    with pytest.raises(NotImplementedError, match="is_causal=False"):
        ours(hf_models.tokens(), use_cache=False)


def test_a_mask_of_the_caller_has_its_own_chunks():
    kind, options = MODELS["llama4"]
    model, ours = hf_models.pair(kind, **options)
    sees = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    term = torch.where(sees, 0.0, torch.finfo(torch.float32).min)
    ids = hf_models.tokens()
    with torch.no_grad():
        want = model(ids, attention_mask=term).logits
        for mask in (sees, term):
            hf_models.close(ours(ids, attention_mask=mask).logits, want)


def generated(model, ids, mask, **options):
    """Logits of six greedy steps, ``(B, 6, V)``."""
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(out.logits, 1)


@pytest.mark.parametrize(
    "cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"]
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"num_key_value_heads": 4}),
        ("Falcon", {"alibi": False, "multi_query": False, "parallel_attn": False}),
    ],
    ids=["llama", "falcon"],
)
def test_no_convolution_reads_padding(kind, options, cache):
    ours = hf.apply(hf_models.tiny(kind, **options), schemes.SelectiveRoPE(4, 8, 32))
    ids, mask = hf_models.padded(left=True)
    pad = int((mask[1] == 0).sum())
    alone = generated(ours, ids[1:, pad:], mask[1:, pad:], **cache)
    hf_models.close(generated(ours, ids, mask, **cache)[1:], alone)


def test_windows_of_a_plan_hold_with_a_static_cache():
    plan = posenc.layers.LayerPlan.of(posenc.ALiBi(4), 2, [3, 3])
    ours, ids = hf.apply(hf_models.tiny("Llama"), plan), hf_models.tokens()
    mask = torch.ones_like(ids)
    want = generated(ours, ids, mask, use_cache=False)
    hf_models.close(generated(ours, ids, mask, cache_implementation="static"), want)


POSITIONS = {
    "gpt_neo": MODELS["gpt_neo"],
    "qwen2_vl": (
        "Qwen2VLText",
        {"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2],
        }},
    ),
}  # fmt: skip


@pytest.mark.parametrize("scheme", [schemes.FIRE(4), schemes.LogScale("llama4", train_len=3)],
                         ids=["fire", "log-scale"])  # fmt: skip
@pytest.mark.parametrize("name", POSITIONS)
def test_schemes_of_one_axis_read_position_ids(name, scheme):
    """A padded row is the row alone, and positions that skip are not those of the row."""
    kind, options = POSITIONS[name]
    auto = "AutoModel" if name == "qwen2_vl" else "AutoModelForCausalLM"
    model = hf.apply(hf_models.tiny(kind, auto, **options), scheme)
    ids, mask = hf_models.padded(left=True)
    at, pad = (mask.cumsum(-1) - 1).clamp(min=0), int((mask[1] == 0).sum())
    with torch.no_grad():
        got = model(ids, attention_mask=mask, position_ids=at)[0]
        hf_models.close(got[1, pad:], model(ids[1:, pad:])[0][0])
        skips = model(ids, attention_mask=mask, position_ids=3 * at + 2)[0]
    assert not torch.allclose(skips, got, atol=1e-4)


def test_positions_that_layers_do_not_get_are_not_repeated():
    kind, options = MODELS["gpt_neo"]
    model = hf.apply(hf_models.tiny(kind, **options), schemes.FIRE(4)).train()
    model.activation_checkpointing_enable()
    ids = hf_models.tokens()
    model(ids, labels=ids).loss.backward()
    with pytest.raises(NotImplementedError, match="gradient checkpointing"):
        model(ids, position_ids=torch.arange(12)[None] + 2)
