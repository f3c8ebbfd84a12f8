"""Long work: what a study takes before it starts, its live line, and where progress also goes."""

from __future__ import annotations

import io
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from posenc.cli.main import main
from posenc.layers import LayerPlan
from posenc.schemes import NoPE
from posenc.study import Study, run_study
from posenc.study.corpus import from_files
from posenc.study.decoder import Decoder
from posenc.study.dry_run import dry_run
from posenc.study.estimate import Speed, estimate, memory_of, parameters
from posenc.study.events import crc32c, event, record
from posenc.study.live import LiveLine
from posenc.study.progress import Progress, number
from posenc.study.recipe import Recipe
from posenc.study.results import save
from posenc.study.run import Run
from posenc.study.runner import plan
from posenc.study.trackers import TensorBoard, Trackers, make_trackers
from posenc.study.usage import Usage

SMALL = {
    "schemes": ("nope", "alibi"), "seeds": 2, "steps": 3, "train_len": 8, "eval_lens": (8, 16),
    "batch_size": 2, "layers": 1, "dim": 8, "heads": 2, "eval_windows": 2,
}  # fmt: skip


@pytest.fixture
def study(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 8)
    return Study(**SMALL, backend="torch", text=(str(text),), out=str(tmp_path / "out"))


# Before it starts.


def test_a_dry_run_counts_what_is_missing_and_writes_nothing(study, tmp_path, capsys):
    words = ["compare", "--dry-run", "--out", study.out, "--text", *study.text, "--seeds", "2"]
    words += ["--schemes", "nope", "alibi", "--steps", "3", "--train-len", "8", "--batch-size", "2"]
    words += ["--eval-lens", "8", "16", "--eval-windows", "2", "--backend", "torch"]
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert "4 runs are missing, 0 of 4 are in" in shown
    # 4 trainings of 3 steps of 2 x 8 tokens; 12 d² per layer twice, and 256 d.
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("text ")]
    assert row[:5] == ["text", "4", "4", "12", "192"]
    assert row[5:7] == ["115", "k"]
    assert "time: about" in shown
    assert "by estimate" in shown
    assert "memory: about" in shown


def test_a_dry_run_plans_what_the_study_would(study, tmp_path):
    corpus = study.corpus()
    _, (first, *others) = plan(study, corpus, writes=False)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out" / "runs").mkdir(parents=True)
    save(tmp_path / "out" / "runs" / first.file_name(), {"run": first.digest(), "status": "ok"})
    kept, missing = plan(study, corpus, writes=False)
    assert (len(kept), missing) == (1, others) == (1, plan(study, corpus)[1])


def test_a_dry_run_of_a_sweep_counts_what_tunes(study, tmp_path, capsys):
    assert dry_run(replace(study, sweep=("learning-rate=1e-3,1e-2",))) == 0
    assert "8 runs are missing, 0 of 8 are in" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_dry_run_has_the_errors_of_the_study(study, tmp_path, monkeypatch):
    with pytest.raises(ImportError, match="tracker 'not_there:f': No module named"):
        dry_run(replace(study, tracker=("not_there:f",)))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=f"{str(tmp_path)!r} cannot be written into"):
        dry_run(study)


@pytest.mark.parametrize("task", ["text", "copy"])
def test_parameters_are_those_of_the_decoder(task):
    recipe = Recipe(task=task, dim=16, heads=2, layers=2)
    sizes = Decoder.of(recipe, LayerPlan.of(NoPE(), 2), 0).sizes()
    gains = 2 * 2 * 16 + 16
    assert parameters(recipe) == sizes["total"] - gains
    assert memory_of(recipe, "cpu") > 16 * sizes["total"]


