"""What the README, the pages and the examples show runs as it stands."""

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
PAGES = ["README.md", "docs/pytorch.md", "docs/jax.md", "docs/tokens.md"]
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]
DOCS = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# A compiler for ten seconds or most schemes, several processes, three trainings, studies.
SLOW = ("ablation", "ring_attention", "kv_cache", "context_parallel", "hf_ablation",
        "study_equinox", "study_flax", "study_hf", "study_nanogpt")  # fmt: skip
OPTIONAL = ("equinox", "flax", "keras", "transformers")


def missing(text):
    needed = {n for n in ("torch", "jax") if re.search(rf"^import {n}$", text, re.MULTILINE)}
    needed_too = [n for n in OPTIONAL if re.search(rf"^(from|import) {n}\b", text, re.MULTILINE)]
    if absent := [name for name in needed_too if not find_spec(name)]:
        return absent
    return [name for name in needed if not require(name)]


@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(BLOCKS)]
)
def test_python_blocks_run(page, block, capsys):
    if missing(block):
        pytest.skip(f"not installed: {missing(block)}")
    exec(compile(block, page, "exec"), {"__name__": "page"})
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


@pytest.mark.parametrize("page", ["README.md", "docs/systems.md"])
def test_lists_of_schemes_name_the_catalogue(page):
    written = re.findall(r"[\w/]+", " ".join(re.findall(r"`([^`]*)`", (ROOT / page).read_text())))
    assert not set(posenc.catalogue()) - set(written)


@pytest.mark.parametrize("page", [Path("README.md"), *DOCS], ids=str)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    own = [link for link in links if "://" not in link]
    assert not [link for link in own if not (ROOT / page.parent / link).exists()]


def test_the_readme_is_two_screens():
    text = (ROOT / "README.md").read_text()
    prose = re.sub(r"```.*?```|^\|.*?$|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 600
    assert len(text.splitlines()) <= 100


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
    names = ("docs/compare.md", "docs/get_started.md")
    page, started = ((ROOT / name).read_text() for name in names)
    tables = page.split("## With ")[1].split("### T5 at the learning rate of the other weights")
    ends = [
        re.search(r"^\| t5 \|.* ([\d.]+ ± [\d.]+) \|$", part, re.MULTILINE)[1] for part in tables
    ]
    assert f"T5 ends at {ends[1]} instead of {ends[0]} at 1024" in started
    assert "max_distance=64" in page
