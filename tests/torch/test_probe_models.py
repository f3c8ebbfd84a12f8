"""``posenc probe``: models of transformers in folders, also under other schemes."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

import hf_models  # noqa: E402

import posenc  # noqa: E402
from posenc.cli.main import main  # noqa: E402
from posenc.probe import report  # noqa: E402
from posenc_torch import hf, probe  # noqa: E402

LENGTHS = ["16", "64"]
SMALL = ["--windows", "2", "--depths", "2", "--keys", "1"]
V = 257  # bytes and the start of a text


def byte_tokenizer():
    """Each byte is a token; every text begins with token 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": 0, **{c: i + 1 for i, c in enumerate(letters)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def save(folder, name="Llama", words=False, **options):
    """A tiny random model in a folder; its base is not the default."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    model = hf_models.tiny(
        name, **{"vocab_size": V, **(rope if name == "Llama" else {}), **options}
    )
    model.save_pretrained(folder)
    if words:
        byte_tokenizer().save_pretrained(folder)
    return model


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Figures take seconds; ``tests/study/test_probe.py`` draws them."""
    monkeypatch.setattr(report, "figures", lambda summary, records: {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    save(place)
    return str(place)


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    place = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(place, np.random.default_rng(0).integers(0, V, 1000))
    return str(place)


def run(capsys, *arguments):
    status = main(["probe", *map(str, arguments)])
    return status, *capsys.readouterr()


def records(out):
    """The records of a folder by row, measure and length, without their times."""
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {
        (r["scheme"], r["measure"], r["length"]): {
            name: value for name, value in r.items() if name not in ("began", "seconds")
        }
        for r in lines
    }


def test_schemes_side_by_side_are_single_probes_and_the_losses_of_transformers(
    folder, ids, tmp_path, capsys
):
    labels = ["rope", "rope_yarn:factor=4", "alibi"]
    given = [folder, "--text", ids, "--eval-lens", *LENGTHS, *SMALL]
    schemes = [word for label in labels for word in ("--scheme", label)]
    status, text, _ = run(capsys, *given, *schemes, "--out", tmp_path / "all")
    assert status == 0
    assert "20 pieces: about" in text
    together = records(tmp_path / "all")
    assert re.search(r"rope_yarn:factor=4: train_len=\d+, base=700.0, layout=half", text)
    for label in labels[1:2]:
        run(capsys, *given, "--scheme", label, "--out", tmp_path / label)
        alone = records(tmp_path / label)
        assert alone.items() <= together.items()
    # The model's own base is that of ``rope``, so nothing changes.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.from_numpy(np.load(ids))
    for label in labels:
        if label == "alibi":
            hf.apply(model, posenc.ALiBi(4))
        windows = torch.stack([tokens[s : s + 65] for s in (0, 1000 - 65)])
        with torch.no_grad():
            logits = model(windows[:, :-1]).logits.double()
        bits = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), windows[:, 1:], reduction="none"
        ) / np.log(2)
        if label != "rope_yarn:factor=4":
            found = together[label, "text", 64]["bits"]
            np.testing.assert_allclose(found, bits.sum(1), rtol=1e-4)
    own = [together[row, "text", 64]["bits"] for row in ("untouched", "rope")]
    np.testing.assert_allclose(*own, rtol=1e-5)
    assert not np.allclose(own[0], together[labels[1], "text", 64]["bits"], rtol=1e-5)


def test_a_head_that_is_computed_in_parts_gives_the_same_losses(folder, ids, monkeypatch):
    model = probe.Model(folder)
    model.load()
    assert model._chunked
    tokens = np.load(ids)[:124].reshape(2, 62)
    whole = model.answers(tokens[:, :-1], tokens[:, 1:])
    monkeypatch.setattr(probe, "CELLS", 2 * V * 7)
    parts = model.answers(tokens[:, :-1], tokens[:, 1:])
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    assert np.array_equal(parts[1], whole[1])
    monkeypatch.setattr(model, "_chunked", False)
    np.testing.assert_allclose(model.answers(tokens[:, :-1], tokens[:, 1:])[0], whole[0], rtol=1e-5)


