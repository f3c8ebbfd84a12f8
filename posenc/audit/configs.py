"""``audit_config``: what each installed library makes of a model's ``config.json``.

The definition is that of ``posenc.hf``; the readers are those of ``posenc.audit.readers``. Nothing
needs weights or a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any

from posenc.audit.config_comparison import Finding, compare
from posenc.audit.definition import Definition, definition
from posenc.audit.readers import (
    FACTS,
    Facts,
    Missing,
    NotReadError,
    Reader,
    Unsaid,
    installed_readers,
)
from posenc.audit.record import Record
from posenc.audit.released import released

PATH = "configuration"
"""``Record.path`` of these records."""

_NAMES = {
    "ClipHann": "rope_clip_hann", "ClipPeriod": "rope_clip_period", "DynamicNTK": "rope_dynamic",
    "Llama3": "rope_llama3", "LongRoPE": "rope_longrope", "NTK": "rope_ntk",
    "NTKMixed": "rope_ntk_mixed", "PI": "rope_pi", "Proportional": "p_rope", "YaRN": "rope_yarn",
}  # fmt: skip


def audit_config(
    path: str | PathLike[str], *, readers: Sequence[Reader | Missing] | None = None
) -> list[Record]:
    """What installed libraries make of configurations, against the definition and each other.

    Parameters
    ----------
    path
        A JSON file; or a folder, in which every ``config.json`` is read, also in folders below.
    readers
        Those to ask. Default: those of every installed library, and a record for each known
        library that is not installed or has no reader.

    Returns
    -------
    One record per configuration, type of layers, reader and fact (``FACTS``). ``subject`` is the
    file, below the folder that was given. What cannot be compared is a record too: a file that is
    no configuration, a key that is not understood, a model that a library does not know, a fact
    that it does not say.

    Raises
    ------
    FileNotFoundError
        There is no such file, or no ``config.json`` in the folder.
    """
    place = Path(path)
    files = _files(place)
    asked = list(installed_readers()) if readers is None else list(readers)
    records = [_missing(each, place.name) for each in asked if isinstance(each, Missing)]
    present = [each for each in asked if not isinstance(each, Missing)]
    for file in files:
        subject = file.relative_to(place).as_posix() if place.is_dir() else file.name
        records += _of_file(file, subject, present)
    return records


def _files(place: Path) -> list[Path]:
    if not place.exists():
        raise FileNotFoundError(f"config must be a file or a folder, got {str(place)!r}")
    if place.is_file():
        return [place]
    found = sorted(place.rglob("config.json"))
    if not found:
        raise FileNotFoundError(f"no config.json in {str(place)!r} or in folders below")
    return found


def _missing(one: Missing, subject: str) -> Record:
    status = "cannot express" if one.installed else "not installed"
    return Record(
        one.name, subject, "", "configuration", status, one.version, PATH, message=one.reason
    )  # fmt: skip


def _not_called(subject: str, message: str, check: str = "configuration") -> Record:
    return Record("posenc", subject, "", check, "not called", _version(), PATH, message=message)


def _version() -> str:
    import posenc

    return str(getattr(posenc, "__version__", ""))


def _of_file(file: Path, subject: str, readers: Sequence[Reader]) -> Iterator[Record]:
    """The records of one file."""
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        yield _not_called(subject, f"cannot be read: {error.strerror}")
        return
    except ValueError as error:  # of JSON or of UTF-8
        yield _not_called(subject, f"no JSON: {error}")
        return
    if not isinstance(config, Mapping):
        what = f"must hold a JSON object, got {type(config).__name__}"
        yield _not_called(subject, f"no configuration: {what}")
        return
    if not isinstance(config.get("model_type"), str):
        some = ", ".join(map(str, list(config)[:5])) or "nothing"
        yield _not_called(
            subject, f"no configuration of a model: model_type is missing; it has {some}"
        )
        return
    try:
        own = definition(config)
    except (TypeError, ValueError) as error:
        yield _not_called(subject, f"the definition refuses it: {error}")
        return
    for key, hint in own.unknown.items():
        yield _not_called(subject, f"{key} is not understood{hint}", f"key {key}")
    told: dict[Any, list[tuple[Reader, Facts, bool]]] = {}
    for reader in readers:
        yield from _of_reader(config, subject, own, reader, file, told)
    yield from _of_each_other(subject, own, told)


def _of_reader(
    config: Mapping[str, Any],
    subject: str,
    own: Definition,
    reader: Reader,
    file: Path,
    told: dict[Any, list[tuple[Reader, Facts, bool]]],
) -> Iterator[Record]:
    def record(scheme: str, check: str, finding: Finding) -> Record:
        given = vars(finding)
        again = f"posenc audit --config {file}" if finding.status == "differs" else ""
        return Record(
            reader.name, subject, scheme, check, version=reader.version, path=PATH,
            reproducer=again, **given,
        )  # fmt: skip

    try:
        found = reader.read(config, own.lengths)
    except NotReadError as error:
        yield record("", "configuration", Finding("cannot express", str(error)))
        return
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield record("", "configuration", Finding("not called", f"{reader.name} raised {what}"))
        return
    model = _model(config, own.part)
    for number, facts in enumerate(own.facts):
        rope, scheme = own.ropes[number], _label(own, number)
        matching = _matching(facts, found)
        if not matching:
            kinds = ", ".join(repr(each.kind) for each in found) or "none"
            why = Finding("cannot express", f"no layers of this type; it has {kinds}")
            yield record(scheme, _check("layers", facts), why)
        for fact in FACTS:
            results = [
                (each, result)
                for each in matching
                if (result := compare(fact, facts, each, rope, own.far)) is not None
            ]
            if not results:
                continue
            # Layers of one type may be read as several: the worst is told, and which layers.
            each, result = min(results, key=lambda pair: _RANK.index(pair[1].status))
            for one in matching:
                told.setdefault((number, fact), []).append(
                    (reader, one, result.status == "differs")
                )
            yield record(
                scheme, _check(fact, facts), _in_words(result, fact, model, facts, each, matching)
            )


_RANK = ("differs", "not called", "cannot express", "agrees", "not installed")


def _model(config: Mapping[str, Any], part: str) -> str:
    """The ``model_type`` of the part that was read."""
    inner: Any = config
    for name in filter(None, part.split(".")):
        inner = inner.get(name, inner)
    return str(inner.get("model_type", config["model_type"]))


def _check(fact: str, facts: Facts) -> str:
    name = FACTS.get(fact, fact)
    return f"{name}, {facts.kind}" if facts.kind else name


def _label(own: Definition, number: int) -> str:
    """The scheme of a group of layers as ``posenc compare`` names it."""
    rope, facts = own.ropes[number], own.facts[number]
    if rope is None:
        return "nope" if any(own.ropes) else ""
    name = "rope" if rope.scaling is None else _NAMES.get(type(rope.scaling).__name__, "rope")
    return name if facts.sections is None or isinstance(facts.sections, Unsaid) else "mrope"


def _matching(own: Facts, found: Sequence[Facts]) -> list[Facts]:
    """The layers of a reader that are those of a type of the definition."""
    if own.layers is not None:
        mine = set(own.layers)
        return [
            each
            for each in found
            if (each.kind in ("", own.kind) if each.layers is None else mine & set(each.layers))
        ]
    same = [each for each in found if each.kind == own.kind] if own.kind else list(found)
    same = same or [each for each in found if not each.kind]
    # Without a plan, which layers rotate is not known.
    turning = [each for each in same if each.rotates]
    return (turning or same) if own.rotates else same


def _in_words(
    result: Finding, fact: str, model: str, own: Facts, found: Facts, matching: Sequence[Facts]
) -> Finding:
    """With the layers that it is about, and what is known of released weights."""
    message = result.message
    if own.layers and found.layers and len(matching) > 1 and result.status == "differs":
        layers = sorted(set(own.layers) & set(found.layers))
        message = f"layers {_short(layers)} of {len(own.layers)}: {message}"
    row = released(model, fact, own.kind)
    if row is not None and result.status == "differs":
        message = f"differs from released weights: {message}. In them, {row.sentence()}"
    elif row is not None and result.status == "agrees":
        message = f"{message}, as in released weights ({', '.join(row.sources)})"
    return Finding(result.status, message, result.error, result.tolerance, result.where)


def _short(layers: Sequence[int]) -> str:
    first = ", ".join(map(str, layers[:6]))
    return f"{first}, …" if len(layers) > 6 else first


def _of_each_other(
    subject: str, own: Definition, told: Mapping[Any, list[tuple[Reader, Facts, bool]]]
) -> Iterator[Record]:
    """Two readers, where one of them differs from the definition."""
    for (number, fact), several in told.items():
        by_reader: dict[str, tuple[Reader, Facts, bool]] = {}
        for one in several:
            by_reader.setdefault(one[0].name, one)
        for (first, mine, wrong), (second, other, also) in combinations(by_reader.values(), 2):
            if not (wrong or also):
                continue
            result = compare(fact, mine, other, own.ropes[number], own.far)
            if result is None:
                continue
            facts = own.facts[number]
            message = f"{second.name}, held against {first.name}: {result.message}"
            yield Record(
                f"{first.name} and {second.name}", subject, _label(own, number),
                f"{_check(fact, facts)}, of each other", result.status,
                f"{first.version} and {second.version}", PATH, message=message,
                error=result.error, tolerance=result.tolerance, where=result.where,
            )  # fmt: skip