def test_the_estimate_is_the_operations_over_the_speed():
    recipe = Recipe(**{k: v for k, v in SMALL.items() if k not in ("schemes", "seeds")})
    weights, attention = 12 * 8**2 + 256 * 8, 8  # multiplications per token; per token and key
    step = 3 * 2 * 2 * 8 * (weights + 8 * attention)
    # Two windows: at 8 twice as many by the first protocol; at 16 by both.
    scores = 2 * ((4 + 2) * 8 * (weights + 8 * 8) + (2 + 2) * 16 * (weights + 16 * 8))
    speed = Speed(1000.0, 5.0, "")
    found = estimate([(recipe, 2, 3)], 2, speed)
    assert found == pytest.approx((2 * (5 + 3 * step / 1000) + 3 * scores / 1000) / 2)


# The live line.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    live = LiveLine(stream)
    live.show("step 1")
    live.show("step 2")
    live.print("a result")
    live.clear()
    assert stream.getvalue() == "\r\x1b[2Kstep 1\r\x1b[2Kstep 2\r\x1b[2Ka result\n"


def test_a_log_has_none(monkeypatch):
    assert LiveLine(io.StringIO()).show is None
    monkeypatch.setenv("TERM", "dumb")
    assert LiveLine(Terminal()).show is None


