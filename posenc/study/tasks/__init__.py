"""Tasks: what a model learns at one size and is tested on at others. One idea, one file."""

from posenc.study.tasks.task import KINDS, NO_ANSWER, Examples, Task

__all__ = ["KINDS", "NO_ANSWER", "Examples", "Task"]
