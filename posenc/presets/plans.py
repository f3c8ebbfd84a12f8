"""The plans, one function each.

All of them take ``layers`` and ``head_dim``, and have a full layer at every ``every``-th place: the
last of each group of ``every``, unless the docstring says otherwise. A window ``W`` leaves keys at
``|q_pos - k_pos| < W`` visible. In a causal call that is ``0 <= q_pos - k_pos < W``, as the sliding
window of transformers.
"""

from __future__ import annotations

from posenc.contract.checks import check_count
from posenc.contract.protocol import PositionScheme
from posenc.hf.layer_schemes import PerLayerLearnedRoPE, inkling_layer
from posenc.layers import LayerPlan
from posenc.presets.named import PLANS, groups, ignoring_sizes, named_plan
from posenc.schemes import (
    Chunk,
    LogScale,
    NoPE,
    Proportional,
    RoPE,
    Sink,
    Sum,
    YaRN,
)


@named_plan
def rnope(
    *,
    layers: int = 32,
    head_dim: int = 128,
    base: float = 10_000.0,
    window: int | None = 4096,
    every: int = 4,
) -> LayerPlan:
    """RNoPE-SWA: three layers of RoPE with a window, then one of NoPE that sees every key.

    Yang et al. 2025, "Rope to Nope and Back Again", arXiv 2501.18795. ``window=None`` gives RNoPE,
    whose layers all see every key; ``every=2`` alternates.
    """
    return groups(layers, every, RoPE(head_dim, base), NoPE(), window=window)


@named_plan
def swan(
    *,
    layers: int = 32,
    head_dim: int = 128,
    base: float = 10_000.0,
    window: int | None = 512,
    every: int = 4,
) -> LayerPlan:
    """SWAN: one layer of NoPE that sees every key, then three of RoPE with a window.

    Puvvada et al. 2025, "SWAN-GPT", arXiv 2504.08719. The paper also scales the scores of NoPE
    layers by the logarithm of the length at inference; the plan does not. The order of layers and
    the window are not verified.
    """
    return groups(layers, every, RoPE(head_dim, base), NoPE(), window=window, first=True)


@named_plan
def cohere2(
    *,
    layers: int = 40,
    head_dim: int = 128,
    base: float = 10_000.0,
    window: int | None = 4096,
    every: int = 4,
) -> LayerPlan:
    """Cohere 2: RoPE in interleaved layout on layers with a window, NoPE on full layers.

    Defaults of ``Cohere2Config`` in transformers 5.23; Command R7B and Command A have
    ``base=50_000``. Without a window no layer rotates, as in transformers.
    """
    near = NoPE() if window is None else RoPE(head_dim, base, layout="interleaved")
    return groups(layers, every, near, NoPE(), window=window)


@named_plan
def smollm3(
    *,
    layers: int = 36,
    head_dim: int = 128,
    base: float = 2_000_000.0,
    window: int | None = None,
    every: int = 4,
) -> LayerPlan:
    """SmolLM3: RoPE, and NoPE on every fourth layer.

    Defaults of ``SmolLM3Config`` in transformers 5.23. Its ``no_rope_layers`` has 1 where a layer
    *has* RoPE. No released model has a window; in transformers ``window`` is that of NoPE layers,
    so it is here.
    """
    return groups(layers, every, RoPE(head_dim, base), NoPE(), window=None, full_window=window)


@named_plan
def exaone4(
    *,
    layers: int = 32,
    head_dim: int = 128,
    base: float = 10_000.0,
    window: int | None = 4096,
    every: int = 4,
) -> LayerPlan:
    """EXAONE 4: RoPE on layers with a window, NoPE on full layers.

    Defaults of ``Exaone4Config`` in transformers 5.23; the released models have
    ``base=1_000_000``. ``window=None`` (EXAONE 4 1.2B): every layer is full and has RoPE.
    """
    rope = RoPE(head_dim, base)
    return groups(layers, every, rope, rope if window is None else NoPE(), window=window)


