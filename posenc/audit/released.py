"""What released weights were trained with, where libraries have read it otherwise.

Neither transformers nor posenc is the judge of a layout: the weights are. Each row says what the
weights of a ``model_type`` need, and where that was measured or said. ``posenc.hf`` reads
configurations so, and a test holds it to every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Released:
    """One fact about the released weights of a ``model_type``.

    Attributes
    ----------
    model
        The ``model_type`` of the configuration of text.
    fact
        A field of ``posenc.audit.readers.Facts``; or ``frequencies``, with ``value`` None.
    value
        Its value for ``config``.
    words
        What it is, in a sentence.
    misread
        Who read it otherwise, and what came of it.
    sources
        Issues and pull requests, ``owner/repository#number``.
    config
        The keys of a released configuration that matter.
    kind
        The type of layers, if the fact is of one type.
    """

    model: str
    fact: str
    value: Any
    words: str
    misread: str
    sources: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""

    def sentence(self) -> str:
        """It with its sources."""
        return f"{self.words} ({', '.join(self.sources)}: {self.misread})"


_HEADS = {"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 10_000.0}
_OLMO3 = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
}  # fmt: skip
RELEASED: tuple[Released, ...] = (
    Released(
        "hy_v4", "layout", "interleaved", "pairs are neighbours",
        "transformers turns halves; perplexity 151, and 6.39 by neighbours",
        ("WestWaters/pollard-weights#70", "vllm-project/vllm#54160", "ggml-org/llama.cpp#28127"),
        {**_HEADS, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    ),
    Released(
        "llama", "layout", "half",
        "pairs are halves in weights of the Hub, which are Meta's reordered",
        "Meta's own code pairs neighbours", ("huggingface/transformers#25199",), _HEADS,
    ),
    Released(
        "qwen2_5_omni_dit", "layout", "interleaved", "pairs are neighbours",
        "transformers 5 built cosines for halves and turned neighbours, which is no rotation",
        ("huggingface/transformers#47328", "huggingface/transformers#47403"),
        {**_HEADS, "head_dim": 64},
    ),
    Released(
        "mimi", "layout", "half", "pairs are halves",
        "candle turns neighbours; codes differ", ("huggingface/candle#3948",),
        {**_HEADS, "hidden_size": 512, "num_attention_heads": 8},
    ),
    Released(
        "minimax_m2", "rotary_dim", 64, "64 of 128 channels rotate, by the key rotary_dim",
        "transformers before #48486 turned all 128",
        ("huggingface/transformers#48241", "huggingface/transformers#48486"),
        {**_HEADS, "head_dim": 128, "rotary_dim": 64},
    ),
    Released(
        "minimax_m3_vl_text", "rotary_dim", 64, "64 of 128 channels rotate, by the key rotary_dim",
        "transformers 5.23 reads partial_rotary_factor in rope_parameters alone, and turns all 128",
        ("ml-explore/mlx-lm#1398",), {**_HEADS, "head_dim": 128, "rotary_dim": 64},
    ),
    Released(
        "glm", "rotary_dim", 64, "half of the channels rotate, though no key says so",
        "mlx-lm turned all 128", ("ml-explore/mlx-lm#1698",), {**_HEADS, "head_dim": 128},
    ),
    Released(
        "qwen3_5_moe_text", "rotary_dim", 64, "a quarter of the channels rotates, also by axes",
        "MaxText turned all 256 where places have several axes",
        ("AI-Hypercomputer/maxtext#4616",),
        {**_HEADS, "head_dim": 256, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
    ),
    Released(
        "olmo3", "attention_factor", 1.0, "YaRN is for layers of full attention alone",
        "transformers 5.0 scaled all layers; so did a change to vLLM, whose MMLU fell from 64.2 to "
        "60.5 %", ("huggingface/transformers#45945", "vllm-project/vllm#43419"),
        {**_HEADS, "max_position_embeddings": 65_536, "rope_scaling": _OLMO3},
        "sliding_attention",
    ),
)  # fmt: skip
"""One row per fact; the source of each is read, not remembered."""


def released(model: str, fact: str, kind: str = "") -> Released | None:
    """The row of a fact of a ``model_type``, for layers of one type; None: there is none."""
    return next(
        (
            row for row in RELEASED
            if (row.model, row.fact) == (model, fact) and row.kind in ("", kind)
        ),
        None,
    )  # fmt: skip