def test_what_a_head_does_to_its_logits_is_done_to_parts_too(tmp_path):
    save(tmp_path, "Gemma2", final_logit_softcapping=0.5, head_dim=8, query_pre_attn_scalar=8)
    model = probe.Model(str(tmp_path))
    model.load()
    assert model._chunked
    ids = torch.arange(9)[None]
    with torch.no_grad():
        logits = model.model(ids).logits
    assert logits.abs().max() <= 0.5
    want = torch.nn.functional.cross_entropy(logits[0], ids[0] + 1, reduction="none")
    np.testing.assert_allclose(model.answers(ids.numpy(), ids.numpy() + 1)[0][0], want, rtol=1e-5)


def test_distances_are_those_of_the_attention_of_transformers(folder):
    model = probe.Model(folder)
    model.load()
    ids = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(0))
    found = model.distances(ids.numpy())
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        weights = torch.stack(plain.eval()(ids, output_attentions=True).attentions)
    at = torch.arange(40)
    want = (weights * (at[:, None] - at)).sum(-1)[..., 20:].mean((1, 3))
    np.testing.assert_allclose(found, want, rtol=1e-4)
    assert not hasattr(model.model, "_posenc_applied")  # it is as it was


def test_distances_of_alibi_alone_are_its_formula(tmp_path):
    save(tmp_path)
    model = probe.Model(str(tmp_path))
    model.load()
    with torch.no_grad():
        for layer in model.model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = model.use(posenc.ALiBi(4)).distances(np.zeros((1, 30), int))
    for head in range(4):
        slope = 2.0 ** -(2 * (head + 1))
        each = []
        for q in range(15, 30):
            d = np.arange(q + 1)
            weights = np.exp(-slope * d)
            each.append((weights * d).sum() / weights.sum())
        np.testing.assert_allclose(found[:, head], np.mean(each), rtol=1e-4)
    assert found.shape == (2, 4)


def test_a_family_that_is_not_served_has_no_distances_and_says_so(tmp_path, ids, capsys):
    save(tmp_path / "model", "Mamba", state_size=4)
    given = ["--text", ids, "--eval-lens", 16, *SMALL, "--out", tmp_path / "out"]
    status, text, _ = run(capsys, tmp_path / "model", *given)
    assert status == 0
    assert "none: posenc_torch.hf: model_type 'mamba' is not served" in text


