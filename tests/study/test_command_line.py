"""Words on the command line that are easily wrong."""

from __future__ import annotations

import pytest

from posenc.cli.main import main
from posenc.study import terminal
from posenc.study.corpus import from_files
from posenc.study.study import Study


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare --lr 0.1", "--lr 0.1 (did you mean --learning-rate?)"),
        ("compare --schemse rope", "--schemse rope (did you mean --schemes?)"),
        ("list --fulll", "unrecognized arguments: --fulll"),
        ("compare --schemes ropee", "did you mean 'rope'?); `posenc list` prints the"),
        ("compare --schemes rope:scaling=yarn", "by name it is a scheme, as rope_yarn"),
    ],
)
def test_an_error_names_what_was_meant(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(words.split())
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 2
    assert said in error
    assert len(error) < 300


def test_options_given_twice_are_taken_together(monkeypatch):
    seen = []
    monkeypatch.setattr(terminal, "compare", lambda study: seen.append(study) or 0)
    words = (
        "compare --text a --text b c --schemes rope --schemes alibi --eval-lens 64 --eval-lens 128"
    )
    assert main(words.split()) == 0
    assert seen[0].text == ("a", "b", "c")
    assert seen[0].schemes == ("rope", "alibi")
    assert seen[0].eval_lens == (64, 128)


@pytest.mark.parametrize("label", ["alibi\udcff", "alibi\x1b[31m", "alibi\n"])
def test_a_label_can_be_printed(label):
    with pytest.raises(ValueError, match=r"schemes names .*not printable"):
        Study(schemes=(label,))


def test_a_text_has_a_name_that_can_be_printed(tmp_path):
    path = tmp_path / "a\x1b[31m\nb.txt"
    path.write_text("text")
    name = from_files([path]).name
    assert name == r"a\x1b[31m\nb.txt"


def test_an_empty_text_is_named(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(ValueError, match=r"text must name files with bytes.*empty\.txt': empty"):
        from_files([path])
