"""What a study keeps of a training: weights, checkpoints, norms and spikes, rows that join."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from frameworks_installed import require
from sample import long, some

from posenc.cli.main import main
from posenc.study import checkpoints, weights
from posenc.study import run as runs
from posenc.study.checkpoints import Checkpoint
from posenc.study.corpus import from_files
from posenc.study.decoder import Decoder
from posenc.study.history import History, count_spikes
from posenc.study.results import write_tables
from posenc.study.runner import plan, run_study, without_weights
from posenc.study.specs import layers
from posenc.study.study import Study
from posenc.study.trainer import load_trainer
from posenc.weights.safetensors import dump, dump_sealed, load, load_sealed

BACKENDS = [name for name in ("jax", "torch") if require(name)]
BACKEND = BACKENDS[-1]
SMALL = {
    "train_len": 8,
    "eval_lens": (8, 16),
    "steps": 110,
    "batch_size": 2,
    "layers": 1,
    "dim": 8,
    "heads": 2,
    "eval_windows": 2,
    "warmup": 2,
    "schemes": ("t5",),
    "seeds": 1,
    "backend": BACKEND,
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 300)
    return path


@pytest.fixture
def study(tmp_path, text):
    return Study(**SMALL, text=(str(text),), out=str(tmp_path / "out"))


def ended(study):
    with ThreadPoolExecutor(1) as pool:
        return list(run_study(study, study.corpus(), executor=pool))


def test_kept_weights_are_those_that_were_scored(study, tmp_path, text, capsys):
    (record,) = ended(study)
    assert not (tmp_path / "out" / "weights").exists()
    keeping = replace(study, keep_weights=True)
    _, missing = plan(keeping, keeping.corpus())
    assert len(missing) == without_weights(keeping, missing) == 1
    (again,) = ended(keeping)
    assert again["loss"] == record["loss"]
    assert plan(keeping, keeping.corpus())[1] == []
    kept = weights.find(tmp_path / "out", "t5", 0)
    assert (kept.run, kept.seed, kept.recipe) == (record["run"], 0, missing[0].training())
    decoder = kept.decoder()
    model = load_trainer(BACKEND)(decoder, "cpu")
    task = kept.recipe.of_task.with_text(study.corpus())
    scores = task.scores(kept.recipe, 0, lambda *of: model.answers(*of), False)
    assert scores["loss"] == record["loss"]
    initial = Decoder.of(kept.recipe, layers("t5", kept.recipe), seed=0)
    assert (decoder.position[0]["table"] != initial.position[0]["table"]).any()
    out = str(tmp_path / "t5.svg")
    assert main(["show", "t5", "--params", str(tmp_path / "out"), "--out", out]) == 0
    capsys.readouterr()
    # A file that was damaged is noticed: its run is missing.
    data = bytearray(kept.path.read_bytes())
    data[-1] ^= 1
    kept.path.write_bytes(data)
    assert len(plan(keeping, keeping.corpus())[1]) == 1
    with pytest.raises(ValueError, match=r"holds no weights of .* damaged or edited"):
        weights.read(kept.path)
    for words, said in [
        ("--seed 1", "needs --params"),
        (f"--params {tmp_path} --heads 2", "--heads comes from the run"),
        (f"--params {tmp_path}", "keep-weights` writes them"),
        (f"--params {text}", "holds no weights of `posenc compare`"),
    ]:
        assert main(["show", "t5", *words.split()]) == 2
        assert said in capsys.readouterr().err


def test_the_choice_among_kept_weights(study, tmp_path):
    run = study.runs(study.corpus(), BACKEND)[0]
    state = {"weights.a": np.ones(2, np.float32), "position.0.table": np.ones(3, np.float32)}
    state |= {"optimizer.step": np.array(3)}
    for seed in (0, 1):
        one = replace(run, seed=seed)
        weights.write(tmp_path / weights.file_name(one), one, state)
    kept = weights.find(tmp_path, "t5", 1)
    assert (kept.seed, list(kept.weights), list(kept.position[0])) == (1, ["a"], ["table"])
    assert weights.find(kept.path).run == kept.run  # one file is one choice
    with pytest.raises(ValueError, match=r"has 2 runs to choose from, .*seed 0\), .*seed 1\)$"):
        weights.find(tmp_path, "t5")
    with pytest.raises(ValueError, match=r"no seed 2 of 't5'; seeds: 0, 1$"):
        weights.find(tmp_path, "t5", 2)
    with pytest.raises(ValueError, match=r"no weights of 't6'; accepted: t5"):
        weights.find(tmp_path, "t6")
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        weights.find(tmp_path / "absent")


def test_safetensors_there_and_back():
    tensors = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float32), "n": np.array(7)}
    found, about = load(dump(tensors, {"key": "é"}))
    assert about == {"key": "é"}
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    data = dump_sealed(tensors, {"key": "é"})
    assert load_sealed(data)[1] == {"key": "é"}
    for damaged in (b"", data[:40], data[:-4], data[:-1] + b"\1", dump(tensors, {})):
        with pytest.raises(ValueError, match=r"ends early|header|damaged|reshape|multiple"):
            load_sealed(damaged)


class InterruptedTrainingError(BaseException):
    """Breaks a training off."""


def training(study, folder, backend=BACKEND, stop=None):
    """The record of a training, and the steps that it took; ``stop`` is where it breaks off."""
    (run,) = study.runs(study.corpus(), backend)
    taken = []

    def report(step, loss):
        taken.append(step)
        if step == stop:
            raise InterruptedTrainingError

    checkpoint = Checkpoint(folder, run.training_digest())
    (record,) = runs.carry_out([run], study.corpus(), report, None, checkpoint)
    return record, taken


SAME = ("loss", "loss_same_targets", "curve", "gradient_norms", "spikes", "clipped", "steps")


def alike(one, other):
    one, other = (json.loads(json.dumps(record)) for record in (one, other))
    return all(one[name] == other[name] for name in SAME)


@pytest.mark.parametrize("backend", some(BACKENDS, BACKENDS[-1:], long))
def test_an_interrupted_training_goes_on_bit_for_bit(study, tmp_path, monkeypatch, backend):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    study = replace(study, backend=backend)
    whole, _ = training(study, None, backend)
    with pytest.raises(InterruptedTrainingError):
        training(study, tmp_path, backend, stop=100)
    record, taken = training(study, tmp_path, backend)
    assert (taken, record["resumed"], whole["resumed"]) == ([100, 110], [50], [])
    assert alike(record, whole)


@long
def test_a_checkpoint_that_is_not_this_trainings_is_refused(study, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    with pytest.raises(InterruptedTrainingError):
        training(study, tmp_path, stop=100)
    (path,) = tmp_path.glob("*.checkpoint")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.warns(UserWarning, match=r"begins anew: it was damaged or edited"):
        assert training(study, tmp_path)[1][0] == 50
    state, about = load_sealed(data)
    path.write_bytes(dump_sealed(state, {**about, "training": "0" * 64}))
    with pytest.warns(UserWarning, match="begins anew: it belongs to another training"):
        assert training(study, tmp_path)[1][0] == 50


@pytest.mark.parametrize("backend", some(BACKENDS, BACKENDS[-1:], long))
def test_an_interrupted_fine_tuning_goes_on_bit_for_bit(study, tmp_path, monkeypatch, backend):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    tuned = {"finetune_steps": 6, "finetune_len": 12, "random_positions": 32, "steps": 9}
    study = replace(study, backend=backend, schemes=("t5~t5@5",), **tuned)
    whole, _ = training(study, None, backend)
    with pytest.raises(InterruptedTrainingError):
        training(study, tmp_path, backend, stop=9 + 4)
    (path,) = tmp_path.glob("*.checkpoint")
    record, taken = training(study, tmp_path, backend)
    assert taken == [9, 9 + 4, 9 + 5, 9 + 6]
    assert not path.exists()
    assert (record["finetune"]["resumed"], whole["finetune"]["resumed"]) == ([3], [])
    assert alike(record, whole)
    for name in ("curve", "weights_sha256"):
        of = json.loads(json.dumps(record["finetune"][name]))
        assert of == json.loads(json.dumps(whole["finetune"][name]))
    assert record["before"] == whole["before"]


def test_a_checkpoint_that_no_run_needs_leaves_after_a_day(study, tmp_path):
    """One of a run that is missing stays, and so does every other file."""
    study = replace(study, steps=2, finetune_steps=2)
    (run,) = study.runs(study.corpus(), BACKEND)
    folder, day = tmp_path / "out" / "runs", 86400
    needed, own, old, recent, link = (
        f"{digest[:16]}.checkpoint"
        for digest in (run.training_digest(), run.digest(), "0" * 16, "1" * 16, "2" * 16)
    )
    folder.mkdir(parents=True)
    for name in (needed, own, old, recent, "mine.checkpoint"):
        (folder / name).write_bytes(b"")
        age = time.time() - (0.9 if name == recent else 1.1) * day
        os.utime(folder / name, (age, age))
    (folder / link).symlink_to("mine.checkpoint")
    with pytest.warns(UserWarning, match="begins anew") as said:  # its own two, which are empty
        ended(study)
    assert len(said) == 2
    assert {path.name for path in folder.glob("*.checkpoint")} == {
        recent, link, "mine.checkpoint"
    }  # fmt: skip


def test_a_short_training_writes_no_checkpoint(study, tmp_path):
    training(study, tmp_path)
    assert not list(tmp_path.glob("*.checkpoint"))
    assert checkpoints.EVERY == 60.0


_KILLED = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from posenc.study import checkpoints, run, runner
from posenc.study.study import Study
checkpoints.EVERY = 0.0
carry_out = run.carry_out
def killed(job, corpus, report, *rest):
    def stop(step, loss):
        report(step, loss)
        if step == 100:
            os.kill(os.getpid(), signal.SIGKILL)
    return carry_out(job, corpus, stop, *rest)
run.carry_out = killed
study = Study(**eval(sys.argv[1]))
with ThreadPoolExecutor(1) as pool:
    list(runner.run_study(study, study.corpus(), executor=pool))
"""


