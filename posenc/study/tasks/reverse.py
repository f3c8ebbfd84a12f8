"""Reverse: repeat symbols backwards."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.study.tasks.prompts import Prompt
from posenc.study.tasks.task import Integers


@dataclass(frozen=True)
class Reverse(
    Prompt, kind="separating", varied=True,
    paper="Kazemnejad et al. 2023, arXiv 2305.19466",
    settings={"train_len": 16, "steps": 1200},
):  # fmt: skip
    """Answer with the symbols of the prompt, the last one first; no symbol occurs twice."""

    def answer(self, x: Integers) -> Integers:
        return x[:, ::-1]
