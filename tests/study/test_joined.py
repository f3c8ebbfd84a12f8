"""Studies of several machines, joined into one report or refused."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from frameworks_installed import require
from sample import long

from posenc.cli.main import main
from posenc.study import joined, terminal
from posenc.study.outputs import STUDY
from posenc.study.runner import run_study
from posenc.study.study import Study
from posenc.study.terminal import write_results

BACKEND = "torch" if require("torch") else "jax"
SMALL = {
    "train_len": 8, "eval_lens": (8, 16), "steps": 2, "batch_size": 2, "layers": 1, "dim": 8,
    "heads": 2, "eval_windows": 2, "warmup": 1, "backend": BACKEND,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def fewer_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "FORMATS", ("svg",))
        yield


def carry_out(study):
    with ThreadPoolExecutor(1) as pool:
        records = list(run_study(study, study.corpus(), executor=pool))
    write_results(study, records)
    return records


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two studies of text with rope, seed 0, in both; and all their runs as one study's."""
    home = tmp_path_factory.mktemp("studies")
    (home / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 100)
    one = Study(
        **SMALL, text=(str(home / "text.txt"),), schemes=("alibi", "rope"), out=str(home / "one"),
        seeds=1,
    )  # fmt: skip
    carry_out(one)
    carry_out(replace(one, schemes=("rope", "nope"), out=str(home / "two")))
    shutil.copytree(home / "one" / "runs", home / "all" / "runs")
    shutil.copytree(home / "two" / "runs", home / "all" / "runs", dirs_exist_ok=True)
    carry_out(replace(one, schemes=("alibi", "rope", "nope"), out=str(home / "all")))
    return home


