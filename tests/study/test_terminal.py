"""What `posenc compare` prints while it works, and the origin that it reports."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

import posenc
from posenc.cli import main as cli
from posenc.study import origin, progress, results, terminal
from posenc.study.corpus import Corpus
from posenc.study.progress import Progress
from posenc.study.study import Study

STUDY = Study(schemes=("alibi", "rope"), seeds=2, steps=1000, backend="jax")
CORPUS = Corpus("a folder of texts " * 8, b"x" * 9, b"y" * 9, 1, 1, "ab" * 32)


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests advance."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now.seconds)
    return now


def run(scheme="alibi", seed=0, steps=1000):
    return SimpleNamespace(
        task="text", train_len=64, scheme=scheme, label=scheme, seed=seed, steps=steps, tuning=()
    )


def finished(scheme="alibi", seed=0, **changes):
    losses = dict.fromkeys(("1024", "128", "256", "512", "64"), 2.0)  # as JSON sorts them
    seconds = {"train_seconds": 30.0, "eval_seconds": 10.0}
    own = {"scheme": scheme, "seed": seed, "training": f"{scheme} {seed}", **seconds}
    return {"status": "ok", "loss": losses, **own, **changes}


@pytest.mark.parametrize("active", [1, 3])
def test_lines_come_no_more_often_than_they_should(clock, active):
    printed = []
    progress = Progress(STUDY, 0, printed.append)
    for step in range(1, 1001):
        clock.seconds += 0.25
        for seed in range(active):
            progress.step(run(seed=seed), step, 3.0)
    # One at once, then every five seconds, then every fiftieth of all that passed.
    assert 30 <= len(printed) <= 1 + 250 / 5
    assert "step 1 of 1000" in printed[0]


def test_an_estimate_comes_with_the_second_line(clock):
    printed = []
    progress = Progress(STUDY, 0, printed.append)
    for step in (50, 100, 150):
        clock.seconds += 10
        progress.step(run(), step, 3.0)
    # The first 50 steps compile; then 50 take 10 s, and 4 runs of 1000 are to be made.
    assert "left" not in printed[0]
    assert printed[1].endswith(f"more than {(4000 - 100) * 10 / 50 / 60:.0f} min left")
    clock.seconds = 40.0
    progress.result(finished())
    for step in (500, 1000):
        clock.seconds += 10
        progress.step(run("rope"), step, 3.0)
    # Training is three quarters of a run: 1 + 3/8 and 1 + 3/4 runs are done.
    assert printed[-2].endswith(f"about {50 * 2.625 / 1.375 / 60:.0f} min left")
    assert "rope seed 0: trained, now scored, 3.00 bits/byte" in printed[-1]
    assert printed[-1].endswith(f"about {60 * 2.25 / 1.75:.0f} s left")


def test_kept_runs_do_not_count_in_the_estimate(clock):
    printed = []
    progress = Progress(STUDY, 3, printed.append)
    progress.kept()
    assert printed[-1] == "3 of 4 runs are kept from before"
    for step in (500, 550):
        clock.seconds += 10
        progress.step(run("rope", 1), step, 3.0)
    assert printed[-1].endswith("more than 90 s left")


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_is_wider_than_the_terminal(clock, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = []
    label = "rope:base=500000,rotary_dim=4,layout=interleaved"
    progress = Progress(replace(STUDY, schemes=(label, "t5"), seeds=7), 0, printed.append)
    progress.header(CORPUS, "jax")
    for seed, scheme in enumerate((label, "t5", "sinusoidal")):
        clock.seconds += 100
        progress.step(run(scheme, seed), 500, 3.0)
        progress.result(finished(scheme, seed))
    progress.result(finished(seed=4, status="failed", error="ValueError: " + "many words " * 20))
    lines = [line for text in printed for line in text.splitlines()]
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()).count("many words") == 20
    shown = [line for line in lines if line.startswith("[")]
    assert all("64: 2.000" in line and "1024: 2.000" in line for line in shown[:3])
    assert "t5 seed 1" in shown[1]


@pytest.mark.parametrize(("steps", "share"), [(30, "60%"), (50, "100%"), (51, None)])
def test_a_warm_up_of_all_steps_is_said(clock, steps, share):
    printed = []
    Progress(replace(STUDY, steps=steps, warmup=50), 0, printed.append).header(None, "jax")
    said = [text for text in printed if text.startswith("warmup 50")]
    assert len(said) == (share is not None)
    assert share is None or f"{share} of its value" in " ".join(said[0].split())


def test_rows_of_the_csv_are_in_the_order_of_lengths():
    record = finished(params={"total": 1, "position": 0}, loss_windowed=None)
    rows = results.rows([{**record, "loss_same_targets": record["loss"]}])
    assert [row["eval_len"] for row in rows] == [64, 128, 256, 512, 1024]


def test_a_wide_terminal_shows_all_losses(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    printed = []
    Progress(STUDY, 0, printed.append).result(finished())
    assert printed == [
        "[1/4] alibi seed 0  64: 2.000  128: 2.000  256: 2.000  512: 2.000  1024: 2.000"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_len": 32, "schemes": ("t5", "rope:base=5,layout=half"), "position_lr_scale": 1.0},
        {"schemes": ("rope:base=5@8/nope", "rope+alibi"), "windowed": ("rope+alibi",)},
        {"eval_lens": (64, 100), "learning_rate": 1 / 3, "out": "two words", "seeds": 5},
        {"windowed": (), "text": ("a b.txt", "c.txt"), "device": "cuda", "backend": "torch"},
    ],
)
def test_the_command_is_the_study(monkeypatch, changes):
    study, ran = Study(**changes), []
    monkeypatch.setattr(terminal, "compare", lambda study: ran.append(study) or 0)
    program, *words = shlex.split(origin.command(study))
    assert program == "posenc"
    assert cli.main(words) == 0
    assert ran == [study]


def test_the_commit_is_that_of_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "posenc"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(posenc, "__file__", str(package / "__init__.py"))
    assert origin.commit() == ""  # installed: the version says it
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*run, *words], check=True)
    head = subprocess.run([*run, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert origin.commit() == head.stdout.strip()
    (package / "__init__.py").write_text("edited = True")
    assert origin.commit() == f"{head.stdout.strip()}, edited since"
    monkeypatch.setattr(origin.shutil, "which", lambda name: None)
    assert origin.commit() == "unknown: git is not installed"


def test_the_machine_is_named(monkeypatch):
    facts = terminal.describe(STUDY, CORPUS, "numpy", 1.0)
    assert (
        facts["command"]
        == "posenc compare --steps 1000 --schemes alibi rope --seeds 2 --backend jax"
    )
    assert facts["fitted"] == {}
    fitted = terminal.describe(replace(STUDY, schemes=("t5@9/rope",)), CORPUS, "numpy", 1.0)
    assert fitted["fitted"] == {"t5": "causal=True, num_buckets=32, max_distance=64"}
    assert facts["versions"]["processor"]
    assert int(facts["versions"]["cores"]) >= 1
