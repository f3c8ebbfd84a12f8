"""The schemes that every law is tried on: the catalogue, its options, and the examples.

The examples of ``posenc.testing.examples`` use every hook of the contract, so that a test that
passes says something about schemes that are not written yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import posenc
from posenc import PositionScheme
from posenc.attn.embedding_only import ATTENTION_HOOKS
from posenc.contract.params import head_count
from posenc.schemes import (
    BAM,
    FIRE,
    ALiBi2D,
    AxialRoPE,
    CARoPE,
    Chunk,
    CoPE,
    DeBERTa,
    DualChunk,
    FoX,
    HeadSlice,
    Inkling,
    RelativeTable,
    ReRoPE,
    Sandwich,
    SelectiveRoPE,
    Shaw,
    Sink,
    Sum,
    TransformerXL,
    Wall,
)
from posenc.testing import examples
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM, Fence
from posenc.testing.framework import readonly

MAX_LEN = 64


def from_catalogue() -> dict[str, PositionScheme]:
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "max_len": MAX_LEN, "train_len": 16}
    sizes["hidden_dim"] = HIDDEN_DIM
    return {name: posenc.make(name, **sizes) for name in posenc.catalogue()}


# ``test_what_schemes_can_say`` compares each of these with its formula.
PROOFS: dict[str, PositionScheme] = {
    "fox": FoX(HEADS, HIDDEN_DIM),
    "fading": examples.Fading(),
    "shaw": Shaw(HEAD_DIM, max_distance=3),
    "transformer_xl": TransformerXL(HEADS, HEAD_DIM, HIDDEN_DIM, max_distance=9),
    "deberta": DeBERTa(HEADS, HEAD_DIM, buckets=4, max_distance=6),
    "inkling": Inkling(HEADS, HIDDEN_DIM, rank=3, extent=5),
    "selective": SelectiveRoPE(HEADS, HEAD_DIM, HIDDEN_DIM, rank=3, conv=3),
    "axial": AxialRoPE(HEAD_DIM, layout="half"),
    "streets": ALiBi2D(HEADS, "city_block", [0.5, 0.25, 0.125, 1.0]),
    "cope": CoPE(HEAD_DIM, npos=6, init_std=0.5),
    "rerope": ReRoPE(HEAD_DIM, window=4),
    "fox+alibi": Sum(FoX(HEADS, HIDDEN_DIM), posenc.ALiBi(HEADS)),
    "rope+alibi": Sum(posenc.RoPE(HEAD_DIM), posenc.ALiBi(HEADS)),
    "rope+key-side": Sum(
        posenc.RoPE(HEAD_DIM), DeBERTa(HEADS, HEAD_DIM, None, max_distance=4, terms="p2c")
    ),
    "sink": Sink(posenc.ALiBi(HEADS)),
    "sink-of-queries": Sink(posenc.NoPE(), HEADS, per_query=True, hidden_dim=HIDDEN_DIM),
    "sink-off-by-one": Sink(posenc.RoPE(HEAD_DIM), learned=False),
}

SUBJECTS: dict[str, PositionScheme] = from_catalogue() | {
    "t5": posenc.T5Bias(HEADS),  # from the training length it would be causal
    "sandwich": Sandwich(HEADS, dim=16),  # 128 gives scores of 32, tolerances are for 8
    "wall": Wall(HEADS, HEAD_DIM, HIDDEN_DIM, offset=0.0),  # gates that forget
    "carope": CARoPE(HEADS, HEAD_DIM, HIDDEN_DIM, init_std=0.5),
    "bam": BAM(HEADS, init_beta=0.7, learned_mu=True),
    "alibi-learned": posenc.ALiBi(HEADS, learned=True),
    "alibi-geometric": posenc.ALiBi(3, slopes="geometric"),
    "alibi-given": posenc.ALiBi(HEADS, slopes=[0.0, 1.0, -0.5, 3.0]),
    "alibi-far": posenc.ALiBi(HEADS, slopes=[0.5, 0.5, 0.25, 0.125]),
    "rope+chunk": Sum(posenc.RoPE(HEAD_DIM), Chunk(8)),
    "alibi-asymmetric": posenc.ALiBi(HEADS, noncausal="asymmetric"),
    "alibi-two-sided": posenc.ALiBi(HEADS, noncausal="two_sided", learned=True),
    "alibi-offset": posenc.ALiBi(HEADS, noncausal="offset"),
    "alibi-interpolated": posenc.ALiBi(HEADS, learned=True, interpolate_from=16).at_length(64),
    # Only a sink lets softmax see the offset.
    "fire-offset": Sink(FIRE(HEADS, hidden=8, init_len=12.5, offset=True), value=0.5),
    "relative-table-two-sided": RelativeTable(HEADS, max_distance=5),
    "transformer_xl-two-sided": TransformerXL(
        HEADS, HEAD_DIM, HIDDEN_DIM, max_distance=5, bidirectional=True
    ),
    "learned-offset": posenc.Learned(max_len=MAX_LEN, dim=HEAD_DIM, offset=2),
    "rope-base": posenc.RoPE(HEAD_DIM, base=100.0),
    "rope-interleaved": posenc.RoPE(HEAD_DIM, layout="interleaved"),
    "rope-partial": posenc.RoPE(HEAD_DIM, rotary_dim=4),
    "sinusoidal-base": posenc.Sinusoidal(HEADS * HEAD_DIM, base=100.0),
    "sinusoidal-concatenated": posenc.Sinusoidal(HEADS * HEAD_DIM, layout="concatenated"),
    "sinusoidal-tensor2tensor": posenc.Sinusoidal(HEADS * HEAD_DIM, layout="tensor2tensor"),
    "dual-chunk": DualChunk(HEAD_DIM, 8, chunk_size=4),
    "rerope-leaky": ReRoPE(HEAD_DIM, window=3, leak=2.5, train_len=4),
    "t5-causal": posenc.T5Bias(HEADS, causal=True),
    "t5-few": posenc.T5Bias(HEADS, num_buckets=8, max_distance=20),
    "t5-far": posenc.T5Bias(HEADS, max_distance=129),
    "t5-unscaled": posenc.T5Bias(HEADS, scaled=False),
    "fence": Fence(),
    "fence-wide": Fence(reach=9),
    "head-slice": HeadSlice(Sum(FoX(6, HIDDEN_DIM), posenc.ALiBi(6)), 1, 5),
    "cooled": examples.Cooled(),
    "stretching": examples.Stretching(HEAD_DIM),
    "stretched": examples.Stretching(HEAD_DIM).at_length(64),
    "sharpening": examples.Sharpening(),
    "parabola": examples.Parabola(),
    "checkered": examples.Checkered(),
    "tide": examples.Tide(),
    "silent": examples.Silent(),
    "both": examples.Both(HEAD_DIM),
    **PROOFS,
}
# These show most faults: nothing, a rotation, a bias, a table, learned numbers, sums, features of
# queries.
TELLING = ("nope", "rope", "alibi", "t5", "alibi-learned", "fading", "inkling")


def heads(scheme: PositionScheme) -> int:
    """How many heads to try a scheme with: its own count where it has one."""
    return head_count(scheme) or HEADS


def params_of(scheme: PositionScheme, seed: int = 0, dtype: str = "float32"):
    """First values, read-only."""
    values = posenc.init_params(scheme, seed)
    return {name: readonly(value.astype(dtype)) for name, value in values.items()}


def normal(shape: Sequence[int], seed: int, dtype: str = "float64"):
    """Independent normal values, read-only, that half precision holds exactly."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return readonly((np.round(values * 32) / 32).astype(dtype))


def steers_attention(scheme: PositionScheme) -> bool:
    """Whether attention can see the scheme at all: by a transform, a bias, a scale."""
    return bool(scheme.hooks() & ATTENTION_HOOKS)


def fox_alibi(num_heads: int = HEADS) -> PositionScheme:
    """FoX and ALiBi with learned slopes: sums of gates, positions and a learned number per head."""
    return Sum(FoX(num_heads, HIDDEN_DIM), posenc.ALiBi(num_heads, learned=True))


def sunk(scheme: PositionScheme) -> PositionScheme:
    """With a learned sink, 0.5 at first."""
    return Sink(scheme, value=0.5)
