"""``attn_implementation="posenc"``: a model keeps its positions, and posenc computes attention."""

from __future__ import annotations

import copy

import pytest
from sample import long

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

import hf_models  # noqa: E402

import posenc  # noqa: E402
from posenc_torch import hf  # noqa: E402

CAP = {"head_dim": 16, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0}
# Of text: windows and a cap; sinks; chunks; positions in embeddings.
CASES = {
    "gemma2": ("Gemma2", {"sliding_window": 5, **CAP}),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": 5, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt2": ("GPT2", {}),
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}  # fmt: skip
QUICK = ("gemma2", "gpt_oss")


@pytest.fixture(autouse=True)
def registered():
    hf.register()
    yield
    hf.register()


def pair(name):
    """A model with eager attention, and the same that posenc attends for."""
    kind, options = CASES[name]
    model = hf_models.tiny(kind, **options)
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("posenc")
    return model, ours


@pytest.mark.parametrize("name", [pytest.param(n, marks=[long] * (n not in QUICK)) for n in CASES])
def test_a_model_keeps_its_logits(name):
    model, ours = pair(name)
    hf_models.check_full(model, ours)
    hf_models.check_left_padded(model, ours)
    hf_models.check_generation(model, ours)


@long
def test_a_model_learns_the_same():
    hf_models.check_training(*pair("gemma2"))


def test_a_static_cache():
    hf_models.check_generation(*pair("gemma2"), cache_implementation="static")


def test_from_pretrained_asks_for_it(tmp_path):
    model = hf_models.tiny("Llama")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="posenc"
    )
    ids = hf_models.tokens()
    with torch.no_grad():
        want = model(ids).logits
        hf_models.close(loaded(ids).logits, want)
        hf_models.close(hf.apply(loaded)(ids).logits, want)  # positions too
        assert loaded.config._attn_implementation != "posenc"
        hf_models.close(hf.remove(loaded)(ids).logits, want)
    assert loaded.config._attn_implementation == "posenc"


@pytest.mark.parametrize("kind", ["T5", pytest.param("Bert", marks=long)])
def test_attention_both_ways_with_a_bias_of_the_model(kind):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    options = {**sizes, "dropout_rate": 0.0} if kind == "T5" else {"is_decoder": False}
    model = hf_models.tiny(kind, auto="AutoModel", **options)
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("posenc")
    ids, mask = hf_models.padded(left=False)
    call = {"input_ids": ids, "attention_mask": mask}
    if kind == "T5":
        call["decoder_input_ids"] = hf_models.tokens(length=7)
    with torch.no_grad():
        got, want = (m(**call).last_hidden_state for m in (ours, model))
    real = slice(None) if kind == "T5" else mask.bool()
    hf_models.close(got[real], want[real])


def test_an_implementation_of_ones_own_choice():
    _, ours = pair("gemma2")
    hf.register("sdpa")
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"'sdpa'.*softcap"):
        ours(hf_models.tokens())
    with pytest.raises(ValueError, match=r"unknown implementation 'fast'; accepted: auto"):
        hf.register("fast")


def test_a_model_whose_attention_is_code_of_its_own_is_told_so():
    model = hf_models.tiny("Bloom", attn_implementation="posenc")
    with pytest.raises(ValueError, match=r"'bloom' is code of its own.*apply, as bloom, .*, mpt"):
        model(hf_models.tokens())


def test_what_it_has_not_is_an_error():
    _, ours = pair("llama")
    for dropout in ("attention_dropout", "attn_pdrop"):
        kind = "Llama" if dropout == "attention_dropout" else "GPT2"
        model = hf_models.tiny(kind, attn_implementation="posenc", **{dropout: 0.5})
        with pytest.raises(NotImplementedError, match=rf"dropout=0.5; set {dropout} of the"):
            model.train()(hf_models.tokens())
    with pytest.raises(NotImplementedError, match=r"'posenc' does not serve output_attentions"):
        ours(hf_models.tokens(), output_attentions=True)


@pytest.mark.parametrize("scheme", [posenc.ALiBi(4), posenc.T5Bias(4, causal=True)], ids=repr)
def test_a_folder_of_another_scheme_is_not_computed_with_the_models_own(scheme, tmp_path):
    model = hf.apply(hf_models.tiny("Llama"), scheme)
    ids = hf_models.tokens()
    with torch.no_grad():
        want = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="posenc")
    with pytest.raises(ValueError, match=r"saved under posenc_torch.hf.apply"):
        loaded(ids)
    with torch.no_grad():
        hf_models.close(hf.apply(loaded.eval(), scheme)(ids).logits, want)
