"""JUnit's XML, as the consoles of CIs read it: the schema ``junit-10.xsd`` of Jenkins."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from posenc.audit.expected import Judged
from posenc.audit.outputs.run import Group, Run, conditions, groups, number, one_line, place
from posenc.audit.record import Record

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(records: Sequence[Record], judged: Judged, run: Run) -> str:
    """One suite for each subject, one case for each check.

    ``differs`` is a failure and ``not called`` an error. An expected failure is skipped with its
    reason, as are ``cannot express`` and ``not installed``. Lines that must leave the file of
    expected failures are failures of a suite of their own.
    """
    root = ET.Element("testsuites", name="posenc audit", time=f"{run.seconds:.3f}")
    suites = [_suite(root, group, judged, run) for group in groups(records)]
    if judged.errors:
        suites.append(_lines(root, judged, run))
    for attribute in ("tests", "failures", "errors"):
        root.set(attribute, str(sum(int(suite.get(attribute, 0)) for suite in suites)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _suite(root: ET.Element, group: Group, judged: Judged, run: Run) -> ET.Element:
    suite = _element(root, "testsuite", name=group.title, timestamp=run.time, time="0.000")
    properties = ET.SubElement(suite, "properties")
    known = {**run.versions, "platform": run.platform, "grid": run.grid, "command": run.command}
    if group.library:
        known[group.library] = group.version
    for name, value in known.items():
        _element(properties, "property", name=name, value=value)
    for record in group.records:
        _case(suite, record, judged)
    return _count(suite)


def _case(suite: ET.Element, record: Record, judged: Judged) -> None:
    names = {"name": conditions(record), "classname": f"{record.library} {record.subject}".strip()}
    case = _element(suite, "testcase", time="0.000", **names)
    if record.status == "agrees":
        return
    message = record.message or record.status
    if judged.expects(record):
        said = f"expected to fail: {judged.reason(record)}"
        _element(case, "skipped", said, type="expected", message=said)
        text = _element(case, "system-out")
        text.text = _xml(_details(record))
    elif record.status == "differs":
        _element(case, "failure", _details(record), type="differs", message=message)
    elif record.status == "not called":
        _element(case, "error", _details(record), type="not called", message=message)
    else:
        said = record.status if record.status in message else f"{record.status}: {message}"
        _element(case, "skipped", said, type=record.status, message=said)


def _lines(root: ET.Element, judged: Judged, run: Run) -> ET.Element:
    title = "file of expected failures"
    suite = _element(root, "testsuite", name=title, timestamp=run.time, time="0.000")
    for message in judged.errors:
        case = _element(suite, "testcase", name=message, classname=title, time="0.000")
        _element(case, "failure", message, type="expected failure", message=message)
    return _count(suite)


def _count(suite: ET.Element) -> ET.Element:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for attribute, tag in {"failures": "failure", "errors": "error", "skipped": "skipped"}.items():
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    return suite


def _details(record: Record) -> str:
    known = {
        "name": record.name,
        "found": record.message,
        "first at": place(record),
        "error": number(record.error),
        "tolerance": number(record.tolerance),
        "reproducer": one_line(record.reproducer),
    }
    return "\n".join(f"{name}: {value}" for name, value in known.items() if value)


def _element(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    element = ET.SubElement(parent, tag, {name: _xml(v) for name, v in attributes.items()})
    element.text = _xml(text) or None
    return element


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 does not have: they become escapes."""
    return _NOT_XML.sub(lambda found: repr(found[0])[1:-1], text)
