"""A commit that is slower is noticed: by the gate, and by ``asv continuous``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from clones import ROOT, clone, commit
from frameworks_installed import require
from sample import long

sys.path.insert(0, str(ROOT / "benchmarks"))

import gate
from harness import worker

pytestmark = pytest.mark.skipif(not require("asv"), reason="asv is not installed")

# Each sample of asv has its own memory and load: only a large change is sure to be noticed.
FIVE_TIMES = """

_once = bias


def bias(*arguments, **keywords):
    for _ in range(4):
        _once(*arguments, **keywords)
    return _once(*arguments, **keywords)
"""


def ratios(*first, again=(), **counts):
    return gate.Guarded(list(first), list(again), counts)


def test_a_call_is_slower_if_both_medians_are():
    assert ratios(1.2, 1.0, 1.3).is_slower(1.1)
    assert not ratios(1.2, 1.0, 1.05).is_slower(1.1)
    assert ratios(1.2, again=[1.15]).is_slower(1.1)
    assert not ratios(1.2, again=[1.05]).is_slower(1.1)
    assert not ratios().is_slower(1.1)


def test_a_count_that_grows_is_slower():
    assert ratios(calls=(100, 106)).has_more(1.05)
    assert not ratios(calls=(100, 105)).has_more(1.05)
    assert not ratios(calls=(106, 100)).has_more(1.05)


def test_counts_are_of_one_call():
    assert worker.counts(lambda: [abs(n) for n in (1, 2, 3)])["Python calls"] >= 4
    varying = iter(range(100))
    assert worker.counts(lambda: [abs(n) for n in range(next(varying))])["Python calls"] is None


def test_processor_time_counts_work_and_child_processes_not_waiting():
    def work():
        sum(range(10**6))

    assert worker.seconds(work, 3) > 1e-3
    assert worker.seconds(lambda: time.sleep(0.2), 1) < 0.1
    child = [sys.executable, "-c", "sum(range(10**6))"]
    assert worker.seconds(lambda: subprocess.run(child, check=True), 1) > 1e-3


def test_a_call_that_subnormal_numbers_slow_down_is_named():
    options = gate._options(["HEAD"])
    one = ratios(1.0)
    assert "subnormal" not in gate._table({"call": one}, options)
    one.subnormal = 1.62
    assert "ok; 1.62 of the time without subnormal numbers" in gate._table({"call": one}, options)


def test_a_worker_takes_subnormal_numbers_for_0_as_long_as_it_is_asked():
    torch = pytest.importorskip("torch")
    small = lambda: (torch.tensor([2e-38]) / 4).item()  # noqa: E731
    with worker.flushing(True):
        assert small() == 0
    assert small() > 0
    with worker.flushing(False):
        assert small() > 0


def test_an_unknown_commit_and_a_name_that_is_not_guarded_are_errors():
    with pytest.raises(SystemExit, match="commits or branches of this clone, got 'nowhere'"):
        gate.main(["nowhere"])
    with pytest.raises(SystemExit, match="matches none of start, bias"):
        gate.main(["HEAD", "--only", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        gate.main(["HEAD", "--pairs", "0"])


@pytest.fixture(scope="module")
def slower(tmp_path_factory):
    """Two commits; after the second one the dense bias takes five times as long."""
    folder = clone(tmp_path_factory.mktemp("slower"))
    source = folder / "posenc" / "apply" / "bias.py"
    source.write_text(source.read_text() + FIVE_TIMES)
    config = folder / "benchmarks" / "asv.conf.json"
    # asv's environment takes everything but posenc from the one in which this test runs.
    link = (
        "import sys, pathlib, sysconfig; "
        "pathlib.Path(sysconfig.get_path('purelib'), 'sources.pth')"
        ".write_text('\\n'.join(sys.argv[1:]))"
    )
    own, sources = sysconfig.get_path("purelib"), "{build_dir} {build_dir}/backends"
    described = json.loads(config.read_text()) | {
        "matrix": {},
        "build_command": [],
        "install_command": [f'in-dir={{env_dir}} python -c "{link}" {sources} {own}'],
    }
    config.write_text(json.dumps(described))
    commit(folder)
    return folder


def run(folder, *words, **variables):
    environment = os.environ | {"HOME": str(folder / "home")} | variables
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@long
def test_the_gate_notices_a_planted_slowdown_and_not_the_same_sources(slower):
    few = ("--only", "^bias$", "--pairs", "2", "--turns", "5", "--slower", "1.4")
    done = run(slower, "benchmarks/gate.py", "HEAD~1", *few)
    assert done.returncode == 1, done.stderr
    assert "SLOWER" in done.stdout
    done = run(slower, "benchmarks/gate.py", "HEAD", *few)
    assert done.returncode == 0, done.stdout + done.stderr


@long
def test_asv_continuous_notices_a_planted_slowdown(slower):
    config = ("--config", "benchmarks/asv.conf.json")
    assert run(slower, "-m", "asv", "machine", "--yes", *config).returncode == 0
    done = run(
        slower, "-m", "asv", "continuous", *config, "--factor", "1.4", "--bench", "^bias",
        "HEAD~1", "HEAD", POSENC_SCHEMES="t5", POSENC_FRAMEWORKS="numpy",
    )  # fmt: skip
    assert "PERFORMANCE DECREASED" in done.stdout, done.stdout + done.stderr
    assert Path(slower, ".asv", "results").is_dir()
