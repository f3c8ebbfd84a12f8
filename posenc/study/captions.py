"""What the rows of the tables do not say: units, settings, schemes as built, failed runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posenc.study.results import worded
from posenc.study.statistics import (
    BEFORE,
    SORTED_FROM,
    Records,
    Summary,
    lengths,
    row_order,
    series,
)

PROTOCOLS = {
    "loss": "Non-overlapping windows: the same bytes, cut again for each length",
    "loss_same_targets": "Same targets: the same last bytes of each window, after a longer context",
    "loss_sliding": "Sliding windows: each starts a stride after the one before, and only targets "
    "that are new in it count",
    "loss_key_bytes": "Key bytes: those of non-overlapping windows that only a repeat further back "
    "than the training length predicts",
}


def protocol_title(protocol: str, records: Records) -> str:
    """What a protocol scores; how many key bytes there are, and what no window of a length has."""
    title = PROTOCOLS[protocol]
    if protocol == "loss_key_bytes":
        counts: dict[str, int] = next((r["key_bytes"] for r in records if r.get("key_bytes")), {})
        found = [f"{counts[n]:,} at {n}" for n in sorted(counts, key=int)]
        title += f": {', '.join(found)}" if found else ""
    if protocol == "loss":
        at = lengths(records, protocol)
        left = [f"{at[-1] % n} at {n}" for n in at if at[-1] % n]
        title += f"; without the last bytes of each stretch: {', '.join(left)}" if left else ""
    return worded(title, records)


def settings(summary: Summary, records: Records) -> list[str]:
    """What the rows do not say: options set by the study, a learning rate, shared trainings."""
    config = summary["config"]
    fitted = [
        f"{name} is built with {options}" for name, options in summary.get("fitted", {}).items()
    ]
    lines = (
        [f"Set by the study to suit the training length: {'; '.join(fitted)}."] if fitted else []
    )
    learned = [
        name for name, run in first_runs(summary, records).items() if run["params"]["position"]
    ]
    if learned and "position_lr_scale" in config and "position_lr_scale" not in tuned(summary):
        rate = config["position_lr_scale"]
        scale = "the learning rate" if rate == 1 else f"{rate:g} times the learning rate"
        lines.append(
            f"Learned position params ({', '.join(learned)}) have {scale} of the other weights."
        )
    lines += [
        f"Trained once as {name}, then tested as each: {', '.join(labels)}."
        for name, labels in _shared_trainings(summary, records).items()
    ]
    if reach := config.get("random_positions"):
        lines.append(f"Trained at positions drawn from 0 .. {reach - 1}, tested at 0, 1, 2, ...")
    if reach := config.get("random_float_positions"):
        lines.append(
            f"Trained at real positions drawn from 0 to {reach}, tested at tokens spread evenly "
            "over them."
        )
    if stride := config.get("stride"):
        lines.append(worded(f"Sliding windows advance by {stride} bytes.", records))
    return [*lines, *finetuning(summary, records)]


def finetuning(summary: Summary, records: Records) -> list[str]:
    """How all schemes were fine-tuned, and which of them did not change; empty if none was."""
    tuned = [record for record in records if record.get("finetune")]
    if not tuned:
        return []
    facts = tuned[0]["finetune"]
    order = row_order(records, summary)
    plain = {r["scheme"] for r in tuned if r["tested_schemes"] is None}
    same = [name for name in order if name in plain]
    alike = f", {', '.join(same)} too, tested as trained" if same else ""
    return [
        f"Every scheme was fine-tuned after its change{alike}: {facts['steps']} steps of "
        f"{facts['batch_size']} x {facts['len']}, peak learning rate {facts['learning_rate']:g}, "
        "on the same data for all schemes of a seed. Rows that end in "
        f"{BEFORE.strip(', ')!r} are the same models before."
    ]


def _shared_trainings(summary: Summary, records: Records) -> dict[str, list[str]]:
    """Labels that share a training with another label, by the label of the training."""
    by_training: dict[str, set[str]] = {}
    trained_as: dict[str, str] = {}
    for record in records:
        if "training" in record:
            by_training.setdefault(record["training"], set()).add(record["scheme"])
            trained_as[record["scheme"]] = record["trained_as"]
    shared = {label for labels in by_training.values() if len(labels) > 1 for label in labels}
    found: dict[str, list[str]] = {}
    for label in filter(shared.__contains__, row_order(records, summary)):
        found.setdefault(trained_as[label], []).append(label)
    return found


def schemes_as_built(summary: Summary, records: Records) -> dict[str, str]:
    """Each scheme as built, layer by layer where layers differ; ``@512`` is a window."""
    shown = {}
    for name, run in first_runs(summary, records).items():
        trained = _layers(run.get("schemes"), run.get("windows"))
        tested = _layers(run.get("tested_schemes"), run.get("tested_windows"))
        shown[name] = f"{trained}; tested as {tested}" if tested else trained
    return {name: text for name, text in shown.items() if text}


def _layers(schemes: Sequence[str] | None, windows: Sequence[int | None] | None) -> str:
    schemes = schemes or ()
    layers = [
        f"{scheme}@{window}" if window else scheme
        for scheme, window in zip(schemes, windows or (None,) * len(schemes), strict=True)
    ]
    kinds = list(dict.fromkeys(layers))
    return ", ".join(kinds if len(kinds) < 2 else layers)


def first_runs(summary: Summary, records: Records) -> dict[str, Mapping[str, Any]]:
    """The first successful run of each scheme, in the order of the study."""
    order = row_order(records, summary)
    runs = {r["scheme"]: r for r in reversed(records) if r["status"] == "ok"}
    return {name: runs[name] for name in order if name in runs}


def caption(records: Records, summary: Summary | None = None) -> str:
    """The unit of the loss tables, the meaning of an entry, and whether the runs are tuned."""
    seeds = len({record["seed"] for record in records})
    entry = (
        f"mean ± half the 95 % interval over {seeds} seeds"
        if seeds > 1
        else "one seed, no interval"
    )
    tuned = next((r["finetune"] for r in records if r.get("finetune")), None)
    if tuned:
        entry += f"; after fine-tuning of {tuned['steps']} steps at length {tuned['len']}, rows "
        entry += f"that end in {BEFORE.strip(', ')!r} without it"
    note = " [2 of 3]: of 3 runs, 2 have a finite loss." if has_lost_runs(records) else ""
    if len({record["scheme"] for record in records}) >= SORTED_FROM:
        note += " Rows are sorted by the loss at the longest length of non-overlapping windows."
    tuned = f" {said}" if summary and (said := tuned_caption(summary)) else ""
    return worded(f"Bits per byte, lower is better; {entry}.", records) + f"{tuned}{note}"


def tuned(summary: Summary) -> list[str]:
    """The options that a sweep chose for each scheme."""
    schemes = summary.get("tuning", {}).get("schemes", ())
    return list(dict.fromkeys(name for one in schemes for name in one["grid"]))


def tuned_caption(summary: Summary) -> str:
    """What a table of results says of its runs; empty without a sweep."""
    names = " and ".join(tuned(summary))
    return f"Tuned runs: each scheme has the {names} chosen for it." if names else ""


def has_lost_runs(records: Records) -> bool:
    """Whether a run failed, or has a loss that is not finite."""
    return any(
        point.lost
        for protocol in PROTOCOLS
        for line in series(records, protocol)
        for point in line.points.values()
    ) or bool(failures(records))


def failures(records: Records) -> list[str]:
    """One line per scheme and message of failed runs."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["status"] != "ok":
            what = record["scheme"], record.get("error") or "no message"
            seeds.setdefault(what, []).append(str(record["seed"]))
    return [
        f"failed: {scheme}, seed{'s' * (len(of) > 1)} {', '.join(of)}: {message}"
        for (scheme, message), of in seeds.items()
    ]


def length_label(length: int, train_len: int | None) -> str:
    """``1024 (16x)``; without the factor where rows differ in their training length."""
    return f"{length}" if train_len is None else f"{length} ({length / train_len:g}x)"
