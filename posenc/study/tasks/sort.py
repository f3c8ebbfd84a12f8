"""Sort: repeat symbols in their order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posenc.contract.fields import Count
from posenc.study.tasks.prompts import Prompt
from posenc.study.tasks.task import Integers


@dataclass(frozen=True)
class Sort(
    Prompt, kind="separating", varied=True, solved_at=0.95,
    paper="Kazemnejad et al. 2023, arXiv 2305.19466",
    settings={"train_len": 16, "steps": 800},
):  # fmt: skip
    """Answer with the symbols of the prompt, the smallest first; no symbol occurs twice.

    ``symbols`` must be well above the longest size: if most symbols occur, the answer is nearly
    always the same.
    """

    symbols: Count = 128

    def answer(self, x: Integers) -> Integers:
        return np.sort(x, axis=1)
