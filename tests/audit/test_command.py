"""``posenc audit``: its arguments, files and exit status, with audits that are stood in for."""

from __future__ import annotations

import html.parser
import json
import re
import sys
import types
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from posenc.audit import Record, expected
from posenc.audit.outputs import Run, junit, markdown, terminal
from posenc.audit.outputs import html as html_page
from posenc.audit.outputs import json as json_page
from posenc.cli.main import main

GOOD = Record(
    "lib", "lib.Rotary", "rope", "two rows", "agrees", version="1.2", dtype="float32",
    error=1e-7, tolerance=2e-6,
)  # fmt: skip
BAD = Record(
    "lib", "lib.Rotary", "rope", "one token per row, rows at other offsets", "differs",
    version="1.2", path="cached", dtype="bfloat16", error=float("inf"), tolerance=4e-3,
    message="Row 1 has <the> | positions of row 0.", where={"position": 40, "row": 1},
    reproducer="from lib import Rotary; f = Rotary(8); f(x, pos)",
)  # fmt: skip
BROKEN = Record("", "mine:f", "alibi", "call", "not called", message="it raised\nTypeError: no")
CANNOT = replace(GOOD, check="partial", status="cannot express", message="it has no such option")
ABSENT = Record("other", "other", "", "import", "not installed", path="")
ALL = [GOOD, BAD, BROKEN, CANNOT, ABSENT]


@pytest.fixture
def audits(monkeypatch):
    """Records that the audits answer with, and what they were asked."""
    answers = types.SimpleNamespace(records=[GOOD], asked=[], act=lambda: None)

    def stand_in(module, name):
        def answer(*given, **named):
            answers.asked.append((name, given, named))
            answers.act()
            return answers.records

        fake = types.ModuleType(f"posenc.audit.{module}")
        setattr(fake, name, answer)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)

    stand_in("audit", "audit_path")
    stand_in("configs", "audit_config")
    stand_in("libraries", "audit_libraries")
    return answers


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("", ("audit_libraries", (None,), {"grid": "full"})),
        ("lib other --grid ci", ("audit_libraries", (["lib", "other"],), {"grid": "ci"})),
        ("m:f --as rope", (
            "audit_path", ("m:f", "rope"), {"kind": None, "framework": None, "grid": "full"}
        )),
        ("m:f --as alibi --kind bias --framework jax --grid ci", (
            "audit_path", ("m:f", "alibi"), {"kind": "bias", "framework": "jax", "grid": "ci"}
        )),
        ("--config .", ("audit_config", (".",), {})),
    ],
)  # fmt: skip
def test_what_is_audited(audits, words, asked):
    assert main(["audit", *words.split()]) == 0
    assert audits.asked == [asked]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("lib --config .", "--config takes no other subjects, got lib"),
        ("lib m:f --as rope", "functions or libraries, not both, got m:f and lib"),
        ("m:f", "m:f needs --as LABEL"),
        ("m:f --as rop", "unknown scheme 'rop' (did you mean 'rope'?)"),
        ("json:f", "error: json:f needs --as LABEL"),  # a module with the name of an option
        ("lib --as rope", "--as is for functions, module:function, got lib"),
        ("--framework jax", "--framework is for functions; name one as module:function"),
        ("--kind bias --config .", "--kind is for functions"),
        ("--grid ci --config .", "--grid has no effect on --config"),
        ("models/config.json", "a configuration is --config models/config.json"),
        ("--config no/such", "no file or folder no/such"),
        ("lib lib", "lib is named twice"),
        ("--json a --html a", "--html and --json cannot both be written to a"),
        ("--json - --junit -", "--json and --junit cannot both be written to -"),
        ("--json .", "--json must be a file, got the folder '.'"),
        ("--markdown no/such.md", "--markdown: there is no folder 'no'"),
        ("--expected-failures none.txt", "cannot read: No such file"),
    ],
)
def test_wrong_arguments_are_told_before_any_work(audits, capsys, words, error):
    assert main(["audit", *words.split()]) == 2
    assert error in capsys.readouterr().err
    assert audits.asked == []


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([GOOD], 0), ([GOOD, CANNOT, ABSENT], 0), ([GOOD, BAD, BROKEN], 1), ([GOOD, BROKEN], 2),
        ([], 2), ([CANNOT, ABSENT], 2),
    ],
)  # fmt: skip
def test_exit_status(audits, records, status):
    audits.records = records
    assert main(["audit"]) == status


