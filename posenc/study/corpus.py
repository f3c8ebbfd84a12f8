"""Text to train and to score on: bytes, split by file, the same on every machine that has it."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posenc.contract.checks import check_count

# Packages that some distributions strip, that are tests, or that hold tables instead of prose.
_EXCLUDED = frozenset(
    (
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "distutils",
        "ensurepip",
        "tkinter",
        "turtledemo",
        "pydoc_data",
        "encodings",
        "msilib",
        "lib-dynload",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "__phello__",
    )
)
# Generated when that Python was built: they differ between machines of one version.
_GENERATED = ("config-", "_sysconfigdata")
# Modules of different styles, present in every Python since 3.7.
_HELD_OUT = frozenset(
    (
        "argparse",
        "asyncio",
        "configparser",
        "difflib",
        "email",
        "pickletools",
        "shutil",
        "statistics",
        "tarfile",
        "typing",
    )
)
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_WHOLE_FILES = 10  # with at least this many files, whole files are held out


@dataclass(frozen=True)
class Corpus:
    """Bytes, or tokens, to train on and held out; ``sha256`` covers both, training first."""

    name: str
    train: bytes | np.ndarray[Any, Any]
    validation: bytes | np.ndarray[Any, Any]
    train_files: int
    validation_files: int
    sha256: str


def standard_library() -> Corpus:
    """The ``.py`` sources of the running Python's standard library, about 8 MB.

    Ten modules are held out. Python versions differ in their text, so losses compare only where
    ``sha256`` is the same.

    Raises
    ------
    FileNotFoundError
        This Python comes without sources (zipped, frozen, or only compiled files).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if _is_library(name)]
    held = [name for name in names if _module(name) in _HELD_OUT]
    kept = sorted((name for name in names if _module(name) not in _HELD_OUT), key=_checksum)
    absent = _HELD_OUT - {_module(name) for name in held}
    if absent or not kept:
        raise FileNotFoundError(
            f"the standard library's .py sources are not all in {root}: {len(names)} found, "
            f"without {', '.join(sorted(absent)) or 'any to train on'}; "
            "install them, or give your own text files (--text FILE...)"
        )
    version = sysconfig.get_python_version()
    return _corpus(
        f"Python {version} standard library",
        [_read_with_lf(root / name) for name in kept],
        [_read_with_lf(root / name) for name in held],
    )


def from_files(paths: Iterable[str | os.PathLike[str]]) -> Corpus:
    """The given files, byte for byte.

    With ten files or more, whole files are held out: about a tenth of the bytes, chosen by a
    checksum of their names. With fewer, the last tenth of each file is held out.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, ValueError
        A path that is missing or a directory, a file given twice, no bytes at all, or UTF-16,
        of which every second byte would be 0.
    """
    files = [_regular_file(path) for path in paths]
    if not files:
        raise ValueError("text must name at least one file, got none")
    twice = sorted({str(file) for file in files if files.count(file) > 1})
    if twice:
        raise ValueError(f"text must name each file once, got {', '.join(twice)} more than once")
    # With relative names the split does not depend on the place of the folder.
    folder = Path(os.path.commonpath([file.parent for file in files]))
    texts = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
    if wide := [name for name, text in texts.items() if text[:2] in _UTF_16]:
        raise ValueError(
            f"text must be UTF-8, or any other code of bytes, {printable(wide[0])} is UTF-16: "
            "convert it, as by iconv -f UTF-16 -t UTF-8"
        )
    if not any(texts.values()):
        raise ValueError(f"text must name files with bytes in them, got {_listed(files)}: empty")
    name = files[0].name if len(files) == 1 else f"{len(files)} files of {folder.name or folder}"
    split = _whole_files if len(files) >= _WHOLE_FILES else _last_tenths
    return _corpus(printable(name), *split(texts))


def printable(name: str) -> str:
    """The name of a file, with escapes for bytes that are not UTF-8 and for control characters."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _listed(files: Sequence[Path]) -> str:
    names = [repr(str(file)) for file in files[:3]]
    return ", ".join(names) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def check_size(corpus: Corpus, *, train_len: int, longest: int, windows: int) -> None:
    """``ValueError`` if a split is too small.

    Training needs one window of ``train_len``, validation ``windows`` of ``longest``. Each window
    needs one more byte, the last one to predict.
    """
    needed = check_count("train_len", train_len) + 1
    scored = check_count("windows", windows) * (check_count("longest", longest) + 1)
    has, holds = len(corpus.train), len(corpus.validation)
    what = "bytes" if isinstance(corpus.train, bytes) else "tokens"
    if has < needed or holds < scored:
        raise ValueError(
            f"corpus {corpus.name!r} is too small: it has {has:,} {what} to train on and {holds:,} "
            f"held out; it needs {needed:,} (a sequence of {train_len}) and {scored:,} "
            f"({windows} windows of {longest}); give more text, fewer windows, or shorter lengths"
        )


def _corpus(name: str, train: Sequence[bytes], validation: Sequence[bytes]) -> Corpus:
    # Text has no zero bytes, so a zero byte marks the end of a file.
    kept, held = b"\0".join(train), b"\0".join(validation)
    return Corpus(name, kept, held, len(train), len(validation), digest(kept, held))


def digest(train: bytes, validation: bytes) -> str:
    """The ``sha256`` of a corpus."""
    found = hashlib.sha256(train)
    found.update(validation)
    return found.hexdigest()


def _is_library(name: str) -> bool:
    parts = name.split("/")
    return _EXCLUDED.isdisjoint(parts[:-1]) and not any(p.startswith(_GENERATED) for p in parts)


def _module(name: str) -> str:
    """The top-level module of a file: ``email/header.py -> email``."""
    return name.split("/")[0].removesuffix(".py")


def _checksum(name: str) -> tuple[int, str]:
    """A sort key that shuffles names, always in the same way."""
    return zlib.crc32(name.encode(errors="surrogateescape")), name


def _read_with_lf(path: Path) -> bytes:
    return path.read_bytes().replace(b"\r\n", b"\n")


def _regular_file(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if file.is_dir():
        raise IsADirectoryError(f"text must name files, got the directory {str(file)!r}")
    if not file.is_file():
        raise FileNotFoundError(f"text must name files, got {str(file)!r}, which is not a file")
    return file.resolve()


def _whole_files(texts: dict[str, bytes]) -> tuple[list[bytes], list[bytes]]:
    """In the order of checksums, hold a file out if the total comes closer to a tenth of all."""
    missing = sum(map(len, texts.values())) / 10
    held = []
    for name in sorted(texts, key=_checksum):
        if 0 < len(texts[name]) < 2 * missing:
            held.append(name)
            missing -= len(texts[name])
    kept = sorted(texts.keys() - held, key=_checksum)
    return [texts[name] for name in kept], [texts[name] for name in sorted(held)]


def _last_tenths(texts: dict[str, bytes]) -> tuple[list[bytes], list[bytes]]:
    ordered = [texts[name] for name in sorted(texts)]
    cuts = [len(text) - len(text) // 10 for text in ordered]
    pairs = list(zip(ordered, cuts, strict=True))
    return [text[:cut] for text, cut in pairs], [text[cut:] for text, cut in pairs]
