"""The tables of a probe, for the terminal, for Markdown, for HTML, and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posenc.probe.measures import rate
from posenc.study.effective import NOLIMA, RULER, Effective, effective_length
from posenc.study.table import Table

Records = Sequence[Mapping[str, Any]]
_LOSSES = {
    "bits": "Non-overlapping windows: the same tokens, cut again for each length",
    "last_bits": "Same targets: the last {last} of each stretch, after a longer context",
    "key_bits": "Key tokens: those of non-overlapping windows that only a repeat more than {near} "
    "tokens back predicts, with the {context} tokens before them",
}
COLUMNS = ("scheme", "measure", "length", "part", "value", "unit")


def by_length(records: Records, row: str, measure: str) -> dict[int, Mapping[str, Any]]:
    """The records of a row that succeeded, by length."""
    found = (r for r in records if r["scheme"] == row and r["measure"] == measure)
    return {r["length"]: r for r in sorted(found, key=_length) if r["status"] == "ok"}


def rows(records: Records) -> list[str]:
    """The rows that have a record, in order."""
    return list(dict.fromkeys(record["scheme"] for record in records))


def passkey_scores(record: Mapping[str, Any]) -> np.ndarray[Any, Any] | None:
    """Exact match by depth; None if the length has no room for a prompt."""
    return None if record.get("right") is None else np.mean(record["right"], axis=1)


def tables(summary: Mapping[str, Any], records: Records) -> list[Table]:
    """All tables that have a value: losses per token and per byte, passkeys, and so on."""
    setting, found = summary["setting"], []
    for what, caption in _LOSSES.items():
        cells = {row: _rates(records, row, what, "tokens") for row in rows(records)}
        of_bytes = {row: _rates(records, row, what, "bytes") for row in rows(records)}
        known = any(_known(value) for own in of_bytes.values() for value in own.values())
        below = of_bytes if known and of_bytes != cells else {}
        unit = "; bits per token" + (", and below per byte" if below else "")
        title = f"{caption.format(**setting)}{unit}"
        found.append(_by_length(title, cells, setting, ".3f", min, below))
    cells = {
        row: {
            n: float(scores.mean())
            for n, r in by_length(records, row, "passkey").items()
            if (scores := passkey_scores(r)) is not None
        }
        for row in rows(records)
    }
    asked = setting["depths"] * setting["keys"]
    title = f"Passkeys found, of {asked} prompts of each length: {summary['prompts']}; a guess "
    title += f"finds {summary['chance']:.2g}"
    found.append(_by_length(title, cells, setting, ".2f", max, {}))
    found += [_effective(summary, records), _distances(records)]
    return [table for table in found if table is not None]


def _rates(records: Records, row: str, what: str, per: str) -> dict[int, float]:
    return {n: rate(r, what, per) for n, r in by_length(records, row, "text").items()}


def _by_length(
    title: str,
    cells: Mapping[str, Mapping[int, float]],
    setting: Mapping[str, Any],
    form: str,
    better: Callable[..., float],
    below: Mapping[str, Mapping[int, float]],
) -> Table | None:
    """Rows by length, the best of each length bold; ``below`` are minor rows of the same rows."""
    lengths = [n for n in setting["eval_lens"] if any(_known(own.get(n)) for own in cells.values())]
    if not lengths:
        return None
    lines: list[list[str]] = []
    minor, best = set(), set()
    tops = {n: _top([own.get(n) for own in cells.values()], form, better) for n in lengths}
    for row, own in cells.items():
        texts = [_text(own.get(n), form) for n in lengths]
        best |= {(len(lines), c + 1) for c, n in enumerate(lengths) if texts[c] == tops[n]}
        lines.append([row, *texts])
        if any(_known(value) for value in below.get(row, {}).values()):
            minor.add(len(lines))
            lines.append(["per byte", *(_text(below[row].get(n), form) for n in lengths)])
    columns = ["scheme", *map(str, lengths)]
    return Table(title, columns, lines, minor=frozenset(minor), best=frozenset(best))


def _top(values: Sequence[float | None], form: str, better: Callable[..., float]) -> str:
    """The best value as it is shown; empty if there is only one."""
    known = [value for value in values if value is not None and _known(value)]
    return format(better(known), form) if len(known) > 1 else ""


def effective(records: Records, row: str) -> dict[str, Effective | None]:
    """The effective lengths of a row: of its loss, by its own and by the first row; of passkeys."""
    losses = _last_losses(records, row)
    first = _last_losses(records, rows(records)[0])
    keys = {
        n: [np.array(r["right"], dtype=np.float64).ravel()]
        for n, r in by_length(records, row, "passkey").items()
        if r["right"] is not None
    }
    shortest = [one / NOLIMA for one in first[min(first)]] if first else math.nan
    same = {"lower": True, "same_texts": True}
    return {
        "loss": effective_length(losses, **same),
        "loss, by the first row": effective_length(losses, least=shortest, **same),
        "passkeys": effective_length(keys, least=RULER),
    }


def _last_losses(records: Records, row: str) -> dict[int, list[np.ndarray[Any, Any]]]:
    """Bits per token of the same targets of each stretch, by length."""
    text = by_length(records, row, "text")
    return {n: [np.array(r["last_bits"]) / r["last_tokens"]] for n, r in text.items()}


def _effective(summary: Mapping[str, Any], records: Records) -> Table | None:
    found = {row: effective(records, row) for row in rows(records)}
    columns = ["loss", *["loss, by the first row"] * (len(found) > 1), "passkeys"]
    columns = [name for name in columns if any(own[name] for own in found.values())]
    if not columns:
        return None
    near = summary["setting"]["near"]
    caption = (
        f"Effective length, in tokens, up to which a score holds at every length: the loss of the "
        f"same targets at most that at {near} / {NOLIMA}, its own or that of the first row; of "
        f"passkeys, at least {RULER}. In brackets, 95 % intervals over stretches and prompts"
    )
    lines = [[row, *(_holds(own[name]) for name in columns)] for row, own in found.items()]
    return Table(caption, ["scheme", *columns], lines)


def _holds(found: Effective | None) -> str:
    return "–" if found is None else found.text()


def _distances(records: Records) -> Table | None:
    lines, lengths = [], set()
    for row in rows(records):
        for length, record in by_length(records, row, "attention").items():
            if record["distances"] is not None:
                lengths.add(length)
                each = np.array(record["distances"])
                low, high = (np.unravel_index(f(each), each.shape) for f in (np.argmin, np.argmax))
                lines.append([row, f"{each.mean():.1f}", _head(each, low), _head(each, high)])
    if not lines:
        return None
    caption = (
        f"Mean distance of attention at length {min(lengths)}, in tokens: sum of a(q, k) (q − k), "
        "over queries of the second half; heads as layer.head, from 0"
    )
    return Table(caption, ["scheme", "mean", "nearest head", "furthest head"], lines)


def _head(each: np.ndarray[Any, Any], place: Any) -> str:
    layer, head = map(int, place)
    return f"{each[layer, head]:.1f} ({layer}.{head})"


def headline(summary: Mapping[str, Any], records: Records) -> str:
    """The losses of the same targets at the longest length, and what context changes, in words."""
    setting = summary["setting"]
    ends = setting["near"], setting["longest"]
    found = {row: _rates(records, row, "last_bits", "tokens") for row in rows(records)}
    parts = [
        f"{row} {own[ends[1]]:.3f} ({own[ends[1]] - own[ends[0]]:+.3f})"
        for row, own in sorted(found.items(), key=lambda each: each[1].get(ends[1], math.inf))
        if set(ends) <= own.keys()
    ]
    if not parts:
        return ""
    return (
        f"Bits per token of the same targets after a context of {ends[1]}, and the change from "
        f"{ends[0]}: {'; '.join(parts)}."
    )


def not_had(records: Records) -> list[str]:
    """What cannot be had, and why: a line for each reason."""
    found: dict[str, list[str]] = {}
    for record in records:
        if "why" in record:
            what = "distance of attention" if record["measure"] == "attention" else "passkeys"
            place = f"{what} at {record['length']}"
            places = found.setdefault(record["why"], [])
            places += [place] if place not in places else []
    return [f"None of {', '.join(places)}: {why}." for why, places in found.items()]


def failures(records: Records) -> list[str]:
    """What failed, and why."""
    return [
        f"{r['scheme']}, {r['measure']} at {r['length']}: {r['error']}"
        for r in records
        if r["status"] != "ok"
    ]


def results_csv(records: Records) -> str:
    """Every number, one a line."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for record in records:
        if record["status"] != "ok":
            writer.writerow(
                [record["scheme"], record["measure"], record["length"], "", "", "failed"]
            )
            continue
        for part, value, unit in _values(record):
            if _known(value):
                own = record["scheme"], record["measure"], record["length"]
                writer.writerow([*own, part, repr(float(value)), unit])
    return text.getvalue()


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, float, str]]:
    if record["measure"] == "text":
        parts = {"bits": "loss", "last_bits": "same targets", "key_bits": "key tokens"}
        for what, name in parts.items():
            for per in ("tokens", "bytes"):
                yield name, rate(record, what, per), f"bits per {per.removesuffix('s')}"
        begin = 0
        for end, loss in zip(record["edges"], record["by_position"], strict=True):
            yield f"positions {begin} to {end - 1}", loss, "bits per token"
            begin = end
    elif record["measure"] == "passkey" and record["right"] is not None:
        depths = np.linspace(0, 1, len(record["right"])) if len(record["right"]) > 1 else [0.5]
        for depth, right, bits in zip(depths, record["right"], record["bits"], strict=True):
            yield f"depth {depth:.2f}", float(np.mean(right)), "share of keys"
            yield f"depth {depth:.2f}", float(np.mean(bits)), "bits per key"
    elif record["measure"] == "attention" and record["distances"] is not None:
        for layer, heads in enumerate(record["distances"]):
            for head, distance in enumerate(heads):
                yield f"layer {layer} head {head}", distance, "tokens"


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _text(value: float | None, form: str) -> str:
    return format(value, form) if value is not None and _known(value) else "–"


def _length(record: Mapping[str, Any]) -> int:
    return int(record["length"])
