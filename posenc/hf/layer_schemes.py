"""The scheme of one layer, from its RoPE and the rest of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from posenc.contract.protocol import PositionScheme
from posenc.hf.layer_types import Config
from posenc.schemes import Inkling, LearnedRoPE, LogScale, NoPE, RoPE, Sink, Sum, T5Bias


@dataclass(frozen=True)
class PerLayerLearnedRoPE(LearnedRoPE, shared=False):
    """``LearnedRoPE`` whose layers learn their own frequencies, so that a ``Sum`` with it has too.

    A set of learned arrays belongs to one layer or to all. So in a ``Sum`` with ``LearnedRoPE``,
    other parts would be learned once for all layers.
    """


@dataclass(frozen=True)
class PerLayerT5Bias(T5Bias, shared=False):
    """``T5Bias`` whose layers learn their own tables, as those of UMT5."""


def plain(part: Config, rope: RoPE | None) -> PositionScheme:
    """RoPE, or NoPE."""
    return NoPE() if rope is None else rope


def with_sink(part: Config, rope: RoPE | None) -> PositionScheme:
    """gpt-oss: a learned sink per head."""
    return Sink(plain(part, rope), part["num_attention_heads"])


def llama4(part: Config, rope: RoPE | None) -> PositionScheme:
    """Llama 4: queries of NoPE layers grow with the logarithm of their position."""
    if rope is not None or not part.get("attn_temperature_tuning", True):
        return plain(part, rope)
    period, beta = part.get("floor_scale", 8192), part.get("attn_scale", 0.1)
    return LogScale("llama4", train_len=period, beta=beta)


def ministral3(part: Config, rope: RoPE | None) -> PositionScheme:
    """Ministral 3: queries of all layers grow likewise."""
    given = part["rope_parameters"]
    period, beta = given["original_max_position_embeddings"], given["llama_4_scaling_beta"]
    return Sum(plain(part, rope), LogScale("ministral3", train_len=period, beta=beta))


def latent(part: Config, rope: RoPE | None) -> RoPE:
    """Heads of latent attention: the channels that rotate, and others."""
    turning = part["qk_rope_head_dim"]
    assert rope is not None
    layout = "half" if part.get("rope_interleave") is False else rope.layout
    width = turning + part["qk_nope_head_dim"]
    return replace(rope, head_dim=width, rotary_dim=turning, layout=layout)


def mistral4(part: Config, rope: RoPE | None) -> PositionScheme:
    """Mistral 4: both."""
    return ministral3(part, latent(part, rope))


def mistral_large4(part: Config, rope: RoPE | None) -> PositionScheme:
    """Mistral Large 4: learned frequencies, and queries that grow by learned numbers."""
    scale = LogScale("mistral_large4", num_heads=part["num_attention_heads"])
    if rope is None:
        return scale
    turning = part["qk_rope_head_dim"]
    given = {field.name: getattr(rope, field.name) for field in fields(rope) if field.init}
    whole = {"head_dim": turning + part["qk_nope_head_dim"], "rotary_dim": turning}
    return Sum(PerLayerLearnedRoPE(**{**given, **whole}), scale)


def inkling_layer(
    num_heads: int,
    hidden_dim: int,
    rank: int,
    extent: int,
    *,
    clip: float | None = None,
    length: int | None = None,
    beta: float = 0.1,
) -> PositionScheme:
    """A layer of Inkling, or with ``clip`` of Inkling 2; queries and bias grow from ``length``."""
    version = 1 if clip is None else 2
    scheme: PositionScheme = Inkling(num_heads, hidden_dim, rank, extent, version, clip)
    if length is not None:
        scheme = Sum(scheme, LogScale("inkling", train_len=length, beta=beta))
    if clip is not None:
        scheme = Sink(scheme, num_heads, per_query=True, hidden_dim=hidden_dim)
    return scheme
