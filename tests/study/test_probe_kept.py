"""``posenc probe`` of weights that a study kept."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from frameworks_installed import require
from sample import long

from posenc.cli.main import main
from posenc.probe import report
from posenc.study import weights
from posenc.study.decoder import Decoder
from posenc.study.specs import layers
from posenc.study.study import Study
from posenc.study.trainer import choose_backend, load_trainer

pytestmark = pytest.mark.skipif(not (require("jax") or require("torch")), reason="no backend")


@pytest.fixture
def kept(tmp_path):
    """A file of first weights of a decoder with RoPE, and its text."""
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 2000, np.uint8).tobytes())
    study = Study(
        train_len=8, eval_lens=(8, 16), layers=2, dim=16, heads=2, eval_windows=2, seeds=1,
        schemes=("rope:base=50",), text=(str(text),), out=str(tmp_path / "study"),
    )  # fmt: skip
    backend = choose_backend("auto")
    (run,) = study.runs(study.corpus(), backend)
    decoder = Decoder.of(run, layers(run.scheme, run), seed=0)
    path = tmp_path / weights.file_name(run)
    weights.write(path, run, load_trainer(backend)(decoder, "cpu").state())
    return path, text, run


@long  # two frameworks compile
def test_it_has_the_losses_of_its_trainer_and_other_schemes(kept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "figures", lambda summary, records: {})
    path, text, _ = kept
    out = tmp_path / "out"
    words = ["--text", str(text), "--eval-lens", "8", "32", "--windows", "3", "--depths", "1"]
    labels = ["--scheme", "rope", "--scheme", "rope_pi:factor=4"]
    assert main(["probe", str(path), *words, *labels, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "base=50" in said
    assert "trainers of posenc compare give no attention" in said
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    found = {(r["scheme"], r["length"]): r["bits"] for r in lines if r["measure"] == "text"}
    model = load_trainer(choose_backend("auto"))(weights.read(path).decoder(), "cpu")
    data = np.frombuffer(text.read_bytes(), np.uint8).astype(np.int64)
    windows = np.stack([data[s : s + 33] for s in np.linspace(0, 2000 - 33, 3).astype(int)])
    loss, _ = model.answers(windows[:, :-1], windows[:, 1:], None)
    want = np.asarray(loss).sum(1) / np.log(2)
    np.testing.assert_allclose(found["untouched", 32], want, rtol=1e-5)
    np.testing.assert_allclose(found["rope", 32], want, rtol=1e-5)
    assert not np.allclose(found["rope_pi:factor=4", 32], want, rtol=1e-6)


def test_what_cannot_be_probed_is_one_line(kept, tmp_path, capsys):
    path, text, run = kept
    words = ["--text", str(text), "--eval-lens", "8", "--out", str(tmp_path / "out")]
    other = tmp_path / "parity-0-0123456789abcdef.safetensors"
    weights.write(other, replace(run, task="parity"), {"weights.a": np.ones(1, np.float32)})
    for name, more, message in [
        (path, ["--scheme", "t5"], "needs the learned arrays ['table'], and its training as"),
        (path, ["--dtype", "bfloat16"], "dtype must be float32 for kept weights"),
        (other, [], "was trained on the task 'parity'"),
        (tmp_path / "absent.safetensors", [], "absent.safetensors"),
    ]:
        assert main(["probe", str(name), *words, *more]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
