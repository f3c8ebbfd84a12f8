"""What a probe measures of one model at one length: text, passkeys, distances of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from posenc.probe.passkey import Source, prompts
from posenc.probe.text import Array, Text
from posenc.study.key_bytes import CONTEXT, key_tokens
from posenc.study.tasks.examples import NO_ANSWER

MEASURES = ("text", "passkey", "attention")
_BITS = 1 / math.log(2)
Progress = Callable[[int], None]  # how many windows are done


class Subject(Protocol):
    """A model under one scheme: a row of the tables."""

    def answers(self, tokens: Array, labels: Array) -> tuple[Array, Array]:
        """Losses in nats of ``labels (N, T)``, and whether the likeliest token is the label."""
        ...

    def distances(self, tokens: Array) -> Array:
        """Mean distances of attention ``(layers, heads)`` of queries in the second half of tokens.

        ``NotImplementedError`` says why they cannot be had.
        """
        ...

    def batch_size(self, length: int) -> int:
        """How many windows of a length it reads at once."""
        ...


@dataclass(frozen=True)
class Setting:
    """Everything that a probe's numbers depend on, besides the model, its scheme and the text.

    Parameters
    ----------
    eval_lens
        Lengths of windows, ascending.
    windows
        Stretches of the longest length that are scored.
    depths, keys
        Depths of a passkey, and prompts of each; no keys, no passkeys.
    attention_len
        Tokens of the text whose attention is measured; 0 for none.
    context
        Tokens before a key token that repeat with it.
    seed
        Of the keys and their noise.
    """

    eval_lens: tuple[int, ...]
    windows: int
    depths: int = 10
    keys: int = 4
    attention_len: int = 0
    context: int = CONTEXT
    seed: int = 0

    @property
    def longest(self) -> int:
        return self.eval_lens[-1]

    @property
    def near(self) -> int:
        """Up to this distance, a repeat makes no key token: the shortest length."""
        return self.eval_lens[0]

    @property
    def last(self) -> int:
        """Last targets of a stretch, the same at every length: half of the shortest."""
        return max(1, self.near // 2)

    def of(self, measure: str) -> dict[str, Any]:
        """The fields that a measure depends on."""
        names = {
            "text": ("windows", "context"),
            "passkey": ("depths", "keys", "seed"),
            "attention": ("windows",),
        }
        own = {name: asdict(self)[name] for name in names[measure]}
        return own if measure == "passkey" else {**own, "near": self.near, "longest": self.longest}


def edges(length: int) -> list[int]:
    """Where buckets of positions end: about two for each doubling."""
    found = {round(2 ** (n / 2)) for n in range(2 * max(1, length).bit_length())}
    return sorted({n for n in found if n < length} | {length})


def score_text(
    subject: Subject, text: Text, setting: Setting, length: int, progress: Progress
) -> dict[str, Any]:
    """Sums of bits over the windows of a length.

    Returns
    -------
    ``bits``, ``last_bits``, ``key_bits``
        Of each stretch: over all targets; the last ``Setting.last`` ones; the key tokens.
    ``tokens``, ``key_tokens``, ``bytes``, ``last_bytes``, ``key_bytes``
        Over how many tokens, or bytes of text: of each stretch; None if bytes are unknown.
    ``by_position``
        Means of bits per token over windows, in buckets of positions that end at ``edges``.
    """
    longest, stretches = setting.longest, text.stretches(setting.windows, setting.longest)
    firsts = text.windows(stretches, longest, length)
    each = firsts.shape[1]
    flat, at_once = firsts.ravel(), subject.batch_size(length)
    bits = np.zeros((len(flat), length))
    covered = np.zeros((len(flat), length), np.int64)
    of_key = np.zeros((len(flat), length), bool)
    for first in range(0, len(flat), at_once):
        rows = slice(first, min(first + at_once, len(flat)))
        inputs, labels, own = text.cut(flat[rows], length)
        labels = labels.copy()
        if own is not None:
            covered[rows] = own
        windows = np.concatenate([inputs[:, :1], labels], axis=1)
        of_key[rows] = key_tokens(windows, setting.near, setting.context)
        losses, _ = subject.answers(inputs, labels)
        bits[rows] = np.asarray(losses, dtype=np.float64) * _BITS
        progress(rows.stop)
    last, known = setting.last, text.lengths is not None
    by_stretch = (len(stretches), each * length)
    ends = edges(length)
    by_position = bits.mean(axis=0)
    return {
        "tokens": each * length,
        "bits": bits.reshape(by_stretch).sum(axis=1).tolist(),
        "bytes": covered.reshape(by_stretch).sum(axis=1).tolist() if known else None,
        "last_tokens": last,
        "last_bits": bits[each - 1 :: each, -last:].sum(axis=1).tolist(),
        "last_bytes": covered[each - 1 :: each, -last:].sum(axis=1).tolist() if known else None,
        "key_tokens": of_key.reshape(by_stretch).sum(axis=1).tolist(),
        "key_bits": (bits * of_key).reshape(by_stretch).sum(axis=1).tolist(),
        "key_bytes": (covered * of_key).reshape(by_stretch).sum(axis=1).tolist() if known else None,
        "edges": ends,
        "by_position": [float(part.mean()) for part in np.split(by_position, ends[:-1])],
    }


def find_passkeys(
    subject: Subject, source: Source, setting: Setting, length: int, progress: Progress
) -> dict[str, Any]:
    """Whether all tokens of each key are right, ``(depths, keys)``, and the bits of each key.

    A prompt that needs more tokens than the length has no cells, and ``why`` says so.
    """
    shape = setting.depths, setting.keys
    try:
        tokens, labels = prompts(source, length, *shape, setting.seed)
    except ValueError as error:
        return {"right": None, "bits": None, "why": str(error)}
    asked, at_once = labels != NO_ANSWER, subject.batch_size(length)
    right, bits = np.zeros(len(tokens), bool), np.zeros(len(tokens))
    for first in range(0, len(tokens), at_once):
        rows = slice(first, min(first + at_once, len(tokens)))
        losses, hits = subject.answers(tokens[rows], labels[rows])
        right[rows] = (hits | ~asked[rows]).all(axis=1)
        bits[rows] = (np.asarray(losses, dtype=np.float64) * asked[rows]).sum(axis=1) * _BITS
        progress(rows.stop)
    return {
        "right": right.reshape(shape).astype(int).tolist(),
        "bits": bits.reshape(shape).tolist(),
        "chance": source.chance,
    }


def look_at_attention(
    subject: Subject, text: Text, setting: Setting, length: int, progress: Progress
) -> dict[str, Any]:
    """Mean distances ``(layers, heads)`` over the beginnings of the stretches, one at a time."""
    firsts = text.stretches(setting.windows, setting.longest)[:4]
    found = []
    for done, first in enumerate(firsts):
        inputs, _, _ = text.cut(first[None], length)
        try:
            found.append(subject.distances(inputs))
        except NotImplementedError as error:
            return {"distances": None, "why": str(error)}
        progress(done + 1)
    return {"distances": np.mean(found, axis=0).tolist(), "windows": len(found)}


def windows_of(measure: str, setting: Setting, length: int) -> int:
    """How many windows a measure reads at a length."""
    if measure == "text":
        return setting.windows * (setting.longest // length)
    if measure == "passkey":
        return setting.depths * setting.keys
    return 3 * min(4, setting.windows)  # attention is computed three times


def rate(record: Mapping[str, Any], what: str, per: str = "tokens") -> float:
    """Bits per token or byte of a record of text: of ``bits``, ``last_bits`` or ``key_bits``."""
    part = {"bits": "", "last_bits": "last_", "key_bits": "key_"}[what]
    total = record.get(f"{part}{per}")
    if total is None:
        return math.nan
    count = float(np.sum(total))
    if isinstance(total, int):
        count *= len(record[what])
    return float(np.sum(record[what])) / count if count else math.nan
