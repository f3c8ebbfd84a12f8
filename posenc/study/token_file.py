"""Tokens of a file, mapped into memory and never read whole: nanoGPT's ``.bin``, or ``.npy``.

A ``.bin`` is the bytes of 16-bit unsigned integers, little-endian, and nothing else, as the
``prepare.py`` of nanoGPT writes ``train.bin`` and ``val.bin``. A ``.npy`` says its own dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posenc.study.corpus import Corpus, printable

Tokens = np.ndarray[Any, Any]

_BLOCK = 1 << 22  # tokens that are looked at at a time
_HELD_OUT = 10  # of one file, its last tenth


def from_tokens(paths: Sequence[str | Path], vocabulary: int) -> Corpus:
    """Tokens to train on, and held out: of two files, or the first nine tenths and the last.

    One pass, block by block, checks each id and makes the digest that names the data.

    Raises
    ------
    FileNotFoundError, ValueError
        A file is missing, has an odd size, a dtype that is no integer or more than one axis, or
        ids that are not below ``vocabulary``.
    """
    files = [Path(path).resolve() for path in paths]
    if not 1 <= len(files) <= 2:
        raise ValueError(
            f"tokens must name one file, or one to train on and one held out, got {len(files)}"
        )
    parts = [_mapped(file) for file in files]
    if len(parts) == 1:
        cut = len(parts[0]) - len(parts[0]) // _HELD_OUT
        parts = [parts[0][:cut], parts[0][cut:]]
    digest = hashlib.sha256()
    for file, part in zip([files[0], files[-1]], parts, strict=True):
        digest.update(f"{len(part)}\0".encode())
        _check(part, file, vocabulary, digest)
    name = printable(" and ".join(file.name for file in files))
    return Corpus(name, parts[0], parts[1], 1, 1, digest.hexdigest())


def _mapped(file: Path) -> Tokens:
    """All tokens of a file, which is read where they are looked at."""
    if not file.is_file():
        raise FileNotFoundError(f"tokens must name files, got {str(file)!r}, which is not a file")
    size = file.stat().st_size
    if file.suffix == ".bin":
        if size % 2:
            raise ValueError(
                f"tokens of {str(file)!r} must be 16-bit integers, got an odd size, {size} bytes"
            )
        return np.memmap(file, "<u2", "r") if size else np.zeros(0, "<u2")
    if file.suffix != ".npy":
        raise ValueError(
            f"tokens must be a file .bin of 16-bit unsigned integers, or .npy, got {str(file)!r}"
        )
    try:
        found: Tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"tokens: {str(file)!r} is no whole file of NumPy: {error}") from error
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise ValueError(
            f"tokens of {str(file)!r} must be integers on one axis, got {found.dtype} of shape "
            f"{found.shape}"
        )
    return found


def _check(tokens: Tokens, file: Path, vocabulary: int, digest: Any) -> None:
    """Check the ids, and add them to the digest as 64-bit integers, whatever their dtype."""
    for start in range(0, len(tokens), _BLOCK):
        block = np.asarray(tokens[start : start + _BLOCK])
        wrong = (block < 0) | (block >= vocabulary)
        if wrong.any():
            at = start + int(np.argmax(wrong))
            raise ValueError(
                f"tokens of {str(file)!r} must be 0 .. {vocabulary - 1}, as vocabulary_size="
                f"{vocabulary} says, got {int(tokens[at])} at {at:,}"
            )
        digest.update(block.astype("<i8").tobytes())
