"""Where the progress of a study also goes: the hook, and the trackers that have a name.

A tracker is any object with the three methods of ``Tracker``: ``run_study(..., trackers=[mine])``,
or ``--tracker module:function``, which is called with the folder of the results.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posenc.contract.checks import nearest
from posenc.study.events import Events
from posenc.study.results import Record

if TYPE_CHECKING:
    from posenc.study.run import Run


class Tracker(Protocol):
    """Is told of a study's progress, in the process that started it; results never depend on it."""

    def log(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        """After about every 50 steps of a run; steps of fine-tuning count on.

        ``values`` has ``loss`` in bits, ``tokens_per_second``, and ``memory``: the most bytes that
        the run's process has used so far, on an accelerator those of the device; 0 where the
        system does not tell.
        """
        ...

    def finish(self, record: Record) -> None:
        """A run has finished: its record, as a line of ``results.jsonl``."""
        ...

    def close(self) -> None:
        """The study has ended, however that came."""
        ...


class TensorBoard:
    """Event files that TensorBoard reads, in ``tensorboard/RUN`` of the results' folder.

    They are written without TensorBoard, so nothing needs to be installed.
    """

    def __init__(self, out: Path) -> None:
        self._folder = out / "tensorboard"
        self._files: dict[str, Events] = {}

    def log(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        self._of(run.digest(), _title(run.task, run.label, run.seed)).write(step, values)

    def finish(self, record: Record) -> None:
        events = self._of(record["run"], _title(record["task"], record["scheme"], record["seed"]))
        events.write(int(record.get("steps", 0)), _scores(record))
        events.close()

    def close(self) -> None:
        for events in self._files.values():
            events.close()

    def _of(self, digest: str, title: str) -> Events:
        if digest not in self._files:
            name = "".join(c if c.isalnum() or c in "-_=.+," else "-" for c in title)
            self._files[digest] = Events(self._folder / f"{name[:80]}-{digest[:8]}")
        return self._files[digest]


class WandbOffline:
    """Runs of Weights & Biases in ``wandb/`` of the results' folder; nothing uses the network.

    ``wandb sync`` uploads them, when and if its user wants to.
    """

    def __init__(self, out: Path) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise RuntimeError(
                f"tracker 'wandb-offline' needs the package wandb: pip install wandb ({error})"
            ) from error
        self._out, self._runs = out, dict[str, Any]()

    def log(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        about = {"scheme": run.label, "seed": run.seed, "backend": run.backend}
        title = _title(run.task, run.label, run.seed)
        self._of(run.digest(), title, about | vars(run.training())).log(dict(values), step=step)

    def finish(self, record: Record) -> None:
        about = {name: record[name] for name in ("scheme", "seed", "backend")}
        title = _title(record["task"], record["scheme"], record["seed"])
        run = self._of(record["run"], title, about | record["recipe"])
        run.summary.update({"status": record["status"], **_scores(record)})
        run.finish(exit_code=int(record["status"] != "ok"))

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()

    def _of(self, digest: str, title: str, config: Mapping[str, Any]) -> Any:
        if digest not in self._runs:
            self._out.mkdir(parents=True, exist_ok=True)
            self._runs[digest] = self._wandb.init(
                project="posenc", name=title, dir=str(self._out), mode="offline",
                reinit="create_new", config=dict(config),
                settings=self._wandb.Settings(console="off", silent=True),
            )  # fmt: skip
        return self._runs[digest]


NAMED: Mapping[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb-offline": WandbOffline,
}


def make_trackers(names: Sequence[str], out: Path) -> list[Tracker]:
    """The trackers of a study's option.

    Raises
    ------
    RuntimeError
        A tracker needs a package that is not installed.
    ImportError, ValueError
        No tracker has this name, and it is no ``module:function`` that can be imported.
    """
    return [kind(out) for kind in tracker_kinds(names)]


def tracker_kinds(names: Sequence[str]) -> list[Callable[[Path], Tracker]]:
    """What makes the trackers; ``ImportError`` if one cannot be imported."""
    return [_kind(name) for name in names]


def check_names(names: Sequence[str]) -> None:
    """``ValueError`` for a name that no tracker has and that is no ``module:function``."""
    if len(set(names)) < len(names):
        raise ValueError(f"tracker must name each tracker once, got {list(names)}")
    for name in names:
        module, _, function = name.partition(":")
        if name not in NAMED and not (module and function):
            raise ValueError(f"tracker names {name!r}{nearest(name, [*NAMED, 'module:function'])}")


def _kind(name: str) -> Callable[[Path], Tracker]:
    if name in NAMED:
        return NAMED[name]
    module, _, function = name.partition(":")
    try:
        found: Callable[[Path], Tracker] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"tracker {name!r}: {error}") from error
    return found


class Trackers:
    """Several trackers as one. A tracker that fails is left out from then on, with a warning.

    So a full disk in the tenth hour costs curves, and no study.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        self._tell("log", run, step, values)

    def finish(self, record: Record) -> None:
        self._tell("finish", record)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, method: str, *given: Any) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*given)
            except Exception as error:
                self._trackers.remove(tracker)
                warnings.warn(
                    f"tracker {type(tracker).__name__} failed, so the study goes on without it: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=3,
                )


def _title(task: str, label: str, seed: int) -> str:
    return f"{task} {label} seed {seed}"


def _scores(record: Record) -> dict[str, float]:
    """What a record's tables say by length, as numbers with one name each."""
    found = {f"loss/{length}": loss for length, loss in (record.get("loss") or {}).items()}
    for test, cells in (record.get("scores") or {}).items():
        for length, cell in cells.items():
            for name in ("token_accuracy", "exact_match"):
                if cell.get(name) is not None:
                    found["/".join(filter(None, (name, test, length)))] = cell[name]
    if "validation" in record:
        found["validation_loss"] = record["validation"]["loss"]
    return {name: float(value) for name, value in found.items()}
