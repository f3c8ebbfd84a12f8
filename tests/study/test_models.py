"""Models of one's own: the protocol of posenc's decoder, and errors before any training."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from frameworks_installed import require
from sample import long

from posenc.study import Decoder, Recipe, Study, compare, run_study, weights, write_results
from posenc.study import run as runs
from posenc.study.corpus import Corpus
from posenc.study.models import load_model, model_name
from posenc.study.specs import Plans
from posenc.study.trainer import load_trainer

needs_torch = pytest.mark.skipif(not require("torch"), reason="needs torch")
needs_jax = pytest.mark.skipif(not require("jax"), reason="needs jax")
SMALL = {
    "train_len": 8, "eval_lens": (8, 16), "steps": 4, "batch_size": 3, "layers": 2, "dim": 16,
    "heads": 2, "eval_windows": 3, "warmup": 1,
}  # fmt: skip
TEXT = bytes(np.random.default_rng(0).integers(97, 123, 3000).tolist())
SAME, PLAIN = "own_torch_models:Same", "own_torch_models:Plain"


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A study and its records, computed in a thread."""
    corpus = Corpus("letters", TEXT[:2000], TEXT[2000:], 1, 1, "0" * 64)
    monkeypatch.setattr("posenc.study.runner.read_corpus", lambda text: corpus)
    monkeypatch.setattr("posenc.study.study.read_corpus", lambda text: corpus)

    def run(**changes):
        given = {**SMALL, "seeds": 1, "backend": "torch", "out": str(tmp_path / "out"), **changes}
        study = Study(**given)
        with ThreadPoolExecutor(1) as pool:
            return study, list(run_study(study, corpus, executor=pool))

    return run


def trainer(backend, model, label="t5", seed=0, **changes):
    recipe = Recipe(**{**SMALL, "task": "copy", **changes}, model=model)
    decoder = Decoder.of(recipe, Plans.of(label, recipe).trained, seed)
    return load_trainer(backend)(decoder, "cpu"), decoder


def batches(recipe, steps=4):
    drawn = recipe.of_task.training(recipe, 0, 0, steps)
    return drawn.tokens, drawn.labels, np.full(steps, 1e-2)


@needs_torch
@pytest.mark.parametrize(
    "changes",
    [{}, {"random_positions": 64}, {"finetune_steps": 3}],
    ids=["plain", "random", "fine-tuned"],
)
def test_posencs_decoder_as_a_model_of_ones_own_has_the_same_losses(records, changes):
    """Bit for bit: under a change of schemes at test time, and inside a window, too."""
    labels = ("rope~rope_yarn", "t5@6/learned", "learned")
    shared = {"schemes": labels, "windowed": labels, **changes}
    _, posencs = records(**shared)
    _, own = records(**shared, model=SAME)
    assert [record["status"] for record in own] == ["ok"] * 3, own
    for name in ("loss", "loss_same_targets", "loss_windowed", "loss_by_position", "params"):
        assert [record[name] for record in own] == [record[name] for record in posencs]
    assert [record["curve"] for record in own] == [record["curve"] for record in posencs]
    assert {record["run"] for record in own}.isdisjoint(record["run"] for record in posencs)


@long  # JAX compiles both
@needs_jax
def test_the_same_in_jax_up_to_rounding():
    posencs, decoder = trainer("jax", "", layers=1)
    own, _ = trainer("jax", "own_jax_models:same", layers=1)
    given = batches(decoder.recipe)
    np.testing.assert_allclose(own.train(*given), posencs.train(*given), rtol=2e-5)
    own = own.answers(given[0][0], given[1][0], 4)[0]
    np.testing.assert_allclose(own, posencs.answers(given[0][0], given[1][0], 4)[0], rtol=2e-5)


@needs_torch
def test_schemes_of_a_seed_begin_with_the_same_weights(records):
    _, found = records(schemes=("nope", "t5", "learned", "fox"), seeds=2, model=PLAIN)
    assert all(record["status"] == "ok" for record in found), found
    digests = {(record["seed"], record["weights_sha256"]) for record in found}
    assert len(digests) == len(dict(digests)) == len({digest for _, digest in digests}) == 2
    extra = {record["scheme"]: record["params"]["position"] for record in found}
    assert extra["nope"] == 0 < extra["t5"]
    shared = {record["params"]["total"] - record["params"]["position"] for record in found}
    assert len(shared) == 1