def test_configurations_are_named_by_their_paths(audits, capsys, tmp_path):
    """Two folders have the same names within them; what is not installed is there once."""
    for name in ("a é", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "c.json").write_text("{}")
    audits.records = [replace(GOOD, subject="m/config.json"), ABSENT]
    assert main(["audit", "--config", "a é", "b", "c.json", "--json", "-"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    subjects = ["a é/m/config.json", "other", "b/m/config.json", "c.json"]
    assert [record["subject"] for record in records] == subjects


def test_expected_failures_are_strict(audits, capsys, tmp_path):
    file = tmp_path / "known.txt"
    file.write_text(f"# issue 7\n{BAD.name}\n\n{BROKEN.name}  # never called\n")
    audits.records = [GOOD, BAD, BROKEN]
    words = ["audit", "--expected-failures", str(file)]
    assert main(words) == 0
    assert "1 agrees" in (said := capsys.readouterr().out)
    assert "2 fail as expected" in said
    audits.records = [GOOD, replace(BAD, status="agrees"), BROKEN]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert f"error: {file}:2: this check agrees now, so remove the line:" in _plain(said)
    assert BAD.name in _plain(said)


def test_a_line_about_something_else_is_a_note_and_one_about_nothing_an_error():
    line = expected.Line("absent | A | rope | eager | two rows", "known.txt:3")
    assert not expected.judge([GOOD], [line]).errors
    (note,) = expected.judge([GOOD], [line]).notes
    assert note.startswith("known.txt:3: not audited in this run")
    line = expected.Line(GOOD.name.replace("two", "too"), "known.txt:3")
    (error,) = expected.judge([GOOD], [line]).errors
    assert error.startswith("known.txt:3: no check has this name")
    assert f"did you mean {GOOD.name!r}" in error
    assert expected.judge([GOOD], [line], "ci").errors == []  # that grid has fewer checks
    line = expected.Line(CANNOT.name, "known.txt:3")
    (note,) = expected.judge([CANNOT], [line]).notes
    assert note.startswith("known.txt:3: cannot express")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("\nlib\n", "known.txt:2: a line must be the name of a check, library |"),
        ("lib | | rope | two rows", "known.txt:1: a line must be the name"),
        ("a | b | c\n# again\na |  b | c", "known.txt:3: 'a | b | c' is in known.txt:1 already"),
        (b"\xff\xfe\x00", "known.txt is no UTF-8 text"),
    ],
)
def test_lines_that_are_no_names(tmp_path, text, error):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "known.txt").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(error)):
        expected.read("known.txt")


def test_reasons_of_expected_failures(tmp_path):
    (tmp_path / "known.txt").write_text(
        "\ufeff# no reason: a line is between\n\n# one,\n#two\na | b | c#d\na | b | e # three # 4\n"
    )
    assert [(line.name, line.reason) for line in expected.read("known.txt")] == [
        ("a | b | c#d", "one, two"),
        ("a | b | e", "three # 4"),
    ]


def judged(**reasons):
    return expected.Judged(reasons, ("known.txt:1: remove it: a | b | c",), ("known.txt:2: n",))


RUN = Run("posenc audit", "ci", 1.5, {"posenc": "0"}, "Linux", "2026-01-01T00:00:00")
ODD = [*ALL, replace(BAD, check="\x1b[31m</script>&\udcff\x00", message="`a` ]]> \x1b[0m\n|b|")]


def test_junit_counts_and_kinds():
    """The attributes and elements of junit-10.xsd, of Jenkins; no others."""
    root = ET.fromstring(junit.write(ODD, judged(), RUN).encode("utf-8", "backslashreplace"))
    assert {key: root.get(key) for key in ("tests", "failures", "errors")} == {
        "tests": "7", "failures": "3", "errors": "1",
    }  # fmt: skip
    attributes = {
        "testsuites": {"name", "time", "tests", "failures", "errors"},
        "testsuite": {
            "name", "tests", "failures", "errors", "skipped", "time", "timestamp",
        },
        "testcase": {"name", "classname", "time"},
        "property": {"name", "value"},
    } | {tag: {"type", "message"} for tag in ("failure", "error", "skipped")}  # fmt: skip
    for element in root.iter():
        assert set(element.keys()) == attributes.get(element.tag, set()), element.tag
    for suite in root:
        cases = suite.findall("testcase")
        for key, tag in {"failures": "failure", "errors": "error", "skipped": "skipped"}.items():
            assert int(suite.get(key)) == len(suite.findall(f"testcase/{tag}"))
        assert int(suite.get("tests")) == len(cases)
    (failure, _, line) = root.iter("failure")
    assert failure.get("message") == BAD.message
    assert BAD.reproducer in failure.text
    assert "remove it" in line.get("message")
    assert [s.get("message") for s in root.iter("skipped")] == [
        "cannot express: it has no such option", "not installed",
    ]  # fmt: skip


def test_junit_skips_expected_failures_with_the_reason():
    root = ET.fromstring(junit.write([BAD], expected.Judged({BAD.name: "issue 7"}), RUN))
    assert not [*root.iter("failure")]
    (skipped,) = root.iter("skipped")
    assert skipped.get("message") == "expected to fail: issue 7"
    assert root.get("failures") == "0"


def test_json_has_every_field():
    text = json_page.write(ODD, judged(**{}), RUN).encode("utf-8", "backslashreplace")
    page = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert page["schema"] == "posenc.audit/1"
    assert page["versions"] == {"posenc": "0", "lib": "1.2"}
    assert page["exit_status"] == 1
    assert page["counts"]["differs"] == 2
    bad = page["records"][1]
    assert bad["error"] == "Infinity"
    assert bad["where"] == {"position": 40, "row": 1}
    assert bad["name"] == BAD.name
    assert set(bad) == {*BAD.as_dict(), "expected"}