@pytest.mark.long
def test_a_stopped_probe_goes_on(folder, ids, tmp_path, capsys, monkeypatch):
    given = [folder, "--text", ids, "--eval-lens", *LENGTHS, *SMALL, "--scheme", "nope"]
    whole = run(capsys, *given, "--out", tmp_path / "whole")
    answers, calls = probe.Model.answers, []

    def stopping(self, *arguments):
        calls.append(arguments[0].shape)
        if len(calls) == 13:
            raise KeyboardInterrupt
        return answers(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(probe.Model, "answers", stopping)
        status, text, _ = run(capsys, *given, "--out", tmp_path / "out")
    assert status == 130
    assert "the same command continues" in text
    done = len(records(tmp_path / "out"))
    assert 0 < done < 10
    status, text, _ = run(capsys, *given, "--out", tmp_path / "out")
    assert status == 0
    assert f"{done} of 10 pieces are there from before" in text
    assert records(tmp_path / "out") == records(tmp_path / "whole")
    again = run(capsys, *given, "--out", tmp_path / "out")
    assert "all 10 pieces are in" in again[1]
    assert whole[0] == again[0] == 0
    # Another model, text or setting is another probe.
    _, text, _ = run(capsys, *given, "--out", tmp_path / "out", "--windows", 3, "--dry-run")
    assert "4 of 10 pieces are there" in text  # passkeys


def test_words_are_read_by_the_tokenizer_of_the_folder(tmp_path, capsys):
    save(tmp_path / "model", words=True)
    (tmp_path / "a.txt").write_text("é😀 " * 300)
    model = probe.Model(str(tmp_path / "model"))
    ids, covered = model.encode("é😀 ")
    assert model.start == 0
    assert len(ids) == 7
    assert covered.sum() == 7
    given = ["--text", tmp_path / "a.txt", "--eval-lens", 32, 256, *SMALL]
    status, text, _ = run(capsys, tmp_path / "model", *given, "--out", tmp_path / "out")
    assert status == 0
    found = records(tmp_path / "out")
    assert found["untouched", "passkey", 32]["right"] is None
    assert np.shape(found["untouched", "passkey", 256]["right"]) == (2, 1)
    assert "a number of 5 digits" in text
    assert "The first token of every window is 0" in text
    record = found["untouched", "text", 256]
    total = sum(record["bytes"]) / (len(record["bytes"]) * record["tokens"])
    assert total == pytest.approx(1, abs=0.02)


def test_a_dry_run_says_the_cost_and_writes_nothing(folder, ids, tmp_path, capsys):
    given = [folder, "--text", ids, "--eval-lens", 16, "--out", tmp_path / "out", "--dry-run"]
    status, text, _ = run(capsys, *given, "--batch-size", 5)
    assert status == 0
    assert re.search(r"3 pieces: about \d", text)
    assert "5 of 16" in text
    assert not (tmp_path / "out").exists()


ERRORS = {
    "no folder": ({"model": "absent"}, "there is no folder 'absent'"),
    "no config": ({"model": "{tmp}"}, "has no config.json"),
    "an encoder": ({"model": "{bert}"}, "BertForMaskedLM, which is no causal language model"),
    "no tokenizer": ({"text": "{words}"}, "needs a tokenizer"),
    "no text": ({"text": "{tmp}/none.npy"}, "there is no file"),
    "a longer length": ({"lens": "2000"}, "2000 needs a text of 2,001 tokens, and ids.npy has"),
    "another vocabulary": ({"text": "{large}"}, "has the token 999, and the model's vocabulary"),
    "no scheme": ({"scheme": "ropee"}, "unknown scheme 'ropee' (did you mean 'rope'?)"),
    "two schemes": ({"scheme": "rope~rope_pi"}, "trained already"),
    "a scheme twice": ({"scheme": "rope rope"}, "is a row already"),
    "a misfit": ({"scheme": "rope:rotary_dim=64"}, "rotary_dim must be at most head_dim=8, got 64"),
    "of both heads": ({"scheme": "mixed_rope"}, "does not fit layer 0"),
    "no device": ({"device": "nosuch"}, "device: cannot use 'nosuch'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_one_line(name, folder, ids, tmp_path, capsys, monkeypatch):
    change, message = ERRORS[name]
    monkeypatch.setattr(
        probe.Model, "answers", lambda self, *given: pytest.fail("it has begun to work")
    )
    places = {"tmp": str(tmp_path), "bert": str(tmp_path / "bert")}
    if name == "an encoder":
        config = transformers.BertConfig(architectures=["BertForMaskedLM"])
        config.save_pretrained(tmp_path / "bert")
    places["words"], places["large"] = str(tmp_path / "a.txt"), str(tmp_path / "large.npy")
    (tmp_path / "a.txt").write_text("words")
    np.save(tmp_path / "large.npy", np.arange(1000))
    given = {"model": folder, "text": ids, "lens": "16", "scheme": "", "device": "cpu", **change}
    given = {name: value.format(**places) for name, value in given.items()}
    words = [given["model"], "--text", given["text"], "--eval-lens", given["lens"]]
    words += [word for label in given["scheme"].split() for word in ("--scheme", label)]
    status, _, error = run(capsys, *words, "--device", given["device"], "--out", tmp_path / "out")
    assert status == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1 or name == "of both heads"
    assert not (tmp_path / "out").exists()


def test_a_length_beyond_a_table_of_positions_is_an_error_that_says_so(tmp_path, ids, capsys):
    """Where no table ends, a longer length is a note."""
    for name in ("GPT2", "Llama"):
        save(tmp_path / name, name, max_position_embeddings=32)
    given = ["--text", ids, "--eval-lens", *LENGTHS, *SMALL, "--keys", "0", "--attention-len", "0"]
    assert main(["probe", str(tmp_path / "GPT2"), *given, "--out", str(tmp_path / "one")]) == 2
    said = (
        "--eval-lens: this model takes no windows of 64 tokens; its max_position_embeddings is 32"
    )
    assert said in capsys.readouterr().err
    assert main(["probe", str(tmp_path / "Llama"), *given, "--out", str(tmp_path / "two")]) == 0
    assert "Longer than the model was trained for, 32 tokens: 64." in capsys.readouterr().out


def test_a_model_that_reads_later_tokens_is_no_causal_one(tmp_path, ids, capsys):
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, is_decoder=False,
    )  # fmt: skip
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    status, _, error = run(capsys, tmp_path, "--text", ids, "--eval-lens", 16)
    assert status == 2
    assert "its logits depend on later tokens" in error
