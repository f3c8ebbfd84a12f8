"""Tasks in ``posenc list`` and ``posenc show``."""

from __future__ import annotations

import itertools
import re

import pytest

from posenc.cli.main import main
from posenc.cli.pages import title_of
from posenc.study.recipe import Recipe
from posenc.study.tasks.catalogue import ALL, TEXT, expand, make_task, task_classes

LABELS = [label for label in (*expand([ALL]), "mqar:tokens_per_pair=2") if label != TEXT]


@pytest.fixture(autouse=True)
def narrow(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


def lines_of(words, capsys):
    assert main(words.split()) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_the_list_ends_with_the_tasks(capsys):
    lines = lines_of("list", capsys)
    (head,) = (n for n, line in enumerate(lines) if re.match("task +kind +paper", line))
    rows = {line.split()[0]: line for line in lines[head + 2 :] if line[:1].islower()}
    assert rows.keys() == task_classes().keys()
    kind, paper = (lines[head].index(word) for word in ("kind", "paper"))
    text = " ".join(" ".join(lines[head:]).split())
    for name, each in task_classes().items():
        assert rows[name][kind:].startswith(each.kind)
        assert rows[name][paper:] == each.paper.replace("arXiv ", "")
        assert title_of(each).replace("`", "") in text


@pytest.mark.parametrize("name", task_classes())
def test_the_page_of_a_task(name, capsys):
    lines = lines_of(f"list {name}", capsys)
    kind, task, recipe = task_classes()[name], make_task(name), Recipe(task=name)
    text = " ".join(" ".join(lines).split())
    assert lines[0] == f"{name} = {kind.__module__}.{kind.__qualname__}"
    assert title_of(kind).replace("`", "") in text
    assert f"kind {kind.kind}" in text
    assert text.count(kind.paper) == 1 or name == TEXT
    for option in task.options():
        assert re.search(rf"^  {option}  \w+, default {getattr(task, option)!r}$\n      \w",
                         "\n".join(lines), re.MULTILINE)  # fmt: skip
    for setting in task.defaults().keys() - {"multiples"}:
        value, option = getattr(recipe, setting), setting.replace("_", "-")
        shown = value if isinstance(value, str) else f"{value:g}"
        assert (f"--no-{option}" if value is False else f"--{option} {shown}") in text
    assert f"--eval-lens {' '.join(map(str, recipe.eval_lens))} --steps" in text
    (label,) = re.findall(rf"posenc compare --task ({name}\S*)", text)
    assert type(make_task(label)) is kind


def test_the_page_shows_another_form_where_there_is_one(capsys):
    assert lines_of("list passkey", capsys)[-1].endswith("--task passkey:shared=True")
    of_two = lines_of("list rope copy", capsys)
    assert {"options:", "defaults of posenc compare:"} <= set(of_two)


@pytest.mark.parametrize("label", LABELS)
def test_examples_have_answers_below_what_is_read(label, capsys):
    title, *lines = lines_of(f"show {label}", capsys)
    task = make_task(label)
    size = int(re.fullmatch(rf"{re.escape(label)}, size (\d+)", title)[1])
    read, answers, above = [0], 0, set()
    for line in lines:
        row, *words = line.split() or [""]
        starts = {found.start() for found in re.finditer(r"\S+", line)}
        read += [0] if not row else []
        if row == "reads":
            above, read[-1] = starts, read[-1] + len(words)
        elif row == "answers":
            answers += len(words)
            assert starts <= above
    assert read[1:] == [task.tokens(size)] * 3
    assert answers >= 3


def test_the_groups_of_answers(capsys):
    lines = lines_of("show variable_tracking", capsys)
    below = [(one, other) for one, other in itertools.pairwise(lines) if "links" in other]
    assert below
    for answers, links in below:
        assert answers.startswith("answers")
        assert len(answers.split()) == len(links.split())


def test_examples_of_one_size(capsys):
    lines = lines_of("show copy:symbols=9 --length 3", capsys)
    (read, answers), count = lines[2:4], len(lines)
    assert re.fullmatch(r"reads    #  \d  \d  \d  :  \d  \d  \d", read)
    assert read.split()[2:5] == read.split()[6:] == answers.split()[1:4]
    assert answers.split()[4:] == ["#"]
    assert answers.index(read.split()[2]) == read.index(":")
    assert count == 10


def test_text_is_shown_with_the_next_byte_below(capsys):
    lines = lines_of("show text --length 6", capsys)
    assert len(lines) == 10
    for read, answers in zip(lines[2::3], lines[3::3], strict=True):
        assert read.split()[2:] == answers.split()[1:-1]


def test_a_task_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "shown_tasks.py").write_text(
        "from posenc.study.tasks.copy import Copy as Own\nfrom posenc import NoPE as Scheme\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert lines_of("show shown_tasks.Own --length 3", capsys)[0] == "shown_tasks.Own, size 3"
    assert lines_of("list shown_tasks.Own", capsys)[0].startswith("shown_tasks.Own = ")
    assert "relative" in " ".join(lines_of("list shown_tasks.Scheme", capsys))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("show copi", "unknown task 'copi' (did you mean 'copy'?); accepted: "),
        ("list pass_key", "unknown task 'pass_key' (did you mean 'passkey'?)"),
        ("show rop", "unknown scheme 'rop' (did you mean 'rope'?)"),
        ("show copy --length 81", "task 'copy', length 81: symbols must be at least 81"),
        ("show flip_flop --length 7", "task 'flip_flop', length 7: sizes must be even"),
        ("show mqar --length 0", "task 'mqar', length 0: length must be at least 1, got 0"),
        ("show copy --out copy.png", "--out is for pictures of schemes; 'copy' is a task"),
        ("show copy --heads 2", "--heads is for pictures of schemes; 'copy' is a task"),
        ("show copy:symbol=3", "task 'copy' has no option 'symbol' (did you mean 'symbols'?)"),
        ("list copy+sort", "unknown scheme 'copy+sort'"),
        ("show nowhere.Task", "No module named 'nowhere'"),
    ],
)
def test_errors(words, said, capsys):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
