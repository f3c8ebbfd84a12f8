"""``docs/design.md``: its rooms import as it says, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import posenc

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
SOURCES = ("posenc", "backends", "tests/support", "tests", "benchmarks")
# For a type checker, or in a function that is called later.
UP = {("schemes", "makers"), ("testing", "audit"), ("study", "probe")}


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rooms():
    """The rooms of the core in the order of the page."""
    table = section("Rooms").split("| room of `posenc/` |")[1].split("\n\n")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    return [name.removesuffix(".py").rstrip("/") for r in rows for name in re.findall("`(.+?)`", r)]


def imported(file):
    """The rooms in the lines ``from posenc.room`` and ``import posenc.room`` of a file."""
    return re.findall(r"^\s*(?:from|import) posenc\.(\w+)", file.read_text("utf-8"), re.MULTILINE)


def test_a_room_imports_those_above_it():
    order = rooms()
    names = {path.stem for path in (ROOT / "posenc").iterdir() if path.suffix in ("", ".py")}
    assert set(order) == {name for name in names if not name.startswith("_")}
    broken = set()
    for room in order:
        at = ROOT / "posenc" / room
        for file in at.rglob("*.py") if at.is_dir() else [at.with_suffix(".py")]:
            for other in {*imported(file)} - {room}:
                if order.index(other) > order.index(room) and (room, other) not in UP:
                    broken.add((room, other, file.name))
    assert not broken


def test_a_file_holds_one_idea():
    (most,) = re.findall(r"no file of theirs has more than (\d+) lines", PAGE)
    files = [f for each in ("posenc", "backends") for f in (ROOT / each).rglob("*.py")]
    assert len(files) > 400
    lines = {f.relative_to(ROOT).as_posix(): len(f.read_text("utf-8").splitlines()) for f in files}
    assert not {name: count for name, count in lines.items() if count > int(most)}


def test_the_files_that_the_page_names_exist():
    paths = set(re.findall(r"`([\w./]+(?:\.py|/))`", PAGE)) - {"asv/", "earlier/"}
    assert len(paths) > 50
    inside = [f for each in SOURCES for f in (ROOT / each, *(ROOT / each).glob("**/"))]
    assert not [p for p in sorted(paths) if not any((f / p).exists() for f in (ROOT, *inside))]


def test_the_names_of_the_page_are_public():
    (row,) = re.findall(r"^\| `posenc` \| (.*) \|$", PAGE, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", row))
    schemes = {name for name in posenc.__all__ if name in posenc.schemes.__all__}
    assert named | schemes == set(posenc.__all__)
    modules = re.findall(r"^\| (`posenc.*?) \|", section("Public names"), re.MULTILINE)
    for module in re.findall(r"`(.*?)`", " ".join(modules)):
        at = ROOT / ("backends" if "_" in module else "") / module.replace(".", "/")
        assert at.is_dir() or at.with_suffix(".py").exists(), module


PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_land(page):
    for name, anchor in re.findall(r"\]\(([\w./-]*\.md)?(?:#([\w-]+))?\)", page.read_text("utf-8")):
        target = page.parent / name if name else page
        assert target.exists(), name
        titles = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, f"{name}#{anchor}"
