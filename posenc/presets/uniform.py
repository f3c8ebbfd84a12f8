"""Models whose layers are all alike: the scheme of every layer.

A function takes sizes of the model by keyword, and ignores those that it does not name. Defaults of
options are those of the released configurations. ``LayerPlan.of(scheme, layers)`` makes a plan.
"""

from __future__ import annotations

from posenc.contract.checks import check_count
from posenc.hf.whole_plans import falcon_alibi
from posenc.presets.named import ignoring_sizes
from posenc.schemes import ALiBi, Learned, Llama3, MRoPE, RoPE, T5Bias, YaRN


@ignoring_sizes
def llama(*, head_dim: int, base: float = 10_000.0) -> RoPE:
    """Llama 1 and 2, and Phi-3 with 4096 tokens."""
    return RoPE(head_dim, base)


phi3 = llama


@ignoring_sizes
def llama3(
    *, head_dim: int, base: float = 500_000.0, factor: float | None = 8.0, train_len: int = 8192
) -> RoPE:
    """Llama 3.1 (``factor=8``) and 3.2 (``factor=32``); ``factor=None``: Llama 3."""
    scaling = None if factor is None else Llama3(factor, train_len=train_len)
    return RoPE(head_dim, base, scaling=scaling)


@ignoring_sizes
def gptj(*, head_dim: int, rotary_dim: int | None = None) -> RoPE:
    """GPT-J: the first 64 channels rotate, or all of a smaller head, in interleaved layout."""
    turning = min(64, check_count("head_dim", head_dim)) if rotary_dim is None else rotary_dim
    return RoPE(head_dim, layout="interleaved", rotary_dim=turning)


@ignoring_sizes
def neox(*, head_dim: int, base: float = 10_000.0) -> RoPE:
    """GPT-NeoX: the first quarter of the channels rotates."""
    return RoPE(head_dim, base, rotary_dim=check_count("head_dim", head_dim) // 4)


@ignoring_sizes
def deepseek_v3(
    *,
    head_dim: int = 192,
    rotary_dim: int | None = None,
    base: float = 10_000.0,
    factor: float = 40.0,
    train_len: int = 4096,
) -> RoPE:
    """DeepSeek V3: a third of the channels rotates, in interleaved layout, over YaRN.

    YaRN's factor multiplies the softmax scale. Channels that rotate are the first here and the last
    in the released model, which changes no score.
    """
    turning = check_count("head_dim", head_dim) // 3 if rotary_dim is None else rotary_dim
    yarn = YaRN(factor, train_len, mscale=1.0, mscale_all_dim=1.0, apply_to="scale")
    return RoPE(head_dim, base, "interleaved", turning, yarn)


@ignoring_sizes
def qwen2_vl(*, head_dim: int = 128, base: float = 1_000_000.0) -> MRoPE:
    """Qwen2-VL and Qwen2.5-VL: M-RoPE in three blocks of pairs, for time, height and width."""
    return MRoPE(head_dim, layout="chunked", base=base)


@ignoring_sizes
def qwen3_vl(*, head_dim: int = 128, base: float = 5_000_000.0) -> MRoPE:
    """Qwen3-VL: M-RoPE whose axes take turns."""
    return MRoPE(head_dim, layout="interleaved", base=base)


@ignoring_sizes
def bloom(*, num_heads: int) -> ALiBi:
    """BLOOM: ALiBi with the slopes of the paper."""
    return ALiBi(num_heads)


@ignoring_sizes
def mpt(*, num_heads: int, max_bias: float = 8.0) -> ALiBi:
    """MPT: ALiBi, with ``alibi_bias_max`` as ``max_bias``."""
    return ALiBi(num_heads, max_bias=max_bias)


@ignoring_sizes
def falcon_rw(*, num_heads: int, head_dim: int) -> ALiBi:
    """Falcon-RW: ALiBi added before scores are scaled, so its slopes are divided by ``sqrt(D)``.

    The released code rounds slopes and biases to bfloat16; these are exact.
    """
    return falcon_alibi(num_heads, head_dim)


@ignoring_sizes
def t5(
    *, num_heads: int, causal: bool = False, num_buckets: int = 32, max_distance: int = 128
) -> T5Bias:
    """T5's encoder, or with ``causal`` its decoder: scores are not scaled."""
    return T5Bias(num_heads, num_buckets, max_distance, causal=causal, scaled=False)


@ignoring_sizes
def gpt2(*, dim: int, max_len: int = 1024) -> Learned:
    """GPT-2: a learned table of positions."""
    return Learned(max_len, dim)


@ignoring_sizes
def opt(*, dim: int, max_len: int = 2048) -> Learned:
    """OPT: a learned table of positions, with two rows before the first."""
    return Learned(max_len, dim, offset=2)