@needs_torch
def test_learned_arrays_of_position_learn_at_their_own_rate():
    model, decoder = trainer("torch", PLAIN, position_lr_scale=7.0)
    before = model.state()
    tokens, labels, rates = batches(decoder.recipe, 1)
    model.train(tokens, labels, rates)
    moved = {name: np.abs(value - before[name]).max() for name, value in model.state().items()
             if name in before and not name.startswith("optimizer")}  # fmt: skip
    assert moved["position.0.table"] == pytest.approx(7e-2, rel=1e-3)
    assert moved["weights.qkv.0.bias"] == pytest.approx(1e-2, rel=1e-3)


@needs_torch
def test_dropout_depends_on_the_seed_and_the_step_alone():
    """So a training goes on from its state bit for bit, and other draws are not disturbed."""
    import torch

    one, decoder = trainer("torch", PLAIN)
    other, _ = trainer("torch", PLAIN)
    tokens, labels, rates = batches(decoder.recipe)
    torch.manual_seed(3)
    generator = torch.get_rng_state()
    whole = one.train(tokens, labels, rates)
    assert torch.equal(torch.get_rng_state(), generator)
    still, _ = trainer("torch", PLAIN)
    at = tokens[:1].repeat(2, 0), labels[:1].repeat(2, 0), np.zeros(2)
    assert len(set(still.train(*at).tolist())) == 2  # a step draws other channels
    first = other.train(tokens[:2], labels[:2], rates[:2])
    torch.rand(5)
    resumed, _ = trainer("torch", PLAIN)
    resumed.load_state(other.state())
    rest = resumed.train(tokens[2:], labels[2:], rates[2:])
    assert np.array_equal(whole, [*first, *rest])
    answers = [resumed.answers(tokens[0], labels[0], None)[0] for _ in range(2)]
    assert np.array_equal(*answers)  # none at test time


@needs_torch
def test_kept_weights_are_those_of_the_model_again(records, tmp_path):
    _, (record,) = records(schemes=("t5",), model=PLAIN, keep_weights=True)
    assert record["status"] == "ok", record
    kept = weights.find(tmp_path / "out")
    again = load_trainer("torch")(kept.decoder(), "cpu").state()
    assert kept.weights
    assert all(np.array_equal(again[f"weights.{n}"], a) for n, a in kept.weights.items())
    fresh, _ = trainer("torch", PLAIN, task="text")
    assert not np.array_equal(fresh.state()["weights.tokens.weight"], kept.weights["tokens.weight"])
    other = replace(kept.decoder(), weights={"tokens": np.zeros(3)})
    with pytest.raises(ValueError, match=r"those that were kept are \['tokens'\]"):
        load_trainer("torch")(other, "cpu")


FILES = {
    "mine.py": "from helped import layer\n\ndef build(recipe):\n    return layer()\n",
    "helped.py": "def layer():\n    return 1\n",
    "apart.py": "x = 1\n",
}


def test_a_run_is_named_by_the_files_of_its_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def digest(model="mine:build"):
        (run, *_) = Study(task="copy", schemes=("nope",), model=model).runs(None, "torch")
        return run.digest()

    first = digest()
    assert digest("") != first == digest()
    for name in ("mine.py", "helped.py"):
        (tmp_path / name).write_text(f"{FILES[name]}# edited\n")
        assert digest() != first
        (tmp_path / name).write_text(FILES[name])
    (tmp_path / "apart.py").write_text("x = 2\n")
    assert digest() == first


def build(recipe):
    """A function of a test."""


def test_a_function_is_named_as_others_import_it(monkeypatch):
    models = pytest.importorskip("own_torch_models") if require("torch") else None
    if models is not None:
        assert model_name(models.Plain) == PLAIN == model_name(PLAIN)
        assert Study(model=models.Plain).model == PLAIN == Recipe(model=models.Plain).model
        assert load_model(PLAIN) is models.Plain
    assert model_name("") == ""


WRONG = {
    "lambda": (lambda recipe: None, ValueError, "'<lambda>', which worker processes cannot import"),
    "method": (Study.corpus, ValueError, "'Study.corpus', which worker"),
    "number": (3, TypeError, "must be a name, a function or a class, got 3"),
    "no colon": ("own_torch_models.Plain", ValueError, "accepted: module:function"),
    "no module": ("not_there:f", ValueError, "no file of a module 'not_there' is found"),
    "no module in a package": ("posenc_study.x:f", ValueError, "no file of a module"),
    "no such name": ("own_torch_models:not_there", ValueError, "own_torch_models.py defines no"),
    "posenc's": ("posenc.study:Task", ValueError, "a package of posenc"),
}


