"""What the records of a task say of each scheme: how many seeds solved it, and what they score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np

from posenc.study.effective import RULER, Effective, effective_length
from posenc.study.results import before_finetuning
from posenc.study.statistics import BEFORE, Records, Summary

TEXT = "text"
ABOVE_CHANCE = 0.1  # less at the training length is no score that a longer one could hold
_PASSED = 0.9  # beyond the training length, a score that a task that must fail does not allow


@dataclass(frozen=True)
class Outcome:
    """One scheme on one task, over its seeds.

    ``about`` is what the summary says of the task. ``before_finetuning``: the scores are those
    before the fine-tuning of another outcome with the same records. Seeds that solved the task in
    training and seeds that did not are never averaged: ``counted`` are the former, or all where
    none solved it.
    """

    scheme: str
    about: Mapping[str, Any]
    records: Records
    failed: int
    before_finetuning: bool = False

    @property
    def label(self) -> str:
        """The name of its row and line."""
        return f"{self.scheme}{BEFORE}" if self.before_finetuning else self.scheme

    @property
    def solved(self) -> int:
        """Seeds that solved the task."""
        return sum(record["solved"] is not None for record in self.records)

    @property
    def counted(self) -> Records:
        """The seeds whose scores are shown."""
        return [r for r in self.records if r["solved"] is not None] or self.records

    def scores(self, length: int, test: str = "", score: str | None = None) -> list[float]:
        """The scores of the counted seeds at a length."""
        cells = (r["scores"].get(test, {}).get(str(length), {}) for r in self.counted)
        found = (cell.get(score or self.about["score"]) for cell in cells)
        return [value for value in found if value is not None]

    def score(self, length: int, test: str = "") -> float:
        """Their mean; NaN for none."""
        found = self.scores(length, test)
        return mean(found) if found else math.nan

    @property
    def lower(self) -> bool:
        """Whether a lower score is better: it is a loss."""
        return bool(self.about["score"] == "loss")

    def costs(self, length: int) -> list[float]:
        """The scores, with their signs turned where more is better."""
        return [value if self.lower else -value for value in self.scores(length)]

    def cost(self, length: int) -> float:
        """Their mean; infinite for none, which is then the last."""
        found = self.costs(length)
        return mean(found) if found else math.inf

    def groups(self, length: int, test: str = "") -> list[float]:
        """Token accuracy of each group over the counted seeds; NaN for groups without answers."""
        cells = [r["scores"].get(test, {}).get(str(length), {}) for r in self.counted]
        pairs = np.array([cell["groups"] for cell in cells if "groups" in cell])
        if not pairs.size:
            return []
        right, asked = pairs.sum(axis=0).T
        return [float(a / b) if b else math.nan for a, b in zip(right, asked, strict=True)]

    def effective(self, own: bool) -> Effective | None:
        """The effective length: NoLiMa's, relative to its own score, or RULER's.

        None without scores, for RULER's of a loss, and for NoLiMa's where the own score is hardly
        above chance: every length would do.
        """
        trained = self.about["train_len"]
        if self.lower:
            if not own:
                return None
        elif own and not self.score(trained) >= self.about["chance"] + ABOVE_CHANCE:
            return None
        by_length = {}
        for length in self.about["eval_lens"]:
            cells = [r["scores"][""].get(str(length)) for r in self.counted]
            if length >= trained and all(cells):
                by_length[length] = [self._by_sequence(cell) for cell in cells if cell]
        by_length = {n: seeds for n, seeds in by_length.items() if all(s.size for s in seeds)}
        return effective_length(by_length, least=None if own else RULER, lower=self.lower)

    def _by_sequence(self, cell: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        right, asked = np.array(cell["right"]), np.array(cell["asked"])
        if self.lower:
            return np.asarray(np.array(cell["bits"]) / asked, dtype=np.float64)
        exact = self.about["score"] == "exact_match"
        return np.asarray(right == asked if exact else right / asked, dtype=np.float64)

    @property
    def leaks(self) -> bool:
        """Whether it passes where no model can: then the harness gives the answer away."""
        beyond = [n for n in self.about["eval_lens"] if n >= 2 * self.about["train_len"]]
        return self.must_fail and any(
            record["scores"][""].get(str(n), {}).get("exact_match", 0) >= _PASSED
            for record in self.records
            for n in beyond
        )

    @property
    def must_fail(self) -> bool:
        """Whether theory says that it fails beyond the training length."""
        return bool(self.about["must_fail"].get(self.scheme))


def score_name(about: Mapping[str, Any]) -> str:
    """What the score of a task is called, and which way is better."""
    if about["score"] == "loss":
        return f"{about['unit']}, lower is better"
    return f"{about['score'].replace('_', ' ')}, higher is better"


def tasks(summary: Summary) -> dict[str, Mapping[str, Any]]:
    """The tasks of a study without text, by label, and what the summary says of them."""
    every: Mapping[str, Mapping[str, Any]] = summary.get("tasks", {})
    return {label: about for label, about in every.items() if not _is_text(about)}


def has_text(summary: Summary) -> bool:
    """Whether a study trains on text."""
    return bool(texts(summary, []))


def of_task(records: Records, about: Mapping[str, Any]) -> Records:
    """The records of a task at one training length; ``about`` is what the summary says of it."""
    named = about["recipe"]["task"], about["recipe"]["train_len"]
    return [r for r in records if (r.get("task", TEXT), r.get("train_len")) == named]


def texts(summary: Summary, records: Records) -> list[tuple[Summary, Records]]:
    """The study as if text were its only task, once for each training length; none without text."""
    if "tasks" not in summary:
        return [(summary, [r for r in records if r.get("task", TEXT) == TEXT])]
    every = (about for about in summary["tasks"].values() if _is_text(about))
    return [
        (
            {**summary, "config": {**summary["config"], **about["recipe"]}},
            of_task(records, about),
        )
        for about in every
    ]


def text_records(summary: Summary, records: Records) -> Records:
    """The records of text, at all training lengths."""
    return [record for _, own in texts(summary, records) for record in own]


def _is_text(about: Mapping[str, Any]) -> bool:
    return bool(about["recipe"]["task"] == TEXT)


def outcomes(about: Mapping[str, Any], records: Records) -> list[Outcome]:
    """One per scheme that has a record, the best at the longest length first.

    After a scheme that was fine-tuned comes its outcome before.
    """
    own = of_task(records, about)
    found = []
    for scheme in dict.fromkeys(record["scheme"] for record in own):
        of_scheme = [record for record in own if record["scheme"] == scheme]
        ok = [record for record in of_scheme if record["status"] == "ok"]
        found.append(Outcome(scheme, about, ok, len(of_scheme) - len(ok)))
    lengths = list(reversed(about["eval_lens"]))
    found.sort(key=lambda one: [one.cost(n) for n in lengths])
    return [each for one in found for each in _with_both(one)]


def _with_both(one: Outcome) -> list[Outcome]:
    if not any("before" in record for record in one.records):
        return [one]
    return [
        one,
        replace(
            one,
            records=[before_finetuning(r) for r in one.records],
            failed=0,
            before_finetuning=True,
        ),
    ]


def finetuned_only(found: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes that are compared: without those before fine-tuning."""
    return [one for one in found if not one.before_finetuning]


def wilson(k: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of 95 % for ``k`` of ``n``; Wilson 1927, JASA 22."""
    if not n:
        return 0.0, 1.0
    share, square = k / n, z * z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def top_schemes(found: Sequence[Outcome], length: int) -> list[str]:
    """The schemes with the best mean at a length, as it is shown; none if there is only one."""
    shown = {one.scheme: round(one.cost(length), 3) for one in found if one.scores(length)}
    if len(shown) < 2:
        return []
    return [scheme for scheme, cost in shown.items() if cost == min(shown.values())]


def best(found: Sequence[Outcome], length: int) -> list[str]:
    """The best schemes at a length: the best mean, and those whose seeds overlap with its seeds."""
    ranked = sorted(found, key=lambda one: one.cost(length))
    if not ranked or not (first := ranked[0].costs(length)):
        return []
    return [one.scheme for one in ranked if min(one.costs(length), default=math.inf) <= max(first)]
