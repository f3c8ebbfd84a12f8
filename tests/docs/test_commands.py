"""Every command of posenc that a page shows is one that its parser takes."""

import re
import shlex
from pathlib import Path

import pytest

from posenc.cli.main import parsers_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text):
    """The words of each command after ``posenc``, in blocks of a shell."""
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words:
                end = next((n for n, w in enumerate(words) if w in ("&&", ">", "|")), len(words))
                part, words = words[:end], words[end + 1 :]
                if part and Path(part[0]).name == "posenc":
                    yield part[1:]


SHOWN = {
    f"{page.name}: {' '.join(words)}": words
    for page in PAGES
    for words in commands(page.read_text())
}


@pytest.mark.parametrize("words", SHOWN.values(), ids=SHOWN)
def test_a_command_that_a_page_shows_is_taken(words):
    parser, _ = parsers_of(tuple(words[:1]))
    _, unknown = parser.parse_known_args(words)
    assert not unknown


def test_pages_show_commands():
    assert len(SHOWN) > 40
    assert {words[0] for words in SHOWN.values()} >= {
        "compare",
        "audit",
        "show",
        "probe",
        "vectors",
    }