@pytest.fixture
def folders(made, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in (STUDY, joined.RESULTS):
            shutil.copy(made / name / file, tmp_path / name / file)
    return tmp_path


def edit(folder, study=lambda summary: None, record=lambda record: None):
    """Edit a study on disk, and seal its results again."""
    records = [json.loads(line) for line in (folder / joined.RESULTS).read_text().splitlines()]
    for each in records:
        record(each)
    text = "".join(json.dumps(each) + "\n" for each in records)
    (folder / joined.RESULTS).write_text(text)
    summary = json.loads((folder / STUDY).read_text())
    study(summary)
    summary["sha256"][joined.RESULTS] = hashlib.sha256(text.encode()).hexdigest()
    (folder / STUDY).write_text(json.dumps(summary))


def report(folder, capsys, *words):
    names = [str(folder / name) for name in ("one", "two")]
    status = main(["report", *names, "--out", str(folder / "both"), *words])
    shown = capsys.readouterr()
    return status, shown.out if status < 2 else shown.err


def rows(folder):
    with (folder / "results.csv").open() as file:
        return [
            {name: value for name, value in row.items() if name not in joined._OF_ONE_TIME}
            for row in csv.DictReader(file)
        ]


@long
def test_joined_studies_are_as_one_study_of_all_runs(made, folders, capsys):
    """The run that both have counts once."""
    status, shown = report(folders, capsys)
    assert status == 0
    assert rows(folders / "both") == rows(made / "all")
    names = {path.name for path in (made / "all").iterdir()} - {"runs"}
    assert {path.name for path in (folders / "both").iterdir()} == names
    of_all = (made / "all" / "table.md").read_text()
    assert (folders / "both" / "table.md").read_text() == of_all
    command = json.loads((folders / "both" / STUDY).read_text())["command"]
    assert [line.split()[:2] for line in command.splitlines()] == [
        ["posenc", "report"], ["posenc", "compare"], ["posenc", "compare"]
    ]  # fmt: skip
    # A joined report is a study that joins.
    again = joined.join([joined.read(folders / name) for name in ("both", "one")])[1]
    assert [r["run"] for r in again] == [r["run"] for r in joined.read(made / "all").records]
    assert "nope" in shown


def config(**changes):
    return {"study": lambda summary: summary["config"].update(changes)}


def of_text(**changes):
    return {"study": lambda summary: summary["tasks"]["text"]["recipe"].update(changes)}


def versions(**changes):
    named = {name.replace("_", " "): value for name, value in changes.items()}
    return {"study": lambda summary: summary["versions"].update(named)}


REFUSED = {
    "backend differs": config(backend="mlx"),
    "learning_rate (of the task text) differs": of_text(learning_rate=0.5),
    "eval_lens (of the task text) differs": {
        "study": lambda summary: summary["tasks"]["text"].update(eval_lens=[8])
    },
    "sweep differs": config(sweep=["learning-rate"]),
    "train_len differs": config(train_len=[8, 16]),
    "version of posenc differs": versions(posenc="9.9"),
    "version of posenc files differs": versions(posenc_files="0123456789abcdef"),
    "version of numpy differs": versions(numpy="1.0"),
    "text differs": {"study": lambda summary: summary["corpus"].update(sha256="0" * 64)},
    "device differs": {"record": lambda record: record["versions"].update(device="An H100")},
    "rope, seed 0, of the task text, has other results": {
        "record": lambda record: record["loss"].update({"8": 1.0})
    },
    "rope, seed 0, of the task text, is another run": {
        "record": lambda record: record.update(run="0" * 64)
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_comparable_is_refused_by_its_name(folders, capsys, message):
    edit(folders / "two", **REFUSED[message])
    status, error = report(folders, capsys)
    assert status == 2
    assert message in error
    assert all(str(folders / name) in error for name in ("one", "two"))
    assert not (folders / "both").exists()


def test_a_baseline_and_a_finished_run_win(folders, capsys):
    """One study may name the baseline, and a run that failed there may have succeeded here."""

    def fail(record):
        if record["scheme"] == "rope":
            record.update(status="failed", error="OSError: full")

    edit(folders / "one", record=fail)
    edit(folders / "two", **config(baseline="nope"))
    assert report(folders, capsys)[0] == 0
    both = joined.read(folders / "both")
    assert both.summary["config"]["baseline"] == "nope"
    assert [r["status"] for r in both.records] == ["ok"] * 3


@pytest.mark.long
def test_studies_of_different_tasks_are_joined(made, folders):
    """Each task has its own recipe, so options that follow from it may differ."""
    study = Study(
        task="copy", schemes=("alibi", "fire"), steps=2, seeds=1, layers=1, dim=8, heads=2,
        train_len=4, eval_lens=(4, 8), eval_windows=4, backend=BACKEND, out=str(folders / "copy"),
    )  # fmt: skip
    carry_out(study)
    parts = [joined.read(folders / name) for name in ("one", "copy")]
    summary, records = joined.join(parts)
    assert list(summary["tasks"]) == ["text", "copy"]
    assert summary["config"]["train_len"] is None
    assert [(r["task"], r["scheme"]) for r in records] == [
        ("text", "alibi"), ("text", "rope"), ("copy", "alibi"), ("copy", "fire")
    ]  # fmt: skip
    joined.report([str(part.folder) for part in parts], str(folders / "both"))
    assert {"task-copy.svg", "loss.svg"} <= {path.name for path in (folders / "both").iterdir()}


def test_folders_without_a_study_are_named(folders, capsys):
    assert report(folders, capsys, "--out", str(folders / "one"))[0] == 2
    status, shown = report(folders, capsys, "--out", str(folders / "one" / STUDY))
    assert status == 2
    assert "--out must be a folder, got" in shown
    with pytest.raises(FileNotFoundError, match=r"absent' holds no study: it has no study\.json"):
        joined.read(folders / "absent")
    (folders / "one" / joined.RESULTS).write_text("")
    with pytest.raises(ValueError, match="was edited since"):
        joined.read(folders / "one")
    (folders / "one" / STUDY).write_text('{"model": 1}')
    with pytest.raises(ValueError, match="is not that of a study"):
        joined.read(folders / "one")
