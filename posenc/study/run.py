"""One run of a study: train on short windows, score long ones, give back a record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from posenc.checks import nearest
from posenc.layers import LayerPlan
from posenc.schemes import NoPE
from posenc.study import windows
from posenc.study.corpus import Corpus
from posenc.study.decoder import Decoder
from posenc.study.identity import TRAINERS, ingredients, own_sources, versions
from posenc.study.specs import layers
from posenc.study.study import Cell
from posenc.study.windows import Tokens

Record = dict[str, Any]
Report = Callable[[int, float], None]
_CHUNK = 50  # steps between two reports
_MEANING = {
    "built": "the scheme's fields",
    "windows": "the layers' windows",
    "source": "the scheme's files",
    "own": "posenc's files",
    "versions": "packages",
}


class Learner(Protocol):
    """What a backend brings: the decoder in its framework, a training step, per-token losses.

    A module registers its class in the entry-point group ``posenc.trainers`` under the name of the
    framework it needs.
    """

    def __init__(self, decoder: Decoder, device: str, scratch: Path | None = None) -> None:
        """``scratch`` is a folder that the processes of a study share, for compiled programs."""
        ...

    def train(self, batches: Tokens, first_step: int) -> np.ndarray[Any, Any]:
        """Steps on ``batches (n, batch, T + 1)``; mean losses ``(n,)`` in nats.

        Each layer attends inside its own window, one of ``decoder.windows()``.
        """
        ...

    def token_losses(self, tokens: Tokens, window: int | None) -> np.ndarray[Any, Any]:
        """Losses ``(N, L)`` in nats of the next bytes of ``tokens (N, L + 1)``.

        No layer sees further than ``window``, nor than its own: ``decoder.windows(window)``.
        """
        ...

    def versions(self) -> dict[str, str]:
        """The framework's version and the device's name."""
        ...


def backends() -> dict[str, bool]:
    """Names of the backends there are, and whether the framework of each is installed."""
    names = sorted({entry.name for entry in entry_points(group=TRAINERS)})
    return {name: find_spec(name) is not None for name in names}


def choose_backend(name: str) -> str:
    """``name``, or for ``"auto"`` the first that is installed; raises with what to install."""
    known = backends()
    if name == "auto":
        able = [n for n, installed in known.items() if installed]
        if not able:
            raise RuntimeError(
                f"no backend is installed; pip install one of: {', '.join(known) or 'none known'}"
            )
        return able[0]
    if name not in known:
        raise ValueError(f"unknown backend {name!r}{nearest(name, ['auto', *known])}")
    if not known[name]:
        raise RuntimeError(f"backend {name!r} is not installed: pip install 'posenc[{name}]'")
    return name


def learner(cell: Cell, decoder: Decoder, scratch: Path | None = None) -> Learner:
    """The backend's model, ready to train."""
    entry = next(iter(entry_points(group=TRAINERS, name=cell.backend)))
    made: Learner = entry.load()(decoder, cell.device, scratch)
    return made


def run(
    cell: Cell,
    corpus: Corpus,
    report: Report = lambda step, loss: None,
    scratch: Path | None = None,
) -> Record:
    """Train and evaluate; ``report(step, bits per byte)`` hears of it on the way."""
    if corpus.sha256 != cell.corpus:
        raise ValueError(f"the text changed: sha256 {corpus.sha256[:12]}, not {cell.corpus[:12]}")
    began, clock = time.time(), time.perf_counter()
    plan = layers(cell.scheme, cell)
    check_same(cell, plan)
    decoder = Decoder.of(cell, plan, cell.seed)
    model = learner(cell, decoder, scratch)
    curve, seconds, rate = _trained(cell, corpus, model, report)
    begin = time.perf_counter()
    scores = _scores(cell, corpus, model)
    return {
        "cell": cell.digest(),
        "scheme": cell.scheme,
        "seed": cell.seed,
        "backend": cell.backend,
        "status": "ok",
        "error": None,
        "train_len": cell.train_len,
        "steps": cell.steps,
        **scores,
        "curve": curve,
        "params": decoder.sizes(),
        "tokens_per_second": rate,
        "train_seconds": seconds,
        "eval_seconds": time.perf_counter() - begin,
        "began": began,
        "seconds": time.perf_counter() - clock,
        "weights_sha256": decoder.digest(),
        "schemes": [repr(scheme) for scheme in decoder.schemes],
        "windows": list(plan.windows),
        "versions": model.versions(),
    }


