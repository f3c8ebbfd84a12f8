"""Schemes and kinds of calls that every implementation is checked on, with random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import posenc
from posenc.cli.list import one_of_each_kind
from posenc.contract.protocol import PositionScheme
from posenc.positions import packed
from posenc.schemes import FoX, Kerple
from posenc.testing import AttentionCase, Host, SchemeCase
from posenc.testing.examples import HEADS, HIDDEN_DIM, Both, Fence
from posenc.testing.framework import readonly

BATCH = 2
Options = dict[str, Any]


def schemes(dim: int) -> dict[str, PositionScheme]:
    """One scheme of each kind in the catalogue, and what it lacks, most important first."""
    sizes = {"num_heads": HEADS, "head_dim": dim, "max_len": 4096, "train_len": 64}
    first = {
        "alibi": posenc.ALiBi(HEADS),
        "t5": posenc.T5Bias(HEADS),
        "alibi-learned": posenc.ALiBi(HEADS, learned=True),
        "fox": FoX(HEADS, HIDDEN_DIM),
        "rope": posenc.RoPE(dim),
    }
    rest = {name: posenc.make(name, **sizes) for name in one_of_each_kind() if name not in first}
    own = {
        "t5-causal": posenc.T5Bias(HEADS, causal=True),
        "alibi-given": posenc.ALiBi(HEADS, slopes=[0.0, 1.0, -0.5, 3.0]),
        "kerple_log": Kerple(HEADS),
        "fence": Fence(reach=90),
        "both": Both(dim),
    }
    return first | rest | own


CORE = ("alibi", "t5", "alibi-learned", "fox", "rope")


@dataclass(frozen=True)
class Layout:
    """One kind of call: lengths, sizes and options.

    Attributes
    ----------
    length, queries
        Number of keys, and of queries if there are fewer.
    options
        ``options(rng, queries, keys)``: keywords of attention.
    dim, value_dim, grouped, batch
        Channels per head, channels of its values, whether heads share keys, batch size.
    size
        Factor on standard normal queries and keys.
    """

    length: int
    queries: int | None = None
    options: Callable[[np.random.Generator, int, int], Options] = field(
        default=lambda rng, queries, keys: {"causal": True}
    )
    dim: int = 64
    value_dim: int | None = None
    grouped: bool = False
    batch: int = BATCH
    size: float = 1.0


def _everything(rng: np.random.Generator, queries: int, keys: int) -> Options:
    return {}


def _window(rng: np.random.Generator, queries: int, keys: int) -> Options:
    return {"causal": True, "window": keys // 4 + 5}


def _packed(rng: np.random.Generator, queries: int, keys: int) -> Options:
    lengths = keys // 2 + 7, keys // 3, keys - keys // 2 - 7 - keys // 3
    return {"causal": True, "tokens": packed(lengths)}


def _shuffled(rng: np.random.Generator, queries: int, keys: int) -> Options:
    pos = np.stack([rng.permutation(keys) - int(rng.integers(keys)) for _ in range(BATCH)])
    return {"causal": True, "tokens": posenc.Tokens(pos)}


def _far(rng: np.random.Generator, queries: int, keys: int) -> Options:
    pos = np.arange(keys) + int(rng.integers(10**6, 2 * 10**6))
    return {"causal": True, "tokens": posenc.Tokens(pos)}


def _fully_masked(rng: np.random.Generator, queries: int, keys: int) -> Options:
    """Some queries belong to a segment without keys."""
    seg = np.arange(keys) * 2 // keys
    of_queries = np.where(rng.random(queries) < 0.3, 7, seg)
    return {
        "causal": True,
        "tokens": posenc.Tokens(seg=seg),
        "queries": posenc.Tokens(seg=of_queries),
    }


LAYOUTS = {
    "causal": Layout(384),
    "long": Layout(2048, batch=1, size=0.5),  # long and small enough for negligible blocks
    "odd": Layout(300),
    "grouped": Layout(300, grouped=True),
    "decode": Layout(300, queries=1),
    "packed": Layout(300, options=_packed),
    "window": Layout(384, options=_window),
    "shuffled": Layout(300, options=_shuffled),
    "fully-masked": Layout(300, options=_fully_masked),
    "far": Layout(300, queries=200, options=_far),
    "everything": Layout(300, options=_everything),
    "wide": Layout(384, dim=128),
    "narrow": Layout(300, value_dim=32),
}


def random_call(
    name: str, layout: Layout, seed: int, scale: float = 1.0
) -> tuple[AttentionCase, Host]:
    """A call with random inputs, and a gradient of its result; ``scale`` is a factor on lengths."""
    rng = np.random.default_rng(seed)
    scheme = schemes(layout.dim)[name]
    case = SchemeCase(scheme, head_dim=layout.dim, params=_params(scheme, rng))
    keys = max(2, int(layout.length * scale))
    queries = keys if layout.queries is None else max(1, int(layout.queries * scale))
    shared = 2 if layout.grouped and case.shares_keys else 1
    own, wide = layout.dim, layout.value_dim or layout.dim
    tensors = {
        "q": layout.size * _normal(rng, layout.batch, HEADS, queries, own),
        "k": layout.size * _normal(rng, layout.batch, HEADS // shared, keys, own),
        "v": _normal(rng, layout.batch, HEADS // shared, keys, wide),
    }
    x = _normal(rng, layout.batch, keys, case.hidden_dim) if case.reads_hidden else None
    options = layout.options(rng, queries, keys)
    if x is not None:
        tokens = options.get("tokens", posenc.Tokens())
        options["tokens"] = replace(tokens, x=readonly(x))
    d_out = _normal(rng, layout.batch, HEADS, queries, wide)
    fixed = {name: readonly(a) for name, a in tensors.items()}
    return AttentionCase(scheme, fixed, case.params, options), readonly(d_out)


def _params(scheme: PositionScheme, rng: np.random.Generator) -> dict[str, Host]:
    """Random learned arrays: initial values are often near 0, or the same for all heads."""
    first = posenc.init_params(scheme, int(rng.integers(2**31)))
    return {
        name: np.float32(
            rng.normal(0, 0.5, spec.shape)
            if spec.init is None
            else first[name] * rng.uniform(0.8, 1.2, spec.shape)
        )
        for name, spec in scheme.param_specs().items()
    }


def _normal(rng: np.random.Generator, *shape: int) -> Host:
    """Values that half precision represents exactly, so that all dtypes start from the same."""
    return np.round(rng.standard_normal(shape).clip(-3.9, 3.9) * 32) / 32
