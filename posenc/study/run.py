"""Runs of a study: a scheme and a seed, trained and scored. Runs may share one training."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import posenc
from posenc.layers import LayerPlan
from posenc.schemes import NoPE
from posenc.study import windows
from posenc.study.corpus import Corpus
from posenc.study.decoder import Decoder
from posenc.study.identity import fingerprint, posenc_digest, versions
from posenc.study.recipe import Recipe
from posenc.study.results import Record
from posenc.study.specs import Plans, sides
from posenc.study.trainer import Trainer, load_trainer
from posenc.study.windows import Tokens

Report = Callable[[int, float], None]
_CHUNK = 50  # steps between two reports
_READABLE = 60  # characters of a label in the name of a file
_MEANING = {
    "descriptions": "the scheme's fields",
    "windows": "the layers' windows",
    "source_digest": "the scheme's files",
    "tested": "the scheme at test time",
    "posenc_digest": "posenc's files",
    "versions": "packages",
}


@dataclass(frozen=True, kw_only=True)
class Run(Recipe):
    """One scheme and one seed of a study: JSON-able, and named by the digest of all its fields."""

    scheme: str
    seed: int
    text: tuple[str, ...]
    corpus: str
    windowed: bool
    backend: str
    device: str
    descriptions: tuple[str, ...]  # the layers' schemes, with all their fields
    windows: tuple[int | None, ...]  # of the layers
    source_digest: str  # of the files of other packages' schemes, and of what these import
    tested: str  # digest of the last three for the layers at test time; empty: as in training
    posenc_digest: str  # of posenc's own files
    versions: tuple[str, ...]
    version: str = posenc.__version__

    @property
    def trained_as(self) -> str:
        """The label of the scheme that is trained: that before ``~``."""
        return sides(self.scheme)[0]

    def digest(self) -> str:
        """Names this run: two runs with one digest have the same results."""
        return self._digest()

    def training_digest(self) -> str:
        """Names this run's training: runs with the same one may share it."""
        return self._digest(scheme=self.trained_as, windowed=None, tested=None)

    def _digest(self, **replaced: Any) -> str:
        canonical = json.dumps({**asdict(self), "text": None, **replaced}, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def file_name(self) -> str:
        """Unique to this configuration, readable, and short enough for every file system."""
        readable = re.sub(r"[^a-z0-9]+", "-", self.scheme.lower())[:_READABLE]
        return f"{readable}-{self.seed}-{self.digest()[:16]}.json"


def carry_out(
    job: Sequence[Run],
    corpus: Corpus,
    report: Report = lambda step, loss: None,
    scratch: Path | None = None,
) -> Iterator[Record]:
    """Records of runs that share a training: it happens once, and then each run is scored.

    ``report(step, bits per byte)`` is called after every 50 steps. A training that fails raises its
    error; a run that cannot be scored becomes a record with ``status`` ``"failed"``.
    """
    began, clock = time.time(), time.perf_counter()
    trained = _trained(job[0], corpus, report, scratch)
    for run in job:
        try:
            record = _scored(run, trained, corpus)
        except Exception as error:
            yield failure_record(run, error)
            continue
        yield {**record, "began": began, "seconds": time.perf_counter() - clock}
        began, clock = time.time(), time.perf_counter()


def failure_record(run: Run, error: BaseException) -> Record:
    """The record of a run that did not finish."""
    return {
        "run": run.digest(),
        "scheme": run.scheme,
        "seed": run.seed,
        "backend": run.backend,
        "train_len": run.train_len,
        "status": "failed",
        "error": f"{type(error).__name__}: {error}",
    }


@dataclass(frozen=True)
class _Trained:
    """A trained model; ``facts`` are the part of a record that its runs share."""

    model: Trainer
    facts: Record


def _trained(run: Run, corpus: Corpus, report: Report, scratch: Path | None) -> _Trained:
    if corpus.sha256 != run.corpus:
        raise ValueError(f"the text changed: sha256 {corpus.sha256[:12]}, not {run.corpus[:12]}")
    plans = Plans.of(run.scheme, run)
    _check_planned(run, **fingerprint(plans, run.backend))
    decoder = Decoder.of(run, plans.trained, run.seed)
    model = make_trainer(run, decoder, scratch)
    curve, seconds, speed = _train(run, corpus, model, report)
    facts = {
        "trained_as": run.trained_as,
        "training": secrets.token_hex(8),
        "curve": curve,
        "params": decoder.sizes(),
        "tokens_per_second": speed,
        "train_seconds": seconds,
        "weights_sha256": decoder.digest(),
        "schemes": [repr(scheme) for scheme in decoder.schemes],
        "windows": list(plans.trained.windows),
        "versions": model.versions(),
    }
    return _Trained(model, facts)


def _scored(run: Run, trained: _Trained, corpus: Corpus) -> Record:
    begin = time.perf_counter()
    plans = Plans.of(run.scheme, run)
    _check_planned(run, **fingerprint(plans, run.backend))
    same = not run.tested
    scores = _score(run, corpus, trained.model, None if same else plans.tested)
    return {
        "run": run.digest(),
        "scheme": run.scheme,
        "seed": run.seed,
        "backend": run.backend,
        "status": "ok",
        "error": None,
        "train_len": run.train_len,
        "steps": run.steps,
        **scores,
        **trained.facts,
        "eval_seconds": time.perf_counter() - begin,
        "tested_schemes": None if same else [repr(scheme) for scheme in plans.tested.schemes],
        "tested_windows": None if same else list(plans.tested.windows),
    }


def check_can_train(run: Run, scratch: Path | None = None) -> None:
    """``RuntimeError`` if no run like this one can begin: its backend, device or versions fail.

    The run's own scheme is not tried; it may fail alone.
    """
    _check_planned(run, posenc_digest=posenc_digest(run.backend), versions=versions(run.backend))
    plain = LayerPlan.of(NoPE(), run.layers)
    try:
        make_trainer(replace(run, scheme="nope"), Decoder.of(run, plain, run.seed), scratch)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        where = f"backend {run.backend!r} cannot train on device {run.device!r}"
        raise RuntimeError(f"{where}: {cause}") from error


def make_trainer(run: Run, decoder: Decoder, scratch: Path | None = None) -> Trainer:
    """The decoder in the backend's framework, ready to train."""
    return load_trainer(run.backend)(decoder, run.device, scratch)


def _check_planned(run: Run, **present: Any) -> None:
    """``RuntimeError`` where this process differs from the one that planned the study."""
    for name, value in present.items():
        planned = getattr(run, name)
        if planned != value:
            raise RuntimeError(
                f"{_MEANING[name]} changed since the study was planned: from {_short(planned)} to "
                f"{_short(value)}; restart the study, and any workers that were already running"
            )


def _short(value: str | tuple[object, ...]) -> str:
    """Twelve characters of a digest, or windows, or names and versions."""
    return value[:12] if isinstance(value, str) else ", ".join(map(str, value))


def _batches(run: Run, corpus: Corpus) -> Iterator[tuple[int, Tokens, Tokens | None]]:
    """First step, tokens ``(n, batch_size, T + 1)`` and positions of each chunk of steps."""
    starts = windows.training_starts(
        corpus.train,
        seed=run.seed,
        steps=run.steps,
        batch_size=run.batch_size,
        length=run.train_len,
    )
    positions = windows.training_positions(
        run.random_positions, seed=run.seed, steps=run.steps, length=run.train_len
    )
    for first in range(0, run.steps, _CHUNK):
        chunk = slice(first, first + _CHUNK)
        tokens = windows.cut(corpus.train, starts[chunk], run.train_len)
        yield first, tokens, None if positions is None else positions[chunk]


def _train(
    run: Run, corpus: Corpus, model: Trainer, report: Report
) -> tuple[list[tuple[int, float]], float, float]:
    """The curve, its seconds, and tokens per second after the first chunk, which compiles."""
    curve, times = [], [time.perf_counter()]
    for first, tokens, positions in _batches(run, corpus):
        # Trainers that know of no positions still train at the plain ones.
        at = {} if positions is None else {"positions": positions}
        losses = np.asarray(model.train(tokens, first, **at)) / math.log(2)
        if not np.isfinite(losses).all():
            wrong = first + int(np.argmin(np.isfinite(losses)))
            raise FloatingPointError(f"training diverged: the loss of step {wrong} is not finite")
        curve.append((first + len(losses), float(losses.mean())))
        times.append(time.perf_counter())
        report(*curve[-1])
    warm = min(1, len(times) - 2)  # a study of a single chunk counts it all
    tokens_seen = (run.steps - warm * _CHUNK) * run.batch_size * run.train_len
    return curve, times[-1] - times[0], tokens_seen / (times[-1] - times[warm])


def _score(run: Run, corpus: Corpus, model: Trainer, plan: LayerPlan | None) -> Record:
    """Bits per byte at every length, under both protocols, and by position."""
    bits = partial(_bits, model, plan)
    stretches = windows.held_out_stretches(
        corpus.validation, count=run.eval_windows, longest=run.longest
    )
    separate, same, windowed = {}, {}, {}
    by_position = np.zeros(0)
    last = max(1, min(run.eval_lens) // 2)
    for length in run.eval_lens:
        pieces = windows.non_overlapping(stretches, length)
        losses = ends = bits(pieces, None)
        separate[str(length)] = float(losses.mean())
        by_position = losses.mean(axis=0)
        if length < run.longest:  # at the longest, both protocols score the same windows
            ends = bits(windows.same_targets(stretches, length), None)
        same[str(length)] = float(ends[:, -last:].mean())
        if run.windowed:
            windowed[str(length)] = float(bits(pieces, run.train_len).mean())
    bucket = max(1, run.train_len // 4)
    whole = len(by_position) // bucket * bucket
    return {
        "loss": separate,
        "loss_same_targets": same,
        "loss_windowed": windowed or None,
        "loss_by_position": {
            "length": run.longest,
            "bucket": bucket,
            "loss": by_position[:whole].reshape(-1, bucket).mean(axis=1).tolist(),
        },
    }


def _bits(
    model: Trainer, plan: LayerPlan | None, tokens: Tokens, window: int | None
) -> np.ndarray[Any, Any]:
    """Losses in bits per byte."""
    other = {} if plan is None else {"plan": plan}
    losses = model.token_losses(tokens, window, **other)
    return np.asarray(losses, dtype=np.float64) / math.log(2)