@named_plan
def irope(
    *,
    layers: int = 48,
    head_dim: int = 128,
    base: float = 500_000.0,
    chunk: int | None = 8192,
    every: int = 4,
    train_len: int = 8192,
    beta: float = 0.1,
) -> LayerPlan:
    """IRoPE of Llama 4: RoPE in chunks, and on every fourth layer NoPE that sees every key.

    Queries of NoPE layers grow with the logarithm of their position:
    ``1 + beta ln(1 + floor((p + 1) / train_len))``. Layers with RoPE have no window but chunks: a
    query sees the keys of its own ``chunk`` positions, so the first query of each sees one key.

    Defaults of ``Llama4TextConfig`` in transformers 5.23. ``chunk=None`` is no chunk. The QK norm
    of layers with RoPE is the model's, not the plan's.
    """
    near: PositionScheme = RoPE(head_dim, base, layout="interleaved")
    if chunk is not None:
        near = Sum(near, Chunk(check_count("chunk", chunk)))
    full = LogScale("llama4", train_len=train_len, beta=beta)
    return groups(layers, every, near, full, window=None)


llama4 = PLANS["llama4"] = irope


@named_plan
def mistral_large4(
    *,
    layers: int = 72,
    num_heads: int = 64,
    head_dim: int = 128,
    rotary_dim: int | None = None,
    base: float = 10_000.0,
    factor: float = 2048.0,
    train_len: int = 512,
    every: int = 4,
) -> LayerPlan:
    """Mistral Large 4: RoPE with learned frequencies over YaRN, and NoPE on every fourth layer.

    Queries of all layers are multiplied by ``a ln(p + 1) + b``, learned for each head. Half of the
    channels rotate; ``rotary_dim`` is another number. They are the first channels here and the last
    in the released model, which changes no score.

    Defaults of ``MistralLarge4TextConfig`` in transformers 5.23. Its layers share the learned
    frequencies, and each has its own ``a`` and ``b``; here each layer has its own of all. Its
    sparse attention, to the 2048 keys that an indexer chooses, is the model's, not the plan's.
    """
    yarn = YaRN(factor, train_len, attention_factor=1.0)
    turning = head_dim // 2 if rotary_dim is None else rotary_dim
    rope = PerLayerLearnedRoPE(head_dim, base, "interleaved", turning, yarn)
    scale = LogScale("mistral_large4", num_heads=num_heads)
    return groups(layers, every, Sum(rope, scale), scale, window=None)


@named_plan
def kolibri1(
    *,
    layers: int = 50,
    head_dim: int = 128,
    base: float = 10_000.0,
    window: int | None = 513,
    every: int = 5,
) -> LayerPlan:
    """Kolibri 1: as EXAONE 4, with a full layer of NoPE every fifth layer.

    Defaults of ``Kolibri1Config`` in transformers 5.23.
    """
    rope = RoPE(head_dim, base)
    return groups(layers, every, rope, rope if window is None else NoPE(), window=window)


@named_plan
def olmo3(
    *,
    layers: int = 32,
    head_dim: int = 128,
    base: float = 500_000.0,
    window: int | None = 4096,
    every: int = 4,
) -> LayerPlan:
    """OLMo 3: RoPE everywhere, with a window on three of four layers.

    Defaults of ``Olmo3Config`` in transformers 5.23. Released long-context models have YaRN on full
    layers: see ``from_hf_config``.
    """
    rope = RoPE(head_dim, base)
    return groups(layers, every, rope, rope, window=window)


@named_plan
def gpt_oss(
    *,
    layers: int = 36,
    num_heads: int = 64,
    head_dim: int = 64,
    base: float = 150_000.0,
    factor: float = 32.0,
    train_len: int = 4096,
    window: int | None = 128,
    every: int = 2,
) -> LayerPlan:
    """gpt-oss: RoPE over YaRN and a learned sink everywhere, a window on every other layer.

    OpenAI 2025, arXiv 2508.10925. Defaults of ``GptOssConfig`` in transformers 5.23.
    """
    rope = RoPE(head_dim, base, scaling=YaRN(factor, train_len, truncate=False))
    sink = Sink(rope, num_heads)
    return groups(layers, every, sink, sink, window=window)


