"""Unique copy: repeat symbols that are all different."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.study.tasks.prompts import Prompt
from posenc.study.tasks.task import Integers


@dataclass(frozen=True)
class Copy(
    Prompt, kind="separating", varied=True,
    paper="Zhou et al. 2023, arXiv 2310.16028",
    settings={"train_len": 16, "steps": 1500},
):  # fmt: skip
    """Answer with the symbols of the prompt, in their order; no symbol occurs twice.

    A model may look for the last symbol of its answer in the prompt and go on from there, or read
    the prompt by position.
    """

    def answer(self, x: Integers) -> Integers:
        return x