def test_the_live_line_adds_up_what_all_runs_use(study, monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("posenc.study.progress.time.perf_counter", lambda: now.seconds)
    monkeypatch.setenv("COLUMNS", "120")
    printed, shown = [], []
    progress = Progress(study, 0, printed.append, show=shown.append)
    for seed in (0, 1):
        for step in (1, 2):
            now.seconds += 1
            run = SimpleNamespace(
                task="text", train_len=8, scheme="nope", label="nope", seed=seed, steps=3, tuning=()
            )
            usage = {"loss": 2.0, "tokens_per_second": 40_000.0, "memory": 3e8}
            progress.step(run, step, 2.0, usage)
    assert not printed
    assert len(shown) == 4
    assert shown[-1] == (
        "[0/4] nope seed 1: step 2 of 3, 2.00 bits/byte, 80 k tokens/s, 600 MB, more than 8 s left"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 "), (999, "999 "), (999.6, "1.0 k"), (61_234, "61 k"), (1.25e9, "1.2 G")],
)
def test_numbers_have_two_or_three_digits(value, text):
    assert number(value) == text.rstrip()


def test_tokens_per_second_are_those_since_the_last_report(study, monkeypatch):
    now = SimpleNamespace(seconds=10.0)
    monkeypatch.setattr("posenc.study.usage.time.perf_counter", lambda: now.seconds)
    run = study.runs(study.corpus(), "torch")[0]
    usage = Usage(run)
    for step, seconds, expected in [(1, 2, 1 * 16 / 2), (3, 1, 2 * 16 / 1)]:
        now.seconds += seconds
        found = usage.since_last(step)
        assert found["tokens_per_second"] == expected
    assert found["memory"] > 1e6 or sys.platform == "win32"


# Trackers.


def test_the_checksum_is_crc_32c():
    assert crc32c(b"123456789") == 0xE3069283  # its check value in the catalogue of CRCs
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def fields_of(data):
    """Fields of a message of protocol buffers, by their number."""
    found, at = [], 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        size = {0: None, 1: 8, 5: 4}.get(key & 7, ...)
        if size is None:
            found.append((key >> 3, varint()))
            continue
        size = varint() if size is ... else size
        found.append((key >> 3, data[at : at + size]))
        at += size
    return found


def scalars(path):
    """Step and scalars of each event of a file."""
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body, data = data[12 : 12 + size], data[16 + size :]
        event = dict(fields_of(body))
        values = [dict(fields_of(value)) for _, value in fields_of(event.get(5, b""))]
        pairs = {v[1].decode(): struct.unpack("<f", v[2])[0] for v in values}
        found.append((event.get(2), pairs))
    return found


def test_an_event_has_the_bytes_of_its_definition():
    # By hand: time, step 300 as a varint, and one scalar "a" of 0.5.
    value = b"\x0a\x01a" + b"\x15\x00\x00\x00\x3f"
    summary = b"\x0a\x08" + value
    expected = b"\x09" + struct.pack("<d", 1.5) + b"\x10\xac\x02" + b"\x2a\x0a" + summary
    assert event(1.5, 300, {"a": 0.5}) == expected
    assert record(b"abc")[:8] == b"\x03" + bytes(7)
    assert record(b"abc")[12:15] == b"abc"


class Mine:
    def __init__(self, out=None):
        self.told = []

    def log(self, run, step, values):
        self.told.append((run.label, step, sorted(values)))

    def finish(self, record):
        self.told.append((record["scheme"], record["status"]))

    def close(self):
        self.told.append("closed")


def test_trackers_hear_of_steps_records_and_the_end(study, tmp_path):
    study = replace(study, schemes=("nope",), seeds=1)
    mine, board = Mine(), TensorBoard(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        (found,) = run_study(study, study.corpus(), executor=pool, trackers=[mine, board])
    # A run of less than a fifth of a second may end before anyone looks.
    step = ("nope", 3, ["loss", "memory", "tokens_per_second"])
    assert mine.told in ([("nope", "ok"), "closed"], [step, ("nope", "ok"), "closed"])
    (path,) = (tmp_path / "tensorboard").glob("text-nope-seed-0-*/events.out.tfevents.*")
    _, *others = scalars(path)
    last = {name: pytest.approx(loss) for name, loss in found["loss"].items()}
    assert others[-1] == (3, {f"loss/{length}": loss for length, loss in last.items()})


def test_a_tracker_that_fails_is_left_out(study):
    class Full(Mine):
        def log(self, run, step, values):
            raise OSError("no space left")

    full, mine = Full(), Mine()
    both = Trackers([full, mine])
    run = SimpleNamespace(label="nope")
    with pytest.warns(UserWarning, match="Full failed, so the study goes on without it: OSError"):
        both.log(run, 1, {"loss": 1.0})
    both.log(run, 2, {"loss": 1.0})
    both.close()
    assert full.told == []
    assert mine.told == [("nope", 1, ["loss"]), ("nope", 2, ["loss"]), "closed"]


def test_wandb_is_offline(monkeypatch, tmp_path, study):
    calls = []

    class Started:
        def __init__(self):
            self.summary = {}

        def log(self, values, step):
            calls.append(("log", step, values))

        def finish(self, exit_code=0):
            calls.append(("finish", exit_code))

    def init(**given):
        calls.append(("init", given["mode"], given["dir"], given["config"]["scheme"]))
        return Started()

    module = SimpleNamespace(init=init, Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", module)
    (tracker,) = make_trackers(("wandb-offline",), tmp_path)
    run: Run = study.runs(study.corpus(), "torch")[0]
    tracker.log(run, 3, {"loss": 1.0})
    recipe = {"task": "text", "recipe": {}, "backend": "torch", "seed": 0, "scheme": "nope"}
    tracker.finish({**recipe, "run": run.digest(), "status": "ok", "loss": {"8": 2.0}})
    assert calls == [
        ("init", "offline", str(tmp_path), "nope"),
        ("log", 3, {"loss": 1.0}),
        ("finish", 0),
    ]


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RuntimeError, match=r"'wandb-offline' needs .* pip install wandb"):
        make_trackers(("wandb-offline",), tmp_path)


def test_names_of_trackers_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"'tensorbord' .*did you mean 'tensorboard'"):
        Study(tracker=("tensorbord",))
    with pytest.raises(ValueError, match="each tracker once"):
        Study(tracker=("tensorboard", "tensorboard"))
    (mine,) = make_trackers((f"{__name__}:Mine",), tmp_path)
    assert isinstance(mine, Mine)
    with pytest.raises(ImportError, match="has no attribute 'Nobody'"):
        make_trackers((f"{__name__}:Nobody",), tmp_path)


def test_a_tracker_is_no_part_of_a_run(study):
    corpus = from_files(study.text)
    tracked = replace(study, tracker=("tensorboard",))
    runs = [one.runs(corpus, "torch") for one in (study, tracked)]
    assert [r.digest() for r in runs[0]] == [r.digest() for r in runs[1]]
