"""transformers: rotations of its models, by their own classes and functions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import CohereConfig, GPTNeoXConfig, LlamaConfig, LlamaModel, Qwen2VLTextConfig
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen
from transformers.utils import logging

from posenc.audit import Candidate, Sizes
from posenc.audit.adapters import scheme_of
from posenc_torch.audit import runs, transformers_attention, transformers_biases

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
_LLAMA = "llama: apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(config)(x, pos))"


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate; compiled ones in the full grid alone."""
    for label in ("rope", *SCALED):
        made = _by_class(llama, llama.LlamaRotaryEmbedding, LlamaConfig, label)
        yield _rotation(_LLAMA, label, made)
        yield _rotation(_LLAMA, label, _from_disk(label), path="from_pretrained")
        if label == "rope" and grid == "full":
            yield _rotation(_LLAMA, label, runs.compiled(made), path="compiled", dtypes=("float32",))
    yield _rotation(
        _LLAMA, "rope", _from_disk("rope", dtype=torch.bfloat16), dtypes=("bfloat16",),
        path="from_pretrained(dtype=bfloat16)",
    )  # fmt: skip
    yield _rotation(
        _LLAMA, "rope", _cast("rope"), dtypes=("bfloat16",), path="model.to(bfloat16)"
    )
    partial = "rope:rotary_dim=32"
    yield _rotation(
        "gpt_neox: apply_rotary_pos_emb(x, x, *GPTNeoXRotaryEmbedding(config)(x, pos))", partial,
        _by_class(gpt_neox, gpt_neox.GPTNeoXRotaryEmbedding, GPTNeoXConfig, partial),
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
    yield _rotation(
        "qwen2_vl: apply_rotary_pos_emb(x, x, *Qwen2VLRotaryEmbedding(config)(x, pos))",
        "mrope:sections=(8,12,12)", _qwen,
    )  # fmt: skip
    yield from transformers_biases.candidates()
    yield from transformers_attention.candidates()


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


def _model(label: str, sizes: Sizes) -> LlamaModel:
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


def _qwen(sizes: Sizes) -> Callable[..., Any]:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]}
    config = Qwen2VLTextConfig(
        hidden_size=sizes.num_heads * sizes.head_dim, num_attention_heads=sizes.num_heads,
        rope_parameters=parameters,
    )  # fmt: skip
    rotary = qwen.Qwen2VLRotaryEmbedding(config)
    turn = getattr(qwen, "apply_rotary_pos_emb", None) or qwen.apply_multimodal_rotary_pos_emb

    def f(x: Tensor, pos: Tensor) -> Tensor:
        found: Tensor = turn(x, x, *rotary(x, pos.movedim(-1, 0)))[0]
        return found

    return f