@pytest.mark.parametrize(("model", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_name_that_cannot_be_imported_is_refused(model, error, message):
    with pytest.raises(error, match=message):
        Study(model=model)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def build(recipe): ...", True),
        ("from other import build", True),
        ("if True:\n    build = other = 3", True),
        ("from other import *", True),
        ("globals()['build'] = 3", True),
        ("build(", True),  # its import says what is wrong
        ("def f():\n    build = 3\nclass A:\n    def build(self): ...", False),
    ],
)
def test_what_only_running_could_tell_is_not_refused(text, found, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "with_build.py").write_text(text)
    if found:
        assert model_name("with_build:build") == "with_build:build"
        return
    with pytest.raises(ValueError, match=r"with_build\.py defines no 'build'"):
        model_name("with_build:build")


def test_a_function_of_a_script_has_the_name_of_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    script = SimpleNamespace(__spec__=None, __file__=str(tmp_path / "mine_too.py"))
    (tmp_path / "mine_too.py").write_text("def build(recipe): ...")
    monkeypatch.setitem(sys.modules, "__main__", script)

    class Function:
        __module__, __qualname__ = "__main__", "build"

    assert model_name(Function) == "mine_too:build"
    script.__file__ = str(tmp_path / "elsewhere" / "mine_too.py")
    with pytest.raises(ValueError, match=r"is in .*elsewhere"):
        model_name(Function)
    del script.__file__
    with pytest.raises(ValueError, match="was typed at a prompt"):
        model_name(Function)


TRIED = {
    "narrow": "must return logits (2, 18, 82), for tokens (2, 18) and a vocabulary of 82, got",
    "skips": "never calls the attention of layers [1] of 2",
    "no_embed": "calls bound.embed 0 times, and the scheme has an embedding",
    "peeks": "is not causal: when the last token changes",
    "half": "has weights 'tokens.weight' of torch.bfloat16",
    "unseeded": "draws other weights 'tokens.weight' the second time from one seed",
    "no_module": "must make a torch.nn.Module, got dict",
    "not_there": "own_torch_models.py defines no 'not_there'",
    "not_callable": "is 3, which cannot be called",
}


@needs_torch
@pytest.mark.parametrize(("name", "message"), TRIED.items(), ids=TRIED)
def test_a_model_is_tried_before_it_is_trained(name, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        trainer("torch", f"own_torch_models:{name}", "learned")
    assert message in str(caught.value)


@needs_jax
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without_apply", "got SimpleNamespace without apply"),
        ("integers", "has params['steps'] of int32"),
        ("drawn_anew", "draws other params['w'] the second time"),
    ],
)
def test_params_of_jax_are_looked_at_before_they_are_trained(name, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        trainer("jax", f"own_jax_models:{name}")
    assert message in str(caught.value)


@needs_torch
def test_a_model_that_none_can_train_stops_the_study(records):
    with pytest.raises(RuntimeError, match=r"cannot train the model 'own_torch.*bfloat16"):
        records(schemes=("nope", "rope"), model="own_torch_models:half")


def test_a_trainer_that_trains_posencs_decoder_alone_says_so(monkeypatch):
    class Other:
        def __init__(self, decoder, device, scratch):
            raise AssertionError

    monkeypatch.setattr(runs, "load_trainer", lambda backend: Other)
    plain = {"dtype": "float32", "accumulate": 1, "compile": False}
    run = SimpleNamespace(model="own_jax_models:same", backend="other", device="cpu", **plain)
    with pytest.raises(ValueError, match="backend 'other' trains only posenc's own: Other has no"):
        runs.make_trainer(run, None)


@long
@needs_torch
def test_a_study_from_python_writes_its_report(records, tmp_path):
    study, found = records(schemes=("nope", "alibi"), model=PLAIN)
    text = write_results(study, found)
    assert "alibi" in text
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"table.md", "results.csv", "results.jsonl", "report.html", "loss.png"} <= written
    assert PLAIN in (tmp_path / "out" / "report.html").read_text()
    failed = [{**record, "status": "failed", "error": "no memory"} for record in found]
    with pytest.raises(RuntimeError, match="no run of the study has succeeded: no memory"):
        write_results(study, failed)


@long
@needs_torch
def test_a_study_from_python_writes_what_the_command_writes(records, tmp_path, capsys):
    study, found = records(schemes=("nope", "alibi"), model=PLAIN)
    text = write_results(study, found)
    seen = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.csv")}
    assert compare(study) == 0  # every run is kept from before
    assert text in capsys.readouterr().out
    assert seen == {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.csv")}
