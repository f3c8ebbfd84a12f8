"""Differences and p values of a study as a CSV, for other programs; the report has them in words.

A row compares a scheme with the baseline at one length, or with itself at the training length.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from posenc.study.captions import PROTOCOLS
from posenc.study.differences import GROWTH, baseline, differences, end_lengths, growth
from posenc.study.outcomes import texts
from posenc.study.results import UNIT, worded
from posenc.study.statistics import Difference, Records, Summary, lengths

COLUMNS = (
    "protocol",  # a column of results.csv
    "scheme",
    "eval_len",
    "against",
    "against_len",
    "seeds",  # pairs with two finite losses
    "lost",  # pairs without
    "difference",  # mean over pairs
    "half_width",  # of the 95 % interval, not corrected
    "p",  # two-sided paired t test
    "p_holm",  # corrected over the schemes of the same protocol and lengths
    "verdict",
    "train_len",
    "loss_unit",
)


def comparisons_csv(summary: Summary, records: Records) -> str:
    """All comparisons at every evaluation length, one row each."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(summary, records))
    return file.getvalue()


def rows(summary: Summary, records: Records) -> Iterator[dict[str, Any]]:
    """Rows by ``COLUMNS``, for one training length after the other."""
    for own, of_text in texts(summary, records):
        trained = own["config"]["train_len"]
        common = {"train_len": trained, "loss_unit": worded(UNIT, of_text)}
        yield from ({**row, **common} for row in _rows(own, of_text))


def _rows(summary: Summary, records: Records) -> Iterator[dict[str, Any]]:
    """First against the baseline, length by length, then growth."""
    name = baseline(summary)
    for protocol in PROTOCOLS:
        for length in lengths(records, protocol):
            results = differences(summary, records, protocol, length)
            at = {"protocol": protocol, "eval_len": length, "against_len": length}
            yield from (
                _row(difference, {**at, "scheme": s, "against": name})
                for s, difference in results.items()
            )
    for protocol in PROTOCOLS:
        for scheme, difference in growth(summary, records, protocol).items():
            short, long = end_lengths(summary, records, protocol)
            at = {"protocol": protocol, "eval_len": long, "against_len": short}
            row = _row(difference, {**at, "scheme": scheme, "against": scheme})
            yield {**row, "verdict": GROWTH.get(difference.verdict, difference.verdict)}


def _row(difference: Difference, about: Mapping[str, Any]) -> dict[str, Any]:
    interval = difference.interval
    numbers = {
        "difference": interval.mean,
        "half_width": interval.half_width,
        "p": difference.uncorrected,
        "p_holm": difference.p,
    }
    known = {key: "" if value != value else value for key, value in numbers.items()}
    return {
        **about,
        **known,
        "seeds": interval.n,
        "lost": interval.lost,
        "verdict": difference.verdict,
    }
