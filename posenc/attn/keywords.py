"""Keywords of other libraries' attention, and what takes their place here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from posenc.attn.options import Options
from posenc.checks import nearest

P = ParamSpec("P")
R = TypeVar("R")

_MASK = (
    "say mask=, booleans (B or 1, H or 1, Q, K) that are True where a query sees a key, or a "
    "function of positions; causal=, window= and segments (q_seg=, k_seg=) are faster"
)
_PADDING = "say k_valid=, booleans (B, K) that are True for keys that exist"
_DROPOUT = "weights are not dropped out here; drop out the result, or hidden states"
_WEIGHTS = "weights are not returned: they are L x L, which no fast implementation holds"
_BIAS = "say bias=, (B or 1, H or 1, Q, K); what depends on positions is a scheme's own bias"
_GROUPED = "leave it out: keys and values with fewer heads are understood as they are"
_POSITIONS = (
    "positions of queries and of keys are q_pos= and k_pos=; those that repeat, as of image "
    "tokens, are places, q_axes= and k_axes="
)
_LENGTHS = "lengths of a batch are segments, q_seg= and k_seg= (posenc.positions.packed)"
_WINDOW = "say window=(left, right), or a width W for |q_pos - k_pos| < W"
_CAP = "say softcap="
_SINK = (
    "a sink is a scheme's: from posenc.schemes import Sink, and Sink(scheme), whose "
    "params['sink'] is (H,)"
)
_FEATURES = "gates are features now: say q_features= and k_features= (posenc.features)"
_FLEX = "for flex_attention itself, use posenc_torch.score_mod and posenc_torch.block_mask"
_ADVICE = {
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "mask_mod": _MASK,
    "key_padding_mask": _PADDING,
    "padding_mask": _PADDING,
    "attn_bias": _BIAS,
    "position_bias": _BIAS,
    "alibi_slopes": "the scheme has them: posenc.ALiBi(num_heads, slopes=...)",
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "need_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "return_residual": "say return_lse=True",
    "is_causal": "say causal=",
    "enable_gqa": _GROUPED,
    "position_ids": _POSITIONS,
    "positions": _POSITIONS,
    "pos": _POSITIONS,
    "query_seq_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "cu_seqlens": _LENGTHS,
    "window_size": _WINDOW,
    "local_window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "logits_soft_cap": _CAP,
    "soft_cap": _CAP,
    "sinks": _SINK,
    "s_aux": _SINK,
    "q_coords": _FEATURES,
    "k_coords": _FEATURES,
    "softmax_scale": "say scale=",
    "path": "say implementation=",
    "attn_implementation": "say implementation=",
    "score_mod": _FLEX,
    "block_mask": _FLEX,
}


def advise_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which answers an unknown keyword with what to write instead."""
    names = [*inspect.signature(function).parameters, *Options.__annotations__]
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
