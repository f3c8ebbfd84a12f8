"""An interrupted training or fine-tuning goes on where it was, bit for bit: its state is kept."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from posenc.study.history import History
from posenc.study.results import WRITING, is_old, write_whole
from posenc.study.trainer import Trainer
from posenc.weights.safetensors import dump_sealed, load_sealed

# Seconds of training between two checkpoints. A kill then costs a minute at most, runs of less
# than a minute write none, and a state of 100 million numbers, written in a second, costs 2 %.
EVERY = 60.0
_TRAINING, _HISTORY = "training", "history"
_NAME = re.compile(r"[0-9a-f]{16}\.checkpoint", re.ASCII)


class Checkpoint:
    """The state of one training, or fine-tuning, in ``folder``; None keeps nothing.

    The file is one of safetensors: the arrays of ``Trainer.state``, and in the metadata the
    training's digest and its ``History`` as JSON. A trainer without ``state`` has no checkpoints,
    and neither has a worker that cannot write into the folder: its training begins anew.
    """

    def __init__(self, folder: Path | None, digest: str) -> None:
        self._folder, self._path = folder, None if folder is None else folder / _name(digest)
        self._digest, self._last = digest, time.perf_counter()

    def of(self, digest: str) -> Checkpoint:
        """That of another training in the same folder."""
        return Checkpoint(self._folder, digest)

    def resume(self, model: Trainer) -> History:
        """Bring the model to where its training was; how far that is, step 0 without a file.

        A file that was damaged or belongs to another training is refused, with a warning.
        """
        self._last = time.perf_counter()
        if self._path is None or not _has_state(model) or not self._path.is_file():
            return History()
        try:
            state, about = load_sealed(self._path.read_bytes())
            if about.get(_TRAINING) != self._digest:
                raise ValueError("it belongs to another training")
            history = History.of_text(about[_HISTORY])
        except (OSError, ValueError, TypeError, LookupError) as error:
            warnings.warn(
                f"cannot go on from {self._path}, so this training begins anew: {error}",
                stacklevel=2,
            )
            return History()
        model.load_state(state)
        history.resumed.append(history.step)
        return history

    def keep(self, model: Trainer, history: History) -> None:
        """Write the state if the last one is old enough."""
        if self._path is None or not _has_state(model):
            return
        if time.perf_counter() - self._last < EVERY:
            return
        about = {_TRAINING: self._digest, _HISTORY: history.text()}
        data = dump_sealed(model.state(), about)
        with suppress(OSError), WRITING:  # another machine has no such folder
            write_whole(self._path, data)
        self._last = time.perf_counter()

    def remove(self) -> None:
        """Remove the file, of a training that is done."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def remove_stale(folder: Path, digests: Collection[str]) -> None:
    """Remove checkpoints of other trainings than these that nobody has written for a day.

    Until then another study may go on from them, or the same one with its earlier options. Nothing
    with another name is touched, and no link.
    """
    needed = set(map(_name, digests))
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and path.name not in needed and not path.is_symlink():
            with suppress(OSError):
                if path.is_file() and is_old(path):
                    path.unlink()


def _name(digest: str) -> str:
    return f"{digest[:16]}.checkpoint"


def _has_state(model: Trainer) -> bool:
    return hasattr(model, "state") and hasattr(model, "load_state")
