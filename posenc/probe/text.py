"""The text of a probe: token ids, how many bytes each is, and the windows that are scored."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# Of a text: the ids of its tokens, and how many bytes of it each covers, or None if unknown.
Encode = Callable[[str], tuple[Array, Array | None]]
_BLOCK = 1 << 20  # characters that are encoded at once
_IDS = (".npy", ".bin")


@dataclass(frozen=True)
class Text:
    """The tokens of a text.

    Parameters
    ----------
    tokens
        Ids ``(n,)``.
    lengths
        How many bytes of the text each token covers, ``(n,)``; None if that is unknown.
    start
        A token that stands in place of the first one of every window, which is not scored, as
        models expect that were trained with it; None for none.
    name
        What the report calls it.
    """

    tokens: Array
    lengths: Array | None = None
    start: int | None = None
    name: str = "tokens"

    def __post_init__(self) -> None:
        tokens = np.asanyarray(self.tokens)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"text: {self.name} must be integers (n,), got {tokens.dtype} of shape "
                f"{tokens.shape}"
            )
        if self.lengths is not None and self.lengths.shape != tokens.shape:
            raise ValueError(
                f"lengths must be one per token, {tokens.shape}, got {self.lengths.shape}"
            )
        object.__setattr__(self, "tokens", tokens)

    def digest(self) -> str:
        """A digest of the tokens, and of what else decides the scores."""
        total = hashlib.sha256(f"{self.tokens.dtype} {self.start}\0".encode())
        for part in (self.tokens, *(() if self.lengths is None else (self.lengths,))):
            for first in range(0, len(part), _BLOCK):
                total.update(np.ascontiguousarray(part[first : first + _BLOCK]).tobytes())
        return total.hexdigest()

    def check(self, eval_lens: Sequence[int], vocabulary: int | None = None) -> None:
        """``ValueError`` if a length is longer than the text, or a model has too few tokens."""
        longest, least = max(eval_lens), int(self.tokens.min(initial=0))
        if len(self.tokens) < longest + 1:
            raise ValueError(
                f"eval_lens: {longest} needs a text of {longest + 1:,} tokens, and {self.name} "
                f"has {len(self.tokens):,}: give more text or shorter lengths"
            )
        if least < 0:
            raise ValueError(f"text: token ids must be at least 0, got {least}")
        if vocabulary is not None and (most := int(self.tokens.max())) >= vocabulary:
            raise ValueError(
                f"text: {self.name} has the token {most}, and the model's vocabulary is "
                f"0 .. {vocabulary - 1}: the tokens are of another tokenizer"
            )

    def stretches(self, count: int | None, longest: int) -> Array:
        """Starts of ``count`` evenly spaced stretches of ``longest + 1`` tokens.

        None for as many as do not overlap, and at most 16. ``ValueError`` for more than that fit.
        """
        room = len(self.tokens) // (longest + 1)
        if count is None:
            count = min(16, room)
        if not 1 <= count <= room:
            raise ValueError(
                f"windows must be 1 to {room}, as many of {longest + 1:,} tokens as {self.name} "
                f"has room for ({len(self.tokens):,} tokens), got {count}"
            )
        return np.linspace(0, len(self.tokens) - longest - 1, count).astype(np.int64)

    def windows(self, starts: Array, longest: int, length: int) -> Array:
        """First tokens ``(S, longest // length)`` of the windows of each stretch.

        They end with the stretch and do not overlap; a remainder at its start is left out. So all
        lengths that divide the longest score the same tokens, and the last window of each stretch
        has the same last targets at every length.
        """
        count = longest // length
        begin = longest - count * length
        found: Array = starts[:, None] + begin + length * np.arange(count)
        return found

    def cut(self, firsts: Array, length: int) -> tuple[Array, Array, Array | None]:
        """Inputs ``(N, length)``, their targets, and how many bytes each target covers."""
        index = firsts[:, None] + np.arange(length + 1)
        tokens = np.asarray(self.tokens[index], dtype=np.int64)
        inputs = tokens[:, :-1].copy()
        if self.start is not None:
            inputs[:, 0] = self.start
        covered = None if self.lengths is None else np.asarray(self.lengths[index[:, 1:]])
        return inputs, tokens[:, 1:], covered


def of_bytes(data: bytes, name: str = "text") -> Text:
    """A text whose tokens are its bytes."""
    tokens = np.frombuffer(data, np.uint8)
    return Text(tokens, np.ones(len(tokens), np.int64), name=name)


def read(
    paths: Sequence[str | os.PathLike[str]],
    encode: Encode | None,
    *,
    vocabulary: int,
    start: int | None = None,
    end: int | None = None,
) -> Text:
    """The text of files: of UTF-8 by a tokenizer, or of token ids.

    Parameters
    ----------
    paths
        Files of text. Or one of token ids: ``.npy`` of integers ``(n,)``; ``.bin`` of raw integers
        in little-endian order, of 16 bits, or of 32 if the vocabulary needs them.
    encode
        The tokenizer; None if there is none.
    end
        A token between two files; None for none.

    Raises
    ------
    FileNotFoundError, ValueError
        A file is missing, is no UTF-8, or needs a tokenizer that is not there.
    """
    files = [Path(path) for path in paths]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"text: there is no file {str(file)!r}")
    name = files[0].name if len(files) == 1 else f"{len(files)} files"
    of_ids = [file for file in files if file.suffix in _IDS]
    if of_ids:
        if len(files) > 1:
            raise ValueError(f"text takes one file of token ids, got {len(files)} files")
        return Text(_ids(of_ids[0], vocabulary), start=start, name=name)
    if encode is None:
        raise ValueError(
            f"text: {str(files[0])!r} needs a tokenizer, and the model's folder has none: give "
            "token ids, as .npy (integers) or .bin (raw 16 bits, or 32 for a large vocabulary)"
        )
    tokens, lengths, known = [], [], True
    for number, file in enumerate(files):
        if number and end is not None:
            tokens.append(np.array([end]))
            lengths.append(np.array([0]))
        for block in _blocks(_utf8(file)):
            ids, covered = encode(block)
            tokens.append(np.asarray(ids, dtype=np.int64))
            known &= covered is not None
            lengths.append(np.zeros(0, np.int64) if covered is None else covered)
    if not sum(map(len, tokens)):
        raise ValueError(f"text: {name} is empty")
    return Text(np.concatenate(tokens), np.concatenate(lengths) if known else None, start, name)


def byte_lengths(text: str, ends: Array) -> Array:
    """How many bytes of UTF-8 each token covers, from where in the text it ends.

    Tokens that share a character share none of its bytes: the first has all of them. What no token
    covers is the next one's.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    reached = np.concatenate([[0], np.cumsum(sizes)])[np.maximum.accumulate(ends)]
    return np.asarray(np.diff(reached, prepend=0))


def _ids(file: Path, vocabulary: int) -> Array:
    if file.suffix == ".bin":
        kind = "<u2" if vocabulary <= 1 << 16 else "<u4"
        if not (size := file.stat().st_size) or size % np.dtype(kind).itemsize:
            raise ValueError(f"text: {str(file)!r} has {size} bytes, which are no ids of {kind}")
        return np.memmap(file, dtype=kind, mode="r")
    found: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    return found


def _utf8(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text: {str(file)!r} is not UTF-8 ({error.reason} at byte {error.start}); token ids "
            "are given as .npy or .bin"
        ) from None


def _blocks(text: str) -> list[str]:
    """The text in blocks that end with a line, where lines are not too long."""
    found, first = [], 0
    while first < len(text):
        last = min(len(text), first + _BLOCK)
        if last < len(text):
            last = text.rfind("\n", first, last) + 1 or last
            last = last if last > first else first + _BLOCK
        found.append(text[first:last])
        first = last
    return found
