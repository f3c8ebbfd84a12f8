"""Which cases each scheme has: its options, sizes, positions and learned arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posenc.apply.bias import has_bias
from posenc.apply.embed import has_embedding
from posenc.apply.transform import has_transform
from posenc.contract.protocol import Hook, PositionScheme
from posenc.makers import make
from posenc.vectors.inputs import Array, hashed

HEADS, HEAD_DIM, HIDDEN_DIM, LEN = (6, 8), 16, 24, 64
# Rows at other offsets, none of which is a multiple of the other's.
NEAR = np.array([[0, 1, 31, 33, 62], [5, 6, 7, 40, 63]])
FAR = np.array([[127, 129, 4096, 65_537, 100_000], [99_995, 99_996, 99_999, 100_000, 100_001]])
KEYS = 5  # of attention: row 0 at 0 .. 4, row 1 at 37 .. 41
_SHORT, _LONG = ([1 + k * step / 8 for k in range(8)] for step in (1, 16))

_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "alibi": [{}, {"noncausal": "asymmetric"}],
    "axial_rope": [{"layout": "interleaved"}, {"layout": "half"}],
    "kerple_log": [{}],
    "mrope": [
        {"layout": "chunked", "sections": [2, 3, 3]},
        {"layout": "interleaved", "sections": [4, 2, 2]},
        {"layout": "chunked", "sections": [2, 1, 1], "rotary_dim": 8},
    ],
    "relative_table": [{}, {"bidirectional": True}],
    "rope": [
        {"layout": "half"},
        {"layout": "interleaved"},
        {"layout": "half", "rotary_dim": 8},
        {"layout": "interleaved", "rotary_dim": 8},
        {"layout": "half", "base": 500000.0},
    ],
    "rope_dynamic": [{"factor": 2.0}],
    "rope_llama3": [{"factor": 8.0}, {"factor": 8.0, "layout": "interleaved", "rotary_dim": 8}],
    "rope_longrope": [{"short_factor": _SHORT, "long_factor": _LONG, "factor": 32.0}],
    "rope_ntk": [{"factor": 4.0}],
    "rope_ntk_mixed": [{"factor": 4.0}],
    "rope_pi": [{"factor": 4.0}],
    "rope_yarn": [
        {"factor": 8.0},
        {"factor": 8.0, "attention_factor": 1.0},
        {"factor": 8.0, "layout": "interleaved", "rotary_dim": 8},
    ],
    "t5": [{"causal": True}, {"causal": False}],
}  # fmt: skip
# Learned arrays that must be positive.
_POSITIVE = {
    "bam": {"beta"}, "kerple_log": {"p", "a"}, "kerple_power": {"p", "a"},
    "fire": {"c", "len_scale"},
}  # fmt: skip
# Powers of a number below 1: beyond some thousand positions no float32 holds them.
_NEAR_ALONE = {"xpos"}


@dataclass(frozen=True)
class Case:
    """One call of a scheme.

    Attributes
    ----------
    name
        It starts the names of its tensors.
    kind
        ``rotation``, ``bias``, ``embedding`` or ``attention``.
    options, sizes
        What ``posenc.make`` gets.
    scheme
        The scheme.
    inputs
        Arrays by name: ``x``, ``q``, ``k``, ``v``, ``hidden``, ``pos``, ``q_pos``, ``k_pos``, or
        ``places`` where the scheme has several axes.
    params
        Its learned arrays.
    """

    name: str
    kind: str
    options: Mapping[str, Any]
    sizes: Mapping[str, int]
    scheme: PositionScheme
    inputs: Mapping[str, Array] = field(default_factory=dict)
    params: Mapping[str, Array] = field(default_factory=dict)


def cases(name: str) -> Iterator[Case]:
    """The cases of a scheme of the catalogue."""
    for number, options in enumerate(_OPTIONS.get(name, [{}])):
        for heads in HEADS:
            sizes = {"num_heads": heads, "head_dim": HEAD_DIM, "max_len": LEN, "train_len": LEN}
            sizes |= {"dim": heads * HEAD_DIM, "hidden_dim": HIDDEN_DIM}
            made = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
            scheme = make(name, **sizes, **made)  # type: ignore[arg-type]
            params = learned(name, scheme)
            for kind, place, inputs in _questions(name, scheme, heads):
                title = ".".join(filter(None, (kind, f"options{number}", f"heads{heads}", place)))
                yield Case(title, kind, options, sizes, scheme, inputs, params)


def learned(name: str, scheme: PositionScheme) -> dict[str, Array]:
    """Learned arrays of multiples of 1/128 up to 1/2, by the hash; positive ones where needed."""
    arrays: dict[str, Array] = {}
    for stream, (key, spec) in enumerate(sorted(scheme.param_specs().items())):
        array = hashed(spec.shape, 16 + stream, 128)
        positive = key in _POSITIVE.get(name, ())
        arrays[key] = np.asarray(np.abs(array) + np.float32(1 / 2) if positive else array)
    return arrays


def _questions(
    name: str, scheme: PositionScheme, heads: int
) -> Iterator[tuple[str, str, dict[str, Array]]]:
    """Kind, place and inputs of the calls that show what a scheme does."""
    own = bool(scheme.feature_specs()) or bool(scheme.regions())
    whole_rows = Hook.ADJUST_SCORES in scheme.hooks()
    bounded = hasattr(scheme, "max_len") or name in _NEAR_ALONE
    spans = {"near": NEAR} if bounded else {"near": NEAR, "far": FAR}
    for place, pos in spans.items():
        at = _at(scheme, pos)
        if has_embedding(scheme):
            yield "embedding", place, at
        if has_transform(scheme) and not own:
            yield "rotation", place, {"x": hashed((2, heads, pos.shape[1], HEAD_DIM), 1), **at}
        if has_bias(scheme) and not own and scheme.axes == 1 and not whole_rows:
            yield "bias", place, {"q_pos": pos[1], "k_pos": np.concatenate(pos)}
    yield "attention", "", _attention(scheme, heads)


def _at(scheme: PositionScheme, pos: Array) -> dict[str, Array]:
    """Positions; of a scheme with axes, places that differ by axis."""
    if scheme.axes == 1:
        return {"pos": pos}
    size = int(np.max(pos)) + 1
    return {"places": np.stack([pos * (axis + 1) % size for axis in range(scheme.axes)], -1)}


def _attention(scheme: PositionScheme, heads: int) -> dict[str, Array]:
    pos = np.arange(KEYS) + np.array([[0], [37]])
    vectors = {n: hashed((2, heads, KEYS, HEAD_DIM), s) for s, n in enumerate("qkv", 1)}
    found = {**vectors, "pos": pos}
    if scheme.axes > 1:
        found |= _at(scheme, pos)
    if scheme.feature_specs():
        found["hidden"] = hashed((2, KEYS, HIDDEN_DIM), 4)
    return found
