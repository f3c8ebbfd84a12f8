"""Other schemes in models of transformers: ``posenc_torch.hf.apply(model, scheme)``."""

from __future__ import annotations

import copy
import sys

import pytest
from sample import some

from posenc.apply.feature_needs import lookback
from posenc.contract.protocol import Hook

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

import hf_models  # noqa: E402
from sample import long  # noqa: E402

import posenc  # noqa: E402
from posenc import schemes  # noqa: E402
from posenc_torch import Positions, hf  # noqa: E402

HEADS, WIDTH = 4, 32
SIZES = {
    "num_heads": HEADS, "head_dim": 8, "dim": WIDTH, "hidden_dim": WIDTH, "max_len": 64,
    "train_len": 64,
}  # fmt: skip


def qwen():
    """With as many heads of keys as of queries, because some schemes learn arrays for both."""
    window = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
    return hf_models.tiny("Qwen3", head_dim=8, num_key_value_heads=HEADS, **window)


def with_rotation_off(model):
    """The model of transformers whose rotary modules give cosines of 1 and sines of 0."""
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, out: (torch.ones_like(out[0]), torch.zeros_like(out[1]))
    )
    return model


def test_alibi_in_a_llama_is_a_term_of_its_scores():
    model = hf_models.tiny("Llama")
    ours = hf.apply(copy.deepcopy(model), posenc.ALiBi(HEADS))
    at = torch.arange(hf_models.LENGTH)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])  # Press et al. 2021, section 3
    term = -slopes[:, None, None] * (at[:, None] - at)
    term = torch.where(at <= at[:, None], term, torch.finfo(term.dtype).min)
    ids = hf_models.tokens()
    with torch.no_grad():
        want = with_rotation_off(model)(ids, attention_mask=term.expand(2, -1, -1, -1)).logits
        hf_models.close(ours(ids).logits, want)


def test_an_embedding_is_added_once_to_the_embeddings_of_tokens():
    model = hf_models.tiny("Llama")
    ours = hf.apply(copy.deepcopy(model), posenc.Sinusoidal(WIDTH))
    ids = hf_models.tokens()
    pos = torch.arange(hf_models.LENGTH)
    with torch.no_grad():
        x = model.get_input_embeddings()(ids)
        x += posenc.embedding(posenc.Sinusoidal(WIDTH), pos)
        want = with_rotation_off(model)(inputs_embeds=x).logits
        hf_models.close(ours(ids).logits, want)


