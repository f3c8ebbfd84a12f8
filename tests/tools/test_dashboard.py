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
from importlib.metadata import PackagePath
from pathlib import Path
from types import SimpleNamespace

import pytest
from clones import ROOT, clone, commit, git
from frameworks_installed import require
from sample import long

CONFIG = Path("benchmarks", "asv.conf.json")

pytestmark = pytest.mark.skipif(
    not (require("asv") and shutil.which("git")), reason="asv or git is not installed"
)


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
    folder = clone(tmp_path_factory.mktemp("clone"))
    few = {"POSENC_SCHEMES": "alibi nope", "POSENC_FRAMEWORKS": "numpy"}
    done = dashboard(folder, "--quick", "--bench", "Make|Bias|attention.Forward|decode", **few)
    return folder, done


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def read(file):
    return file.read_text(encoding="utf-8")


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
    assert "nothing measured before on this machine" in page


def test_the_page_needs_nothing_from_elsewhere(measured):
    page = (measured[0] / ".asv" / "html" / "dashboard.html").read_text()
    assert not re.findall(r"<script|<link|<img|url\(|@import|https?:", page)
    targets = set(re.findall(r"""(?:href|src)=["'](.*?)["']""", page))
    assert all(target.startswith("#") for target in targets - {"index.html"})


def test_asv_publishes_the_same_commit(measured):
    folder, _ = measured
    index = json.loads((folder / ".asv" / "html" / "index.json").read_text())
    assert list(index["revision_to_hash"].values()) == [git(folder, "rev-parse", "HEAD")]
    assert index["graph_param_list"]


def test_what_the_machine_did_is_no_change(benchmarks):
    """A time that grew as the framework's own attention did has not changed."""
    figures, page = benchmarks("figures"), benchmarks("dashboard_page")

    def figure(then, now, unit="seconds"):
        stats = [{"ci_99_a": 0.99 * value, "ci_99_b": 1.01 * value} for value in (then, now)]
        return figures.Figure({"a": then, "b": now}, dict(zip("ab", stats, strict=True)), unit)

    own = {
        ("torch",): figure(1.0, 1.5), ("jax",): figure(2.0, 3.0),
        ("numpy",): figures.Figure({"a": None, "b": math.nan}, {}, "seconds"),
    }  # fmt: skip
    baseline = figures.Benchmark(
        "attention.WithoutPositions.time", {"framework": []}, own, "seconds"
    )
    machine = benchmarks("comparisons").drift([baseline], "b")
    assert machine == {"a": 1.5, "b": 1.0}
    assert page._change(figure(1.0, 1.5), "b", machine) == ""
    assert "+100 %" in page._change(figure(1.0, 3.0), "b", machine)
    assert "−20 %" in page._change(figure(1.0, 1.2), "b", machine)
    assert "+50 %" in page._change(figure(1.0, 1.5, "bytes"), "b", machine)
    assert "+50 %" in page._change(figure(1.0, 1.5), "b", {})


def test_what_does_not_apply_is_one_line(benchmarks):
    printed = """\
[50.00%] ··· transform.Embedding.time_embedding                              ok
[50.00%] ···· For parameters: 'alibi', 'numpy', 1024
              asv: skipped: NotImplementedError('no embedding')

              For parameters: 'rope', 'numpy', 1024
              asv: skipped: NotImplementedError('no embedding')

[60.00%] ···· For parameters: 'rope', 'torch', 1024
              Traceback (most recent call last):

[100.00%] ··· transform.Transform.time_transform                              ok
"""
    shown = "".join(benchmarks("dashboard").without_skipped(printed.splitlines(keepends=True)))
    kept = [line for n, line in enumerate(printed.splitlines()) if n not in range(1, 7)]
    assert shown.splitlines()[:-1] == kept
    assert shown.splitlines()[-1].startswith("2 figures do not apply")


