"""Where a worker puts what it has done: the study's own folders, or a message to the study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from posenc.study import weights
from posenc.study.checkpoints import Checkpoint
from posenc.study.results import Record, save, write_whole
from posenc.study.run import Run
from posenc.study.trainer import Trainer


class Desk:
    """The study's folders on this disk; a worker that cannot write there only returns records.

    Attributes
    ----------
    checkpoint
        Where the training goes on from.
    """

    def __init__(self, first: Run, folder: Path, weights_home: Path | None) -> None:
        self._folder, self._weights_home = folder, weights_home
        self._progress = folder / progress_name(first)
        self.checkpoint = Checkpoint(folder, first.training_digest())

    def report(self, done: int, step: int, values: Mapping[str, float]) -> None:
        """Say how far the job is: runs that are done, and the step of the next and its values."""
        with suppress(OSError):  # another machine has no such folder
            write_whole(self._progress, progress_text(done, step, values))

    def keep(self, run: Run, model: Trainer) -> None:
        """Keep the weights of a run that is scored, if there is a folder for them."""
        if self._weights_home is not None:
            with suppress(OSError):  # then the study's process says so
                path = self._weights_home / weights.file_name(run)
                weights.write(path, run, model.state())

    def save(self, run: Run, record: Record) -> None:
        """Keep the record of a finished run."""
        with suppress(OSError):  # then the study's process writes the returned record
            save(self._folder / run.file_name(), record)

    def leave(self) -> None:
        """The job has ended, however it did."""
        with suppress(OSError):
            self._progress.unlink(missing_ok=True)


def progress_name(first: Run) -> str:
    """The name of the file that says how far a job is, by its first run."""
    return f"{first.file_name()}.progress"


def progress_text(done: int, step: int, values: Mapping[str, float]) -> str:
    """What is in it."""
    return json.dumps([done, step, dict(values)])