@pytest.mark.parametrize("name", some(posenc.catalogue(), ("alibi", "fox"), long))
def test_it_generates_and_learns(name):
    """Each scheme: tokens from the cache as without, padding that has no influence, gradients."""
    scheme = posenc.make(name, **SIZES)
    ours = hf.apply(qwen(), scheme)
    ids, mask = hf_models.padded(left=True)
    options = {
        "max_new_tokens": 8, "do_sample": False, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    if lookback(scheme):  # beyond the window of the model, which its own cache keeps
        options["past_key_values"] = transformers.DynamicCache()
    out = ours.generate(ids, attention_mask=mask, **options)
    for row, real in enumerate(mask.bool()):
        alone = torch.cat([ids[row, real], out.sequences[row, hf_models.LENGTH :]])
        with torch.no_grad():
            whole = ours(alone[None], use_cache=False).logits[0, -9:-1]
        hf_models.close(torch.stack(out.logits)[:, row], whole)
    ours.train()(ids, labels=ids).loss.backward()
    learned = {n: p for n, p in ours.named_parameters() if n.startswith("posenc.")}
    sets = 1 if scheme.shared or Hook.EMBEDDING in scheme.hooks() else 2
    assert len(learned) == len(scheme.param_specs()) * sets
    assert learned.keys() <= ours.state_dict().keys()
    assert all(p.grad is not None and p.grad.any() for p in learned.values())


@pytest.mark.parametrize("name", ["fox", pytest.param("selective_rope", marks=long)])
def test_packed_documents_are_computed_as_if_alone(name):
    ours, ids = hf.apply(qwen(), posenc.make(name, **SIZES)), hf_models.tokens()
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        both = ours(ids, position_ids=positions, use_cache=False).logits
        hf_models.close(both[:, :5], ours(ids[:, :5]).logits)
        hf_models.close(both[:, 5:], ours(ids[:, 5:]).logits)


def test_windows_and_sinks_of_the_model_stay():
    """A plan without its own windows, in a model with both; sinks are the model's weights."""
    options = {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = hf_models.tiny("GptOss", head_dim=16, **options)
    plan = posenc.presets.from_hf_config(model.config)
    rope = plan.schemes[0].scheme
    ours = hf.apply(copy.deepcopy(model), rope)
    with torch.no_grad():
        ids = hf_models.tokens()
        hf_models.close(ours(ids).logits, model(ids).logits)
    without = posenc.layers.LayerPlan.of(rope, len(plan))
    with torch.no_grad():
        assert not torch.allclose(hf.apply(ours, without)(ids).logits, model(ids).logits, atol=1e-3)


@pytest.mark.parametrize("name", ["Mpt", pytest.param("T5", marks=long)])
def test_several_axes_where_layers_get_no_positions(name):
    more = {"auto": "T5ForConditionalGeneration", "d_kv": 8, "num_decoder_layers": 2}
    model = hf_models.tiny(name, **(more if name == "T5" else {}), decoder_start_token_id=0)
    ours, ids = hf.apply(model, schemes.AxialRoPE(8)), hf_models.tokens()
    cached, whole = (
        ours.generate(ids, use_cache=c, max_new_tokens=4, do_sample=False) for c in (True, False)
    )
    assert cached.tolist() == whole.tolist()


def test_scale_of_the_scheme_counts_beside_the_models():
    model = hf_models.tiny("Llama")
    alike = hf.apply(copy.deepcopy(model), posenc.T5Bias(HEADS, scaled=False))
    other = hf.apply(copy.deepcopy(model), posenc.T5Bias(HEADS))
    other.load_state_dict(alike.state_dict())
    for layer in other.model.layers:
        layer.self_attn.scaling = 1.0
    with torch.no_grad():
        ids = hf_models.tokens()
        hf_models.close(alike(ids).logits, other(ids).logits)


def test_a_copy_has_its_own_parameters():
    ours, ids = hf.apply(qwen(), schemes.FoX(HEADS, WIDTH)), hf_models.tokens()
    ours(ids)  # leaves nothing of its graph behind, which could not be copied
    other = copy.deepcopy(ours)
    with torch.no_grad():
        before = ours(ids).logits
        for p in other.posenc.parameters():
            p += 1
        assert isinstance(other.posenc, Positions)
        assert torch.equal(ours(ids).logits, before)
        assert not torch.allclose(other(ids).logits, before, atol=1e-3)


def test_a_wider_window_needs_a_cache_that_keeps_all_keys():
    options = {"sliding_window": 5, "head_dim": 16}
    model = hf_models.tiny("Gemma3Text", **options)
    plan = posenc.layers.LayerPlan.of(posenc.RoPE(16), 2)
    ours, ids = hf.apply(model, plan), hf_models.tokens()
    options = {"max_new_tokens": 2, "do_sample": False}
    assert "dropped keys that layer 0 reads" in message(ValueError, ours.generate, ids, **options)
    whole = ours.generate(ids, past_key_values=transformers.DynamicCache(), **options)
    assert whole.tolist() == ours.generate(ids, use_cache=False, **options).tolist()


def message(error, function, *args, **keywords):
    with pytest.raises(error) as caught:
        function(*args, **keywords)
    return str(caught.value)


def test_transformers_is_imported_on_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers" in message(ImportError, hf.apply, torch.nn.Linear(1, 1))


def test_layers_repeat_a_list_of_schemes():
    """Of which the second reads hidden states, so that caches hold them from its layer on."""
    some = [posenc.ALiBi(HEADS), schemes.FoX(HEADS, WIDTH)]
    ours = hf.apply(hf_models.tiny("Llama", num_hidden_layers=4), some)
    assert list(ours.posenc.plan.schemes) == some * 2
    ids, options = hf_models.tokens(), {"max_new_tokens": 8, "do_sample": False}
    cached, whole = (ours.generate(ids, use_cache=c, **options) for c in (True, False))
    assert cached.tolist() == whole.tolist()
    ours(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for p in ours.posenc.parameters())


def test_what_cannot_be_served_is_an_error():
    bert = transformers.BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    assert "model_type 'bert' is not served" in message(
        ValueError, hf.apply, transformers.BertModel(bert)
    )
    assert "got Linear" in message(TypeError, hf.apply, torch.nn.Linear(1, 1))
    model, ids = hf_models.tiny("Llama", attention_dropout=0.5), hf_models.tokens()
    assert "implementation" in message(ValueError, hf.apply, model, implementation="fast")
    short = posenc.layers.LayerPlan.of(posenc.NoPE(), 1)
    assert "layers must be 1" in message(ValueError, hf.apply, model, short)
    cache = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    hf.apply(model)
    assert "before apply()" in message(ValueError, model, ids, past_key_values=cache)
    assert "output_attentions" in message(NotImplementedError, model, ids, output_attentions=True)
    assert "dropout=0.5" in message(NotImplementedError, model.train(), ids)
    bloom = hf.apply(hf_models.tiny("Bloom"), posenc.Sinusoidal(WIDTH))
    assert "layers of this model get no position_ids" in message(NotImplementedError, bloom, ids)
    model.eval().set_attn_implementation("sdpa")
    assert "attention is 'sdpa'" in message(RuntimeError, model, ids)
