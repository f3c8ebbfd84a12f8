"""Named sets of a study's options: a size to look with, and one that fills a GPU.

Both take one path through the code: bfloat16, gradient accumulation, a compiled step, and tokens of
a mapped file. ``small`` is a minute on a CPU, most of it torch.compile, so that a file and an
environment can be tried before an hour of GPU. A scale gives options that the study leaves open;
one that is given wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED: Mapping[str, Any] = {"dtype": "bfloat16", "compile": True}
# Of text: GPT-2's 50257 tokens, and up to a multiple of 64, which is faster (nanoGPT).
VOCABULARY = 50304

SCALES: Mapping[str, Mapping[str, Any]] = {
    # GPT-2's small model (Radford et al. 2019) on 118 million tokens. By estimate ten minutes a
    # scheme on an H100: ``--dry-run`` computes it.
    "gpu": {
        **_SHARED, "layers": 12, "dim": 768, "heads": 12, "train_len": 512,
        "eval_lens": (512, 1024, 2048, 4096, 8192, 16384), "eval_windows": 8, "steps": 3600,
        "batch_size": 64, "accumulate": 2, "learning_rate": 6e-4, "warmup": 200, "device": "cuda",
    },
    "small": {
        **_SHARED, "layers": 2, "dim": 32, "heads": 4, "train_len": 32,
        "eval_lens": (32, 64, 128), "eval_windows": 2, "steps": 10,
        "batch_size": 4, "accumulate": 2, "learning_rate": 6e-4, "warmup": 2, "seeds": 1,
    },
}  # fmt: skip


def check_scale(name: str) -> None:
    """``ValueError`` for a name that no scale has."""
    if name and name not in SCALES:
        raise ValueError(f"scale must be {' or '.join(map(repr, SCALES))}, got {name!r}")
