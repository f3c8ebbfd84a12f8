"""``docs/add_a_scheme.md``, executed from top to bottom in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks_installed import require
from sample import exhaustive, long

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add_a_scheme.md").read_text()
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", PAGE, re.DOTALL)
FILES = {  # blocks that begin with the name of a file are that file
    name: text for kind, text in BLOCKS for name in re.findall(r"\A# (\w+\.py)\n", text)
}
STEPS = [(kind, text) for kind, text in BLOCKS if text not in FILES.values()]

pytestmark = pytest.mark.skipif(
    not (require("torch") and require("jax")), reason="the page uses both torch and jax"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Nothing but the page's own files: the scheme lies outside of the package."""
    made = tmp_path_factory.mktemp("add_a_scheme")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


def run(step, folder, **changes):
    kind, text = step
    bin = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
        "POSENC": str(ROOT),
        "HOME": str(folder),  # where asv keeps what it knows of the machine
    }
    environment.pop("PYTEST_ADDOPTS", None)
    environment |= changes
    command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-euc", text]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def steps():
    for step in STEPS:
        last = step[1].strip().splitlines()[-1]
        # Two minutes of all laws, which the page's own test file tries too, one by one.
        whole = last.startswith("check_scheme(") and "frameworks=" not in last
        yield pytest.param(step, id=last, marks=exhaustive if whole else long)


@pytest.mark.parametrize("step", list(steps()))
def test_a_step_of_the_page(step, folder):
    if "asv" in step[1] and not require("asv"):
        pytest.skip("asv is not installed")
    done = run(step, folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "failed" not in done.stdout


def test_the_error_that_the_page_shows(folder):
    text = (folder / "kerple.py").read_text().replace("relative=True, ", "")
    code = f"{text}\nfrom posenc.testing import check_scheme\n"
    code += "check_scheme(KerpleLog(num_heads=4), frameworks=['numpy'])"
    found = run(("python", code), folder).stderr
    (shown,) = re.findall(r"```\n(BrokenLawError: .*?)```", PAGE, re.DOTALL)
    assert shown in found


def test_the_scheme_takes_about_forty_lines():
    assert sum(len(text.splitlines()) for text in FILES.values()) <= 45


def test_a_benchmark_without_a_clone_says_what_is_missing(folder):
    (step,) = (step for step in STEPS if "asv" in step[1])
    done = run(step, folder, POSENC="")
    assert done.returncode != 0
    assert done.stderr.strip().endswith("POSENC: the folder of a clone")


def test_a_fact_in_place_of_a_field_is_an_error_that_names_the_file(folder):
    text = (folder / "kerple.py").read_text().replace("relative=True, ", "")
    text = text.replace("    num_heads", "    relative: bool = True\n    num_heads")
    (folder / "field.py").write_text(text)
    done = run(("sh", "posenc show field.KerpleLog"), folder)
    assert done.returncode == 2
    assert "cannot import 'field': TypeError: class KerpleLog: relative is written" in done.stderr


def test_an_edited_scheme_is_another_one(folder, monkeypatch):
    from posenc.schemes import make
    from posenc.study.source import source_digest

    monkeypatch.syspath_prepend(str(folder))
    sizes = {"num_heads": 2, "head_dim": 8, "max_len": 8}
    before = source_digest([make("kerple.KerpleLog", **sizes)])
    file = folder / "kerple.py"
    text = file.read_text()
    try:
        file.write_text(f"{text}# edited\n")
        assert source_digest([make("kerple.KerpleLog", **sizes)]) != before
    finally:
        file.write_text(text)
    assert source_digest([make("rope", **sizes)]) == ""
