"""Tables of a comparison: on the terminal, and in ``docs/measurements.md``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness import record
from harness.clock import Speed

Row = dict[str, Any]
BEGIN = "<!-- peers: written by benchmarks/peers.py --write-docs -->"
END = "<!-- peers: end -->"
_TITLES = {
    "embedding": "Embeddings",
    "transform": "Rotations of queries and keys",
    "rotation": "Rotations by angles that were made before, for all layers",
    "bias": "The dense bias of all heads",
    "attention": "Causal attention, as a whole",
}
_RUNS = {
    "eager": "PyTorch",
    "compile": "PyTorch, both compiled",
    "jit": "JAX, both under `jax.jit`",
}


def line(row: Row) -> str:
    """One comparison, as it is printed when it is done."""
    what = f"{row['stage']} {row['scheme']}, {row['pass']}, {row['mode']}"
    name = f"{what}: {row['library']} {row['call']}"
    if row["status"] != "measured":
        return f"{name}: {row['status']}: {row['reason']}"
    ours, peer, ratio = _speeds(row)
    return (
        f"{name}: {ours.median:.3g} / {peer.median:.3g} ms = "
        f"{ratio.median:.3g} ({ratio.q1:.3g} to {ratio.q3:.3g}), "
        f"difference {row['difference']:.1g} of {row['bound']:.1g} allowed ({row['why']})"
    )


def without_peer(names: Iterable[str], compared: Iterable[str]) -> list[str]:
    """Names of the catalogue that no peer computes."""
    return sorted(set(names) - set(compared))


def terminal(rows: Sequence[Row]) -> str:
    """All ratios in columns."""
    head = ["posenc / peer", "pass", "runs", "peer", "posenc, ms", "peer, ms", "ratio"]
    return record.table(
        head,
        [
            [
                f"{r['stage']} {r['scheme']}", r["pass"], r["mode"], r["library"],
                *_times(r, None),
            ]
            for r in rows
        ],
    )  # fmt: skip


def check_comparable(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if rows of two results do not stand in one table."""
    for field in ("arguments", "clock", "libraries"):
        if before[field] != now[field]:
            raise ValueError(
                f"--only adds to a result whose {field} are {before[field]}, now {now[field]}: "
                "run all, or give another --out"
            )


def merged(before: Sequence[Row], now: Sequence[Row]) -> list[Row]:
    """Earlier rows, with those of now in their places."""
    own = {_identity(row): row for row in now}
    kept = [own.pop(_identity(row), row) for row in before]
    return [*kept, *own.values()]


def _identity(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("stage", "scheme", "pass", "mode", "library", "call"))


def section(result: Mapping[str, Any]) -> str:
    """The section of ``docs/measurements.md``, from a result."""
    sizes, rows = result["arguments"], result["rows"]
    versions = ", ".join(f"{n} {v}" for n, v in result["libraries"].items())
    text = [
        "| | |",
        "| :-- | :-- |",
        "| command | `python benchmarks/peers.py` |",
        "| figure | time of posenc divided by that of the peer, as the median of paired runs, with "
        "their quartiles: below 1 posenc is faster |",
        f"| sizes | one sequence of {sizes['length']} tokens, {sizes['heads']} heads, "
        f"`D={sizes['dim']}`, float32 |",
        f"| clock | {result['clock']} |",
        f"| versions | {versions} |",
        f"| dates | {_dates(rows)} |",
        "| difference | the largest between the two results, or gradients, relative to the largest "
        "number; checked before a call is timed |",
        f"| all figures | [benchmarks/{result['file']}](../benchmarks/{result['file']}) |",
    ]
    for stage, title in _TITLES.items():
        for mode, runs in _RUNS.items():
            some = [r for r in rows if r["stage"] == stage and r["mode"] == mode]
            if some:
                text += ["", f"{title}, {runs}:", "", *_table(some)]
    causes = sorted({r["why"] for r in rows if r.get("why") not in (None, "rounding")})
    if causes:
        text += ["", f"Differences above 1e-6: {'; '.join(causes)}."]
    text += ["", f"No peer computes these: {', '.join(f'`{n}`' for n in result['no peer'])}."]
    return "\n".join(text)


def written(document: str, text: str) -> str:
    """The document with this text between its markers.

    Raises
    ------
    ValueError
        It does not have each marker once, in order.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the document must have {BEGIN!r} and {END!r} once each")
    before, _, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{END!r} stands before {BEGIN!r}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| scheme | pass | peer | posenc, ms | peer, ms | posenc / peer | difference |",
        "| :-- | :-- | :-- | --: | --: | --: | --: |",
    ]
    for row in rows:
        ours, peer, ratio = _times(row, row.get("reason"))
        difference = row.get("difference")
        shown = "" if difference is None else f"{difference:.0e}" if difference else "0"
        lines.append(
            f"| {row['scheme']} | {row['pass']} | {row['library']}: `{row['call']}` | {ours} | "
            f"{peer} | {ratio} | {shown} |"
        )
    return lines


def _times(row: Row, reason: str | None) -> tuple[str, str, str]:
    if row["status"] != "measured":
        return "", "", f"{row['status']}: {reason}" if reason else row["status"]
    ours, peer, ratio = _speeds(row)
    interval = f"({ratio.q1:.3g}–{ratio.q3:.3g})"
    return f"{ours.median:.3g}", f"{peer.median:.3g}", f"{ratio.median:.3g} {interval}"


def _speeds(row: Row) -> list[Speed]:
    """Times of posenc and of the peer, and their ratio."""
    return [Speed.read(row[name]) for name in ("ours, ms", "peer, ms", "ratio")]


def _dates(rows: Sequence[Row]) -> str:
    days = sorted({row["date"][:10] for row in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