@ignoring_sizes
def inkling(
    *,
    layers: int = 66,
    num_heads: int = 64,
    hidden_dim: int = 6144,
    rank: int = 16,
    extent: int = 1024,
    window: int | None = 512,
    every: int = 6,
) -> LayerPlan:
    """Inkling: a bias that each query chooses, over the window or, in full layers, ``extent`` keys.

    Thinking Machines Lab 2026. Defaults of ``InklingTextConfig`` in transformers 5.23. Norms of
    queries and keys, and the short convolutions, are the model's. It is not in ``PLANS``: there
    ``inkling`` is the scheme of one layer.
    """
    near = inkling_layer(num_heads, hidden_dim, rank, extent if window is None else window)
    full = inkling_layer(num_heads, hidden_dim, rank, extent)
    return groups(layers, every, near, full, window=window)


@ignoring_sizes
def inkling2(
    *,
    layers: int = 48,
    num_heads: int = 48,
    hidden_dim: int = 4608,
    rank: int = 16,
    extent: int = 1024,
    window: int | None = 1024,
    every: int = 6,
    length: int = 128_000,
) -> LayerPlan:
    """Inkling 2: as Inkling, clipped, with a sink per query, and log scaling from ``length`` on.

    Thinking Machines Lab 2026. Defaults of ``Inkling2TextConfig`` in transformers 5.23. Clips of
    queries and keys, and the short convolutions, are the model's. Like ``inkling`` it is not in
    ``PLANS``.
    """
    near_extent = extent if window is None else window
    near = inkling_layer(num_heads, hidden_dim, rank, near_extent, clip=8.0)
    full = inkling_layer(num_heads, hidden_dim, rank, extent, clip=8.0, length=length)
    return groups(layers, every, near, full, window=window)


@named_plan
def gemma2(
    *,
    layers: int = 26,
    head_dim: int = 256,
    base: float = 10_000.0,
    window: int | None = 4096,
    every: int = 2,
) -> LayerPlan:
    """Gemma 2: RoPE everywhere, with a window on every other layer.

    Gemma Team 2024, arXiv 2408.00118, section 2. Defaults of ``Gemma2Config`` in transformers 5.23.
    Its cap of scores is the model's: ``softcap=50``.
    """
    rope = RoPE(head_dim, base)
    return groups(layers, every, rope, rope, window=window)


@named_plan
def gemma3(
    *,
    layers: int = 26,
    head_dim: int = 256,
    base: float = 1_000_000.0,
    local_base: float = 10_000.0,
    window: int | None = 4096,
    every: int = 6,
) -> LayerPlan:
    """Gemma 3: RoPE everywhere, with one base on layers with a window, another on full layers.

    Team Gemma 2025, arXiv 2503.19786, section 2. Defaults of ``Gemma3TextConfig`` in transformers
    5.23; released models have windows of 512 (1B) and 1024.
    """
    near, full = RoPE(head_dim, local_base), RoPE(head_dim, base)
    return groups(layers, every, near, full, window=window)


@named_plan
def gemma4(
    *,
    layers: int = 30,
    head_dim: int | None = None,
    global_head_dim: int | None = None,
    base: float = 1_000_000.0,
    local_base: float = 10_000.0,
    p: float = 0.25,
    window: int | None = 512,
    every: int = 6,
) -> LayerPlan:
    """Gemma 4: RoPE on layers with a window; on full layers p-RoPE, which turns a part ``p``.

    Defaults of ``Gemma4TextConfig`` in transformers 5.23. The last layer is full in any case.
    Full layers have ``global_head_dim`` channels per head; default: ``head_dim``, or the released
    256 and 512 if neither is given.
    """
    near_dim = 256 if head_dim is None else head_dim
    full_dim = (
        (512 if head_dim is None else head_dim) if global_head_dim is None else global_head_dim
    )
    near = RoPE(near_dim, local_base)
    full = RoPE(full_dim, base, scaling=Proportional(p))
    plan = groups(layers, every, near, full, window=window)
    return LayerPlan((*plan.schemes[:-1], full), (*plan.windows[:-1], None))
