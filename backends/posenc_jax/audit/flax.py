"""flax: what it has for positions, by looking at its public names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flax import linen, nnx

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc.audit.adapters import Kind
from posenc_jax.audit import runs

_WORDS = {
    "rope": ("rope", "rotary"), "alibi": ("alibi",), "t5": ("relativeposition", "t5"),
    "sinusoidal": ("sinus", "positionalenc"),
    "learned:max_len=512": ("positionemb", "positionalemb"),
}  # fmt: skip
_KINDS: dict[str, Kind] = {
    "rope": "rotation", "alibi": "bias", "t5": "bias", "sinusoidal": "embedding",
    "learned:max_len=512": "embedding",
}  # fmt: skip


def candidates(grid: str) -> Iterator[Candidate]:
    """A candidate for each scheme, none of which can be made as long as there is no such name."""
    for label, words in _WORDS.items():
        yield runs.candidate(
            "flax", "flax.linen and flax.nnx", label, _KINDS[label], partial(_look, words),
        )  # fmt: skip


def _look(words: tuple[str, ...], sizes: Sizes) -> Callable[..., Any]:
    names = [name for module in (linen, nnx) for name in dir(module)]
    found = [n for n in names if any(word in n.lower().replace("_", "") for word in words)]
    if found:
        raise RuntimeError(f"it has {', '.join(found)}, which this adapter does not know")
    raise CannotExpressError("it has no such module")