def try_out(cell: Cell, scratch: Path | None = None) -> None:
    """Raise what would end every run like this one: the backend, its device, or its version."""
    none = LayerPlan.of(NoPE(), cell.layers)
    _check_planned(cell, own=own_sources(cell.backend), versions=versions(cell.backend))
    try:
        learner(replace(cell, scheme="nope"), Decoder.of(cell, none, cell.seed), scratch)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        where = f"backend {cell.backend!r} cannot train on device {cell.device!r}"
        raise RuntimeError(f"{where}: {cause}") from error


def check_same(cell: Cell, plan: LayerPlan) -> None:
    """``RuntimeError`` if this process has not what the study was planned with."""
    _check_planned(cell, **ingredients(plan, cell.backend))


def _check_planned(cell: Cell, **here: Any) -> None:
    for name, found in here.items():
        planned = getattr(cell, name)
        if planned != found:
            raise RuntimeError(
                f"{_MEANING[name]} changed since the study was planned: from {_short(planned)} to "
                f"{_short(found)}; start the study anew, and workers that were running before"
            )


def _short(found: str | tuple[object, ...]) -> str:
    """Twelve characters of a digest, or windows, or names and versions."""
    return found[:12] if isinstance(found, str) else ", ".join(map(str, found))


def _batches(cell: Cell, corpus: Corpus) -> Iterator[tuple[int, Tokens]]:
    starts = windows.training_starts(
        corpus.train, seed=cell.seed, steps=cell.steps, batch=cell.batch, length=cell.train_len
    )
    for first in range(0, cell.steps, _CHUNK):
        yield first, windows.cut(corpus.train, starts[first : first + _CHUNK], cell.train_len)


def _trained(
    cell: Cell, corpus: Corpus, model: Learner, report: Report
) -> tuple[list[tuple[int, float]], float, float]:
    """The curve, its seconds, and tokens per second after the first chunk, which compiles."""
    curve, times = [], [time.perf_counter()]
    for first, tokens in _batches(cell, corpus):
        losses = np.asarray(model.train(tokens, first)) / math.log(2)
        if not np.isfinite(losses).all():
            wrong = first + int(np.argmin(np.isfinite(losses)))
            raise FloatingPointError(f"training diverged: the loss of step {wrong} is not finite")
        curve.append((first + len(losses), float(losses.mean())))
        times.append(time.perf_counter())
        report(*curve[-1])
    warm = min(1, len(times) - 2)  # a study of a single chunk counts it all
    tokens_seen = (cell.steps - warm * _CHUNK) * cell.batch * cell.train_len
    return curve, times[-1] - times[0], tokens_seen / (times[-1] - times[warm])


def _scores(cell: Cell, corpus: Corpus, model: Learner) -> Record:
    """Bits per byte at every length, under both protocols, and by position."""
    stretches = windows.held_out(corpus.validation, windows=cell.eval_windows, longest=cell.longest)
    apart, same, windowed = {}, {}, {}
    by_position = np.zeros(0)
    last = max(1, min(cell.eval_lens) // 2)
    for length in cell.eval_lens:
        pieces = windows.non_overlapping(stretches, length)
        losses = ends = _bits(model, pieces, None)
        apart[str(length)] = float(losses.mean())
        by_position = losses.mean(axis=0)
        if length < cell.longest:  # at the longest, both protocols score the same windows
            ends = _bits(model, windows.same_targets(stretches, length), None)
        same[str(length)] = float(ends[:, -last:].mean())
        if cell.windowed:
            windowed[str(length)] = float(_bits(model, pieces, cell.train_len).mean())
    bucket = max(1, cell.train_len // 4)
    whole = len(by_position) // bucket * bucket
    return {
        "loss": apart,
        "loss_same_targets": same,
        "loss_windowed": windowed or None,
        "loss_by_position": {
            "length": cell.longest,
            "bucket": bucket,
            "loss": by_position[:whole].reshape(-1, bucket).mean(axis=1).tolist(),
        },
    }


def _bits(model: Learner, tokens: Tokens, window: int | None) -> np.ndarray[Any, Any]:
    return np.asarray(model.token_losses(tokens, window), dtype=np.float64) / math.log(2)
