import hashlib
import os
import sys
import sysconfig

import pytest

from posenc.study.corpus import Corpus, check_size, from_files, standard_library

HELD_OUT = ["argparse", "configparser", "difflib", "pickletools", "shutil", "statistics"]
HELD_OUT += ["tarfile", "typing"]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library; every file holds its own name."""
    root = tmp_path / "python"
    names = [f"{name}.py" for name in HELD_OUT]
    names += ["asyncio/__init__.py", "email/mime/text.py", "abc.py", "json/decoder.py", "os.py"]
    names += ["test/test_abc.py", "json/tests/test_json.py", "site-packages/numpy.py"]
    names += ["encodings/ascii.py", "config-3.11/setup.py", "_sysconfigdata__linux_.py"]
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"<{name}>".encode())
    (root / "notes.txt").write_bytes(b"not Python")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def parts(text):
    return [part.decode() for part in text.split(b"\0")]


def test_modules_are_held_out_whole_and_in_order(library):
    corpus = standard_library()
    held = ["argparse.py", "asyncio/__init__.py", "configparser.py", "difflib.py"]
    held += ["email/mime/text.py", "pickletools.py", "shutil.py", "statistics.py"]
    held += ["tarfile.py", "typing.py"]
    assert parts(corpus.validation) == [f"<{name}>" for name in held]
    assert corpus.validation_files == 10


def test_training_files_lie_in_the_order_of_their_crc32(library):
    corpus = standard_library()
    # crc32: 0x43be9bb7, 0x8c3eda18, 0x90ffc377.
    assert parts(corpus.train) == ["<json/decoder.py>", "<abc.py>", "<os.py>"]
    assert corpus.train_files == 3


def test_line_ends_are_normalised(library):
    before = standard_library()
    (library / "abc.py").write_bytes(b"a\r\nb\n\r")
    (library / "os.py").write_bytes(b"a\nb\n\r")
    after = standard_library()
    assert parts(after.train).count("a\nb\n\r") == 2
    assert after.sha256 != before.sha256


def test_digest_is_of_training_then_validation(library):
    corpus = standard_library()
    assert corpus.sha256 == hashlib.sha256(corpus.train + corpus.validation).hexdigest()
    assert corpus == standard_library()


@pytest.mark.parametrize("missing", ["typing.py", "abc.py json/decoder.py os.py"])
def test_missing_sources_are_an_error_that_says_where(library, missing):
    for name in missing.split():
        (library / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"not all in .*python.*--text") as error:
        standard_library()
    assert ("typing" in str(error.value)) == (missing == "typing.py")


def test_this_python_has_megabytes_on_both_sides():
    corpus = standard_library()
    assert len(corpus.train) > 4_000_000
    assert len(corpus.validation) > 1_000_000
    assert corpus.train_files > 200
    assert corpus.validation_files > 40
    assert b"\r\n" not in corpus.train
    # A line of argparse.py, and one of abc.py.
    assert b"class ArgumentParser(" in corpus.validation
    assert b"class ArgumentParser(" not in corpus.train
    assert b"class ABCMeta(type)" in corpus.train


def write_files(folder, sizes):
    paths = []
    for index, size in enumerate(sizes):
        path = folder / f"{index:02}.txt"
        path.write_bytes(bytes([65 + index]) * size)
        paths.append(path)
    return paths


def test_few_files_give_the_last_tenth_of_each(tmp_path):
    first, second = write_files(tmp_path, [100, 25])
    corpus = from_files([second, first])
    assert corpus.train == b"A" * 90 + b"\0" + b"B" * 23
    assert corpus.validation == b"A" * 10 + b"\0" + b"B" * 2
    assert (corpus.train_files, corpus.validation_files) == (2, 2)


def test_many_files_are_held_out_whole(tmp_path):
    paths = write_files(tmp_path, range(100, 130))
    corpus = from_files(paths)
    kept, held = ({bytes(p)[:1] for p in s.split(b"\0")} for s in (corpus.train, corpus.validation))
    assert not kept & held
    assert len(kept | held) == 30
    assert (corpus.train_files, corpus.validation_files) == (len(kept), len(held))
    assert 0.08 < len(corpus.validation) / len(corpus.train + corpus.validation) < 0.12


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems take UTF-8 alone")
@pytest.mark.parametrize("many", [1, 12])
def test_names_that_are_no_utf8(tmp_path, many):
    folder = tmp_path / os.fsdecode(b"\xe9t\xe9")
    folder.mkdir()
    paths = [folder / os.fsdecode(b"%d\xff.txt" % n) for n in range(many)]
    for path in paths:
        path.write_text("some words " * 20)
    name = from_files(paths).name
    assert name == (r"0\xff.txt" if many == 1 else r"12 files of \xe9t\xe9")


@pytest.mark.parametrize("sizes", [[1000] * 10, [10**6, *[10] * 9], [*[10**5] * 9, 1, 0]])
def test_something_is_held_out_but_never_most(tmp_path, sizes):
    corpus = from_files(write_files(tmp_path, sizes))
    held = len(corpus.validation.replace(b"\0", b""))
    assert 0 < held <= 0.2 * sum(sizes)


def test_split_follows_names_not_folders_nor_the_order_given(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = from_files(write_files(tmp_path / "here", range(50, 70)))
    there = from_files(reversed(write_files(tmp_path / "there", range(50, 70))))
    assert here.sha256 == there.sha256


def test_own_files_are_taken_byte_for_byte(tmp_path):
    path = tmp_path / "own.txt"
    path.write_bytes(b"a\r\n" * 10)
    corpus = from_files([str(path)])
    assert corpus.train + corpus.validation == b"a\r\n" * 10
    assert corpus.name == "own.txt"


def test_wrong_paths_are_named(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(IsADirectoryError, match=r"directory '.*test_wrong_paths"):
        from_files([path, tmp_path])
    with pytest.raises(FileNotFoundError, match=r"text .*'.*nowhere\.txt'"):
        from_files([tmp_path / "nowhere.txt"])
    with pytest.raises(ValueError, match="at least one file"):
        from_files([])
    with pytest.raises(ValueError, match=r"once, got .*empty\.txt"):
        from_files([path, tmp_path / "." / "empty.txt"])
    with pytest.raises(ValueError, match="bytes in them"):
        from_files([path])


def test_size_is_enough_to_the_byte():
    corpus = Corpus("small", b"t" * 65, b"v" * 3 * 129, 1, 1, "")
    check_size(corpus, train_len=64, longest=128, windows=3)
    for change in ({"train_len": 65}, {"longest": 129}, {"windows": 4}):
        with pytest.raises(ValueError, match=r"'small' is too small: it has 65 bytes .* 387 held"):
            check_size(corpus, **{"train_len": 64, "longest": 128, "windows": 3, **change})
    with pytest.raises(ValueError, match="windows must be at least 1, got 0"):
        check_size(corpus, train_len=64, longest=128, windows=0)


@pytest.mark.parametrize("code", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused(tmp_path, code):
    """Every second byte of it is 0, which a model of bytes predicts for nothing."""
    (tmp_path / "wide.txt").write_bytes("\ufefftext".encode(code))
    with pytest.raises(ValueError, match=r"wide\.txt is UTF-16: convert it"):
        from_files([tmp_path / "wide.txt"])
