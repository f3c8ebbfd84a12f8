"""``posenc report``: studies of several machines, joined into one report."""

from __future__ import annotations

from typing import Any

from posenc.cli.parser import Parser
from posenc.study import joined


def add_options(parser: Parser) -> None:
    """Add the options of ``posenc report``."""
    parser.usage = "posenc report DIR ... [--out DIR]"
    parser.failed = "a run of them failed"
    parser.examples = (
        ("posenc report here there", ""),
        ("posenc report here there --out both", ""),
        ("posenc report results/* --out all", "as many as there are"),
    )
    parser.add_argument(
        "folders", nargs="+", metavar="DIR",
        help="folders of posenc compare; all but schemes, seeds, tasks and the machine is equal",
    )  # fmt: skip
    parser.add_argument(
        "--out", default="posenc-report", metavar="DIR",
        help="folder of the joined report, with the files that compare writes (default: "
        "posenc-report)",
    )  # fmt: skip


def run(options: dict[str, Any]) -> int:
    """Join the studies and return the exit status."""
    return joined.report(options["folders"], options["out"])
