"""``posenc audit``: libraries, functions and configurations against their definitions."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.audit import expected
from posenc.audit.candidate import KINDS
from posenc.audit.expected import Judged
from posenc.audit.labels import definition
from posenc.audit.outputs import Run
from posenc.audit.record import Record
from posenc.cli.parser import Parser

_GRIDS = ("full", "ci")
_FRAMEWORKS = ("numpy", "torch", "jax")
_FORMATS = ("junit", "json", "markdown", "html")


def add_options(parser: Parser) -> None:
    """Add the options of ``posenc audit``."""
    parser.usage = "posenc audit [SUBJECT ...] [options]"
    parser.failed = "something differs, or an expected failure is gone"
    parser.examples = (
        ("posenc audit transformers equinox", "none named: all that are installed"),
        ("posenc audit mine:rotate --as rope:layout=interleaved", "a function of yours"),
        ("posenc audit --config checkpoints/ --junit audit.xml", "configurations, for a CI"),
    )
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help="names of libraries, or module:function"
    )
    parser.add_argument(
        "--as", dest="label", metavar="SCHEME", help="what the functions are: as for posenc compare"
    )
    parser.add_argument("--kind", choices=KINDS, help="of the functions (default: by signature)")
    parser.add_argument(
        "--framework", choices=_FRAMEWORKS, help="whose arrays they take (default: tried in turn)"
    )
    parser.add_argument(
        "--config", nargs="+", action="extend", metavar="FILE",
        help="config.json files, or folders with such files",
    )  # fmt: skip
    parser.add_argument("--grid", choices=_GRIDS, help="ci takes seconds (default: full)")
    for form in _FORMATS:
        parser.add_argument(f"--{form}", metavar="FILE", help=f"write {form}; - is standard output")
    parser.add_argument(
        "--expected-failures", metavar="FILE", help="names of checks that may fail, one a line"
    )


def run(options: dict[str, Any]) -> int:
    """Audit, print a summary, write the reports, and return the exit status."""
    _check(options)
    files = {form: options[form] for form in _FORMATS if options[form] is not None}
    _check_files(files)
    expects = options["expected_failures"]
    lines = expected.read(expects) if expects is not None else []
    grid = options["grid"] or "full"
    start = time.monotonic()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what audited code prints is no report
            records = [record for some in _records(options, grid) for record in some]
    except SystemExit as stop:
        raise RuntimeError(f"the audited code left by sys.exit({stop.code!r})") from stop
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, IndexError):
        raise
    except Exception:  # exit status 1 would say that something differs
        traceback.print_exc()
        return 2
    judged = expected.judge(records, lines, "full" if options["config"] else grid)
    about = Run(_command(options), grid, time.monotonic() - start)
    _write(files, records, judged, about)
    return judged.exit_status(records)


def _check(options: dict[str, Any]) -> None:
    """Raise ``ValueError`` for options that do not go together."""
    subjects, configs = options["subjects"], options["config"] or []
    functions = [name for name in subjects if ":" in name]
    libraries = [name for name in subjects if ":" not in name]
    given = [f"--{o}" for o in ("as", "kind", "framework") if options["label" if o == "as" else o]]
    if subjects and configs:
        raise ValueError(f"--config takes no other subjects, got {' '.join(subjects)}")
    if functions and libraries:
        raise ValueError(
            f"subjects must be functions or libraries, not both, got {', '.join(functions)} and "
            f"{', '.join(libraries)}"
        )
    if functions and not options["label"]:
        raise ValueError(f"{functions[0]} needs --as LABEL: what it should be, such as --as rope")
    if functions:
        definition(options["label"])
    if given and not functions:
        if libraries:
            raise ValueError(
                f"{given[0]} is for functions, module:function, got {' '.join(libraries)}"
            )
        raise ValueError(f"{given[0]} is for functions; name one as module:function")
    if configs and options["grid"]:
        raise ValueError("--grid has no effect on --config, whose checks have no grid")
    for name in libraries:
        if name.endswith(".json") or "/" in name or "\\" in name:
            raise ValueError(f"{name} is no name of a library; a configuration is --config {name}")
    for path in configs:
        if not Path(path).exists():
            raise FileNotFoundError(f"--config: there is no file or folder {path}")
    twice = sorted(
        {name for name in (*subjects, *configs) if [*subjects, *configs].count(name) > 1}
    )
    if twice:
        raise ValueError(f"{twice[0]} is named twice")


def _check_files(files: dict[str, str]) -> None:
    """Raise if a report could not be written, before the work is done."""
    named: dict[Path | str, str] = {}
    for form, name in files.items():
        place = name if name == "-" else Path(name).absolute()
        if place in named:
            raise ValueError(f"--{form} and --{named[place]} cannot both be written to {name}")
        named[place] = form
        if name == "-":
            continue
        if not name or Path(name).is_dir():
            raise IsADirectoryError(f"--{form} must be a file, got the folder {name or '.'!r}")
        if not Path(name).parent.is_dir():
            raise FileNotFoundError(f"--{form}: there is no folder {str(Path(name).parent)!r}")


def _records(options: dict[str, Any], grid: str) -> Iterator[list[Record]]:
    if options["config"]:
        from posenc.audit.configs import audit_config

        absent: set[str] = set()  # each of them once, not once a path
        for path in options["config"]:
            records = audit_config(path)
            missing = {r.library for r in records if r.status == "not installed"}
            yield [
                _in_path(path, record)
                for record in records
                if record.status != "not installed" or record.library not in absent
            ]
            absent |= missing
    elif any(":" in name for name in options["subjects"]):
        from posenc.audit.audit import audit_path

        for path in options["subjects"]:
            yield audit_path(
                path,
                options["label"],
                kind=options["kind"],
                framework=options["framework"],
                grid=grid,
            )
    else:
        from posenc.audit.libraries import audit_libraries

        yield audit_libraries(options["subjects"] or None, grid=grid)


def _in_path(path: str, record: Record) -> Record:
    """The record of a configuration, whose subject is its path, as that was given."""
    if record.status == "not installed":
        return replace(record, subject=record.library)
    place = Path(path) / record.subject if Path(path).is_dir() else Path(path)
    return replace(record, subject=place.as_posix())


def _write(files: dict[str, str], records: Sequence[Record], judged: Judged, about: Run) -> None:
    """The reports; the summary goes to standard error if a report goes to standard output."""
    from posenc.audit.outputs import terminal

    for form, name in files.items():
        text: str = importlib.import_module(f"posenc.audit.outputs.{form}").write(
            records, judged, about
        )
        if name == "-":
            print(text, end="")
            continue
        try:
            Path(name).write_bytes(text.encode("utf-8", "backslashreplace"))  # odd paths
        except OSError as error:
            raise OSError(error.errno, f"cannot write: {error.strerror}", name) from error
    stream = sys.stderr if "-" in files.values() else sys.stdout
    width = max(80, min(100, shutil.get_terminal_size().columns))
    colour = terminal.colours(stream)
    print(terminal.write(records, judged, about, width=width, colour=colour), end="", file=stream)


def _command(options: dict[str, Any]) -> str:
    """The command, but for its reports."""
    words = ["posenc", "audit", *options["subjects"]]
    named = {"--as": "label", "--kind": "kind", "--framework": "framework", "--grid": "grid"}
    named |= {"--expected-failures": "expected_failures"}
    for option, name in named.items():
        words += [option, options[name]] if options[name] is not None else []
    words += ["--config", *options["config"]] if options["config"] else []
    return shlex.join(words)
