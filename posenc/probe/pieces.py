"""The pieces of a probe: one measure of one model at one length each, kept on disk as they end."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.probe.measures import (
    Setting,
    Subject,
    find_passkeys,
    look_at_attention,
    score_text,
    windows_of,
)
from posenc.probe.passkey import Source
from posenc.probe.text import Text
from posenc.study.results import Record, load, own_folder, save

FOLDER = "pieces"
_NAMES = r"(text|passkey|attention)-\d+-[0-9a-f]{16}\.json"


@dataclass(frozen=True)
class Piece:
    """One measure of one row at one length; ``run`` names everything that it depends on."""

    row: str
    measure: str
    length: int
    run: str

    def file(self, folder: Path) -> Path:
        return folder / f"{self.measure}-{self.length}-{self.run[:16]}.json"


@dataclass(frozen=True)
class Probe:
    """What is measured: a setting, a text, prompts; ``facts`` name the model and the machine.

    ``rows`` are the names of subjects, each with what its numbers depend on.
    """

    rows: Mapping[str, Any]
    text: Text
    source: Source
    setting: Setting
    facts: Mapping[str, Any]

    def pieces(self) -> list[Piece]:
        """All pieces, row by row, the shortest lengths first."""
        setting, text = self.setting, self.text.digest()
        found = []
        for row, about in self.rows.items():
            for measure, lengths in self._lengths().items():
                own = {**setting.of(measure), "text": text}
                if measure == "passkey":
                    own["prompts"] = self.source.about
                for length in lengths:
                    key = [dict(self.facts), row, about, measure, length, own]
                    run = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode())
                    found.append(Piece(row, measure, length, run.hexdigest()))
        return found

    def _lengths(self) -> dict[str, Sequence[int]]:
        setting = self.setting
        return {
            "text": setting.eval_lens,
            "passkey": setting.eval_lens if setting.keys else (),
            "attention": [setting.attention_len] if setting.attention_len else (),
        }

    def measure(self, piece: Piece, subject: Subject, progress: Callable[[int], None]) -> Record:
        """The record of a piece; one that fails has the ``status`` "failed" and the error."""
        begin = time.time()
        common = {
            "run": piece.run, "scheme": piece.row, "measure": piece.measure,
            "length": piece.length, "began": begin,
        }  # fmt: skip
        try:
            found = self._found(piece, subject, progress)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return {**common, "seconds": time.time() - begin, "status": "failed", "error": text}
        return {**common, "seconds": time.time() - begin, "status": "ok", **found}

    def _found(
        self, piece: Piece, subject: Subject, progress: Callable[[int], None]
    ) -> dict[str, Any]:
        given = self.setting, piece.length, progress
        if piece.measure == "text":
            return score_text(subject, self.text, *given)
        if piece.measure == "passkey":
            return find_passkeys(subject, self.source, *given)
        return look_at_attention(subject, self.text, *given)

    def windows(self, piece: Piece) -> int:
        """How many windows a piece reads."""
        return windows_of(piece.measure, self.setting, piece.length)


def kept(pieces: Sequence[Piece], folder: Path) -> list[Record]:
    """The records that are on disk, of pieces that succeeded."""
    found = (load(piece.file(folder), piece.run) for piece in pieces)
    return [record for record in found if record is not None and record["status"] == "ok"]


def carry_out(
    probe: Probe,
    missing: Sequence[Piece],
    subject_of: Callable[[str], Subject],
    folder: Path | None,
    on_progress: Callable[[Piece, int], None] = lambda piece, done: None,
) -> Iterator[Record]:
    """The records of the missing pieces as they end, each kept in ``folder`` at once."""
    for piece in missing:
        subject = subject_of(piece.row)
        record = probe.measure(piece, subject, lambda done, piece=piece: on_progress(piece, done))  # type: ignore[misc]
        if folder is not None and record["status"] == "ok":
            save(piece.file(folder), record)
        yield record


def make_folder(out: Path) -> Path:
    """The folder of kept pieces; ``OSError`` if it cannot be written."""
    return own_folder(out, FOLDER, _NAMES)
