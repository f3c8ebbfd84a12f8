"""Labels of tasks: names, options, classes of other packages, and what is said of wrong ones."""

from __future__ import annotations

import numpy as np
import pytest

from posenc.study.tasks import catalogue
from posenc.study.tasks.catalogue import ALL, expand, make_task, task_classes
from posenc.study.tasks.copy import Copy
from posenc.study.tasks.sort import Sort

OWN = """
from dataclasses import dataclass
from posenc.study import Task

class Melting(Task):
    symbols: int = 3

@dataclass(frozen=True)
class Strange(Task, kind="strange"):
    pass

@dataclass(frozen=True)
class Empty(Task):
    pass
"""


@pytest.mark.parametrize(
    ("label", "size", "said"),
    [
        ("copi", 8, r"unknown task 'copi' \(did you mean 'copy'\?\); accepted: .*all; your own is"),
        ("copy:symbol=3", 8, r"'copy' has no option 'symbol' \(did you mean 'symbols'\?\)"),
        ("text:corpus=1", 8, "'text' has no option 'corpus'; accepted: none"),
        ("copy:symbols=0", 8, "symbols must be at least 1, got 0"),
        ("copy:symbols=many", 8, "symbols must be an integer, got 'many'"),
        ("passkey:shared=1", 8, "shared must be True or False, got 1"),
        ("copy:symbols=8", 9, "symbols must be at least 9, as many as an example has, got 8"),
        ("indirect_indexing:characters=8", 9, "characters must be at least 9, .* got 8"),
        ("copy", 1, "sizes must be at least 2, got 1"),
        ("flip_flop", 7, "sizes must be even, instruction and bit in turn, got 7"),
        ("flip_flop:ignore=1.0", 8, r"ignore must be below 1, got 1\.0"),
        ("frequent_words:words=1", 8, "words must be at least 2, got 1"),
        ("mqar:pairs=17", 32, "pairs must be at most keys=16, got 17"),
        ("mqar:tokens_per_pair=3", 32, "tokens_per_pair must be 1 or 2, got 3"),
        ("mqar:tokens_per_pair=2", 31, "sizes must be at least 32, got 31"),
        ("association:facts=9", 32, "facts must be at most towns=8, got 9"),
        ("variable_tracking:variables=17", 32, "variables must be at most names=16, got 17"),
        ("last_value:active=17", 32, "active must be at most keys=16, got 17"),
        ("state_tracking:things=4", 8, "things must be 2 or 3, got 4"),
        ("copy+sort", 8, r"'copy\+sort': accepted: name or name:option=value"),
        ("copy@3", 8, "'copy@3': accepted: name or name:option=value"),
        ("copy~sort", 8, "'copy~sort': accepted: name or name:option=value"),
        ("nowhere.Copy", 8, r"unknown task 'nowhere\.Copy': No module named 'nowhere'"),
        ("posenc.NoPE", 8, r"'posenc\.NoPE' is no class that inherits posenc\.study\.Task"),
        ("own_tasks.Melting", 8, "class Melting is no frozen dataclass; write @dataclass"),
        ("own_tasks.Strange", 8, "kind must be one of .* got 'strange'"),
        ("own_tasks.Empty", 8, "class Empty has no method draw"),
    ],
)
def test_errors_name_the_value_and_what_is_accepted(label, size, said, tmp_path, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=said):
        make_task(label).draw(np.random.default_rng(0), size, 1)


class Entry:
    """An entry point."""

    def __init__(self, name, found):
        self.name, self.value, self._found = name, f"module:{name}", found

    def load(self):
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def test_other_packages_add_tasks(monkeypatch):
    found = [Entry("empty", Sort), Entry("copy", Sort), Entry("broken", OSError("no file"))]
    monkeypatch.setattr(catalogue, "entry_points", lambda group: found)
    with pytest.warns(UserWarning, match="module:") as warned:
        classes = task_classes()
    assert [str(one.message) for one in warned] == [
        "posenc.tasks: module:copy takes the name 'copy'",
        "posenc.tasks: cannot load module:broken: OSError('no file')",
    ]
    assert classes["empty"] is Sort
    assert classes["copy"] is Copy


def test_all_stands_for_the_tasks_that_are_not_named():
    every = expand([ALL])
    assert set(task_classes()) <= set(every)
    assert expand(["sort", ALL]) == ("sort", *(label for label in every if label != "sort"))
    assert expand(["copy", "sort"]) == ("copy", "sort")
