"""``posenc vectors``: golden vectors of schemes, for implementations in other languages."""

from __future__ import annotations

from typing import Any

from posenc.cli.parser import Parser
from posenc.vectors import write


def add_options(parser: Parser) -> None:
    """Add the options of ``posenc vectors``."""
    parser.usage = "posenc vectors [SCHEME ...] --out DIR"
    parser.examples = (
        ("posenc vectors --out vectors", "the whole catalogue"),
        ("posenc vectors rope alibi --out vectors", "these"),
        ("posenc vectors rope_yarn --out yarn", "one of them"),
    )
    parser.add_argument(
        "schemes", nargs="*", metavar="SCHEME", help="names of the catalogue (default: all)"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="a new or empty folder, or one of this command"
    )


def run(options: dict[str, Any]) -> int:
    """Write the files, print what they are, and return the exit status 0."""
    files = write(options["out"], options["schemes"])
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files, {size / 2**20:.1f} MiB, in {options['out']}: see docs/vectors.md")
    return 0
