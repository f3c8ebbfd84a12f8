"""The plans, one function each.

All of them take ``layers`` and ``head_dim``, and have a full layer at every ``every``-th place: the
last of each group of ``every``, unless the docstring says otherwise. A window ``W`` leaves keys at
``|q_pos - k_pos| < W`` visible. In a causal call that is ``0 <= q_pos - k_pos < W``, as the sliding
window of transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from posenc.checks import check_count, nearest
from posenc.layers import LayerPlan
from posenc.protocol import PositionScheme
from posenc.schemes import (
    SIZES,
    Chunk,
    LearnedRoPE,
    LogScale,
    NoPE,
    Proportional,
    RoPE,
    Sum,
    YaRN,
)

PLANS: dict[str, Callable[..., LayerPlan]] = {}
"""The plans by name, for labels on the command line."""


def _plan(function: Callable[..., LayerPlan]) -> Callable[..., LayerPlan]:
    """Enter a plan into ``PLANS``: it then ignores sizes that it does not use, and is fitted."""
    accepted = inspect.signature(function).parameters

    @functools.wraps(function)
    def plan(**given: Any) -> LayerPlan:
        for name in given.keys() - accepted.keys() - set(SIZES):
            hint = nearest(name, accepted)
            raise ValueError(f"{function.__name__} has no option {name!r}{hint}")
        used = {name: value for name, value in given.items() if name in accepted}
        return function(**{**fitted_options(function.__name__, given), **used})

    PLANS[function.__name__] = plan
    return plan


def fitted_options(name: str, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Options of a plan that follow from the sizes of a small model, if they are not given.

    ``{}`` without ``train_len``. Else a window or a chunk has at most half of ``train_len``,
    because one of all of it has no effect in training, and a group has at most ``layers`` layers.
    """
    if sizes.get("train_len") is None:
        return {}
    half = max(1, check_count("train_len", sizes["train_len"]) // 2)
    most = {"window": half, "chunk": half, "every": check_count("layers", sizes.get("layers", 1))}
    options = inspect.signature(PLANS[name]).parameters
    released = {key: options[key].default for key in most if key in options}
    return {key: min(value, most[key]) for key, value in released.items() if value is not None}


def _groups(
    layers: int,
    every: int,
    near: PositionScheme,
    full: PositionScheme,
    *,
    window: int | None,
    full_window: int | None = None,
    first: bool = False,
) -> LayerPlan:
    """Groups of ``every`` layers: the last, or the ``first``, is ``full``, all others ``near``."""
    place = 0 if first else every - 1
    check_count("every", every)
    is_full = [layer % every == place for layer in range(check_count("layers", layers))]
    return LayerPlan(
        tuple(full if yes else near for yes in is_full),
        tuple(full_window if yes else window for yes in is_full),
    )


@_plan
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
    whose layers all see every key.
    """
    return _groups(layers, every, RoPE(head_dim, base), NoPE(), window=window)


@_plan
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
    layers by the logarithm of the length at inference; the plan does not.
    """
    return _groups(layers, every, RoPE(head_dim, base), NoPE(), window=window, first=True)


@_plan
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
    return _groups(layers, every, near, NoPE(), window=window)


@_plan
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
    return _groups(layers, every, RoPE(head_dim, base), NoPE(), window=None, full_window=window)


@_plan
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
    return _groups(layers, every, rope, rope if window is None else NoPE(), window=window)


@_plan
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
        near = Sum(near, Chunk(chunk))
    full = LogScale("llama4", train_len=train_len, beta=beta)
    return _groups(layers, every, near, full, window=None)


@dataclass(frozen=True)
class PerLayerLearnedRoPE(LearnedRoPE):
    """``LearnedRoPE`` whose layers learn their own frequencies, so that a ``Sum`` with it has too.

    A set of learned arrays belongs to one layer or to all. So in a ``Sum`` with ``LearnedRoPE``,
    other parts would be learned once for all layers.
    """

    shared: ClassVar[bool] = False


@_plan
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
    return _groups(layers, every, Sum(rope, scale), scale, window=None)


@_plan
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
    return _groups(layers, every, near, full, window=window)


@_plan
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
    plan = _groups(layers, every, near, full, window=window)
    return LayerPlan((*plan.schemes[:-1], full), (*plan.windows[:-1], None))
