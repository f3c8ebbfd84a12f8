"""``probe``: any function from tokens to logits, measured by length."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posenc.contract.checks import check_count
from posenc.probe import report
from posenc.probe.losses import Answers, answers_of
from posenc.probe.measures import Setting, rate
from posenc.probe.passkey import Source, Symbols, Words
from posenc.probe.pieces import Probe, carry_out
from posenc.probe.tables import by_length
from posenc.probe.text import Array, Text, of_bytes

Logits = Callable[[Array], Any]
_AT_ONCE = 4096  # tokens, where no batch size is given


@dataclass(frozen=True)
class Probed:
    """What a probe found: ``records``, one per row, measure and length, and a ``summary``."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]

    def text(self, width: int | None = None) -> str:
        """All tables, for a terminal."""
        return report.text(self.summary, self.records, width)

    def loss(self, row: str, what: str = "bits", per: str = "tokens") -> dict[int, float]:
        """Bits by length: of ``"bits"``, ``"last_bits"`` or ``"key_bits"``, per token or byte."""
        found = by_length(self.records, row, "text")
        return {length: rate(record, what, per) for length, record in found.items()}

    def write(self, out: str | os.PathLike[str]) -> list[Path]:
        """Write table, report, numbers and figures into a folder; return their paths."""
        runs = [record["run"] for record in self.records]
        names, _ = report.write(Path(out), dict(self.summary), self.records, runs)
        return [Path(out) / name for name in names]


def probe(
    logits: Logits | Mapping[str, Logits],
    tokens: Text | bytes | Array | Sequence[int],
    eval_lens: Sequence[int],
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
    distances: Callable[[Array], Any] | Mapping[str, Callable[[Array], Any]] | None = None,
    windows: int | None = None,
    depths: int = 10,
    keys: int = 4,
    attention_len: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Probed:
    """Measure models by length: losses of a text, passkeys, distances of attention.

    Parameters
    ----------
    logits
        A function from tokens, integers of NumPy ``(N, T)``, to logits ``(N, T, V)`` of NumPy,
        PyTorch or JAX. Or several by name, which become rows side by side.
    tokens
        The text: ids ``(n,)``; bytes, whose tokens are the bytes; or a ``Text``, which also knows
        how many bytes a token covers.
    eval_lens
        Lengths of windows.
    encode
        Text to ids: passkeys are then asked for in words. Default: in random tokens of the text.
    distances
        A function from tokens ``(1, T)`` to mean distances of attention ``(layers, heads)``, or one
        by name. Default: these are not measured.
    windows
        Stretches of the longest length that are scored. Default: as many as fit, at most 16.
    depths, keys
        Depths of a passkey and prompts of each; ``keys=0`` leaves passkeys out.
    attention_len
        Tokens whose attention is measured. Default: the shortest of ``eval_lens``.
    batch_size
        Windows at once. Default: about 4096 tokens.
    seed
        Of passkeys.

    Returns
    -------
    A ``Probed``. A piece that fails is a record with ``status`` "failed".

    >>> import numpy as np
    >>> found = probe(lambda tokens: np.zeros((*tokens.shape, 4)), np.arange(99) % 4, [8, 16])
    >>> found.loss("model")
    {8: 2.0, 16: 2.0}
    """
    text = _text(tokens)
    models = dict(logits) if isinstance(logits, Mapping) else {"model": logits}
    if not models:
        raise ValueError("logits must name at least one model, got none")
    of_rows = distances if isinstance(distances, Mapping) else dict.fromkeys(models, distances)
    setting = make_setting(
        text, eval_lens, windows=windows, depths=depths, keys=keys, seed=seed,
        attention_len=0 if distances is None else attention_len,
    )  # fmt: skip
    if batch_size is not None:
        check_count("batch_size", batch_size)
    subjects = {
        name: _Callable(answers_of(each), of_rows.get(name), batch_size)
        for name, each in models.items()
    }
    source: Source = Symbols.of(text.tokens) if encode is None else Words(encode, text.start)
    plan = Probe(dict.fromkeys(models), text, source, setting, {})
    records = list(carry_out(plan, plan.pieces(), subjects.__getitem__, None))
    about = summary(plan, title="Models by length", command="", notes=[], versions={})
    return Probed(about, records)


def make_setting(
    text: Text,
    eval_lens: Sequence[int],
    *,
    windows: int | None,
    depths: int,
    keys: int,
    attention_len: int | None,
    seed: int,
    vocabulary: int | None = None,
    context: int | None = None,
) -> Setting:
    """The setting of a probe, checked; ``ValueError`` names what is wrong."""
    lengths = tuple(sorted({check_count("eval_lens", length) for length in eval_lens}))
    if not lengths:
        raise ValueError("eval_lens must name at least one length, got none")
    text.check(lengths, vocabulary)
    count = len(text.stretches(windows, lengths[-1]))
    for name, value in (("keys", keys), ("seed", seed)):
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    if attention_len is None:
        attention_len = lengths[0]
    if not 0 <= attention_len <= lengths[-1]:
        raise ValueError(
            f"attention_len must be 0 to {lengths[-1]}, the longest length, got {attention_len}"
        )
    own = {} if context is None else {"context": context}
    return Setting(
        lengths, count, check_count("depths", depths), keys, attention_len, **own, seed=seed
    )


def summary(
    plan: Probe, *, title: str, command: str, notes: Sequence[str], versions: Mapping[str, Any]
) -> dict[str, Any]:
    """What the files of a probe say besides its numbers."""
    setting, text = plan.setting, plan.text
    derived = {"near": setting.near, "last": setting.last, "longest": setting.longest}
    about: dict[str, Any] = {"name": text.name, "tokens": len(text.tokens), "digest": text.digest()}
    if text.lengths is not None:
        about["bytes"] = int(np.sum(text.lengths))
    if text.start is not None:
        about["first token of every window"] = text.start
    return {
        "title": title, "command": command, "notes": list(notes), "versions": dict(versions),
        "setting": {**asdict(setting), **derived}, "corpus": about,
        "prompts": plan.source.about, "chance": plan.source.chance,
    }  # fmt: skip


def _text(tokens: Any) -> Text:
    if isinstance(tokens, Text):
        return tokens
    return of_bytes(tokens) if isinstance(tokens, bytes) else Text(np.asarray(tokens))


@dataclass(frozen=True)
class _Callable:
    """A model of the caller, which knows nothing of memory."""

    answers: Answers
    _distances: Callable[[Array], Any] | None
    _batch_size: int | None

    def distances(self, tokens: Array) -> Array:
        if self._distances is None:
            raise NotImplementedError("no function was given that measures them")
        return np.asarray(self._distances(tokens), dtype=np.float64)

    def batch_size(self, length: int) -> int:
        return self._batch_size or max(1, _AT_ONCE // length)
