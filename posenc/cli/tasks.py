"""Tasks in ``posenc list`` and ``posenc show``: a table, a page of one task, its examples."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from posenc.cli.pages import docstring_texts, list_parameters, signature_of, title_of
from posenc.contract.checks import check_count
from posenc.makers import catalogue
from posenc.presets import PLANS
from posenc.study.corpus import standard_library
from posenc.study.tasks.catalogue import TEXT, imported, make_task, task_classes
from posenc.study.tasks.task import NO_ANSWER, Task

_EXAMPLES = 3
_LONGEST = 16  # size of an example, unless another is asked for
_GAP = "  "


def is_task(label: str) -> bool:
    """Whether a label means a task: its name is one, or is nearer to one than to a scheme."""
    name = label.partition(":")[0].strip()
    if set("+/~@") & set(name):  # joins schemes
        return False
    if "." in name:
        try:
            found = imported(name)
        except Exception:  # what is said of a scheme fits
            return False
        return isinstance(found, type) and issubclass(found, Task)
    tasks = task_classes()
    (near,) = difflib.get_close_matches(name, [*tasks, *catalogue(), *PLANS], n=1) or [""]
    return near in tasks


def table(width: int) -> str:
    """Name, kind and paper of all tasks in columns; below, first lines of their docstrings."""
    classes = task_classes()
    cells = [("task", "kind", "paper (arXiv)")]
    cells += [(n, each.kind, each.paper.replace("arXiv ", "")) for n, each in classes.items()]
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    indent = " " * (widths[0] + len(_GAP))
    head, *rows = (
        _GAP.join((f"{name:<{widths[0]}}", f"{kind:<{widths[1]}}", paper)).rstrip()
        for name, kind, paper in cells
    )
    lines = [head, "-" * width]
    for row, each in zip(rows, classes.values(), strict=True):
        title = title_of(each).replace("`", "")
        lines += [row] if len(row) <= width else textwrap.wrap(row, width, subsequent_indent=indent)
        lines += textwrap.wrap(title, width, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def page(label: str, width: int) -> str:
    """One task as text: its docstring, its facts, its options, and its settings of a study."""
    task, name = make_task(label), label.partition(":")[0].strip()
    kind = type(task)
    about = inspect.cleandoc(kind.__doc__ or "").replace("`", "").split("\n\nParameters\n")[0]
    options = [p for p in signature_of(kind).parameters.values() if p.name in task.options()]
    texts = docstring_texts(kind)
    lines = [" = ".join(dict.fromkeys((name, f"{kind.__module__}.{kind.__qualname__}")))]
    for paragraph in about.split("\n\n"):
        if paragraph.strip(". ") != kind.paper:  # it has a line of its own
            lines += [*textwrap.wrap(paragraph, width), ""]
    for fact, value in _facts(task):
        start = f"{fact:<8}{_GAP}"
        lines += textwrap.wrap(start + value, width, subsequent_indent=" " * len(start))
    lines += list_parameters("options", options, texts, width)
    lines += ["", "defaults of posenc compare:"]
    together = (setting.replace(" ", "\0").replace("-", "\1") for setting in _settings(task))
    wrapped = textwrap.wrap("  ".join(together), width, initial_indent="  ", subsequent_indent="  ")
    lines += [line.replace("\0", " ").replace("\1", "-") for line in wrapped]
    return "\n".join([*lines, "", *_example(name, options, width)])


def examples(label: str, size: int | None, width: int) -> str:
    """Three examples as text: what a model reads, and below each token what it must answer."""
    task = make_task(label)
    if label.partition(":")[0].strip() == TEXT:
        task = task.with_text(standard_library())
    if size is None:
        size = max(task.least_size, min(task.defaults()["train_len"], _LONGEST))
    try:
        task.check_size(check_count("length", size))
        drawn = task.draw(np.random.default_rng(0), size, _EXAMPLES)
    except ValueError as error:
        raise ValueError(f"task {label!r}, length {size}: {error}") from None
    groups = [None] * _EXAMPLES if drawn.groups is None else drawn.groups
    names, lines = task.group_names(), [f"{label}, size {size}"]
    for tokens, labels, group in zip(drawn.tokens, drawn.labels, groups, strict=True):
        asked = labels != NO_ANSWER
        rows = {
            "reads": [task.word(int(token)) for token in tokens],
            "answers": [
                task.word(int(n)) if yes else "" for n, yes in zip(labels, asked, strict=True)
            ],
        }
        if group is not None:
            of_answers = zip(group, asked, strict=True)
            rows[task.groups] = [names[int(n)] if yes else "" for n, yes in of_answers]
        lines += ["", *_aligned(rows, width)]
    return "\n".join(lines)


def _facts(task: Task) -> Iterator[tuple[str, str]]:
    yield "kind", task.kind
    if type(task).scores is Task.scores:  # or else its docstring says
        by_chance = f"{_words(task.score)}; {task.chance:.3g} by chance"
        yield "score", f"loss in {task.unit}" if task.score == "loss" else by_chance
        yield "solved", f"{_words(task.solved_by)} of at least {task.solved_at:g} in domain"
    drawn = "of each size up to the training length" if task.varied else "of the training length"
    yield "sizes", f"{task.least_size} or more; training examples are {drawn}"
    if task.running:
        yield "scored", "beyond the training length, at longer lengths"
    if others := [name for name in task.tests() if name]:
        yield "tests", f"as in training; {', '.join(others)}"
    if task.groups:
        yield "groups", f"{task.groups}: {', '.join(task.group_names())}"
    if task.paper:
        yield "paper", task.paper


def _settings(task: Task) -> Iterator[str]:
    """The task's own settings as options of the command line."""
    settings = task.defaults()
    multiples = settings.pop("multiples")
    lengths = " ".join(str(settings["train_len"] * n) for n in multiples)
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{option}"
        else:
            yield f"--{option} {value if isinstance(value, str) else format(value, 'g')}"
        if name == "train_len":
            yield f"--eval-lens {lengths}"


def _example(name: str, options: Sequence[inspect.Parameter], width: int) -> list[str]:
    """How to give an option on the command line; a flag is turned over, to show another form."""
    chosen = sorted(options, key=lambda p: not isinstance(p.default, bool))[:1]
    given = [
        f":{p.name}={(not p.default) if isinstance(p.default, bool) else p.default}" for p in chosen
    ]
    text = f"On the command line: posenc compare --task {''.join([name, *given])}"
    return textwrap.wrap(text, width)


def _words(score: str) -> str:
    return score.replace("_", " ")


def _aligned(rows: dict[str, list[str]], width: int) -> Iterator[str]:
    """Rows of cells under one another, in as many pieces as the width needs."""
    start = max(map(len, rows)) + len(_GAP)
    widths = [max(map(len, cells)) for cells in zip(*rows.values(), strict=True)]
    first = 0
    while first < len(widths):
        end, used = first + 1, start + widths[first]
        while end < len(widths) and used + len(_GAP) + widths[end] <= width:
            used, end = used + len(_GAP) + widths[end], end + 1
        for name, cells in rows.items():
            shown = _GAP.join(f"{cells[n]:<{widths[n]}}" for n in range(first, end))
            if shown.strip():
                yield f"{name:<{start}}{shown}".rstrip()
        first = end
