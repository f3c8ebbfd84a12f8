"""Keywords of other libraries' attention, and what takes their place here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from posenc.checks import nearest

P = ParamSpec("P")
R = TypeVar("R")

_MASK = (
    "give causal=, window=, or segments as q_seg= and k_seg= (padding is a segment that no query "
    "carries, see posenc.positions.left_padded); any other mask is a bias of -inf in a scheme"
)
_DROPOUT = "weights are not dropped out here; drop out the result, or hidden states"
_WEIGHTS = "weights are not returned: they are L x L, which no fast path holds"
_BIAS = "a bias is a scheme's own: write one with a bias method (docs/add_a_scheme.md)"
_GROUPED = "leave it out: keys and values with fewer heads are understood as they are"
_POSITIONS = "positions of queries and of keys are q_pos= and k_pos="
_LENGTHS = "lengths of a batch are segments, q_seg= and k_seg= (posenc.positions.packed)"
_FLEX = "for flex_attention itself, use posenc_torch.score_mod and posenc_torch.block_mask"
_ADVICE = {
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "mask": _MASK,
    "key_padding_mask": _MASK,
    "bias": _BIAS,
    "attn_bias": _BIAS,
    "position_bias": _BIAS,
    "alibi_slopes": "the scheme has them: posenc.ALiBi(num_heads, slopes=...)",
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "need_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "is_causal": "say causal=",
    "enable_gqa": _GROUPED,
    "position_ids": _POSITIONS,
    "positions": _POSITIONS,
    "pos": _POSITIONS,
    "query_seq_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "cu_seqlens": _LENGTHS,
    "window_size": "say window=W: a query sees keys at |q_pos - k_pos| < W",
    "local_window_size": "say window=W: a query sees keys at |q_pos - k_pos| < W",
    "softmax_scale": "say scale=",
    "implementation": "say path=",
    "score_mod": _FLEX,
    "block_mask": _FLEX,
}


def answering(
    function: Callable[P, R], like: Callable[..., object] | None = None
) -> Callable[P, R]:
    """``function``, which answers an unknown keyword with what to write instead.

    Its keywords are those of ``like``, if given, and its own.
    """
    names = [*inspect.signature(function).parameters]
    names += [*inspect.signature(like).parameters] if like is not None else []
    accepted = frozenset(names) - {"options"}

    @functools.wraps(function)
    def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in accepted:
                raise TypeError(_answer(function.__name__, name, accepted))
        return function(*args, **kwargs)

    return answered


def _answer(function: str, name: str, accepted: frozenset[str]) -> str:
    advice = _ADVICE.get(name)
    head = f"{function}() has no keyword {name!r}"
    return f"{head}{nearest(name, sorted(accepted))}" if advice is None else f"{head}: {advice}"
