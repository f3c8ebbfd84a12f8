"""``Reader``: a library that reads configurations, and ``Facts``: what it makes of one.

A library is added by one class with ``name``, ``version`` and ``read``, and one line: in
``READERS`` if the class is here, else as an entry point of the group ``posenc.config_readers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from posenc.contract.checks import check_choice

GROUP = "posenc.config_readers"

READERS = {
    "transformers": "posenc_torch.audit.transformers_configs:Transformers",
    "mlx_lm": "posenc.audit.config_mlx_lm:MlxLm",
}
"""Readers of this project, by the package that they ask; each is imported if it is installed."""

WITHOUT_READER = ("vllm", "sglang", "lmdeploy", "keras_hub", "litgpt", "maxtext", "gguf")
"""Libraries that read such files, and for which no reader is written. A report says so."""


@dataclass(frozen=True)
class Unsaid:
    """Instead of a fact: the reader does not say it, and why."""

    reason: str


T = TypeVar("T")
Said: TypeAlias = T | Unsaid
_NOT_ASKED = Unsaid("the reader does not say it")


@dataclass(frozen=True)
class Facts:
    """What a reader makes of the layers of one type.

    Attributes
    ----------
    kind
        The type of these layers, as ``sliding_attention``; ``""``: a configuration without types.
    layers
        Their indices; None: the reader knows types alone.
    frequencies
        Radians per position of each channel pair, by the length of the text. Empty tuples: these
        layers do not rotate.
    layout
        ``half``, pairs ``(k, k + R/2)``; ``interleaved``, ``(2k, 2k + 1)``; either with
        ``, the other way`` for negative angles; or other words.
    rotary_dim
        How many channels rotate.
    attention_factor
        The factor of cosines and sines. Scores have its square.
    softmax_factor
        What the scaling of positions multiplies the softmax scale by.
    window
        Keys at ``|q_pos - k_pos| < window`` are visible; None: all.
    sections
        The axis of each pair under M-RoPE; None: positions have one axis.
    """

    kind: str = ""
    layers: tuple[int, ...] | None = None
    frequencies: Said[Mapping[int, tuple[float, ...]]] = _NOT_ASKED
    layout: Said[str] = _NOT_ASKED
    rotary_dim: Said[int] = _NOT_ASKED
    attention_factor: Said[float] = _NOT_ASKED
    softmax_factor: Said[float] = _NOT_ASKED
    window: Said[int | None] = _NOT_ASKED
    sections: Said[tuple[int, ...] | None] = _NOT_ASKED

    @property
    def rotates(self) -> bool:
        """Whether these layers rotate, as far as the reader says."""
        return isinstance(self.frequencies, Unsaid) or any(self.frequencies.values())


class NotReadError(Exception):
    """A library does not know configurations like this one; the message says which."""


@runtime_checkable
class Reader(Protocol):
    """A library that reads configurations.

    Attributes
    ----------
    name, version
        The package, and its version.
    """

    name: str
    version: str

    def read(self, config: Mapping[str, Any], lengths: Sequence[int]) -> list[Facts]:
        """What it makes of the dictionary of a ``config.json``, layers of one type together.

        ``lengths`` are the lengths of text whose frequencies are asked. It raises ``NotReadError``
        for what the library does not know. Any other exception is one of the library's.
        """


@dataclass(frozen=True)
class Missing:
    """A library without a reader here, and why."""

    name: str
    version: str
    reason: str
    installed: bool


def installed_readers(names: Sequence[str] | None = None) -> Iterator[Reader | Missing]:
    """The readers of installed libraries, and what is missing; ``names``: of these alone."""
    makers: dict[str, Callable[[], Any]] = {}
    for name, place in READERS.items():
        makers[name] = partial(_imported, place)
    for entry in entry_points(group=GROUP):
        makers[entry.name] = entry.load
    for name in names or ():
        check_choice("reader", name, (*makers, *WITHOUT_READER))
    for name, load in makers.items():
        if names is not None and name not in names:
            continue
        if name in READERS and not _here(name):
            yield Missing(name, "", f"{name} is not installed", False)
            continue
        try:
            yield load()()
        except ImportError as error:
            yield Missing(name, _version(name), f"its reader needs more: {error}", False)
    for name in WITHOUT_READER:
        if name in makers or (names is not None and name not in names):
            continue
        here = _here(name)
        reason = f"no reader is written for {name}" if here else f"{name} is not installed"
        yield Missing(name, _version(name) if here else "", reason, here)


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _here(name: str) -> bool:
    return find_spec(name) is not None


def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:  # PackageNotFoundError: a module without a package of its name
        return ""


FACTS: Mapping[str, str] = {
    "frequencies": "frequencies",
    "rotary_dim": "rotary width",
    "layout": "layout",
    "attention_factor": "attention factor",
    "softmax_factor": "softmax factor",
    "window": "window",
    "sections": "sections",
}
"""The facts of ``Facts`` that are compared, and their names in a report."""
