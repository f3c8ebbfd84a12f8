"""``docs/own_models.md``: its files and its script run in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks_installed import require
from sample import long

from posenc.study.tasks import catalogue

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_models.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
FILES = {name: text for _, text in BLOCKS for name in re.findall(r"\A# (\w+\.py)\n", text)}
(SCRIPT,) = (text for kind, text in BLOCKS if kind == "python" and text not in FILES.values())
(COMMAND,) = (text for kind, text in BLOCKS if kind == "sh")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("own_models")
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "script.py").write_text(SCRIPT)
    return made


@long
@pytest.mark.skipif(not require("torch"), reason="needs torch")
@pytest.mark.parametrize("words", [["script.py"], ["-m", *shlex.split(COMMAND)]], ids=len)
def test_what_the_page_runs(words, folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "alibi" in done.stdout


def test_the_stream_of_the_page_is_a_task(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    task = catalogue.make_task("stream.Stream")
    tokens, labels, _ = task.draw(np.random.default_rng(0), 9, 4)
    assert np.array_equal(tokens[:, 1:], labels[:, :-1])
    assert labels.shape == (4, 9)
    assert labels.max() < task.vocabulary


def test_the_page_names_files_that_exist():
    links = re.findall(r"\]\(([^)#]*)\)", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    links = [link for link in links if "." in link]
    assert not [link for link in links if not (ROOT / "docs" / link).exists()]
