"""Words on the command line that are easily wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from posenc.cli import main as command
from posenc.cli.main import COMMANDS, main, parsers_of
from posenc.study import terminal
from posenc.study.corpus import from_files
from posenc.study.study import Study


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare --lr 0.1", "--lr 0.1 (did you mean --learning-rate?)"),
        ("compare --schemse rope", "--schemse rope (did you mean --schemes?)"),
        ("list --fulll", "unrecognized arguments: --fulll"),
        ("comapre", "unknown command 'comapre' (did you mean 'compare'?); accepted: compare, "),
        ("--versoin", "--versoin (did you mean --version?)"),
        ("compare --steps four", "argument --steps: accepted: an integer, got 'four'"),
        ("compare --clip x", "argument --clip: accepted: a number, got 'x'"),
        ("audit --grid ful", "--grid: accepted: full, ci, got 'ful' (did you mean 'full'?)"),
        ("compare --eval-lens 0", "error: --eval-lens must be at least 1, got 0"),
        ("show alibi --out a.gif", "--out: accepted: a name that ends in one of .png, .svg, .pdf"),
        ("rope nowhere.json", "error: cannot read: No such file or directory: 'nowhere.json'"),
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


def test_without_a_command_eight_lines_say_what_there_is(capsys):
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 8
    assert max(map(len, lines)) <= 80
    assert "posenc show alibi" in said.err


def page(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_has_three_examples(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first, full = page([name, "--help"], capsys), page([name, "--help-all"], capsys)
    for text in (first, full):
        assert max(map(len, text.splitlines())) <= 80
        assert "SUPPRESS" not in text
    assert len(first.splitlines()) <= 40
    examples = first.partition("\nexamples:\n")[2].partition("Exit status: ")[0]
    assert sum("posenc " in line for line in examples.splitlines()) == 3
    _, parsers = parsers_of((name,))
    options = {o for a in parsers[name]._actions for o in a.option_strings} - {"--help-all"}
    assert all(option in full for option in options)
    assert (first == full) or f"posenc {name} --help-all" in first
    assert len(full.splitlines()) >= len(first.splitlines()) - 2


def test_examples_of_help_are_accepted_by_their_parsers():
    for name, parser in parsers_of(tuple(COMMANDS))[1].items():
        for words, _ in parser.examples:
            given = words.partition(f"posenc {name}")[2].partition(" > ")[0].strip(')"').split()
            parser.parse_args(given)


def test_help_of_the_whole_fits_a_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = page(["--help"], capsys).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_help_imports_no_numpy():
    code = "import sys; from posenc.cli.main import main\ntry: main(['--help'])\nfinally: "
    code += "print([m for m in ('numpy', 'posenc.study') if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_an_error_of_posenc_itself_is_status_2_with_a_traceback(capsys, monkeypatch):
    """Status 1 would say that a check failed."""

    class Broken:
        add_options = staticmethod(lambda parser: None)
        run = staticmethod(lambda options: {}["absent"])

    monkeypatch.setattr(command, "_module", lambda name: Broken)
    assert main(["list"]) == 2
    error = capsys.readouterr().err
    assert "KeyError: 'absent'" in error
    assert "this is an error of posenc" in error


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal for a closed pipe")
def test_a_closed_pipe_is_silent():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "posenc", "list", "rope"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


COMPLETED = {
    "posenc co": "compare completion",
    "posenc compare --schem": "--schemes",
    "posenc compare --schemes alibi_": "alibi_2d",
    "posenc compare --schemes alibi rope+alibi_": "rope+alibi_2d",
    "posenc compare --backend = j": "jax",
    "posenc compare --task passk": "passkey",
    "posenc compare --steps 4 --keep-weights --o": "--out",
    "posenc show passk": "passkey",
    "posenc show --out pic": "picture.png",
    "posenc vectors --out sub": "sub",
    "posenc audit --kind ro": "rotation",
    "posenc list rope : ba": "",  # an option of a scheme
}


def test_bash_completes_commands_options_and_values(tmp_path, capsys):
    bash = shutil.which("bash")
    if bash is None or os.name == "nt":
        pytest.skip("bash is not installed")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "posenc.bash").write_text(capsys.readouterr().out)
    (tmp_path / "picture.png").touch()
    (tmp_path / "sub").mkdir()
    tries = "".join(f"try {line}\n" for line in COMPLETED)
    code = 'source ./posenc.bash; try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _posenc; '
    code += f'echo "${{COMPREPLY[*]}}"; }}\n{tries}complete -p posenc'
    done = subprocess.run([bash, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [*COMPLETED.values(), "complete -F _posenc posenc"]


@pytest.mark.long
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell, tmp_path, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in (*COMMANDS, "self_extend", "passkey", "rotation"))
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script)
    done = subprocess.run([path, "-n", str(tmp_path / "script")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
