"""The grid of an audit, as data: which sizes and positions each check asks for.

The bugs of other libraries are invisible at position 0, with one sequence, full rotation, short
prompts, and powers of two of heads. So the grid has none of these alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posenc.audit.candidate import Sizes
from posenc.positions.integers import left_padded, packed
from posenc.testing.framework import Host

GRIDS = ("full", "ci")
MAX_LEN = 131_072
HEADS = 8  # of a case that is not about heads
FAR = (0, 1, 31, 33, 127, 129, 4_097, 70_001, 100_000)  # not as many as heads
LENGTHS = (1, 31, 33, 127, 129)


@dataclass(frozen=True)
class Case:
    """One check of the grid.

    Attributes
    ----------
    name
        The check, in words.
    kind
        What it is for: ``rotation``, ``bias``, ``attention`` or ``embedding``.
    why
        Bugs that it sees, as ``owner/repository#number``.
    heads, head_dim
        Sizes of the vectors.
    q_pos, k_pos, seg
        Positions and segments, as ``Question`` has them.
    causal, region, scale, softcap
        As in ``Question``.
    kv_heads
        Heads of keys and values; None for as many as of queries.
    what
        ``values``; ``gradients``; or ``values again``, after a call with other positions.
    half
        Whether it is asked in half precision too.
    ci
        Whether it belongs to the short grid.
    """

    name: str
    kind: str
    why: tuple[str, ...]
    q_pos: Host
    k_pos: Host | None = None
    heads: int = HEADS
    head_dim: int = 64
    seg: Host | None = None
    causal: bool = True
    region: str = "all"
    scale: float | None = None
    softcap: float | None = None
    kv_heads: int | None = None
    what: str = "values"
    half: bool = False
    ci: bool = True

    @property
    def option(self) -> str:
        """A parameter that a function must have to be asked it, as in ``arguments.NAMES``."""
        return next((name for name in ("scale", "softcap") if getattr(self, name) is not None), "")

    @property
    def sizes(self) -> Sizes:
        """Sizes that the candidate is made for."""
        return Sizes(self.heads, self.head_dim, MAX_LEN)


def cases(kind: str, grid: str = "full", *, axes: int = 1, window: int | None = None) -> list[Case]:
    """The cases of a kind in a grid.

    Raises
    ------
    ValueError
        There is no such grid.
    """
    if grid not in GRIDS:
        raise ValueError(f"grid must be one of {', '.join(GRIDS)}, got {grid!r}")
    found = _KINDS[kind]()
    if axes > 1:
        found = [on_axes(case, axes) for case in found] + _images(axes)
    if kind == "attention" and window is not None:
        found += _window_rows(window)
    return [case for case in found if grid == "full" or case.ci]


def named(kind: str, name: str) -> Case:
    """The case of a name."""
    return next(case for case in _KINDS[kind]() if case.name == name)


def near(kind: str) -> Case:
    """A plain case of a kind, with which a function is tried."""
    return named(kind, {"bias": "8 heads"}.get(kind, "positions 0 to 32"))


def _rows(*rows: Sequence[int]) -> Host:
    return np.array(rows, np.int64)


def _packed(*lengths: int) -> tuple[Host, Host]:
    tokens = packed(lengths)
    return np.asarray(tokens.pos)[None], np.asarray(tokens.seg)[None]


def _rotations() -> list[Case]:
    order = np.random.default_rng(5).permutation(40)
    padded = np.asarray(left_padded([9, 33], 33).pos)
    made = [
        Case("position 0", "rotation", (), _rows([0])),
        Case(
            "positions 0 to 32", "rotation", ("vllm#49290", "transformers#47328"),
            _rows(range(33)), half=True,
        ),
        Case(
            "a second call, after far positions", "rotation",
            ("llama.cpp#24875", "transformers#25306"), _rows(range(31)), what="values again",
        ),
        Case(
            "far positions", "rotation", ("mlx-vlm#1710", "unsloth#6197", "mobius#548"),
            _rows(FAR), half=True,
        ),
        Case(
            "one token per row, rows at other offsets", "rotation", ("mlx#3494", "mlx#3496"),
            _rows([33], [129], [1]),
        ),
        Case(
            "an offset", "rotation", ("nanochat#520", "flash-linear-attention#967"),
            _rows(range(29, 60)),
        ),
        Case(
            "left padding", "rotation", ("unsloth#3699", "flash-linear-attention#967"), padded,
        ),
        Case(
            "packed documents", "rotation", ("torchtitan#2559", "LlamaFactory#10283"),
            _packed(7, 12, 20)[0],
        ),
        Case("any order", "rotation", ("Automodel#1439", "TransformerEngine#1930"), order[None]),
        Case(
            "12 heads, a slice of positions", "rotation", ("sglang#20559",),
            _rows(range(3, 40, 4), range(64, 74)), heads=12,
        ),
        Case(
            "gradients", "rotation", ("NeMo-RL#2981", "vllm#51049"),
            _rows([0, 1, 5, 31, 40], [7, 8, 9, 129, 2]), what="gradients",
        ),
    ]  # fmt: skip
    made += [
        Case(f"{n} tokens", "rotation", ("RL-Kernel#228",), _rows(range(n)), ci=False)
        for n in LENGTHS
    ]
    return [*made, Case("6 heads", "rotation", (), _rows(range(31)), heads=6, ci=False)]


def _biases() -> list[Case]:
    near, far = np.arange(131), np.array(FAR)
    some = np.array([0, 1, 2, 31, 32, 33, 64, 127, 128, 129, 130])  # queries of all these keys
    order = np.random.default_rng(6).permutation(40)
    slopes = ("mlx#3071", "aprender#2143", "TensorRT-LLM#1611", "flashinfer#1606")
    made = [
        Case(f"{heads} heads", "bias", slopes, some, near, heads, region="before")
        for heads in (8, 6, 12, 20)
    ]
    return [
        *made,
        Case("all pairs", "bias", (), near[:66], near[:66], region="before"),
        Case("far positions", "bias", (), far, far, region="before"),
        Case(
            "one query, as in decoding", "bias", ("TensorRT-LLM#13870", "keras-hub#2932"),
            near[-1:], near, region="before",
        ),
        Case("an offset", "bias", ("nanochat#520",), near[:31] + 29, near[:60], region="before"),
        Case("any order", "bias", ("TransformerEngine#1930",), order, order[::-1], region="before"),
        Case("12 heads, one key", "bias", slopes, near[3:9], near[:1], 12, region="before"),
        Case("a gradient of learned arrays", "bias", (), near[:40], near[:40], what="gradients"),
        Case("keys after the query", "bias", (), near[:40], near[:40], region="after"),
    ]  # fmt: skip


def _attentions() -> list[Case]:
    pos, seg = _packed(7, 12, 14)
    padding = left_padded([9, 33], 33)
    order = np.random.default_rng(8).permutation(33)[None]
    wide = {"head_dim": 32}
    base = Case("", "attention", (), _rows(range(33)), **wide)  # type: ignore[arg-type]

    def case(name: str, why: tuple[str, ...], q_pos: Host, **other: object) -> Case:
        return replace(base, name=name, why=why, q_pos=q_pos, **other)  # type: ignore[arg-type]

    return [
        case("one token", ("vllm#52156",), _rows([0])),
        case("positions 0 to 32", ("mobius#548",), _rows(range(33)), half=True),
        case("two rows", ("mlx#3494",), _rows(range(31), range(31))),
        case("far positions", ("mlx-vlm#1710",), _rows(FAR)),
        case("an offset", ("nanochat#520",), _rows(range(29, 60))),
        case(
            "one token per row, rows at other offsets", ("mlx#3494",),
            _rows([32], [40]), k_pos=_rows(range(33), range(8, 41)),
        ),
        case(
            "one query, as in decoding", ("TensorRT-LLM#13870", "llama.cpp#24875"),
            _rows([129]), k_pos=_rows(range(130)),
        ),
        case("packed documents", ("torchtitan#2559",), pos, seg=seg),
        case(
            "left padding", ("unsloth#3699",), np.asarray(padding.pos),
            seg=np.asarray(padding.exists).astype(np.int64),
        ),
        case("any order", ("Automodel#1439",), order),
        case("12 heads", ("mlx#3071",), _rows(range(31)), heads=12),
        case("6 heads", ("mlx#3071",), _rows(range(31)), heads=6, ci=False),
        case("2 key heads for 8 query heads", (), _rows(range(31)), kv_heads=2),
        case("another scale", (), _rows(range(31)), scale=0.11),
        case("a soft cap", (), _rows(range(31)), softcap=1.5),
        case("no causal mask", (), _rows(range(33)), causal=False),
        case("gradients", ("NeMo-RL#2981",), _rows(range(17), range(17)), what="gradients"),
        *(
            case(f"{n} tokens", ("RL-Kernel#228",), _rows(range(n)), ci=False)
            for n in (31, 127, 129)
        ),
    ]  # fmt: skip


def _window_rows(window: int) -> list[Case]:
    """Queries at ``w - 1``, ``w`` and ``w + 1``, the first that lose a key."""
    ends = np.array([[window - 1, window, window + 1]])
    keys = np.arange(window + 2)[None]
    why = ("Megatron-Bridge#2656", "transformers#39408", "sglang#26147")
    name = f"rows at the edge of the window, {window - 1} to {window + 1}"
    return [Case(name, "attention", why, ends, keys, head_dim=32)]


def on_axes(case: Case, axes: int) -> Case:
    """The same case with the position on every axis."""
    places = np.repeat(case.q_pos[..., None], axes, axis=-1)
    return replace(case, name=f"text, {case.name}", q_pos=places)


def _images(axes: int) -> list[Case]:
    """Tokens of an image, whose axes differ."""
    rng = np.random.default_rng(9)
    places = np.stack([np.full(35, 5), *(np.arange(35) // 7 + 5, np.arange(35) % 7 + 5)][:axes], -1)
    if places.shape[-1] < axes:
        places = rng.integers(0, 40, (35, axes))
    why = ("vllm-gaudi#1437", "mlx-lm#1768", "ncnn#6833")
    return [
        Case("an image after text", "rotation", why, places[None]),
        Case("any places", "rotation", why, rng.integers(0, 129, (2, 33, axes))),
    ]


def _embeddings() -> list[Case]:
    base = Case("", "embedding", (), _rows([0]), head_dim=8)

    def case(name: str, q_pos: Host, *why: str, **other: object) -> Case:
        return replace(base, name=name, why=why, q_pos=q_pos, **other)  # type: ignore[arg-type]

    return [
        case("position 0", _rows([0])),
        case("positions 0 to 32", _rows(range(33))),
        case("a second call, after far positions", _rows(range(31)), what="values again"),
        case("far positions", _rows(FAR)),
        case("one token per row, rows at other offsets", _rows([33], [129], [1]), "mlx#3494"),
        case("an offset", _rows(range(29, 60)), "nanochat#520"),
        case("left padding", np.asarray(left_padded([9, 33], 33).pos), "unsloth#3699"),
        case("packed documents", _packed(7, 12, 20)[0], "torchtitan#2559"),
        case("any order", np.random.default_rng(5).permutation(40)[None], "Automodel#1439"),
        case("another width", _rows(range(40)), heads=12),
        case("a gradient of learned arrays", _rows(range(17), range(3, 20)), what="gradients"),
        case("129 tokens", _rows(range(129)), ci=False),
    ]


_KINDS = {
    "rotation": _rotations,
    "bias": _biases,
    "attention": _attentions,
    "embedding": _embeddings,
}
