"""The command as a user meets it.

In a process of its own where that matters; most words are tried in this one, where what a command
imports is imported once.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from frameworks_installed import require
from sample import long, some

from posenc.cli.main import main
from posenc.study.study import Study

BACKENDS = [name for name in ("jax", "torch") if require(name)]
TINY = [
    *("--train-len", "16", "--eval-lens", "16", "32", "--steps", "4", "--batch-size", "2"),
    *("--layers", "1", "--dim", "16", "--heads", "2", "--eval-windows", "2", "--warmup", "1"),
]


def run(*arguments, **keywords):
    """In a process of its own."""
    command = [sys.executable, "-m", "posenc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **keywords)


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as stop:
            status = stop.code
        return subprocess.CompletedProcess(arguments, status or 0, *capsys.readouterr())

    return run


# A name that is no UTF-8, which only Linux's file systems take.
NAME = os.fsdecode(b"te\xff.txt") if sys.platform == "linux" else "text.txt"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / NAME
    path.write_text("the quick brown fox jumps over the lazy dog; " * 300)
    return str(path)


@pytest.mark.parametrize("backend", some(BACKENDS, BACKENDS[-1:], long))
def test_compare_from_beginning_to_end(tmp_path, text, here, backend):
    out = tmp_path / "results"
    arguments = ["compare", *TINY, "--text", text, "--backend", backend, "--out", str(out)]
    arguments += ["--schemes", "alibi,rope", "--seeds", "2", "--workers", "1"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\[ ?\d/4\] ", done.stdout, re.MULTILINE)) == 4
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["scheme"], r["seed"], r["eval_len"]) for r in rows} == {
        (s, n, e) for s in ("alibi", "rope") for n in "01" for e in ("16", "32")
    }
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    shown = [line.strip() for line in done.stdout.splitlines()]
    for name in ("differences.csv", "loss.svg", "loss.pdf", "report.html"):
        assert (out / name).stat().st_size
        assert str(out / name) in shown  # a line of its own
    assert "</html>" in (out / "report.html").read_text()
    assert len((out / "results.jsonl").read_text().splitlines()) == 4
    assert not [path for path in out.rglob("*") if path.suffix in (".partial", ".progress")]
    assert not [path for path in out.rglob("*") if "cache" in path.name]  # nothing to execute
    took = json.loads((out / "study.json").read_text())["wall_seconds"]
    arguments[arguments.index("32") - 1 : arguments.index("32") + 1] = ["16,32"]
    again = here(*arguments)
    assert "4 of 4 runs are kept from before" in again.stdout
    assert again.returncode == 0
    assert json.loads((out / "study.json").read_text())["wall_seconds"] == took > 0
    assert not (out / "earlier").exists()


# Tests in the background of a shell ignore Ctrl-C, and child processes would inherit that.
_HEARING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("posenc", run_name="__main__")
"""
ENDINGS = {"ctrl-c": (signal.SIGINT, 130), "kill": (signal.SIGTERM, 143), "kill -9": (9, -9)}


@pytest.mark.parametrize("ending", some(ENDINGS, [], long))
def test_a_stopped_study_leaves_no_process_behind(tmp_path, text, ending):
    number, status = ENDINGS[ending]
    out, scratch = tmp_path / "results", tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["compare", *TINY, "--text", text, "--out", str(out)]
    arguments += ["--workers", "2" if ending == "kill -9" else "1"]
    arguments += ["--schemes", "nope,alibi", "--seeds", "3", "--backend", BACKENDS[-1]]
    arguments[arguments.index("--steps") + 1] = "100000"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _HEARING, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(r": step \d+ of", line):
                break
        # Ctrl-C reaches the whole group, the others the one process that is named.
        (os.killpg if ending == "ctrl-c" else os.kill)(process.pid, number)
        rest, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert ("stopped; the same command continues from here" in rest) == (status > 0)
        assert "Traceback" not in errors
        deadline = time.monotonic() + 30
        while _group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not _group_lives(process.pid), "workers are left behind"
        assert not list(scratch.glob("posenc-*"))  # compiled programs
        if ending != "kill -9":  # then the next run removes leftovers
            assert not [p for p in out.rglob("*") if p.suffix in (".partial", ".progress")]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that a broken study left behind


