"""Fills docs/audit_configurations.md: ``python docs/audit_configurations.py``.

The table of released weights is ``posenc/audit/released.py``. The second part is what the audit
prints of readers with a fault each, ``tests/support/planted_configurations.py``. The last tables
are what installed libraries make of released configurations, one table for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posenc.audit import Record
from posenc.audit.configs import audit_config
from posenc.audit.released import RELEASED

HERE = Path(__file__).parent
PAGE = HERE / "audit_configurations.md"
SUPPORT = HERE.parent / "tests" / "support"


def main() -> None:
    """Write both tables."""
    page = between(PAGE.read_text(encoding="utf-8"), "released weights", weights())
    page = between(page, "planted faults", planted())
    PAGE.write_text(between(page, "libraries", libraries()), encoding="utf-8")


def between(page: str, name: str, text: str) -> str:
    """The page with ``text`` between the marks of a name."""
    start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, found, rest = page.partition(start)
    _, also, after = rest.partition(end)
    if not (found and also):
        raise ValueError(f"{PAGE.name} must have {start!r} and {end!r}")
    return f"{before}{start}{text}{end}{after}"


def weights() -> str:
    """What released weights need, and who read it otherwise."""
    lines = [
        "| `model_type` | the weights | read otherwise | source |",
        "| :-- | :-- | :-- | :-- |",
    ]
    for one in RELEASED:
        of = f" ({one.kind})" if one.kind else ""
        sources = ", ".join(one.sources)
        lines.append(f"| `{one.model}`{of} | {one.words} | {one.misread} | {sources} |")
    return "\n".join(lines)


def planted() -> str:
    """What the audit prints of each planted fault."""
    support()
    from planted_configurations import PLANTED

    said = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (config, reader, expected) in PLANTED.items():
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config))
            found = {one.check: one for one in audit_config(file, readers=[reader])}
            check = next(iter(expected))
            said.append(f"**{name}**\n\n> *{check}:* {found[check].message}")
    return "\n\n".join(said)


def support() -> None:
    """Make ``tests/support`` importable."""
    if str(SUPPORT) not in sys.path:
        sys.path.append(str(SUPPORT))


def libraries() -> str:
    """A table for each library that reads configurations, and those that could not be asked."""
    every = dict(audited())
    records = [one for of_file in every.values() for one in of_file]
    own = (one for one in records if one.scheme and " and " not in one.library)
    found = {one.library: one.version for one in own}
    lines = []
    for name, number in found.items():
        lines += [
            f"### {name} {number}", "",
            "| configuration | facts that agree | what differs, or cannot be compared |",
            "| :-- | --: | :-- |",
            *(row(name, file, records) for file, records in every.items()), "",
        ]  # fmt: skip
    missing = sorted(
        {
            one.message
            for one in records
            if one.check == "configuration" and one.library not in found
        }
    )
    return "\n".join([*lines, f"Not asked: {'; '.join(missing)}."])


def audited() -> Iterator[tuple[str, list[Record]]]:
    """The records of each configuration, by its name."""
    support()
    from released_configurations import ODD, whole
    from released_configurations import RELEASED as FILES

    given: dict[str, Mapping[str, Any]] = {
        name: whole(config) for name, config in {**FILES, **ODD}.items()
    }
    for one in RELEASED:
        if one.model in ("hy_v4", "minimax_m3_vl_text"):
            given[one.model] = {"model_type": one.model, "num_hidden_layers": 4, **one.config}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in given.items():
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config))
            yield name, audit_config(file)


def row(library: str, name: str, records: Sequence[Record]) -> str:
    """One line of a library's table."""
    own = [one for one in records if one.library == library]
    count = Counter(one.status for one in own)
    said = [
        f"{one.check}: {one.message}".replace("|", "\\|").replace("\n", " ")
        for one in own
        if one.status in ("differs", "not called", "cannot express")
        if "which are not asked" not in one.message
    ]
    return f"| {name} | {count['agrees']} | {' '.join(said)} |"


if __name__ == "__main__":
    main()
