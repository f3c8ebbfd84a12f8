"""A study on a real scheduler and workers of Dask, of which some are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from posenc.study.joined import _results
from posenc.study.runner import plan, run_study
from posenc.study.study import Study
from posenc.study.workers import LostPoolError

if find_spec("distributed") is None:
    pytest.skip("distributed is not installed; .ci/libraries runs this", allow_module_level=True)
pytest.importorskip("torch")

# Where workers are slow to start.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no worker for this study:UserWarning")
ROOT = Path(__file__).parents[2]
SMALL = {
    "train_len": 16, "eval_lens": (16, 32), "batch_size": 2, "layers": 1, "dim": 16, "heads": 2,
    "eval_windows": 2, "warmup": 1, "backend": "torch", "device": "cpu",
}  # fmt: skip


class Machines:
    """A scheduler and its workers, processes of their own."""

    def __init__(self, folder):
        self.folder, self.running = folder, []
        self.file = folder / "scheduler.json"
        self.scheduler = self._start("scheduler", "--port", "0", "--scheduler-file", self.file)
        while not self.file.exists():
            time.sleep(0.05)
        self.address = json.loads(self.file.read_text())["address"]

    def worker(self, root=ROOT):
        """A worker, in a folder that is not that of the study, with the posenc of ``root``."""
        words = ("--nthreads", "1", "--no-nanny", "--local-directory", self.folder)
        return self._start("worker", self.address, *words, root=root)

    def _start(self, what, *words, root=ROOT):
        command = [sys.executable, "-m", "distributed.cli.dask_" + what, "--host", "127.0.0.1"]
        path = os.pathsep.join([str(root), str(root / "backends")])
        with (self.folder / f"{what}.log").open("a") as log:
            process = subprocess.Popen(
                [*command, "--no-dashboard", *map(str, words)], cwd=self.folder, stdout=log,
                stderr=log, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        self.running.append(process)
        return process

    def stop(self):
        for process in self.running:
            process.kill()
            process.wait()


@contextmanager
def machines(folder):
    folder.mkdir()
    started = Machines(folder)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def study(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 300)
    schemes = ("alibi", "rope", "rope~rope_pi")  # the last two share a training
    text = (str(tmp_path / "text.txt"),)
    return Study(**SMALL, text=text, schemes=schemes, steps=200, out=str(tmp_path / "far"), seeds=2)


def undisturbed(study, out):
    """The results of the same study in this process."""
    with ThreadPoolExecutor(1) as pool:
        study = replace(study, scheduler="", out=str(out))
        return results(run_study(study, study.corpus(), executor=pool))


def results(records):
    return {record["run"]: _results(record) for record in records}


def test_nothing_finished_is_lost_with_workers_and_with_the_scheduler(study, tmp_path):
    corpus, expected = study.corpus(), undisturbed(study, tmp_path / "near")
    with machines(tmp_path / "first") as far:
        workers, ended = [far.worker()], []

        def kill(run, step, loss):
            if len(workers) == 1:
                workers[0].send_signal(signal.SIGKILL)
                workers.append(far.worker())

        def until_the_scheduler_dies():
            begun = replace(study, scheduler=far.address)
            for record in run_study(begun, corpus, on_progress=kill):
                ended.append(record)
                far.scheduler.send_signal(signal.SIGKILL)

        with (
            pytest.warns(UserWarning, match="a worker is gone, so another one begins"),
            pytest.raises(LostPoolError, match="finished runs are kept, and the same command"),
        ):
            until_the_scheduler_dies()
    kept, _ = plan(study, corpus)
    assert len(workers) == 2
    assert 0 < len(ended) <= len(kept) < len(expected)
    with machines(tmp_path / "second") as far:
        far.worker()
        begun = replace(study, scheduler=far.address)
        records = list(run_study(begun, corpus))
        assert results(records) == expected
        again = {r["run"] for r in records if r["training"] in {k["training"] for k in kept}}
        assert again == {record["run"] for record in kept}
        assert not list(Path(study.out).rglob("*.progress"))
        _check_a_sweep_of_a_task(tmp_path, far)


def _check_a_sweep_of_a_task(tmp_path, far):
    """With weights that are kept, which come back too."""
    sizes = {**SMALL, "train_len": 4, "eval_lens": (4, 8), "eval_windows": 4, "keep_weights": True}
    sweep = ("learning-rate=3e-3,1e-2",)
    study = Study(
        **sizes, task="copy", schemes=("t5",), steps=20, seeds=1, sweep=sweep,
        out=str(tmp_path / "task"), scheduler=far.address,
    )  # fmt: skip
    found = results(run_study(study, None))
    assert found == undisturbed(study, tmp_path / "near task")
    (mine,), (other,) = ((tmp_path / name / "weights").iterdir() for name in ("task", "near task"))
    assert mine.name == other.name
    assert mine.read_bytes() == other.read_bytes()


def test_a_worker_with_another_posenc_is_refused(study, tmp_path, monkeypatch):
    other = tmp_path / "other"
    for package in ("posenc", "backends"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, other / package, ignore=ignored)
    with (other / "posenc" / "schemes" / "alibi.py").open("a") as file:
        file.write("\n# edited\n")
    with machines(tmp_path / "machines") as far:
        far.worker(other)
        begun = replace(study, scheduler=far.address)
        with (
            pytest.warns(UserWarning, match=r"tcp://\S+ is refused: posenc's files differ: "),
            pytest.raises(RuntimeError, match=r"is refused: posenc's files .*; none is left"),
        ):
            list(run_study(begun, begun.corpus()))
    assert not plan(study, study.corpus())[0]


def test_a_scheduler_that_does_not_answer_is_an_error_within_seconds(study, monkeypatch, capsys):
    from posenc.cli.main import main

    monkeypatch.setattr("posenc.study.cluster._CONNECT", 1.0)
    words = ["--eval-lens", "64", "--eval-windows", "2", "--out", study.out]
    words += ["--scheduler", "tcp://127.0.0.1:9"]
    assert main(["compare", "--backend", "torch", "--text", *study.text, *words]) == 2
    error = capsys.readouterr().err
    assert "error: --scheduler 'tcp://127.0.0.1:9' cannot be reached: " in error
