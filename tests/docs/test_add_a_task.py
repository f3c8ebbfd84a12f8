"""``docs/add_a_task.md``, executed from top to bottom in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from frameworks_installed import require
from sample import long

from posenc.study import Recipe, Task
from posenc.study.tasks import catalogue

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add_a_task.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
((NAME, FILE),) = (  # the block that begins with the name of a file is that file
    (name, text) for _, text in BLOCKS for name in re.findall(r"\A# (\w+\.py)\n", text)
)
STEPS = [(kind, text) for kind, text in BLOCKS if kind in ("python", "sh") and text != FILE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Nothing but the page's own file: the task lies outside of the package."""
    made = tmp_path_factory.mktemp("add_a_task")
    (made / NAME).write_text(FILE)
    return made


def run(kind, text, folder):
    bin = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-euc", text]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def steps():
    for kind, text in STEPS:
        trains = "compare" in text
        yield pytest.param(kind, text, id=text.splitlines()[-1], marks=[long] * trains)


@pytest.mark.parametrize(("kind", "text"), list(steps()))
def test_a_step_of_the_page(kind, text, folder):
    if "compare" in text and not require("jax"):
        pytest.skip("needs jax")
    done = run(kind, text, folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for shown in (block for name, block in BLOCKS if name == "" and "show" in text):
        assert shown in done.stdout
    if "compare" in text:
        written = {path.name for path in (folder / "posenc-compare").iterdir()}
        assert {"task-before-before.pdf", "tasks.csv", "report.html"} <= written


def test_the_task_takes_about_thirty_lines():
    assert sum(bool(line.strip()) for line in FILE.splitlines()) <= 36


def test_the_page_names_all_facts_and_settings(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    task = catalogue.make_task("before.Before")
    assert set(Task._FACTS) <= set(re.findall(r"`(\w+)`", PAGE))
    assert replace(task, back=7).least_size == 8
    assert Recipe(task="before.Before").eval_lens == (32, 64, 128)
    assert f'entry-points."{catalogue._GROUP}"' in PAGE
