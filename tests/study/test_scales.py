"""One GPU: scales, tokens of a file, dtype, accumulation. A CPU runs the same code at ``small``."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from posenc.cli.main import main
from posenc.layers import LayerPlan
from posenc.study import Decoder, Recipe, Study, run, terminal, trainer
from posenc.study.corpus import from_files
from posenc.study.origin import command
from posenc.study.scales import SCALES, VOCABULARY
from posenc.study.specs import Plans
from posenc.study.token_file import from_tokens
from posenc.study.windows import cut

SLOWLY = (pytest.param("jax", marks=pytest.mark.long), "torch")
TINY = {
    "train_len": 8, "eval_lens": (8, 16), "steps": 3, "batch_size": 4, "layers": 1, "dim": 16,
    "heads": 2, "eval_windows": 2,
}  # fmt: skip


@pytest.fixture
def ids(tmp_path):
    """A file of 4000 ids below 300, as nanoGPT writes them."""
    found = np.random.default_rng(0).integers(0, 300, 4000).astype("<u2")
    path = tmp_path / "train.bin"
    found.tofile(path)
    return path, found


# Tokens of a file.


def test_a_file_is_mapped_and_its_last_tenth_held_out(ids):
    path, found = ids
    corpus = from_tokens([path], 300)
    assert isinstance(corpus.train, np.memmap)
    assert isinstance(corpus.validation, np.memmap)
    np.testing.assert_array_equal(corpus.train, found[:3600])
    np.testing.assert_array_equal(corpus.validation, found[3600:])
    starts = np.array([[0, 7]])
    np.testing.assert_array_equal(cut(corpus.train, starts, 3), [[found[:4], found[7:11]]])


def test_two_files_are_trained_on_and_held_out(ids, tmp_path):
    path, found = ids
    np.save(tmp_path / "val.npy", found[:100].astype(np.int32))
    corpus = from_tokens([path, tmp_path / "val.npy"], 300)
    assert (len(corpus.train), len(corpus.validation)) == (4000, 100)


def test_the_digest_names_the_ids_and_not_the_file(ids, tmp_path):
    path, found = ids
    other = tmp_path / "other.npy"
    np.save(other, found.astype(np.int64))
    assert from_tokens([path], 300).sha256 == from_tokens([other], 500).sha256
    found[-1] ^= 1
    np.save(other, found)
    assert from_tokens([path], 300).sha256 != from_tokens([other], 500).sha256


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.bin", b"abc", "16-bit integers, got an odd size, 3 bytes"),
        ("a.bin", b"\x00\x00\x2c\x01", r"must be 0 \.\. 299, .* got 300 at 1"),
        ("a.txt", b"ab", r"\.bin of 16-bit unsigned integers, or \.npy, got"),
        ("a.npy", b"ab", "is no whole file of NumPy"),
        ("a.npy", np.zeros(4, np.float32), "integers on one axis, got float32 of shape"),
        ("a.npy", np.zeros((2, 2), int), r"integers on one axis, got int64 of shape \(2, 2\)"),
        ("a.npy", np.array([0, -1]), "got -1 at 1"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, name, content, said):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ValueError, match=said):
        from_tokens([path], 300)


def test_a_file_that_is_short_or_missing_is_named(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(20, dtype="<u2").tofile(path)
    study = Study(tokens=(str(path),), vocabulary_size=300, **TINY)
    with pytest.raises(ValueError, match=r"'a\.bin' is too small: it has 18 tokens to train on"):
        study.corpus()
    with pytest.raises(FileNotFoundError, match=r"b\.bin' is not a file|which is not a file"):
        from_tokens([tmp_path / "b.bin"], 300)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": ("a.bin",)}, "vocabulary_size is missing, which tokens need"),
        ({"vocabulary_size": 300}, "vocabulary_size=300 needs tokens"),
        ({"tokens": ("a.bin",), "text": ("a.txt",)}, "text or tokens, not both"),
        ({"tokens": ("a.bin",), "task": "copy"}, "tokens is for the task text"),
        ({"scale": "gpu"}, "scale='gpu' needs tokens"),
        ({"scale": "small", "task": "copy", "eval_lens": (32,)}, "scale is for the task text"),
        ({"scale": "large"}, "scale must be 'gpu' or 'small', got 'large'"),
        ({"dtype": "float16"}, "dtype must be float32 or bfloat16, got 'float16'"),
        ({"accumulate": 3}, "accumulate must divide batch_size=16, got 3"),
        ({"dtype": "bfloat16", "model": "json:loads"}, "dtype=bfloat16 is for posenc's decoder"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        Study(**changes)


# Scales.


def test_what_is_given_wins_over_the_scale():
    study = Study(scale="gpu", tokens=("a.bin",), layers=6, dtype="float32", compile=False)
    own = dict(SCALES["gpu"], layers=6, dtype="float32", compile=False)
    assert {name: getattr(study, name) for name in own} == own
    assert study.vocabulary_size == VOCABULARY
    words = command(study)
    assert words == (
        "posenc compare --layers 6 --dtype float32 --no-compile --scale gpu --tokens a.bin"
    )
    assert replace(study, seeds=2).layers == 6


def test_ten_minutes_a_scheme_by_estimate(ids, capsys):
    path, _ = ids
    np.random.default_rng(0).integers(0, 300, 300_000).astype("<u2").tofile(path)
    words = f"compare --dry-run --scale gpu --schemes rope --seeds 1 --tokens {path} {path}"
    assert main(words.split()) == 0
    shown = " ".join(capsys.readouterr().out.split())
    minutes = int(shown.split("time: about ")[1].split(" min")[0])
    assert 6 <= minutes <= 10
    assert "is taken to be an H100" in shown


# Computing.


def trained(backend, recipe, label="rope"):
    """Losses of three steps of random tokens, and the weights after them."""
    plans = Plans.of(label, recipe)
    model = trainer.load_trainer(backend)(Decoder.of(recipe, plans.trained, 0), "cpu")
    tokens = np.random.default_rng(1).integers(0, 256, (3, recipe.batch_size, 9))
    labels = tokens[..., 1:].copy()
    labels[:, 0, :5] = -1  # parts with unequally many answers
    losses = model.train(tokens[..., :-1], labels, np.full(3, 1e-2))
    return losses, model.state()


@pytest.mark.parametrize("backend", SLOWLY)
def test_parts_add_up_to_the_step(backend):
    recipe = Recipe(**TINY)
    whole, parts = (trained(backend, replace(recipe, accumulate=n))[0] for n in (1, 4))
    # Sums of 27 losses in another order; Adam divides by small gradients.
    np.testing.assert_allclose(parts, whole, rtol=2e-4)


@pytest.mark.parametrize(
    ("label", "backend"),
    [pytest.param("t5+rope", "jax", marks=pytest.mark.long), ("cope", "torch")],
)
def test_bfloat16_keeps_float32_weights_and_nearly_the_losses(backend, label):
    recipe = Recipe(**TINY)
    label = {"jax": "t5+rope", "torch": "cope"}[backend]
    exact, _ = trained(backend, recipe, label)
    losses, state = trained(backend, replace(recipe, dtype="bfloat16"), label)
    assert losses.dtype == np.float32
    assert {a.dtype for n, a in state.items() if n.startswith("weights")} == {np.dtype("f4")}
    assert (losses != exact).any()
    np.testing.assert_allclose(losses, exact, rtol=0.02)  # 8 bits of a product


@pytest.mark.long
def test_the_compiled_step_is_the_same_step(monkeypatch):
    """One graph without breaks; what its compiler makes of it is not ours to test."""
    torch = pytest.importorskip("torch")
    compiled, made = torch.compile, []

    def traced(function, **given):
        made.append(given)
        return compiled(function, backend="eager", fullgraph=True, **given)

    recipe = replace(Recipe(**TINY), accumulate=2)
    plain, _ = trained("torch", recipe)
    monkeypatch.setattr(torch, "compile", traced)
    found, _ = trained("torch", replace(recipe, compile=True))
    assert made == [{"dynamic": False}]
    np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_a_trainer_that_does_not_follow_is_refused(monkeypatch):
    class Plain:
        pass

    monkeypatch.setattr(run, "load_trainer", lambda backend: Plain)
    study = Study(task="copy", dtype="bfloat16", schemes=("nope",), seeds=1)
    (one,) = study.runs(None, "torch")
    decoder = Decoder.of(one, LayerPlan.of(Plans.of("nope", one).trained.schemes[0], 2), 0)
    with pytest.raises(ValueError, match="dtype=bfloat16 needs a trainer that names it in comput"):
        run.make_trainer(one, decoder)


def test_a_gpu_that_is_not_there_is_named():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    study = Study(task="copy", device="cuda", schemes=("nope",), seeds=1)
    with pytest.raises(RuntimeError, match="on device 'cuda': ValueError: there is no GPU for Py"):
        run.check_can_train(study.runs(None, "torch")[0])


@pytest.mark.parametrize("backend", SLOWLY)
def test_the_small_scale_runs_as_the_command(backend, ids, tmp_path, capsys, monkeypatch):
    path, _ = ids
    monkeypatch.setattr(terminal, "FORMATS", ("svg",))
    words = f"compare --scale small --tokens {path} --vocabulary-size 300 --schemes rope alibi"
    words += f" --steps 4 --backend {backend} --no-compile --out {tmp_path / 'out'}"
    with ThreadPoolExecutor(1) as pool:
        there = partial(terminal.compute, executor=pool)
        monkeypatch.setattr(terminal, "compute", there)
        assert main(words.split()) == 0
    shown = capsys.readouterr().out
    assert "train.bin: 0.0 M tokens to train" in shown
    assert "Bits per token" in shown
    assert " byte" not in shown
    assert " byte" not in (tmp_path / "out" / "loss.svg").read_text()
    record = json.loads((tmp_path / "out" / "results.jsonl").read_text().splitlines()[0])
    assert record["recipe"]["dtype"] == "bfloat16"
    assert record["recipe"]["accumulate"] == 2
    assert abs(record["loss"]["32"] - math.log2(300)) < 2


def test_a_text_of_bytes_is_as_before(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"some text " * 40)
    corpus = from_files([path])
    assert cut(corpus.train, np.array([3]), 4).tobytes() == b"e tex"
