"""Golden vectors: read by other means, the same bytes each time, and within their tolerances."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import posenc
from posenc.cli.main import main
from posenc.vectors import write
from posenc.vectors.answers import answer, context_length, tolerances
from posenc.vectors.cases import Case, cases
from posenc.vectors.files import contents
from posenc.vectors.inputs import hashed
from posenc.weights import safetensors

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "vectors.md"
OWN = sorted(n for n, made in posenc.catalogue().items() if made.__module__.startswith("posenc."))
FEW = ["alibi", "rope", "shaw", "sinusoidal"]  # one of each kind
SLOW = sorted(set(OWN) - {*FEW, "mrope", "rope_yarn", "sandwich", "kerple_log"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors") / "new" / "folder"
    write(folder, FEW)
    return folder


def read(folder):
    """Read them in a program of its own, which sees no ``PYTHONPATH`` (``-I``)."""
    words = [sys.executable, "-I", str(HERE / "read_vectors.py"), str(folder)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_program_without_posenc_reads_them_and_agrees(folder):
    done = read(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 files, 24 cases agree\n"


def test_a_changed_byte_is_noticed(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    content = bytearray((tmp_path / "shaw.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "shaw.safetensors").write_bytes(content)
    done = read(tmp_path)
    assert done.returncode == 1
    assert "AssertionError: shaw.safetensors" in done.stderr


def test_the_same_bytes_each_time(folder):
    for name in ("alibi", "shaw"):
        for file, content in contents(name).items():
            assert (folder / file).read_bytes() == content


def test_tensors_in_any_order_make_the_same_file():
    a, b = np.zeros((2, 3), np.float32), np.arange(3)
    given = {"a": a, "b": b, "scalar": np.float64(2.0).reshape(())}
    assert safetensors.dump(given, {}) == safetensors.dump(dict(reversed(given.items())), {})
    big = {"b": b.astype(">i8")}
    assert safetensors.dump(big, {}) == safetensors.dump({"b": b}, {})
    with pytest.raises(TypeError, match="a must be float64, float32 or int64, got int16"):
        safetensors.dump({"a": np.zeros(2, np.int16)}, {})


def test_inputs_are_held_by_half_precision():
    numbers = hashed((4000,), 1)
    assert np.array_equal(numbers, numbers.astype(np.float16))
    assert np.all(np.abs(numbers) <= 2)
    assert len(np.unique(numbers)) == 129
    assert abs(np.mean(numbers)) < 0.05
    assert abs(np.corrcoef(numbers, hashed((4000,), 2))[0, 1]) < 0.05


def allowed(case: Case, expected, dtype):
    """As docs/vectors.md says."""
    at, tolerance = case.inputs, tolerances(case, answer(case))[dtype]
    if case.kind == "bias":
        position = abs(at["q_pos"][:, None] - at["k_pos"])
    else:
        places = np.max(at["places"], -1) if "places" in at else at["pos"]
        position = places[:, None, :, None] if expected.ndim == 4 else places[..., None]
    allowed = tolerance["absolute"] + tolerance["relative"] * abs(expected)
    return allowed + tolerance["per_position"] * position


def check_tolerances(name):
    for case in cases(name):
        exact, single = answer(case), answer(case, "float32")
        for key, expected in exact.items():
            assert expected.dtype == np.float64
            finite = np.isfinite(expected)
            assert np.array_equal(single[key][~finite], expected[~finite])
            error = np.abs(np.where(finite, single[key], 0) - np.where(finite, expected, 0))
            limit = allowed(case, np.where(finite, expected, 0), "float32")
            assert np.all(error <= limit), case.name
            assert np.any(expected[finite] != 0), case.name


@pytest.mark.parametrize("name", sorted(set(OWN) - {*SLOW}))
def test_float32_is_within_the_tolerances(name):
    check_tolerances(name)


@pytest.mark.long
@pytest.mark.parametrize("name", SLOW)
def test_float32_is_within_the_tolerances_of_every_scheme(name):
    check_tolerances(name)


@pytest.mark.parametrize("name", ["rope_dynamic", "rope_longrope"])
def test_scalings_are_told_the_length_of_the_context(name):
    """Beyond the training length angles are those of the frequencies there, not of the first."""
    far = next(case for case in cases(name) if case.name.endswith("far"))
    x, pos = far.inputs["x"].astype(np.float64), far.inputs["pos"]
    long, short = (far.scheme.at_length(length) for length in (context_length(far), 5))
    assert long.frequencies() != short.frequencies()
    angle = pos[:, None, :, None] * np.array(long.frequencies())
    a, b = np.split(x, 2, axis=-1)
    turned = np.concatenate([a * np.cos(angle), b * np.cos(angle)], -1)
    turned += np.concatenate([-b * np.sin(angle), a * np.sin(angle)], -1)
    np.testing.assert_allclose(answer(far)["query"], long.attention_factor * turned, atol=1e-9)
    (file, about) = sorted(contents(name).items())[0]
    first = next(c for c in json.loads(about)["cases"] if c["name"] == far.name)
    assert file == f"{name}.json"
    assert first["frequencies"] == list(long.frequencies())


def test_every_kind_place_and_head_count_is_there():
    kinds = {case.kind for name in FEW for case in cases(name)}
    assert kinds == {"rotation", "bias", "embedding", "attention"}
    rope = list(cases("rope"))
    assert {case.sizes["num_heads"] for case in rope} == {6, 8}
    assert {case.options["layout"] for case in rope} == {"half", "interleaved"}
    assert any("rotary_dim" in case.options for case in rope)
    (far, *_) = (case.inputs["pos"] for case in rope if case.name.endswith(".far"))
    assert far[0, -1] == 100_000
    assert far[1, 0] != far[0, 0]


def test_an_unedited_folder_is_replaced_and_nothing_else(tmp_path):
    write(tmp_path, ["alibi"])
    write(tmp_path, ["nope"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "SHA256SUMS", "nope.json", "nope.safetensors",
    ]  # fmt: skip
    (tmp_path / "nope.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"nobody edited; '.*' holds 'nope\.json'"):
        write(tmp_path, ["nope"])
    assert (tmp_path / "nope.json").read_text() == "mine"


@pytest.mark.parametrize("held", ["folder", "file", "link"])
def test_a_folder_of_others_stays(tmp_path, held):
    other = tmp_path / "other"
    if held == "folder":
        other.mkdir()
    elif held == "file":
        other.write_text("text")
    else:
        other.symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="holds 'other'"):
        write(tmp_path, ["nope"])
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_command(tmp_path, capsys):
    out = tmp_path / "a folder é"
    assert main(["vectors", "--out", str(out), "nope"]) == 0
    assert re.match(r"3 files, \d\.\d MiB, in .*é: see docs", capsys.readouterr().out)
    assert main(["vectors", "--out", str(out), "rpoe"]) == 2
    assert "unknown scheme 'rpoe' (did you mean 'rope'?)" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["vectors", "--out", str(tmp_path / "file"), "nope"]) == 2
    assert "out must be a folder, got the file" in capsys.readouterr().err


@pytest.mark.long
def test_the_reader_of_the_page_compiles_and_reads(folder, tmp_path):
    if not (compiler := shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("no C compiler is installed")
    (source,) = re.findall(r"```c\n(.*?)```", DOCS.read_text(), re.S)
    (tmp_path / "read.c").write_text(source)
    words = [compiler, "-std=c99", "-Wall", "-Wextra", "-Werror", "read.c", "-o", "read", "-lm"]
    subprocess.run(words, cwd=tmp_path, check=True)
    words = [str(tmp_path / "read"), str(folder / "rope.safetensors")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"largest error \d\.\de-1\d\n", done.stdout)
    whole = (folder / "rope.safetensors").read_bytes()
    (tmp_path / "rope.safetensors").write_bytes(whole[: len(whole) // 3])
    done = subprocess.run(
        [words[0], str(tmp_path / "rope.safetensors")], capture_output=True, check=False
    )
    assert done.returncode == 2