@long
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_study_survives_a_worker_that_is_killed(tmp_path, text):
    """As the kernel kills one for want of memory; the other workers end with it."""
    out = tmp_path / "results"
    arguments = ["compare", *TINY, "--text", text, "--out", str(out), "--workers", "2"]
    arguments += ["--schemes", "nope,alibi", "--seeds", "2", "--backend", BACKENDS[-1]]
    arguments[arguments.index("--steps") + 1] = "2000"
    command, pipe = [sys.executable, "-u", "-m", "posenc", *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        shown, killed = [], False
        for line in process.stdout:
            shown.append(line)
            if re.search(r": step \d+ of", line) and not killed:
                os.kill(_workers(process.pid)[0], signal.SIGKILL)
                killed = True
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert "a worker process died, so new ones go on with" in errors
    assert len([line for line in shown if re.match(r"\[\d/4\]", line)]) == 4
    with (out / "results.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["ok"] * 8


def _workers(parent):
    """The processes that a study started, without multiprocessing's tracker of resources."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(each) for each in found if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


def _group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--schemes", "ropee"], "unknown scheme 'ropee' (did you mean 'rope'?)"),
        (["compare", "--steps", "0"], "steps must be at least 1, got 0"),
        (["compare", "--backend", "tensorflow"], "unknown backend 'tensorflow'"),
        (["compare", "--text", "absent.txt"], "absent.txt"),
        (["compare", "--device", "nosuch"], "cannot train on device 'nosuch'"),
        (["compare", "--schemes", "alibi", "--windowed", "rope"], "windowed names 'rope'"),
        (["show", "rope", "--head-dim", "63"], "--head-dim must be even, got 63"),
        (["show", "alibi", "--heads", "0"], "--heads must be at least 1, got 0"),
        (["show", "alibi", "--length", "0"], "length"),
        (["show", "nothing"], "unknown scheme 'nothing'"),
        (["show", "rope/nope"], "'rope/nope' has layers in turn"),
        (["show", "rope@0"], "rope@0"),
        (["show", "alibi", "--train-len", "0"], "--train-len must be at least 1, got 0"),
        (["compare", "--schemes", "rope@x"], "scheme 'rope@x' has a window 'x'; it is an integer"),
        (["list", "roep"], "unknown scheme 'roep' (did you mean 'rope'?)"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(here, arguments, message):
    done = here(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_lengths_that_are_none(here):
    done = here("compare", "--eval-lens", "64,many")
    assert done.returncode == 2
    assert "argument --eval-lens: accepted: integers" in done.stderr


def test_a_text_too_small_for_the_split(here, tmp_path):
    small = tmp_path / "small.txt"
    small.write_text("too short")
    done = here("compare", "--text", str(small))
    assert done.returncode == 2
    assert re.search(r"\d+ bytes", done.stderr)
    assert not (tmp_path / "posenc-compare").exists()


def test_an_output_folder_that_cannot_be_written(here, tmp_path, text):
    (tmp_path / "file").touch()
    done = here("compare", *TINY, "--text", text, "--out", str(tmp_path / "file" / "results"))
    assert done.returncode == 2
    assert f"--out must be a folder, got '{tmp_path / 'file' / 'results'}'" in done.stderr
    assert "Traceback" not in done.stderr


def test_show_and_list(here, tmp_path):
    done = here("show", "t5", "--length", "32")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t5.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == "t5.png"
    listed = run("list")
    assert all(name in listed.stdout for name in ("alibi", "learned", "nope", "rope", "t5"))
    assert max(map(len, listed.stdout.splitlines())) <= 80  # where there is no terminal
    assert "For models that are trained as rope: " in listed.stdout
    assert re.search(r"rope~\w+\.", listed.stdout)
    assert "Plans of layers, as labels of posenc compare: " in listed.stdout
    shown = here("list", "t5", "rope", "rope_pi").stdout
    assert "trained as rope; in posenc compare rope~rope_pi" in shown
    assert "max_distance  int, default 128" in shown
    assert "layout  'half' or 'interleaved', default 'half'" in shown


@long
@pytest.mark.parametrize("backend", BACKENDS)
def test_compare_of_sums_layers_and_windows(tmp_path, text, backend):
    out, label = tmp_path / "results", "rope+alibi@8/t5"
    arguments = ["compare", *TINY, "--text", text, "--backend", backend, "--out", str(out)]
    arguments[arguments.index("--layers") + 1] = "2"
    arguments += ["--seeds", "1", "--windowed", label, "--schemes", "rope", "+alibi @ 8/t5", "nope"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["scheme"] for r in rows] == [label, label, "nope", "nope"]
    assert all(float(r["loss_windowed"]) for r in rows[:2])
    (record, _) = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    assert record["windows"] == [8, None]
    assert len(list((out / "runs").glob("rope-alibi-8-t5-0-*.json"))) == 1
    page = (out / "report.html").read_text()
    assert "@8, T5Bias(" in page
    assert "t5 is built with causal=True, num_buckets=16, max_distance=16." in page


@long
def test_show_takes_a_sum_and_a_training_length(here, tmp_path):
    done = here("show", "rope + alibi:", "--length", "32")
    assert (done.returncode, done.stdout.strip()) == (0, "rope-alibi.png"), done.stderr
    done = here("show", "t5", "--length", "32", "--train-len", "8", "--out", "t.svg")
    assert done.returncode == 0, done.stderr
    done = here("show", "rope_yarn", "--length", "32", "--out", "y.svg")
    assert (done.returncode, done.stderr) == (0, "")
    assert "YaRN(factor=4.0, train_len=8" in (tmp_path / "y.svg").read_text()
    done = here("show", "self_extend", "--length", "32", "--out", "s.svg")
    assert (done.returncode, done.stderr) == (0, "")
    assert "SelfExtend(head_dim=64, group=8, window=2," in (tmp_path / "s.svg").read_text()


def test_help_names_every_option_of_a_study(here):
    shown = here("compare", "--help-all").stdout
    assert all(f"--{f.name.replace('_', '-')}" in shown for f in fields(Study))
    assert here("--help").returncode == here("compare", "--help").returncode == 0
    assert here("--version").stdout.startswith("posenc 0.")


def test_help_loads_nothing_that_computes():
    code = (
        "import sys, posenc.cli.main\n"
        "try: posenc.cli.main.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted({'torch', 'jax', 'matplotlib', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
