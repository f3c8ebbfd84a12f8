"""transformers: rotations of its models, by their own classes and functions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CohereConfig, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, LlamaModel
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.utils import logging as bars

from posenc.audit import Candidate, Sizes
from posenc.audit.adapters import scheme_of
from posenc_torch.audit import (
    runs,
    transformers_attention,
    transformers_biases,
    transformers_embeddings,
    transformers_relative,
    transformers_scaled,
)

NAME = "transformers"
SCALED = (
    "rope_pi:factor=4",
    "rope_dynamic:factor=4,train_len=4096",
    "rope_yarn:factor=4,train_len=4096",
    "rope_longrope:train_len=4096",
    "rope_llama3",
    "p_rope:p=0.25",
)
"""One label for each ``rope_type``; ``default`` is ``rope``."""

Made = Callable[[Sizes], Callable[..., Any]]
gemma3: Any = modeling_gemma3  # half of these functions have no types
logging: Any = bars
_GEMMA = {"sliding_attention": "rope", "full_attention": "rope_pi:base=1000000,factor=8"}
_BY_AXES: dict[str, tuple[str, str, list[int], str]] = {
    "qwen2_vl": (
        "Qwen2VLRotaryEmbedding",
        "Qwen2VLTextConfig",
        [8, 12, 12],
        "mrope:sections=(8,12,12)",
    ),
    "qwen3_vl": (
        "Qwen3VLTextRotaryEmbedding",
        "Qwen3VLTextConfig",
        [12, 10, 10],
        "mrope:layout=interleaved,sections=(12,10,10)",
    ),
    "glm4v": (
        "Glm4vTextRotaryEmbedding",
        "Glm4vTextConfig",
        [8, 12, 12],
        "mrope:sections=(8,12,12),pairing=interleaved",
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeTextRotaryEmbedding",
        "Ernie4_5_VLMoeTextConfig",
        [11, 11, 10],
        "mrope:layout=ernie,sections=(11,11,10)",
    ),
}
"""M-RoPE, by the model: its rotary class, its configuration, sections, and the definition."""
_LLAMA = "llama: apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(config)(x, pos))"


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate; compiled ones in the full grid alone."""
    for label in ("rope", *SCALED):
        made = _by_class(llama, llama.LlamaRotaryEmbedding, LlamaConfig, label)
        yield _rotation(_LLAMA, label, made)
        yield _rotation(_LLAMA, label, _from_disk(label), path="from_pretrained")
        if label == "rope" and grid == "full":
            yield _rotation(
                _LLAMA, label, runs.compiled(made), path="compiled", dtypes=("float32",)
            )
    yield _rotation(
        _LLAMA, "rope", _from_disk("rope", dtype=torch.bfloat16), dtypes=("bfloat16",),
        path="from_pretrained(dtype=bfloat16)",
    )  # fmt: skip
    yield _rotation(_LLAMA, "rope", _cast("rope"), dtypes=("bfloat16",), path="model.to(bfloat16)")
    part = "rope:rotary_dim=32"
    yield _rotation(
        "gpt_neox: apply_rotary_pos_emb(x, x, *GPTNeoXRotaryEmbedding(config)(x, pos))", part,
        _by_class(gpt_neox, gpt_neox.GPTNeoXRotaryEmbedding, GPTNeoXConfig, part),
    )  # fmt: skip
    inner = "rope:layout=interleaved"
    yield _rotation(
        "cohere: apply_rotary_pos_emb(x, x, *CohereRotaryEmbedding(config)(x, pos))", inner,
        _by_class(cohere, cohere.CohereRotaryEmbedding, CohereConfig, inner),
    )  # fmt: skip
    yield _rotation(
        "gptj: apply_rotary_pos_emb(x, sin, cos) of create_sinusoidal_positions",
        "rope:layout=interleaved,rotary_dim=32", _gptj, dtypes=("float32",),
    )  # fmt: skip
    for label in ("rope_dynamic:factor=4,train_len=4096", "rope_longrope:train_len=4096"):
        yield _rotation(_LLAMA, label, _token_by_token(label), path="cached, token by token")
    for kind, label in _GEMMA.items():
        yield _rotation(
            f"gemma3: apply_rotary_pos_emb(x, x, *Gemma3RotaryEmbedding(config)(x, pos, '{kind}'))",
            label, partial(_gemma, kind),
        )  # fmt: skip
    for name, (rotary, config, sections, label) in _BY_AXES.items():
        yield _rotation(
            f"{name}: apply_rotary_pos_emb(x, x, *{rotary}(config)(x, pos))", label,
            partial(_by_axes, name, rotary, config, sections),
        )  # fmt: skip
    yield from transformers_biases.candidates()
    yield from transformers_attention.candidates()
    yield from transformers_embeddings.candidates()
    yield from transformers_relative.candidates()
    yield from transformers_scaled.candidates()


