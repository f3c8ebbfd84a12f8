"""The benchmark command ends in a page that opens from disk and shows this commit's figures."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks_installed import require

ROOT = Path(__file__).parents[2]
CONFIG = Path("benchmarks", "asv.conf.json")

pytestmark = pytest.mark.skipif(
    not (require("asv") and shutil.which("git")), reason="asv or git is not installed"
)


def clone(folder, *suite):
    """A repository of one commit: the library, and these modules of the suite or all."""
    left_out = shutil.ignore_patterns("__pycache__", "results", *suite)
    for name in ("posenc", "backends", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    git(folder, "init", "--quiet", "--initial-branch", "any")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    (folder / "home").mkdir()
    return folder


def git(folder, *words):
    who = {
        f"GIT_{role}_{what}": "a@b.c"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    return subprocess.run(
        ["git", *words],
        cwd=folder,
        env=os.environ | who,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def dashboard(folder, *words, **variables):
    """The command as a fresh user has it: asv knows of no machine."""
    environment = os.environ | {"HOME": str(folder / "home")} | variables
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, "benchmarks/dashboard.py", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def results(folder):
    (file,) = (folder / ".asv" / "results").glob("*/*-existing*.json")
    return file, json.loads(file.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = clone(tmp_path_factory.mktemp("clone"), "backends.py", "torch_long.py")
    done = dashboard(folder, "--quick", "--bench", "core", POSENC_SCHEMES="alibi nope")
    return folder, done


@pytest.fixture
def page_module(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("dashboard_page")


def test_the_page_shows_the_figures_of_this_commit(measured):
    folder, done = measured
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    page = (folder / ".asv" / "html" / "dashboard.html").read_text()
    _, found = results(folder)
    assert done.stdout.splitlines()[-1] == f"open {(folder / '.asv/html/dashboard.html').as_uri()}"
    assert found["commit_hash"] == git(folder, "rev-parse", "HEAD")
    assert found["commit_hash"] in page
    values = [value for row in found["results"].values() for value in row[0]]
    shown = [float(text) for text in re.findall(r'data-value="(.*?)"', page)]
    assert len(shown) > 5
    assert sorted(shown) == sorted(value for value in values if not math.isnan(value))
    assert "failed</td>" not in page


def test_the_page_needs_nothing_from_elsewhere(measured):
    page = (measured[0] / ".asv" / "html" / "dashboard.html").read_text()
    assert not re.findall(r"<script|<link|<img|url\(|@import|https?:", page)
    assert all(target.startswith("#") for target in re.findall(r'(?:href|src)="(.*?)"', page))


def test_asv_publishes_the_same_commit(measured):
    folder, _ = measured
    index = json.loads((folder / ".asv" / "html" / "index.json").read_text())
    assert list(index["revision_to_hash"].values()) == [git(folder, "rev-parse", "HEAD")]
    assert index["graph_param_list"]


def test_a_commit_before_is_the_history(measured, tmp_path, page_module):
    """A change is shown where the intervals of the samples do not meet, and only there."""
    folder, _ = measured
    copy = tmp_path / "copy"
    shutil.copytree(folder / ".asv", copy / ".asv")
    (copy / "benchmarks").mkdir()
    shutil.copy(folder / CONFIG, copy / CONFIG)
    file, now = results(copy)
    before = json.loads(file.read_text())
    columns, name = now["result_columns"], "core.Make.time_make"
    for one, value, low, high in ((now, 3.0, [2.9, 1.0], 3.1), (before, 2.0, [1.9, 1.0], 2.1)):
        row = one["results"][name]
        row += [None] * (len(columns) - len(row))
        row[columns.index("result")] = [value, value]
        row[columns.index("stats_ci_99_a")] = low
        row[columns.index("stats_ci_99_b")] = [high, high]
    before |= {"commit_hash": "b" * 40, "date": now["date"] - 1}
    file.write_text(json.dumps(now))
    file.with_name(f"{'b' * 8}-{now['env_name']}.json").write_text(json.dumps(before))
    page, failed = page_module.write_page(copy / CONFIG, now["commit_hash"])
    text = page.read_text()
    assert failed == []
    assert text.count("+50 %") == 1  # the second scheme's intervals meet
    table = text[text.index(f'id="{name.replace(".", "-")}"') :].split("</table>")[0]
    assert table.count("<polyline") == 2
    assert re.findall(r'data-value="(.*?)"', table) == ["3.0", "3.0"]
    assert table.count("</i>3.00\u00a0s") == 2
    assert "bbbbbbbb: 2.00" in table
    with pytest.raises(SystemExit, match="no results of commit cccc"):
        page_module.write_page(copy / CONFIG, "cccc")


def test_changes_that_no_commit_holds_are_not_measured(measured):
    folder, _ = measured
    file = folder / "posenc" / "mine.py"
    file.write_text("")
    try:
        done = dashboard(folder, "--quick", "--bench", "core.Make")
    finally:
        file.unlink()
    assert done.returncode == 1
    assert "posenc/mine.py" in done.stderr


def test_what_is_timed_is_built_once_and_warm(monkeypatch):
    """Asv calls ``setup`` before every sample; ``--quick`` makes one call."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    warm = importlib.import_module("suite").warm
    calls = []

    class Subject:
        @warm
        def setup(self, size):
            calls.append(("setup", size))

        def time_it(self, size):
            calls.append(("time", size))

        def track_it(self, size):
            calls.append(("track", size))

    subject = Subject()
    subject.setup(1)
    subject.setup(1)
    assert calls == [("setup", 1), ("time", 1)]
    subject.setup(2)
    assert calls[2:] == [("setup", 2), ("time", 2)]


@pytest.mark.exhaustive
def test_every_benchmark_of_the_suite_runs(tmp_path):
    done = dashboard(clone(tmp_path / "clone"), "--quick")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "failed" not in done.stdout