@long
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_the_same_command_goes_on_after_a_kill(study, tmp_path, text):
    options = {**SMALL, "text": (str(text),), "out": study.out}
    done = subprocess.run([sys.executable, "-c", _KILLED, repr(options)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = tmp_path / "out" / "runs"
    assert len(list(folder.glob("*.checkpoint"))) == 1
    (record,) = ended(study)
    assert record["resumed"] == [50]
    assert not list(folder.glob("*.checkpoint"))
    (whole,) = ended(replace(study, out=str(tmp_path / "other")))
    assert alike(record, whole)


def test_spikes():
    rng = np.random.default_rng(0)
    losses = 3 + 0.01 * rng.standard_normal(300)
    assert count_spikes([], losses) == 0
    losses[[50, 150, 151, 250]] += 1  # nothing is said of the first 100 steps
    assert count_spikes([], losses) == 3
    falling = np.linspace(6, 2, 300)
    assert count_spikes([], falling) == 0
    tiny = np.full(200, 1e-5)
    tiny[150] = 0.05
    assert count_spikes([], tiny) == 0
    history, whole = History(), count_spikes([], losses)
    for first in range(0, 300, 50):  # in chunks, and through JSON, as of one piece
        history.add(losses[first : first + 50], np.array([1.0, 3.0]), 2.0, first)
        history = History.of_text(history.text())
    assert (history.spikes, history.clipped, history.step) == (whole, 6, 300)
    assert history.facts()["gradient_norms"][0] == [50, 2.0, 3.0]


def test_the_rows_of_two_studies_join(study, tmp_path):
    rows = []
    for rate in (0.001, 0.01):
        one = replace(study, learning_rate=rate, steps=2, out=str(tmp_path / str(rate)))
        write_tables(tmp_path, ended(one))
        with (tmp_path / "results.csv").open() as file:
            rows += csv.DictReader(file)
    assert len(rows) == 4
    assert len({(row["run"], row["eval_len"]) for row in rows}) == 4
    names = ("scheme", "seed", "eval_len", "learning_rate", "steps", "dim", "data")
    assert len({tuple(row[name] for name in names) for row in rows}) == 4
    assert {row["text"] for row in rows} == {"text.txt"}
    assert {row["data"] for row in rows} == {from_files([tmp_path / "text.txt"]).sha256}
    assert all(float(row["largest_gradient_norm"]) > 0 for row in rows)
