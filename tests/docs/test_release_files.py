"""What is said in two places about versions, linters and files is the same in both."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import posenc

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def lowest(package):
    """The bound in pyproject.toml, of posenc itself or of the extra with the package's name."""
    extra = PROJECT["optional-dependencies"].get(package, ())
    (bound,) = {
        match[1]
        for line in [*PROJECT["dependencies"], *extra]
        if (match := re.fullmatch(rf"{package}>=([\d.]+)", line))
    }
    return bound


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    home = ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{posenc.__version__}"' in home.read_text(encoding="utf-8")
    assert not re.search(r"^version:", text("CITATION.cff"), re.MULTILINE)


def test_supported_versions_are_those_of_pyproject():
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", text("CONTRIBUTING.md"), re.MULTILINE))
    bounds = {name: lowest(name.lower()) for name in ("NumPy", "JAX")}
    bounds |= {"PyTorch": lowest("torch"), "Python": PROJECT["requires-python"].removeprefix(">=")}
    assert rows == bounds


def test_every_python_of_a_classifier_is_in_the_workflow():
    found = re.search(r"^ +python: (\[.*\])$", text(".github/workflows/tests.yml"), re.MULTILINE)
    tried = re.findall(r"3\.\d+", found[1])
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert claimed
    assert set(claimed) <= set(tried)
    assert claimed[0] == PROJECT["requires-python"].removeprefix(">=")


def test_hooks_are_the_linters_of_continuous_integration():
    def linters(name):
        return set(re.findall(r"\.venv/bin/(ruff \w+|mypy)", text(name)))

    hooks, ci = linters(".pre-commit-config.yaml"), linters(".ci/run")
    assert hooks == ci
    assert ci


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_what_it_uses(workflow):
    uses = re.findall(r"uses: (\S+)", workflow.read_text(encoding="utf-8"))
    assert uses
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used) for used in uses)


def test_a_release_runs_what_exists():
    scripts = re.findall(r"run: (\.ci/\S+)", text(".github/workflows/release.yml"))
    assert set(scripts) == {".ci/release-check"}
    assert (ROOT / scripts[0]).is_file()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_pages_name_files_that_exist(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text(page))
    commands = re.findall(r"(?<![\w/])((?:tests|\.ci|\.github|posenc)/[\w./-]+\w)`", text(page))
    for name in [*links, *commands]:
        assert (ROOT / name).exists(), name