def test_a_commit_before_is_the_history(measured, tmp_path, benchmarks):
    """A change is shown where the intervals of the samples do not meet, and only there."""
    folder, _ = measured
    copy = tmp_path / "copy"
    shutil.copytree(folder / ".asv", copy / ".asv")
    file, now = results(copy)
    before = json.loads(file.read_text())
    columns, name = now["result_columns"], "start.Make.time_make"
    for one, value, low, high in ((now, 3.0, [2.9, 1.0], 3.1), (before, 2.0, [1.9, 1.0], 2.1)):
        row = one["results"][name]
        row += [None] * (len(columns) - len(row))
        row[columns.index("result")] = [value, value]
        row[columns.index("stats_ci_99_a")] = low
        row[columns.index("stats_ci_99_b")] = [high, high]
    before |= {"commit_hash": "b" * 40, "date": now["date"] - 1}
    file.write_text(json.dumps(now))
    file.with_name(f"{'b' * 8}-{now['env_name']}.json").write_text(json.dumps(before))
    conf = importlib.import_module("asv.config").Config.load(str(ROOT / CONFIG))
    conf.results_dir, conf.html_dir = str(copy / ".asv" / "results"), str(copy / ".asv" / "html")
    history = benchmarks("history").results_until(conf.results_dir, ["b" * 40, now["commit_hash"]])
    page, failed = benchmarks("dashboard_page").write_page(conf, history)
    text = page.read_text()
    assert failed == []
    assert text.count("+50 %") == 1  # the second scheme's intervals meet
    table = text[text.index(f'id="{name.replace(".", "-")}"') :].split("</table>")[0]
    assert table.count("<polyline") == 2
    assert re.findall(r'data-value="(.*?)"', table) == ["3.0", "3.0"]
    assert table.count("</i>3.00\u00a0s") == 2
    assert "bbbbbbbb: 2.00" in table
    assert "1 earlier measured on this machine" in text
    before["params"]["cpu"] = "another processor"
    file.with_name(f"{'b' * 8}-{now['env_name']}.json").write_text(json.dumps(before))
    known = ["b" * 40, now["commit_hash"]]
    (alone,) = benchmarks("history").results_until(conf.results_dir, known)
    assert alone.commit_hash == now["commit_hash"]
    with pytest.raises(SystemExit, match="no results of commit cccc"):
        benchmarks("history").results_until(conf.results_dir, ["cccc"])


def test_asv_opens_from_disk(measured, tmp_path, benchmarks, monkeypatch):
    """Whatever asv's page loads lies beside it, and its data is in a script."""
    pages = shutil.copytree(measured[0] / ".asv" / "html", tmp_path / "html")
    names = ("jquery-3.6.1", "jquery.flot", "bootstrap")
    plugins = [f"jquery.flot.{name}" for name in ("time", "selection", "categories")]
    scripts = [tmp_path / f"{name}.min.js" for name in (*names, *plugins)]
    for script in (*scripts, tmp_path / "bootstrap.min.css"):
        script.write_text("")
    published = benchmarks("published")
    installed = [PackagePath(file.name) for file in tmp_path.iterdir()]
    for path in installed:
        path.dist = SimpleNamespace(locate_file=tmp_path.joinpath)
    monkeypatch.setattr(published, "files", lambda _: installed)
    published.from_disk(pages)
    loaded = re.findall(
        r'<(?:script|link|img)[^>]*?(?:src|href)="(.*?)"', read(pages / "index.html")
    )
    assert len(loaded) > 15
    assert all((pages / name).is_file() for name in loaded)
    data = json.loads(read(pages / "data.js").removeprefix("const asvFiles = ").rstrip(";\n"))
    assert data["index.json"]["graph_param_list"]
    assert sum(name.startswith("graphs/summary/") for name in data) == 5


def test_the_files_of_an_earlier_commit(measured, monkeypatch, benchmarks):
    folder, _ = measured
    history, sources = benchmarks("history"), benchmarks("harness.sources")
    monkeypatch.setattr(sources, "ROOT", folder)
    file = folder / "posenc" / "__init__.py"
    before = read(file)
    file.write_text("VALUE = 2")
    commit(folder)
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "no code")
    first, second = history.last_commits(10)
    git(folder, "reset", "--quiet", "--hard", first)
    assert history.ancestors(second) == [first, second]
    for each, text in ((first, before), (second, "VALUE = 2")):
        with sources.checkout(each) as code:
            assert read(code / "posenc" / "__init__.py") == text
            assert (code / "backends").is_dir()


def test_what_the_repository_keeps_names_no_machine_and_no_path(
    measured, tmp_path, monkeypatch, benchmarks
):
    folder, _ = measured
    history = benchmarks("history")
    monkeypatch.setattr(history, "KEPT", tmp_path / "kept")
    stored = folder / ".asv" / "results"
    some = history.results_until(str(stored), git(folder, "rev-list", "HEAD").split())
    history.keep(some, stored, "laptop")
    machine = json.loads(read(folder / "home" / ".asv-machine.json"))
    private = [str(folder), sys.prefix, *(name for name in machine if name != "version")]
    kept = list((tmp_path / "kept").rglob("*.json"))
    assert sorted(file.parent.name for file in kept) == ["kept", "laptop", "laptop"]
    assert not [text for text in private for file in kept if text in read(file)]
    (again,) = history.results_until(
        str(tmp_path / "kept"), git(folder, "rev-list", "HEAD").split()
    )
    assert again.params["machine"] == "laptop"
    assert again._results == some[0]._results


