"""Planted candidates: each has one bug that another project had, in a few lines of plain code.

``PLANTED`` names for each the definition, the issues that it stands for, and words that the
audit's message must have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

YARN = "rope_yarn:factor=4,train_len=64"
DEEPSEEK = (
    "rope_yarn:factor=40,train_len=4096,mscale=1.0,mscale_all_dim=1.0,apply_to=scale,"
    "layout=interleaved"
)
LONG = (
    "rope_longrope:head_dim=32,train_len=64,factor=4,"
    f"short_factor={[1.0] * 16},long_factor={[1.0 + k / 4 for k in range(16)]}"
).replace(" ", "")


@dataclass(frozen=True)
class Planted:
    """A wrong candidate, and what its audit must say."""

    f: Callable[..., Any]
    label: str
    issues: tuple[str, ...]
    phrase: str
    framework: str = "numpy"
    kind: str | None = None
    right: Callable[..., Any] | None = None  # another path of the same kernel, which agrees

    @property
    def name(self) -> str:
        return self.f.__name__


# Parts that are right.


def inv_freq(dim, base=10_000.0):
    return base ** (-np.arange(0, dim, 2) / dim)


def tables(pos, frequencies):
    """Cosines and sines ``(B, 1, L, n)``."""
    angle = np.asarray(pos)[:, None, :, None] * frequencies
    return np.cos(angle), np.sin(angle)


def turn_half(x, cos, sin):
    n = cos.shape[-1]
    a, b = x[..., :n], x[..., n : 2 * n]
    turned = [a * cos - b * sin, b * cos + a * sin, x[..., 2 * n :]]
    return np.concatenate(turned, -1).astype(x.dtype)


def turn_neighbours(x, cos, sin):
    n = 2 * cos.shape[-1]
    a, b = x[..., 0:n:2], x[..., 1:n:2]
    pairs = np.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return np.concatenate([pairs.reshape(*x.shape[:-1], n), x[..., n:]], -1).astype(x.dtype)


def attend(q, k, v, seen, bias=0.0, sink=None, scale=None):
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    scores = np.where(seen, scores, -np.inf)
    highest = np.max(scores, -1, keepdims=True)
    if sink is not None:
        highest = np.maximum(highest, sink[:, None, None])
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[:, None, None] - highest)
    return (weights / total @ v).astype(q.dtype)


def distance(q_pos, k_pos):
    """``q - k``, ``(B, 1, Q, K)``."""
    return (q_pos[:, :, None] - k_pos[:, None, :])[:, None]


def paper_slopes(heads):
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    more = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return np.array((slopes + more)[:heads])


def yarn(dim, factor=4.0, length=64, base=10_000.0):
    """Frequencies of YaRN, with the ramp of the released code."""

    def index(turns):
        return dim * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(base))

    low, high = max(np.floor(index(32)), 0), min(np.ceil(index(1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    plain = inv_freq(dim, base)
    return plain * (1 - ramp) + plain / factor * ramp


# Layouts.


def half_for_neighbours(x, pos):
    return turn_half(x, *tables(pos, inv_freq(x.shape[-1])))


def neighbours_for_half(x, pos):
    return turn_neighbours(x, *tables(pos, inv_freq(x.shape[-1])))


def tables_of_halves_turned_as_neighbours(x, pos):
    cos, sin = (np.concatenate([t, t], -1) for t in tables(pos, inv_freq(x.shape[-1])))
    partner = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return (x * cos + partner * sin).astype(x.dtype)


def leaves_neighbours_as_halves(x, pos):
    turned = turn_neighbours(x, *tables(pos, inv_freq(x.shape[-1])))
    return np.concatenate([turned[..., ::2], turned[..., 1::2]], -1)


def turns_the_other_way(x, pos):
    cos, sin = tables(pos, inv_freq(x.shape[-1]))
    return turn_half(x, cos, -sin)


# Widths.


def partial_factor_ignored(x, pos):
    return turn_half(x, *tables(pos, inv_freq(x.shape[-1])))


def partial_factor_twice(x, pos):
    return turn_half(x, *tables(pos, inv_freq(4)))


def frequencies_of_the_whole_head(x, pos):
    return turn_half(x, *tables(pos, inv_freq(x.shape[-1])[:8]))


# Scalings.


def scaling_unread(x, pos):
    return turn_half(x, *tables(pos, inv_freq(x.shape[-1])))


def attention_factor_ignored(x, pos):
    cos, sin = tables(pos, yarn(x.shape[-1]))
    factor = 0.1 * np.log(4) + 1  # though the label says 1.3
    return turn_half(x, factor * cos, factor * sin)


def attention_factor_missing(x, pos):
    return turn_half(x, *tables(pos, yarn(x.shape[-1])))


def mscale_squared_missing(q, k, v, q_pos, k_pos):
    frequencies = yarn(q.shape[-1], 40.0, 4096)
    q = turn_neighbours(q, *tables(q_pos, frequencies))
    k = turn_neighbours(k, *tables(k_pos, frequencies))
    return attend(q, k, v, distance(q_pos, k_pos) >= 0)


def rotated_twice(x, pos):
    cos, sin = tables(pos, inv_freq(x.shape[-1]))
    return turn_half(turn_half(x, cos, sin), cos, sin)


def cached_keys_keep_old_angles(q, k, v, q_pos, k_pos):
    """The query turns by the long factors, and keys by the short ones of when they were cached."""
    plain = inv_freq(q.shape[-1])
    factor = np.sqrt(1 + np.log(4) / np.log(64))
    long = plain / (1 + np.arange(len(plain)) / 4)
    far = max(q_pos.max(), k_pos.max()) >= 64
    cos, sin = tables(q_pos, long if far else plain)
    q = turn_half(q, factor * cos, factor * sin)
    cos, sin = tables(k_pos, plain)
    k = turn_half(k, factor * cos, factor * sin)
    return attend(q, k, v, distance(q_pos, k_pos) >= 0)


class GrowingBase:
    """Dynamic NTK that never takes its base back after a long context."""

    def __init__(self):
        self.longest = 64

    def __call__(self, x, pos):
        self.longest, dim = max(self.longest, int(pos.max()) + 1), x.shape[-1]
        base = 10_000.0 * (2 * self.longest / 64 - 1) ** (dim / (dim - 2))
        return turn_half(x, *tables(pos, inv_freq(dim, base)))


@cache
def growing_base_module():
    return GrowingBase()


def dynamic_base_stays_long(x, pos):
    return growing_base_module()(x, pos)


# Positions, rows, padding, packing.


def row_0_for_all_rows(x, pos):
    if x.shape[2] == 1:
        pos = np.broadcast_to(pos[:1], pos.shape)
    return turn_half(x, *tables(pos, inv_freq(x.shape[-1])))


def offset_ignored(x, pos):
    return turn_half(x, *tables(np.arange(x.shape[2])[None], inv_freq(x.shape[-1])))


def padding_counts_as_tokens(x, pos):
    first = pos[:, :1]
    return turn_half(x, *tables(first + np.arange(x.shape[2]), inv_freq(x.shape[-1])))


def positions_from_1(x, pos):
    return turn_half(x, *tables(pos + 1, inv_freq(x.shape[-1])))


def table_of_64_positions(x, pos):
    return turn_half(x, *tables(np.minimum(pos, 63), inv_freq(x.shape[-1])))


def documents_not_kept_apart(q, k, v, pos, seg):
    cos, sin = tables(pos, inv_freq(q.shape[-1]))
    q, k = turn_half(q, cos, sin), turn_half(k, cos, sin)
    order = np.arange(q.shape[2])[None]
    return attend(q, k, v, distance(order, order) >= 0)


def positions_in_bfloat16(x, pos):
    bits = pos.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded = bits.astype(np.uint32).view(np.float32)
    return turn_half(x, *tables(rounded, inv_freq(x.shape[-1])))


def angles_in_float16(x, pos):
    frequencies = inv_freq(x.shape[-1])
    angle = (np.minimum(pos, 60_000)[:, None, :, None] * frequencies).astype(np.float16)
    angle = angle.astype(np.float32)
    return turn_half(x, np.cos(angle), np.sin(angle))


def frequencies_in_bfloat16(x, pos):
    import torch

    dim = x.shape[-1]
    frequencies = (10_000.0 ** (-torch.arange(0, dim, 2) / dim)).bfloat16().float()
    angle = pos[:, None, :, None].float() * frequencies
    cos, sin = (torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
    partner = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
    return (x.float() * cos + partner.float() * sin).to(x.dtype)


@cache
def noise(n):
    """A table as it is after a load from the meta device: whatever was in the memory."""
    return np.random.default_rng(0).uniform(0, 1, n)


def table_of_noise(x, pos):
    return turn_half(x, *tables(pos, noise(x.shape[-1] // 2)))


def second_half_of_the_table_dropped(x, pos):
    """Both halves of a head turn by the same table, which in 2-D has an axis in each half."""
    half = x.shape[-1] // 2
    table = tables(pos[..., 0], inv_freq(half, 100.0))
    return np.concatenate([turn_neighbours(x[..., at : at + half], *table) for at in (0, half)], -1)


def eager_rotation(x, pos):
    return turn_neighbours(x, *tables(pos, inv_freq(16)))


def fused_on_export(x, pos):
    """The node that a pattern was fused to has neither ``interleaved`` nor the rotary width."""
    return turn_half(x, *tables(pos, inv_freq(x.shape[-1])))


def unfused_rotation(x, pos):
    return turn_half(x, *tables(pos, inv_freq(x.shape[-1])))


def unfused_path_rotates_again(x, pos):
    return unfused_rotation(unfused_rotation(x, pos), pos)


def keys_of_another_layout(q, k, v, q_pos, k_pos):
    """An indexer that turns halves in a model whose queries are interleaved."""
    frequencies = inv_freq(q.shape[-1])
    q, k = (
        turn_neighbours(q, *tables(q_pos, frequencies)),
        turn_half(k, *tables(k_pos, frequencies)),
    )
    return attend(q, k, v, distance(q_pos, k_pos) >= 0)


def shift_of_the_first_stream(x, pos):
    """Keys are cached at 0, 1, 2, ... and rotated again by their shift: those of one stream."""
    first = np.broadcast_to(np.arange(x.shape[2]), pos.shape)
    shift = (pos - first) * (np.arange(len(pos)) == 0)[:, None]
    frequencies = inv_freq(x.shape[-1])
    return turn_half(turn_half(x, *tables(first, frequencies)), *tables(shift, frequencies))


def shift_of_one_axis(x, pos):
    """Sections of M-RoPE are read when keys are cached, and not when they are shifted."""
    first = np.broadcast_to(np.arange(x.shape[2])[:, None], pos.shape)
    shift = np.where(np.arange(3) == 0, pos - first, 0)
    axis, frequencies = np.repeat([0, 1, 2], (8, 12, 12)), inv_freq(x.shape[-1])
    for at in (first, shift):
        angle = at[..., axis][:, None] * frequencies
        x = turn_half(x, np.cos(angle), np.sin(angle))
    return x


def shift_the_wrong_way(x, pos):
    first = np.broadcast_to(np.arange(x.shape[2]), pos.shape)
    frequencies = inv_freq(x.shape[-1])
    return turn_half(turn_half(x, *tables(first, frequencies)), *tables(first - pos, frequencies))


def image_advances_by_its_tokens(x, pos):
    """Text after an image goes on as if every token of the image had a position of its own."""
    pos = pos.copy()
    image = np.flatnonzero(np.any(pos[0] != pos[0, :, :1], -1))
    if len(image) and len(pos) == 1:
        after = image[-1] + 1
        pos[:, after:] += pos[0, image].min() + len(image) - pos[0, after : after + 1, :1].sum()
    axis = np.repeat([0, 1, 2], (8, 12, 12))
    angle = pos[..., axis][:, None] * inv_freq(x.shape[-1])
    return turn_half(x, np.cos(angle), np.sin(angle))


def rank_takes_one_run(x, pos):
    """A rank of context parallelism has a slice of positions, and counts on from its first."""
    run = pos[:, :1] + np.arange(x.shape[2])
    return turn_half(x, *tables(run, inv_freq(x.shape[-1])))


def positions_of_16_bits(x, pos):
    return turn_half(x, *tables(pos.astype(np.int16), inv_freq(x.shape[-1])))


def mrope_order_of_axes(x, pos):
    """Height where time should be: ``(h, t, w)``."""
    frequencies, sections = inv_freq(x.shape[-1]), (8, 12, 12)
    axis = np.repeat([1, 0, 2], sections)
    angle = pos[..., axis][:, None] * frequencies
    return turn_half(x, np.cos(angle), np.sin(angle))


# Biases.


def geometric_slopes(num_heads, q_pos, k_pos):
    slopes = 2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)
    return -slopes[:, None, None] * np.abs(q_pos[:, None] - k_pos)


def slopes_of_a_slice_of_heads(num_heads, q_pos, k_pos):
    """Two ranks of tensor parallelism, each with the slopes of a model of its own heads."""
    slopes = np.tile(paper_slopes(num_heads // 2), 2)
    return -slopes[:, None, None] * np.abs(q_pos[:, None] - k_pos)


def bias_favours_far_keys(num_heads, q_pos, k_pos):
    return paper_slopes(num_heads)[:, None, None] * np.abs(q_pos[:, None] - k_pos)


def bias_by_index(num_heads, q_pos, k_pos):
    i, j = np.arange(len(q_pos)), np.arange(len(k_pos))
    return -paper_slopes(num_heads)[:, None, None] * np.abs(i[:, None] - j)


def t5_bucket(rel, buckets, most):
    """One direction, as decoders have it."""
    n, exact = np.maximum(-rel, 0), buckets // 2
    with np.errstate(divide="ignore"):
        far = exact + np.log(n / exact) / np.log(most / exact) * (buckets - exact)
    far = np.minimum(np.where(n > 0, far, 0), buckets - 1).astype(int)
    return np.where(n < exact, n, far)


def t5_max_distance_256(num_heads, q_pos, k_pos, table):
    return table[:, t5_bucket(k_pos - q_pos[:, None], 32, 256)]


def t5_bucket_one_off(num_heads, q_pos, k_pos, table):
    bucket = t5_bucket(k_pos - q_pos[:, None], 32, 128)
    return table[:, np.minimum(bucket + 1, 31)]


def t5_bias_dropped_on_a_cached_step(q, k, v, q_pos, k_pos, table):
    bias = 0.0
    if q.shape[2] == k.shape[2]:
        bias = table[:, t5_bucket(-distance(q_pos, k_pos)[:, 0], 32, 128)].swapaxes(0, 1)
    return attend(q, k, v, distance(q_pos, k_pos) >= 0, bias)


def max_bias_unread(num_heads, q_pos, k_pos):
    return -paper_slopes(num_heads)[:, None, None] * np.abs(q_pos[:, None] - k_pos)


def slopes_of_another_rule(num_heads, q_pos, k_pos):
    slopes = 1 / np.arange(2, num_heads + 2)
    return -slopes[:, None, None] * np.abs(q_pos[:, None] - k_pos)


def bias_in_bfloat16(num_heads, q_pos, k_pos):
    """Slopes times positions of keys in bfloat16, less that at the query."""
    import torch

    slopes = torch.tensor(paper_slopes(num_heads)).bfloat16()[:, None]
    q, k = ((slopes * torch.tensor(at).bfloat16()).double().numpy() for at in (q_pos, k_pos))
    return (k[:, None, :] - q[:, :, None]).astype(np.float32)


# Key heads, soft caps, scales.


def grouped(q, k, v, q_pos, k_pos, tiled=False, cap=None, masked_first=False):
    frequencies, groups = inv_freq(q.shape[-1]), q.shape[1] // k.shape[1]
    q, k = turn_half(q, *tables(q_pos, frequencies)), turn_half(k, *tables(k_pos, frequencies))
    k, v = (np.tile(a, (1, groups, 1, 1)) if tiled else np.repeat(a, groups, 1) for a in (k, v))
    seen = distance(q_pos, k_pos) >= 0
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    scores = np.where(seen, scores, -np.inf) if masked_first else scores
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = scores if masked_first else np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).astype(q.dtype)


def key_heads_tiled(q, k, v, q_pos, k_pos):
    return grouped(q, k, v, q_pos, k_pos, tiled=True)


def cap_after_the_mask(q, k, v, q_pos, k_pos, softcap=None):
    return grouped(q, k, v, q_pos, k_pos, cap=softcap, masked_first=softcap is not None)


def scale_ignored(q, k, v, q_pos, k_pos, scale=None):
    return grouped(q, k, v, q_pos, k_pos)


# Embeddings.


def waves(pos, exponents, base=10_000.0, join=np.stack):
    angle = pos[..., None] * base**-exponents
    made = join([np.sin(angle), np.cos(angle)], -1)
    return made.reshape(*pos.shape, -1).astype(np.float32)


def sines_then_cosines(pos, dim):
    return waves(pos, np.arange(dim // 2) / (dim // 2), join=np.concatenate)


def exponents_of_tensor2tensor(pos, dim):
    return waves(pos, np.arange(dim // 2) / (dim // 2 - 1))


def embedding_frequencies_in_float16(pos, dim):
    frequencies = (10_000.0 ** (-np.arange(0, dim, 2) / dim)).astype(np.float16).astype(float)
    angle = pos[..., None] * frequencies
    return np.stack([np.sin(angle), np.cos(angle)], -1).reshape(*pos.shape, -1)


def table_of_512_rows(pos, dim):
    return waves(np.minimum(pos, 511), np.arange(dim // 2) / (dim // 2))


def row_of_padding_unread(pos, table):
    return table[pos]


# Windows and sinks.


def window_one_off(q, k, v, q_pos, k_pos, window):
    far = distance(q_pos, k_pos)
    slopes = paper_slopes(q.shape[1])[:, None, None]
    return attend(q, k, v, (far >= 0) & (far <= window), -slopes * far)


def sinks_dropped(q, k, v, q_pos, k_pos, sinks):
    return attend(q, k, v, distance(q_pos, k_pos) >= 0)


def sink_of_head_0_for_all(q, k, v, q_pos, k_pos, sinks):
    return attend(q, k, v, distance(q_pos, k_pos) >= 0, sink=np.full_like(sinks, sinks[0]))


# Gradients.


@cache
def kernel_that_turns_its_gradient_on():
    import torch

    def turn(x, pos):
        dim = x.shape[-1]
        angle = pos[:, None, :, None].float() * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = (torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
        partner = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return (x.float() * cos + partner.float() * sin).to(x.dtype)

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, pos):
            ctx.save_for_backward(pos)
            return turn(x, pos)

        @staticmethod
        def backward(ctx, d_out):
            return turn(d_out, *ctx.saved_tensors), None  # it should turn back

    return Kernel


def wrong_gradient(x, pos):
    return kernel_that_turns_its_gradient_on().apply(x, pos)


def gradient_cut_off(x, pos):
    import torch

    dim = x.shape[-1]
    angle = pos[:, None, :, None].float() * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    partner = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1).detach()
    cos, sin = (torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
    return (x.float() * cos + partner.float() * sin).to(x.dtype)


PLANTED = (
    Planted(
        half_for_neighbours, "rope:layout=interleaved",
        ("WestWaters/pollard-weights#70", "vllm#54160"), "pairs channels as halves",
    ),
    Planted(neighbours_for_half, "rope", ("vllm#49290", "sglang#13495"), "as neighbours"),
    Planted(
        tables_of_halves_turned_as_neighbours, "rope", ("transformers#47328",),
        "no longer depend on the difference",
    ),
    Planted(
        leaves_neighbours_as_halves, "rope:layout=interleaved", ("vllm-ascend#12765",),
        "leaves the result in the order of 'half'",
    ),
    Planted(turns_the_other_way, "rope", (), "rotates the other way"),
    Planted(
        partial_factor_ignored, "rope:rotary_dim=16", ("transformers#48241", "vllm#30349"),
        "rotary_dim=16 is ignored",
    ),
    Planted(
        partial_factor_twice, "rope:rotary_dim=16", ("transformers#48630", "maxtext#4615"),
        "applied twice: 4 channels",
    ),
    Planted(
        frequencies_of_the_whole_head, "rope:rotary_dim=16", ("transformers#46912",),
        "those of the whole head",
    ),
    Planted(scaling_unread, YARN, ("mlx-vlm#1710", "unsloth#6197"), "YaRN is not applied"),
    Planted(
        attention_factor_ignored, f"{YARN},attention_factor=1.3",
        ("mlx-lm#1507", "exllamav3#259"), "attention_factor=1.3 is ignored",
    ),
    Planted(attention_factor_missing, YARN, ("mlx-lm#1507",), "attention factor"),
    Planted(
        mscale_squared_missing, DEEPSEEK, ("onnxruntime/mobius#548", "Megatron-LM#1429"),
        "mscale squared",
    ),
    Planted(rotated_twice, "rope", ("TensorRT-LLM#16378",), "rotates twice"),
    Planted(
        cached_keys_keep_old_angles, LONG, ("llama.cpp#24875", "openvino.genai#4117"),
        "Cached keys keep old angles",
    ),
    Planted(
        dynamic_base_stays_long, "rope_dynamic:factor=2,train_len=64", ("transformers#25306",),
        "once it was called at far positions",
    ),
    Planted(
        row_0_for_all_rows, "rope", ("mlx#3494", "mlx#3496", "mlx#3795"),
        "Rows after the first take the positions of row 0",
    ),
    Planted(offset_ignored, "rope", ("nanochat#520", "torchtitan#2559"), "ignores the positions"),
    Planted(
        padding_counts_as_tokens, "rope", ("unsloth#3699", "LlamaFactory#10283"),
        "counts on from it",
    ),
    Planted(positions_from_1, "rope", ("prime-rl#3466",), "from 1 instead of 0"),
    Planted(table_of_64_positions, "rope", (), "its table has 64 entries"),
    Planted(
        documents_not_kept_apart, "rope", ("OLMo-core#503",), "are not kept apart",
    ),
    Planted(positions_in_bfloat16, "rope", ("modded-nanogpt#39",), "rounded to bfloat16"),
    Planted(angles_in_float16, "rope", ("prime-rl#1167",), "rounded to float16"),
    Planted(
        frequencies_in_bfloat16, "rope", ("prime-rl#1167",), "inv_freq) are rounded to bfloat16",
        "torch",
    ),
    Planted(
        table_of_noise, "rope", ("transformers#45902", "unsloth#4112", "vllm#39176"),
        "table that was never initialised",
    ),
    Planted(
        mrope_order_of_axes, "mrope:sections=(8,12,12)", ("vllm-gaudi#1437", "lerobot#3648"),
        "in the order height, time, width",
    ),
    Planted(
        image_advances_by_its_tokens, "mrope:sections=(8,12,12)",
        ("vllm-gaudi#1437", "mlx-lm#1768"), "advances by the number of its tokens",
    ),
    Planted(
        second_half_of_the_table_dropped, "axial_rope", ("ncnn#6833",),
        "turns by the axis height alone",
    ),
    Planted(
        fused_on_export, "rope:layout=interleaved,rotary_dim=16", ("onnxruntime#29261",),
        "layout='interleaved' and rotary_dim=16 are both ignored", right=eager_rotation,
    ),
    Planted(
        unfused_path_rotates_again, "rope", ("TensorRT-LLM#16378",), "rotates twice",
        right=unfused_rotation,
    ),
    Planted(
        keys_of_another_layout, "rope:layout=interleaved", ("sglang#13495", "vllm#28968"),
        "Keys are paired as halves",
    ),
    Planted(
        shift_of_the_first_stream, "rope", ("llama.cpp#14742",),
        "Rows after the first are not shifted",
    ),
    Planted(
        shift_of_one_axis, "mrope:sections=(8,12,12)", ("llama.cpp#19928",),
        "The shift moves the axis time alone",
    ),
    Planted(shift_the_wrong_way, "rope", ("llama.cpp#14742",), "shift goes the wrong way"),
    Planted(
        rank_takes_one_run, "rope", ("Automodel#1439", "TransformerEngine#1930", "sglang#20559"),
        "counts on from each row's first position",
    ),
    Planted(
        positions_of_16_bits, "rope", (),
        "those from 32768 on wrap around",
    ),
    Planted(key_heads_tiled, "rope", (), "heads of keys are tiled"),
    Planted(cap_after_the_mask, "rope", (), "applied after the mask"),
    Planted(scale_ignored, "rope", (), "scale=0.11 is ignored"),
    Planted(sines_then_cosines, "sinusoidal", (), "all sines come before all cosines"),
    Planted(exponents_of_tensor2tensor, "sinusoidal", (), "as in tensor2tensor"),
    Planted(embedding_frequencies_in_float16, "sinusoidal", (), "rounded to float16"),
    Planted(table_of_512_rows, "sinusoidal", (), "its table has 512 entries"),
    Planted(row_of_padding_unread, "learned:max_len=600,offset=2", (), "reads row pos + 0"),
    Planted(max_bias_unread, "alibi:max_bias=4", (), "max_bias=4 is ignored"),
    Planted(slopes_of_another_rule, "alibi", (), "linear in distance with other slopes: 0.5"),
    Planted(bias_in_bfloat16, "alibi", (), "rounded to bfloat16, so neighbouring keys"),
    Planted(
        geometric_slopes, "alibi", ("mlx#3071", "aprender#2143"), "geometric, 2**(-8h/12)",
    ),
    Planted(
        slopes_of_a_slice_of_heads, "alibi", ("TensorRT-LLM#1611", "flashinfer#1606"),
        "a slice of heads must take its slopes from all",
    ),
    Planted(bias_favours_far_keys, "alibi", (), "sign of the bias is wrong"),
    Planted(bias_by_index, "alibi", ("keras-hub#2932",), "indices for positions"),
    Planted(t5_max_distance_256, "t5:causal=True", (), "max_distance is 256"),
    Planted(t5_bucket_one_off, "t5:causal=True", (), "one above the right ones"),
    Planted(
        t5_bias_dropped_on_a_cached_step, "t5:causal=True",
        ("TensorRT-LLM#13870", "keras-hub#2932"), "dropped on the cached step",
    ),
    Planted(
        window_one_off, "alibi@16",
        ("Megatron-Bridge#2656", "transformers#39408", "sglang#26147"), "The window is one off",
    ),
    Planted(sinks_dropped, "sink", ("vllm#52156", "miles#1500"), "The sink is dropped"),
    Planted(
        sink_of_head_0_for_all, "sink", ("TensorRT-LLM#13166",), "Every head has the sink",
    ),
    Planted(
        wrong_gradient, "rope", ("NeMo-RL#2981", "vllm#51049"), "rotates the same way", "torch",
    ),
    Planted(gradient_cut_off, "rope", ("vllm#43199",), "gradient by x", "torch"),
)  # fmt: skip
