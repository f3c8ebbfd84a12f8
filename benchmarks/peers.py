"""Other libraries' positions beside posenc's, in one run: the same inputs, in alternating calls.

Run ``python benchmarks/peers.py`` after ``pip install -e '.[peers]'``. Each peer runs in its own
words. Its results and gradients must equal posenc's within a stated bound before it is timed. What
differs is printed with the difference, and not timed. A library that is missing is a row with the
reason. Then, and if anything differs or fails, the exit status is 1.

With one thread (the default) times are processor time, which other work on the machine disturbs
least; with several, wall time. ``--only`` measures some rows and keeps the others of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness.run import load, use_threads  # noqa: E402

_RESULT = Path("results", "peers-cpu.json")
_DOCUMENT = HERE.parent / "docs" / "measurements.md"
# Distributions and what they are imported as.
MODULES = {
    "torch": "torch",
    "jax": "jax",
    "transformers": "transformers",
    "x-transformers": "x_transformers",
    "rotary-embedding-torch": "rotary_embedding_torch",
    "torchtune": "torchtune",
    "attn-gym": "attn_gym",
    "equinox": "equinox",
    "keras-hub": "keras_hub",
    "tokamax": "tokamax",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print, write."""
    options = _options(arguments)
    use_threads(options.threads)
    os.environ["KERAS_BACKEND"] = "jax"  # before Keras reads it

    from harness import record
    from harness.peers import jax_peers, report, torch_peers
    from harness.peers.measure import Plan, groups, rows
    from harness.peers.side import Sizes

    from posenc.schemes import catalogue

    sizes = Sizes(2, 64, 16) if options.quick else Sizes(options.heads, options.length, options.dim)
    runners = {name: load(name).begin(options.threads) for name in ("torch", "jax")}
    every = [*torch_peers.peers(), *jax_peers.peers()]
    plan = Plan(
        sizes,
        time.process_time if options.threads == 1 else time.perf_counter,
        seconds=0.0 if options.quick else options.seconds,
        rounds=(2, 2) if options.quick else (options.rounds, 50),
    )
    result: dict[str, Any] = {
        "what": "posenc peers",
        "file": _RESULT.as_posix(),
        "arguments": {"threads": options.threads, **vars(sizes)},
        "clock": "processor time of one thread"
        if options.threads == 1
        else f"wall time, {options.threads} threads",
        "device": {"processor": record.processor()},
        "versions": record.versions(),
        "libraries": _libraries(),
        "no peer": report.without_peer(catalogue(), (peer.scheme for peer in every)),
    }
    out, earlier = options.out or HERE / _RESULT, []
    if options.only.pattern and out.exists():
        before = json.loads(out.read_text(encoding="utf-8"))
        report.check_comparable(before, result)
        earlier = before["rows"]
    found = []
    for group in groups(every, sizes, options.only.search):
        for row in rows(group, runners[group.framework], plan, MODULES):
            print(report.line(row), flush=True)
            found.append({**row, "date": record.now(), "commit": result["versions"]["commit"]})
        # After each comparison, so that a run that is stopped keeps what it has.
        record.write(out, result | {"rows": report.merged(earlier, found)})
    if not found:
        raise SystemExit(f"no row matches --only {options.only.pattern}")
    result["rows"] = report.merged(earlier, found)
    print(f"\n{report.terminal(found)}\n\nno peer: {', '.join(result['no peer'])}\n\n{out}")
    if options.write_docs:
        text = _DOCUMENT.read_text(encoding="utf-8")
        _DOCUMENT.write_text(report.written(text, report.section(result)), encoding="utf-8")
    accepted = {"measured", "missing"} if options.allow_missing else {"measured"}
    return int(any(row["status"] not in accepted for row in found))


def _libraries() -> dict[str, str]:
    """Versions of the libraries that are installed."""
    found = {}
    for name in ("posenc", *MODULES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "--only",
        type=re.compile,
        default=re.compile(""),
        metavar="REGEX",
        help="rows, as 'transform rope forward torch eager transformers'",
    )
    add("--quick", action="store_true", help="small sizes, two rounds: does every peer still run?")
    add("--heads", type=int, default=16)
    add("--length", type=int, default=2048)
    add("--dim", type=int, default=64)
    add("--threads", type=int, default=1)
    add("--rounds", type=int, default=7, help="the least number of samples of each")
    add("--seconds", type=float, default=4.0, help="for a comparison, if that allows more rounds")
    add("--allow-missing", action="store_true", help="exit with 0 if libraries are missing")
    add("--write-docs", action="store_true", help="rewrite the section of docs/measurements.md")
    add("--out", type=Path, help=f"the result; default: benchmarks/{_RESULT.as_posix()}")
    return parser.parse_args(arguments)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
