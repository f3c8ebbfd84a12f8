"""The arguments that an audit gives a function: which parameters it has, and what they get."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from posenc.audit.candidate import CannotExpressError
from posenc.audit.gold import Question, answer
from posenc.positions.integers import visible
from posenc.testing.framework import Framework, Host

NAMES: Mapping[str, tuple[str, ...]] = {
    "causal": ("causal", "is_causal"),
    "mask": ("mask", "attn_mask"),
    "pos": ("pos", "positions", "position_ids"),
    "q_pos": ("q_pos", "query_pos", "q_positions"),
    "k_pos": ("k_pos", "key_pos", "kv_pos", "k_positions"),
    "seg": ("seg", "segment_ids", "segments"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "window": ("window", "window_size", "sliding_window"),
    "num_heads": ("num_heads", "n_heads", "heads"),
    "sink": ("sink", "sinks"),
    "softcap": ("softcap", "soft_cap", "logit_cap", "logits_soft_cap"),
    "kv_heads": ("num_kv_heads", "n_kv_heads", "num_key_value_heads"),
    "grouped": ("enable_gqa",),
}
"""Parameters of an attention, and the names under which it may have them.

``mask`` is booleans ``(B, 1, Q, K)``, True where a query sees a key, with segments, window and
order of time in it; None where ``causal`` says it all.
"""

WIDTH = ("dim", "d_model", "embed_dim", "hidden_size")
"""Names under which an embedding may have its width."""


class NotCalledError(Exception):
    """A function raised, or returned something else than it should."""


def parameters_of(f: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, by name; of a module, those of its ``forward``."""
    named = getattr(f, "forward", f) if not inspect.isfunction(f) else f
    try:
        return dict(inspect.signature(named).parameters)
    except (TypeError, ValueError):  # written in C
        return {}


def takes(f: Callable[..., Any], option: str) -> bool:
    """Whether a function has a parameter of ``NAMES``; of no name at all it has."""
    return not option or any(name in parameters_of(f) for name in NAMES[option])


def integers(arrays: Framework, value: Host) -> Any:
    """Positions as the framework has them: 64 bits, and 32 in JAX, where these are the default."""
    name = "int32" if arrays.name == "jax" else "int64"
    whole = np.array(value, name)
    return whole if arrays.name == "numpy" else arrays.array(whole, name)


def arguments(
    f: Callable[..., Any], question: Question, arrays: Framework, native: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position, and by name."""
    parameters = parameters_of(f)

    def pos(value: Host | None) -> Any:
        return integers(arrays, question.q_pos if value is None else value)

    if question.kind == "rotation":
        first = [native["x"], pos(None)]
    elif question.kind == "bias":
        first = [question.num_heads, pos(None), pos(question.k_pos)]
    elif question.kind == "embedding":
        first = [pos(None)]
    else:
        first = [native[name] for name in "qkv"]
    rest = dict(list(parameters.items())[len(first) :])
    named = {n: native[leaf_of(question, n)] for n in question.params if n in rest}
    if question.kind == "attention":
        named |= _attention_arguments(rest, question, arrays, native)
    if question.kind == "embedding":
        named |= {n: expected_shape(question)[-1] for n in WIDTH if n in rest}
    missing = [n for n, p in rest.items() if n not in named and must_be_given(p)]
    if missing:
        known = list(question.params)
        known += {
            "attention": [n for names in NAMES.values() for n in names], "embedding": list(WIDTH)
        }.get(question.kind, [])  # fmt: skip
        raise NotCalledError(
            f"its parameter {missing[0]!r} has no default, and is none of those that it can be "
            f"given: {', '.join(known) or 'none'}"
        )
    return first, named


def leaf_of(question: Question, name: str) -> str:
    """The name of a learned array among the leaves: Transformer-XL learns a ``v`` of its own."""
    return f"learned {name}" if name in question.vectors else name


def must_be_given(parameter: inspect.Parameter) -> bool:
    """Whether a parameter has no default."""
    several = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in several


def _attention_arguments(
    rest: Mapping[str, Any], question: Question, arrays: Framework, native: Mapping[str, Any]
) -> dict[str, Any]:
    """What an attention is given by name; an error where it lacks what the question needs."""
    own = {role: next((n for n in names if n in rest), None) for role, names in NAMES.items()}
    keys = question.q_pos if question.k_pos is None else question.k_pos
    length, queries = keys.shape[-1], question.q_pos.shape[-1]
    in_order = np.array_equal(keys, np.broadcast_to(np.arange(length), keys.shape))
    at_end = np.array_equal(question.q_pos, keys[:, length - queries :])
    if not in_order or not at_end:
        has = (own["q_pos"] and own["k_pos"]) or (at_end and own["pos"])
        _need(bool(has), "q_pos and k_pos", "positions of its tokens")
    if queries != length and own["pos"] and not own["q_pos"]:
        _need(False, "q_pos and k_pos", "positions of fewer queries than keys")
    if question.seg is not None:
        _need(bool(own["seg"] or own["mask"]), "seg or mask", "documents, or padding")
    _need(
        question.causal or bool(own["causal"] or own["mask"]),
        "causal or mask",
        "a call without causal mask",
    )
    plain = question.seg is None and (question.window is None or own["window"] is not None)
    by_flag = bool(own["causal"]) and plain
    seen = None if by_flag else integers_of_mask(question, keys)
    values: dict[str, Any] = {
        "causal": question.causal and (by_flag or not own["mask"]),
        "mask": None if seen is None else _booleans(arrays, seen),
        "pos": integers(arrays, keys),
        "q_pos": integers(arrays, question.q_pos),
        "k_pos": integers(arrays, keys),
        "seg": None if question.seg is None else integers(arrays, question.seg),
        "scale": question.scores_scale,
        "window": question.window,
        "num_heads": question.num_heads,
        "sink": native.get("sink"),
        "softcap": question.softcap,
        "kv_heads": question.vectors["k"].shape[1],
        "grouped": question.grouped,
    }
    cap = own["softcap"]
    if cap and question.softcap is None and not must_be_given(rest[cap]):
        own["softcap"] = None  # its default is to have none
    return {n: values[role] for role, n in own.items() if n is not None}


def integers_of_mask(question: Question, keys: Host) -> Host:
    """The mask of a question as booleans ``(B, 1, Q, K)``."""
    q, k = question.q_pos[..., :, None], keys[..., None, :]
    width = question.window
    window = (width - 1, width - 1) if isinstance(width, int) else width
    seen = visible(q, k, causal=question.causal, window=window, first_tokens=0)
    seen = np.ones((q - k).shape, bool) if seen is None else np.asarray(seen)
    if question.seg is not None:
        of_queries = question.seg[..., question.seg.shape[-1] - q.shape[-2] :]
        seen = seen & (of_queries[..., :, None] == question.seg[..., None, :])
    return seen[:, None]


def _booleans(arrays: Framework, value: Host) -> Any:
    return np.array(value) if arrays.name == "numpy" else arrays.array(value, "bool")


def _need(has: bool, parameter: str, what: str) -> None:
    if not has:
        raise CannotExpressError(f"it has no parameter for {what}: {parameter}")


def expected_shape(question: Question) -> tuple[int, ...]:
    """The shape of a right result."""
    if question.kind == "bias":
        keys = question.q_pos if question.k_pos is None else question.k_pos
        return (question.num_heads, len(question.q_pos), len(keys))
    if question.kind == "embedding":
        return tuple(answer(question).shape)
    return tuple(question.vectors["x" if question.kind == "rotation" else "q"].shape)