def _rotation(subject: str, label: str, make: Made, **more: Any) -> Candidate:
    return runs.candidate(NAME, subject, label, "rotation", make, **{"dtypes": runs.HALF, **more})


def _parameters(label: str, sizes: Sizes) -> dict[str, Any]:
    """The label as ``rope_parameters``, and the length that ``dynamic`` reads elsewhere."""
    parameters = dict(scheme_of(label, sizes).to_hf())  # type: ignore[attr-defined]
    longest = sizes.max_len
    if parameters["rope_type"] == "dynamic":
        longest = parameters.pop("original_max_position_embeddings")
    return {"rope_parameters": parameters, "max_position_embeddings": longest}


def _config(kind: Any, label: str, sizes: Sizes, heads: int) -> Any:
    return kind(
        hidden_size=heads * sizes.head_dim, num_attention_heads=heads, num_key_value_heads=heads,
        head_dim=sizes.head_dim, num_hidden_layers=1, intermediate_size=8, vocab_size=8,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, **_parameters(label, sizes),
    )  # fmt: skip


def _by(module: Any, rotary: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """``f(x, pos)`` by a module of angles, and the function of its model that turns by them."""

    def f(x: Tensor, pos: Tensor) -> Tensor:
        found: Tensor = module.apply_rotary_pos_emb(x, x, *rotary(x, pos))[0]
        return found

    return f


def _by_class(module: Any, rotary: Any, kind: Any, label: str) -> Made:
    def make(sizes: Sizes) -> Callable[..., Any]:
        return _by(module, rotary(_config(kind, label, sizes, sizes.num_heads)))

    return make


def _model(label: str, sizes: Sizes) -> Any:
    return LlamaModel(_config(LlamaConfig, label, sizes, heads=1))


def _from_disk(label: str, **how: Any) -> Made:
    """By the tables of a model that was saved, and loaded again."""

    def make(sizes: Sizes) -> Callable[..., Any]:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            _model(label, sizes).save_pretrained(folder)
            loaded = LlamaModel.from_pretrained(folder, **how)
        return _by(llama, loaded.rotary_emb)

    return make


@contextmanager
def _quiet() -> Iterator[None]:
    """Without bars of progress."""
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def _cast(label: str) -> Made:
    def make(sizes: Sizes) -> Callable[..., Any]:
        return _by(llama, _model(label, sizes).to(torch.bfloat16).rotary_emb)

    return make


def _gptj(sizes: Sizes) -> Callable[..., Any]:
    tables = gptj.create_sinusoidal_positions(sizes.max_len, 32)

    def f(x: Tensor, pos: Tensor) -> Tensor:
        sin, cos = tables[pos].chunk(2, dim=-1)
        rest = x[..., 32:]
        turned = gptj.apply_rotary_pos_emb(x[..., :32].transpose(1, 2), sin, cos)
        return torch.cat([turned.transpose(1, 2), rest], dim=-1)

    return f


def _token_by_token(label: str) -> Made:
    """As keys come into a cache: each is rotated when it is the last of the context."""

    def make(sizes: Sizes) -> Callable[..., Any]:
        rotary = llama.LlamaRotaryEmbedding(_config(LlamaConfig, label, sizes, sizes.num_heads))
        turn = _by(llama, rotary)
        return runs.in_decoding(lambda x, n: turn(x, torch.full((x.shape[0], 1), n)))

    return make


def _gemma(kind: str, sizes: Sizes) -> Callable[..., Any]:
    layers = {each: dict(scheme_of(label, sizes).to_hf()) for each, label in _GEMMA.items()}  # type: ignore[attr-defined]
    rotary = gemma3.Gemma3RotaryEmbedding(
        Gemma3TextConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=1, head_dim=sizes.head_dim,
            layer_types=list(layers), rope_parameters=layers,
        )
    )  # fmt: skip
    return _by(gemma3, partial(rotary, layer_type=kind))


def _by_axes(
    name: str, rotary: str, config: str, sections: list[int], sizes: Sizes
) -> Callable[..., Any]:
    module: Any = import_module(f"transformers.models.{name}.modeling_{name}")
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    made = getattr(transformers, config)(
        hidden_size=sizes.num_heads * sizes.head_dim, num_attention_heads=sizes.num_heads,
        head_dim=sizes.head_dim, rope_parameters=parameters,
    )  # fmt: skip
    angles = getattr(module, rotary)(made)
    turn = getattr(module, "apply_rotary_pos_emb", None) or module.apply_multimodal_rotary_pos_emb

    def f(x: Tensor, pos: Tensor) -> Tensor:
        found: Tensor = turn(x, x, *angles(x, pos.movedim(-1, 0)))[0]
        return found

    return f
