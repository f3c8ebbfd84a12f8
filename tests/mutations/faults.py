"""Known faults: each is a change of one place in a source file, which a test must notice.

``faults/posenc/attn/call.toml`` has those of ``posenc/attn/call.py``, a table for each:

=========  ==============================================================================
name       the table's own, short, in kebab case
``why``    what it does to a user, or who made it; issues of other libraries by number
``old``    text that occurs once in the source file
``new``    what takes its place
``tests``  what must notice it: a test file, and words that all occur in the id of a test
=========  ==============================================================================
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "faults"
_KEYS = {"why", "old", "new", "tests"}


@dataclass(frozen=True)
class Fault:
    """One mistake to plant in ``file``, a path from the root of the repository."""

    name: str
    file: str
    why: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(folder: Path = FOLDER) -> list[Fault]:
    """All faults, in the order of their files.

    Raises
    ------
    ValueError
        A file of faults has no source file; a fault has a wrong key or the name of another, or its
        text is not once in the source file.
    """
    found: dict[str, Fault] = {}
    for path in sorted(folder.rglob("*.toml")):
        source = path.relative_to(folder).with_suffix(".py").as_posix()
        if not (ROOT / source).is_file():
            raise ValueError(f"{path.relative_to(folder)}: there is no {source}")
        text = (ROOT / source).read_text(encoding="utf-8")
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
            if set(table) != _KEYS:
                raise ValueError(f"{source}, {name}: its keys are {sorted(table)}, not {_KEYS}")
            if name in found:
                raise ValueError(f"{name} is a fault of {found[name].file} and of {source}")
            if text.count(table["old"]) != 1:
                count = text.count(table["old"])
                raise ValueError(f"{source}, {name}: its text is {count} times there, not once")
            tests = tuple(table.pop("tests"))
            found[name] = Fault(name, source, **table, tests=tests)
    return list(found.values())


FAULTS = read()