@long
def test_earlier_commits_are_measured_once_and_shown(tmp_path):
    """By the present suite, each with its own code; a clone shows what the repository keeps."""
    folder = clone(tmp_path / "clone")
    suite = folder / "benchmarks" / "suite"
    shutil.rmtree(suite)
    suite.mkdir()
    (suite / "__init__.py").touch()
    (suite / "values.py").write_text(
        '"""Values."""\nimport posenc\ndef track_value():\n    return posenc.VALUE\n'
    )
    for value in (1, 2):
        (folder / "posenc" / "__init__.py").write_text(f"VALUE = {value}")
        commit(folder)
    words = ("--commits", "2", "--keep", "laptop")
    done = dashboard(folder, *words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    kept = (folder / "benchmarks" / "results" / "asv" / "laptop").glob("*-existing.json")
    found = {one["commit_hash"]: one for one in map(json.loads, map(read, kept))}
    last = git(folder, "rev-list", "--max-count=2", "HEAD").split()
    assert [found[each]["results"]["values.track_value"][0] for each in last] == [[2], [1]]
    assert "For posenc commit" not in dashboard(folder, *words).stdout
    shutil.rmtree(folder / ".asv")
    done = dashboard(folder, "--page-only")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert read(folder / ".asv" / "html" / "dashboard.html").count("<polyline") == 1


def test_a_ratio_compares_the_same_framework_stage_and_length(benchmarks):
    figures = benchmarks("figures")

    def measured(name, params, values):
        some = {choice: figures.Figure({"c": v}, {}, "seconds") for choice, v in values.items()}
        return figures.Benchmark(f"any.{name}.time_it", dict.fromkeys(params, ()), some, "seconds")

    stages = ("forward", "training step")
    baseline = {
        (framework, stage, length): 1.0 + i + 2 * j + 4 * k
        for i, framework in enumerate(("a", "b"))
        for j, stage in enumerate(stages)
        for k, length in enumerate(("512", "1024"))
    }
    steps = {
        ("rope", f"{framework} tiled", length): value * 3
        for (framework, stage, length), value in baseline.items()
        if stage == stages[1]
    }
    steps["rope", "a broken", "512"] = None
    some = [
        measured("TrainingStep", ("scheme", "implementation", "length"), steps),
        measured("WithoutPositions", ("framework", "stage", "length"), baseline),
    ]
    charts = benchmarks("comparisons").ratios(some, "c")
    assert len(charts) == 4
    assert all(one.shown() == {"rope": {"tiled": 3.0}} for one in charts)


def test_ratios_to_libraries_are_those_that_were_measured(benchmarks, tmp_path):
    row = {"stage": "bias", "scheme": "t5", "pass": "forward", "mode": "eager"}
    ratio = benchmarks("harness.clock").Speed.of([0.5]).json()
    rows = [
        row | {"library": "other", "status": "measured", "ratio": ratio},
        row | {"library": "absent", "status": "missing", "reason": "not installed"},
    ]
    result = tmp_path / "peers.json"
    assert benchmarks("comparisons").peers(result) == []
    result.write_text(json.dumps({"rows": rows}))
    (chart,) = benchmarks("comparisons").peers(result)
    assert chart.rows == {"t5": {"other": 0.5}}


def test_equal_factors_are_equally_far_apart(benchmarks):
    charts = benchmarks("charts")
    rows = {"first": {"one": 0.5, "two": 2.0}, "none": {"one": math.nan, "two": 0.0}}
    drawn = charts.section([charts.Chart("any <title>", rows, line=1.0)])
    low, high = sorted(map(float, re.findall(r"translate\(([\d.]+) ", drawn)))
    (line,) = map(float, re.findall(r'class="line" d="M([\d.]+) ', drawn))
    assert high - line == pytest.approx(line - low, abs=0.11)  # coordinates have one digit
    assert high - low > 100
    assert "none" not in drawn
    assert "any &lt;title&gt;" in drawn
    assert charts.section([charts.Chart("", {}, line=1.0)]) == ""


def test_changes_that_no_commit_holds_are_not_measured(measured):
    folder, _ = measured
    file = folder / "posenc" / "mine.py"
    file.write_text("")
    try:
        done = dashboard(folder, "--quick", "--bench", "start.Make")
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


def test_the_kept_history_is_not_drawn_beside_that_of_another_machine(
    tmp_path, benchmarks, monkeypatch
):
    """asv's grid joins the results of all machines to one line."""
    published, kept, results = benchmarks("published"), tmp_path / "kept", tmp_path / "results"
    monkeypatch.setattr(published, "KEPT", kept)
    for file in ("laptop/machine.json", "laptop/aaaaaaaa-existing.json"):
        (kept / file).parent.mkdir(parents=True, exist_ok=True)
        (kept / file).write_text("{}")
    published.add_kept(results)
    assert len(list(results.glob("laptop/*.json"))) == 2
    (results / "own").mkdir()
    (results / "own" / "machine.json").write_text("{}")
    published.add_kept(results)
    assert [file.parent.name for file in results.rglob("*.json")] == ["own"]
