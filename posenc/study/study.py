"""A study: which schemes, on what text, how trained, how evaluated. Its fields are the options."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import posenc
from posenc.checks import check_count, check_positive, nearest, python_fields
from posenc.study.corpus import Corpus, check_size, from_files, standard_library
from posenc.study.identity import ingredients
from posenc.study.specs import layers

_AUTO = ("auto",)
_WINDOWED = ("rope",)  # of the default study: a default of an option, which goes by labels
_READABLE = 60  # characters of a label in the name of a file
_DEFAULT = ("alibi", "t5", "rope", "sinusoidal", "learned", "nope")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one model is built, trained and evaluated: everything that all schemes share."""

    train_len: int = _option(64, "tokens (bytes) of a training sequence")
    eval_lens: tuple[int, ...] = _option((), "lengths to evaluate at; default 1, 2, 4, 8, 16 times")
    steps: int = _option(900, "training steps")
    batch: int = _option(16, "sequences in a step")
    layers: int = _option(2, "layers of the decoder")
    dim: int = _option(64, "width of the decoder")
    heads: int = _option(8, "attention heads")
    learning_rate: float = _option(1.2e-2, "peak of AdamW's learning rate")
    position_rate: float = _option(10.0, "factor on it for learned position params")
    warmup: int = _option(50, "steps of linear warm-up; linear decay follows")
    weight_decay: float = _option(0.1, "of matrices, never of position params")
    clip: float = _option(1.0, "largest norm of a gradient")
    eval_windows: int = _option(32, "held-out windows of the longest length")

    def __post_init__(self) -> None:
        python_fields(self)
        for name in ("train_len", "steps", "batch", "layers", "dim", "heads", "eval_windows"):
            check_count(name, getattr(self, name), least=2 if name == "train_len" else 1)
        for name in ("learning_rate", "position_rate", "clip"):
            check_positive(name, getattr(self, name))
        check_count("warmup", self.warmup, least=0)
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim={self.dim}, got {self.heads}")
        lengths = self.eval_lens or tuple(self.train_len * 2**n for n in range(5))
        for length in lengths:
            check_count("eval_lens", length)
        object.__setattr__(self, "eval_lens", tuple(sorted(set(lengths))))

    def training(self) -> Recipe:
        """The recipe alone: what all runs of a study share."""
        return Recipe(**{name: getattr(self, name) for name in Recipe.__dataclass_fields__})

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.heads

    @property
    def longest(self) -> int:
        """The longest evaluation length."""
        return max(self.eval_lens)


@dataclass(frozen=True, kw_only=True)
class Study(Recipe):
    """A comparison: the same training once for every scheme and seed."""

    schemes: tuple[str, ...] = _option(
        _DEFAULT,
        "names of `posenc list`, with options as rope:base=500000; a+b is their sum on one layer, "
        "a/b gives layers in turn, a@512/b the first of them a window of 512",
    )
    seeds: int = _option(3, "number of seeds, 0 .. N - 1")
    text: tuple[str, ...] = _option((), "files to train on; default: Python's standard library")
    windowed: tuple[str, ...] = _option(
        _AUTO,
        "schemes to evaluate also inside a window of the training length; auto: rope, if it is "
        "in the study",
    )
    backend: str = _option("auto", "what trains: jax, torch, or auto, what is installed")
    device: str = _option("auto", "auto, cpu, or a name of the backend's, such as cuda")
    workers: int = _option(0, "processes; default: one a core, one in all on an accelerator")
    out: str = _option("posenc-compare", "folder of the results")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seeds", self.seeds)
        check_count("workers", self.workers, least=0)
        if not self.schemes:
            raise ValueError("schemes is empty; name at least one of `posenc list`")
        labels = list(self.schemes)
        if len(set(labels)) < len(labels):
            raise ValueError(f"schemes names one twice: {labels}")
        for label in self.schemes:
            _check_built(label, self)
        for label in self.windowed if self.windowed != _AUTO else ():
            if label not in self.schemes:
                named = f"{label!r}{nearest(label, self.schemes)}"
                raise ValueError(f"windowed names {named}; it takes schemes of the study")

    def is_windowed(self, label: str) -> bool:
        """Whether a scheme is evaluated inside a window too."""
        return label in (_WINDOWED if self.windowed == _AUTO else self.windowed)

    def corpus(self) -> Corpus:
        """The text, checked to be large enough."""
        corpus = read(self.text)
        check_size(
            corpus, train_len=self.train_len, longest=self.longest, windows=self.eval_windows
        )
        return corpus

    def cells(self, corpus: Corpus, backend: str) -> list[Cell]:
        """One run per seed and scheme, seeds outermost: an early stop leaves whole comparisons."""
        made = {label: ingredients(layers(label, self), backend) for label in self.schemes}
        return [
            Cell(
                **asdict(self.training()),
                scheme=label,
                seed=seed,
                text=tuple(str(Path(p).resolve()) for p in self.text),
                corpus=corpus.sha256,
                windowed=self.is_windowed(label),
                backend=backend,
                device=self.device,
                **made[label],
            )
            for seed in range(self.seeds)
            for label in self.schemes
        ]


@functools.lru_cache(maxsize=1)
def read(text: tuple[str, ...]) -> Corpus:
    """The user's files, or the standard library; kept for the next cell of this process."""
    return from_files([Path(p) for p in text]) if text else standard_library()


@dataclass(frozen=True, kw_only=True)
class Cell(Recipe):
    """One run of a study: JSON-able, and known by the digest of all its fields."""

    scheme: str
    seed: int
    text: tuple[str, ...]
    corpus: str
    windowed: bool
    backend: str
    device: str
    built: tuple[str, ...]  # schemes of the layers, with all their fields
    windows: tuple[int | None, ...]  # of the layers
    source: str  # digest of schemes that are not posenc's own, and of what they import
    own: str  # digest of posenc's files
    versions: tuple[str, ...]
    version: str = posenc.__version__

    def digest(self) -> str:
        """Names this run: of two cells with one digest the results are the same."""
        canonical = json.dumps({**asdict(self), "text": None}, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def file_name(self) -> str:
        """Unique to this configuration, readable, and short enough for every file system."""
        readable = re.sub(r"[^a-z0-9]+", "-", self.scheme.lower())[:_READABLE]
        return f"{readable}-{self.seed}-{self.digest()[:16]}.json"


def _check_built(label: str, study: Study) -> None:
    """What fails in a scheme at any length is said before anything is trained."""
    for scheme in layers(label, study).schemes:
        for length in study.eval_lens:
            try:
                scheme.at_length(length).param_specs()
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise ValueError(f"scheme {label!r} fails at length {length}: {cause}") from error
