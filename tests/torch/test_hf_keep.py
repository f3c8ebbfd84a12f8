"""What a model keeps of a scheme: in folders and under PEFT; and what ``apply`` refuses at once."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

import hf_models  # noqa: E402

import posenc  # noqa: E402
from posenc_torch import hf  # noqa: E402

T5 = posenc.T5Bias(4, causal=True)
WHOLE = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bloom": "BloomForCausalLM"}


def whole(name):
    """A model with a head, whose weights GPT-2 and BLOOM share with the embedding of tokens."""
    kind = {"gpt2": "GPT2", "llama": "Llama", "bloom": "Bloom"}[name]
    config = getattr(transformers, f"{kind}Config")(**{**hf_models.TINY, "num_key_value_heads": 4})
    torch.manual_seed(0)
    return getattr(transformers, WHOLE[name])(config).eval()


def logits(model):
    with torch.no_grad():
        return model(hf_models.tokens(), use_cache=False).logits


def trained(name, scheme=T5):
    """A model whose table is not the first one."""
    model = hf.apply(whole(name), scheme)
    with torch.no_grad():
        for array in model.posenc.parameters():
            array.add_(torch.linspace(-1, 1, array.numel()).reshape(array.shape))
    return model


@pytest.mark.parametrize("shards", [None, "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_folder_brings_learned_arrays_back(name, shards, tmp_path):
    model = trained(name)
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    again = hf.apply(type(model).from_pretrained(tmp_path).eval(), T5)
    assert torch.equal(again.posenc[0].table, model.posenc[0].table)
    assert torch.equal(logits(again), logits(model))
    fresh = hf.apply(type(model).from_pretrained(tmp_path), T5, fresh=True)
    assert not torch.equal(fresh.posenc[0].table, model.posenc[0].table)


def test_arrays_of_another_scheme_are_an_error_and_the_model_stays(tmp_path):
    trained("llama").save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    before = logits(model)
    with pytest.raises(ValueError, match=r"learned arrays .*16.*holds .*32.*fresh=True"):
        hf.apply(model, posenc.T5Bias(4, num_buckets=16, causal=True))
    assert torch.equal(logits(model), before)
    hf.apply(model, posenc.ALiBi(4))  # has none
    hf.apply(model, posenc.T5Bias(4, num_buckets=16, causal=True), fresh=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_trains_and_saves_the_arrays_that_are_read(tmp_path):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["posenc"])
    model = peft.get_peft_model(hf.apply(whole("llama"), T5), options)
    ids = hf_models.tokens()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    before = logits(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    copies = {n: p for n, p in model.named_parameters() if "posenc" in n}
    assert [p.requires_grad for p in copies.values()] == [False, True]
    gradient = copies["base_model.model.posenc.modules_to_save.default.0.table"].grad
    assert gradient is not None
    assert gradient.abs().max() > 0
    after = logits(model)
    assert not torch.allclose(after, before)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(hf.apply(whole("llama"), T5), tmp_path).eval()
    torch.testing.assert_close(logits(again), after)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_arrays_of_its_own(how):
    model = trained("llama")
    again = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    before = logits(model)
    assert torch.equal(logits(again), before)
    with torch.no_grad():
        again.posenc[0].table.zero_()
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(again), before)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (posenc.T5Bias(8), "does not fit layer 0 .* 4 heads of 8 channels"),
        (posenc.RoPE(16), "does not fit layer 0 .*head_dim=16"),
        (posenc.make("mixed_rope", num_heads=4, head_dim=8), "and 2 of keys: .*repeat k and v"),
        (
            posenc.make("selective_rope", num_heads=4, head_dim=8, hidden_dim=32),
            "and 2 of keys: .*repeat k and v",
        ),
    ],
)
def test_a_scheme_that_does_not_fit_is_refused_at_once(scheme, said):
    config = transformers.LlamaConfig(**hf_models.TINY)
    model = transformers.LlamaForCausalLM(config).eval()
    before = logits(model)
    with pytest.raises(ValueError, match=said):
        hf.apply(model, scheme)
    assert torch.equal(logits(model), before)


def test_caches_that_cannot_hold_positions_are_named():
    model = hf.apply(whole("llama"))
    ids = hf_models.tokens()[:1]
    cache = transformers.DynamicCache(config=model.config)
    cache.offloading = True  # as an argument, it asks a PyTorch that is built for GPUs for one
    with pytest.raises(NotImplementedError, match="past_key_values offloads its layers"):
        model(ids, past_key_values=cache)
    with pytest.raises(NotImplementedError, match=r"has 1 layers, and the model .*early_exit"):
        model.generate(ids, assistant_early_exit=1, max_new_tokens=3, do_sample=False)


def test_dropout_is_named_as_the_configuration_does():
    for kind, name in (("Llama", "attention_dropout"), ("GPT2", "attn_pdrop")):
        model = hf_models.tiny(kind, **{name: 0.5})
        with pytest.raises(NotImplementedError, match=f"set {name} of the configuration to 0"):
            hf.apply(model, T5).train()(hf_models.tokens(), use_cache=False)


@pytest.mark.long
def test_hf_is_an_attribute_that_imports_no_transformers():
    code = "import sys, posenc_torch; posenc_torch.hf.apply; print('transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_arrays_that_are_not_found_are_no_new_ones(tmp_path):
    model = hf.apply(whole("llama"), T5)
    with torch.no_grad():
        model.posenc[0].table.fill_(3.0)
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"saved with learned arrays \['0.table'\].*fresh=True"):
        hf.apply(loaded, T5)
    found = hf.apply(type(model).from_pretrained(tmp_path / "moved"), T5)
    assert torch.equal(found.posenc[0].table, model.posenc[0].table)
    assert not torch.equal(hf.apply(loaded, T5, fresh=True).posenc[0].table, found.posenc[0].table)


def test_apply_again_keeps_what_was_trained():
    model = hf.apply(whole("llama"), T5)
    with torch.no_grad():
        model.posenc[0].table.fill_(3.0)
    assert torch.all(hf.apply(model, T5).posenc[0].table == 3.0)
    assert not torch.all(hf.apply(model, T5, fresh=True).posenc[0].table == 3.0)
    assert not hasattr(hf.remove(model).config, "posenc_arrays")
