"""What the README and the examples show runs as it stands."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
from frameworks_installed import require
from sample import long

import posenc

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# A compiler for ten seconds or most schemes, several processes, three trainings, studies.
SLOW = ("ring_attention", "kv_cache", "context_parallel", "hf_ablation", "study_equinox",
        "study_flax", "study_hf", "study_nanogpt")  # fmt: skip
OPTIONAL = ("equinox", "flax", "transformers")


def missing(text):
    needed = {n for n in ("torch", "jax") if re.search(rf"^import {n}$", text, re.MULTILINE)}
    needed_too = [n for n in OPTIONAL if re.search(rf"^(from|import) {n}\b", text, re.MULTILINE)]
    if absent := [name for name in needed_too if not find_spec(name)]:
        return absent
    return [name for name in needed if not require(name)]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_of_the_readme_run(block, capsys):
    if missing(block):
        pytest.skip(f"not installed: {missing(block)}")
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert "Error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[long] * (path.stem in SLOW)) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_examples_run(path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(path.parent))  # as Python does with a script
    if missing(path.read_text()):
        pytest.skip(f"not installed: {missing(path.read_text())}")
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "posenc.positions",
        "posenc.positions.images",
        "posenc.schemes",
        "posenc.angles",
        "posenc.presets",
    ],
)
def test_examples_in_docstrings_hold(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_table_of_systems_names_the_catalogue_and_links_files():
    text = (ROOT / "README.md").read_text()
    section = text.split("\n## Schemes\n")[1].split("\n## ")[0]
    written = set(re.findall(r"[\w/]+", " ".join(re.findall(r"`([^`]*)`", section))))
    assert not set(posenc.catalogue()) - written
    absent = [link for link in re.findall(r"\]\(([^)]*)\)", section) if not (ROOT / link).exists()]
    assert not absent


def test_every_scheme_has_a_test_of_its_own():
    files = " ".join(path.stem for path in (ROOT / "tests" / "schemes").glob("*.py"))
    golden = (ROOT / "tests" / "core" / "test_schemes_golden.py").read_text()
    kinds = {inspect.unwrap(maker) for maker in posenc.catalogue().values()}
    modules = {kind.__module__.rpartition(".")[2]: kind.__name__ for kind in kinds}
    assert not {m for m, kind in modules.items() if f"test_{m}" not in files and kind not in golden}


def test_each_command_is_one_line():
    text = (ROOT / "README.md").read_text()
    ends = {"study": "posenc compare", "test": "pytest", "bench": "benchmarks/dashboard.py"}
    for command, end in ends.items():
        lines = [
            line
            for line in text.splitlines()
            if line.startswith("python3 -m venv") and f"[{command}]" in line
        ]
        assert len(lines) == 1
        assert lines[0].endswith(end)


def test_the_table_is_that_of_the_measured_page():
    page = runpy.run_path(str(ROOT / "docs" / "compare.py"))
    readme = (ROOT / "README.md").read_text()
    assert page["with_table"](readme, (ROOT / "docs" / "compare.md").read_text()) == readme
    assert "| alibi |" in readme


def test_numbers_in_the_text_are_those_of_the_measured_page():
    page, readme = ((ROOT / name).read_text() for name in ("docs/compare.md", "README.md"))
    tables = page.split("## With ")[1].split("### T5 at the learning rate of the other weights")
    ends = [
        re.search(r"^\| t5 \|.* ([\d.]+ ± [\d.]+) \|$", part, re.MULTILINE)[1] for part in tables
    ]
    assert f"T5 ends at {ends[1]} instead of {ends[0]} at 1024" in readme
    assert "max_distance=64" in page