def test_markdown_cells_hold_no_markup():
    text = markdown.write(ODD, judged(), RUN)
    table = [line for line in text.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line) for line in table]
    assert {len(row) for row in cells} == {6}
    assert r"Row 1 has \<the\> \| positions" in text
    assert "<script" not in text
    assert f"```python\n{BAD.reproducer}\n```" in text


class Tags(html.parser.HTMLParser):
    """Open tags, and whether each is closed in its turn."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_one_closed_file():
    text = html_page.write(ODD, judged(), RUN)
    page = Tags()
    page.feed(text)
    assert page.open == []
    assert {tag for tag, _ in page.seen}.isdisjoint({"script", "link", "img"})
    assert not re.search(r"https?:|url\(|@import", text)
    links = [given["href"][1:] for tag, given in page.seen if tag == "a"]
    assert links == [given["id"] for _, given in page.seen if "id" in given]
    assert "Row 1 has &lt;the&gt; | positions of row 0." in text
    assert "\x1b" not in text


def test_the_summary_is_legible():
    text = terminal.write(ODD, judged(), RUN)
    copied = (BAD.name, BAD.reproducer, BROKEN.name, ODD[-1].name)
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert all(line.strip().removeprefix("name: ").startswith("lib | ") for line in wide)
    assert "\x1b" not in text
    assert all(part in text for part in copied[:3])
    assert "first at position 40, row 1, error infinite, tolerance 0.004" in text
    assert "it raised TypeError: no" in text
    assert re.search(r"^lib 1.2 lib.Rotary +2 differ, 1 agrees, 1 cannot express$", text, re.M)
    assert re.search(r"^not installed: other$", text, re.M)
    assert text.endswith(
        "Lines must leave the file of expected failures. 2 differ, 1 not called, 1\n"
        "agrees, 1 cannot express, 1 not installed.\n"
    )
    assert "\x1b[31m" in terminal.write([BAD], judged(), RUN, colour=True)


def test_of_many_differences_each_has_a_line():
    many = [replace(BAD, check=f"check {i}", error=float(i)) for i in range(9)]
    text = terminal.write(many, expected.Judged(), RUN)
    assert text.count("Row 1 has") == 3
    assert "6 more of lib 1.2 lib.Rotary:" in text
    for record in many:
        assert record.name in text


def test_reports_are_written_and_one_goes_to_standard_output(audits, capsys, tmp_path):
    audits.records = [GOOD, BAD]
    files = {form: tmp_path / f"out é.{form}" for form in ("junit", "markdown", "html")}
    words = [word for form, file in files.items() for word in (f"--{form}", str(file))]
    audits.act = lambda: print("a function that prints")
    assert main(["audit", *words, "--json", "-"]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)["records"]) == 2
    assert "a function that prints" in err
    assert "Something differs" in err
    assert all(file.stat().st_size > 300 for file in files.values())


def test_a_function_is_audited_from_the_current_folder(tmp_path, capsys):
    """The whole way, with nothing stood in for."""
    (tmp_path / "turning.py").write_text(
        "import numpy as np\n"
        "def turn(x, pos):\n"
        "    print('a line that is no report')\n"
        "    angle = pos[:, None, :, None] * 1e4 ** (-np.arange(0, 1, 2 / x.shape[-1]))\n"
        "    out, cos, sin = x.copy(), np.cos(angle), np.sin(angle)\n"
        "    a, b = x[..., ::2], x[..., 1::2]\n"
        "    out[..., ::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin\n"
        "    return out\n"
    )
    words = ["audit", "turning:turn", "--grid", "ci", "--framework", "numpy", "--json", "-"]
    assert main([*words, "--as", "rope"]) == 1
    page = json.loads(capsys.readouterr().out)
    known = [record["name"] for record in page["records"] if record["status"] == "differs"]
    assert len(known) > 5
    (tmp_path / "known.txt").write_text("\n".join(known))
    words += ["--expected-failures", "known.txt"]
    assert main([*words, "--as", "rope:layout=interleaved"]) == 0  # lines about something else
    agree = json.loads(capsys.readouterr().out)
    assert {record["status"] for record in agree["records"]} == {"agrees"}
    assert len(agree["expected_failures"]["notes"]) == len(known)
    assert main(["audit", "turning:none", "--as", "rope"]) == 2


@pytest.mark.long
def test_configurations_are_audited(tmp_path, capsys):
    """With nothing stood in for."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["audit", "--config", "."]) == 0
    assert "config.json" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["audit", "--config", "empty"]) == 2
    assert "no config.json in 'empty'" in capsys.readouterr().err


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (SystemExit(0), "the audited code left by sys.exit(0)", 2),
        (KeyError("k"), "KeyError: 'k'", 2),
        (ImportError("lib is broken"), "error: lib is broken", 2),
        (KeyboardInterrupt(), "posenc audit: stopped", 130),
    ],
)
def test_audits_that_raise(audits, capsys, error, said, status):
    audits.act = lambda: _raise(error)
    assert main(["audit", "--json", "report.json"]) == status
    assert said in capsys.readouterr().err


def _plain(text):
    return " ".join(text.split())
