"""What can be said of workers of other machines without Dask; test_dask.py starts real ones."""

from __future__ import annotations

import sys
from concurrent.futures import Executor, Future
from dataclasses import replace

import pytest
from frameworks_installed import require

import posenc
from posenc.study.cluster import inspect
from posenc.study.runner import compute, plan
from posenc.study.study import Study
from posenc.study.workers import LostPoolError

BACKEND = "torch" if require("torch") else "jax"
SMALL = {
    "train_len": 8, "eval_lens": (8, 16), "steps": 2, "batch_size": 2, "layers": 1, "dim": 8,
    "heads": 2, "eval_windows": 2, "warmup": 1, "schemes": ("alibi", "rope"), "seeds": 1,
    "backend": BACKEND,
}  # fmt: skip


@pytest.fixture
def study(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 100)
    return Study(**SMALL, text=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"))


@pytest.fixture
def inspected(study, monkeypatch):
    """What a worker says to the study's runs with other fields, or another text."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
        monkeypatch.setenv(name, "1")
    corpus = study.corpus()

    def ask(text=corpus, **changes):
        runs = [replace(run, **changes) for run in study.runs(corpus, BACKEND)]
        return inspect(runs, False, text)

    return ask


def test_a_worker_like_the_study_is_fit(inspected):
    assert inspected() is None


def test_a_worker_that_differs_says_in_what(inspected, study):
    there = study.runs(study.corpus(), BACKEND)[0]
    one, *others = there.versions
    package = one.split()[0]
    other = (f"{package} 0.9", *others)
    said = inspected(versions=other)
    assert said == f"packages differ: {one}, and in the study {package} 0.9"
    assert inspected(posenc_digest="0" * 64).startswith("posenc's files differ: ")
    assert inspected(source_digest="1" * 64).startswith("scheme 'alibi': the files of the scheme")
    assert "No module named 'absent'" in inspected(scheme="absent.Mine")
    assert inspected(scheme="absent.Mine", descriptions=()) is None  # nor could the study make it
    assert "cannot train on device 'nosuch'" in inspected(device="nosuch")
    text = replace(study.corpus(), train=b"another")
    assert inspected(text) == "the text did not arrive as it was sent"


def test_a_worker_with_jax_of_many_threads_is_refused(inspected, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", posenc)
    monkeypatch.delenv("NPROC")
    assert "with a thread for each core" in inspected()


def test_without_distributed_the_error_names_the_extra(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    far, corpus = replace(study, scheduler="tcp://127.0.0.1:1"), study.corpus()
    extra = r"scheduler needs the package distributed: pip install 'posenc\[dask\]'"
    with pytest.raises(ImportError, match=extra):
        list(compute(far, plan(far, corpus)[1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "node7"}, "scheduler must be as tcp://host:port, got 'node7'"),
        ({"scheduler": "tcp://node7:8786", "workers": 2}, "workers=2 is for processes here"),
    ],
)
def test_an_address_is_checked_before_anything_begins(options, message):
    with pytest.raises(ValueError, match=message):
        Study(**options)


class GivenUp(Executor):
    """An executor whose cluster is gone: it cancels every future."""

    def submit(self, function, /, *arguments):
        future = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


def test_an_executor_that_cancels_runs_is_an_error_and_no_failed_run(study):
    corpus = study.corpus()
    with pytest.raises(LostPoolError, match="finished ones are kept"):
        list(compute(study, plan(study, corpus)[1], executor=GivenUp()))
    assert len(plan(study, corpus)[1]) == 2
