"""Keywords of other attention libraries, and what to write here instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from posenc.contract.checks import nearest

P = ParamSpec("P")
R = TypeVar("R")

_MASK = (
    "say mask=, booleans (B or 1, H or 1, Q, K) that are True where a query sees a key, or a "
    "function of positions; causal=, window= and segments (tokens=Tokens(seg=...)) are faster"
)
_PADDING = "say tokens=posenc.Tokens(exists=...), booleans (B, K): True for tokens that exist"
_DROPOUT = "there is no dropout of weights; apply dropout to the result, or to hidden states"
_WEIGHTS = "weights are not returned: they are L x L, and no fast implementation holds them"
_BIAS = "say bias=, (B or 1, H or 1, Q, K); a bias that depends on positions is part of a scheme"
_GROUPED = "leave it out: keys and values may have fewer heads than queries"
_POSITIONS = (
    "say tokens=posenc.Tokens(pos=...), and queries= if the queries are others; positions that "
    "repeat, as those of image tokens, are places: Tokens(places=...)"
)
_LENGTHS = "say tokens=posenc.positions.packed(lengths), tokens with segments"
_WINDOW = "say window=(left, right), or a width W for |q_pos - k_pos| < W"
_FIRST = "say mask=posenc.window(size, first=...)"
_CAP = "say softcap="
_SINK = (
    "a sink is part of the scheme: posenc.schemes.Sink(scheme) has the learned array "
    "params['sink'], (H,)"
)
_FEATURES = "gates are features: say tokens= and queries=, which posenc.features returns"
_FLEX = "for flex_attention itself, use posenc_torch.score_mod and posenc_torch.block_mask"
_ADVICE = {
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "mask_mod": _MASK,
    "key_padding_mask": _PADDING,
    "padding_mask": _PADDING,
    "attn_bias": _BIAS,
    "position_bias": _BIAS,
    "alibi_slopes": "slopes are part of the scheme: posenc.ALiBi(num_heads, slopes=...)",
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
    "q_features": "say queries=posenc.Tokens(features=...)",
    "k_features": "say tokens=posenc.Tokens(features=...)",
    "q_pos": "say queries=posenc.Tokens(pos=...), unless the queries are the last of tokens=",
    "k_pos": "say tokens=posenc.Tokens(pos=...)",
    "q_seg": "say queries=posenc.Tokens(seg=...), unless the queries are the last of tokens=",
    "k_seg": "say tokens=posenc.Tokens(seg=...)",
    "seg": "say tokens=posenc.Tokens(seg=...)",
    "q_axes": "say queries=posenc.Tokens(places=...), unless the queries are the last of tokens=",
    "k_axes": "say tokens=posenc.Tokens(places=...)",
    "axes": "say tokens=posenc.Tokens(places=...), or places= where there are no tokens",
    "k_valid": _PADDING,
    "x": "say tokens=posenc.Tokens(x=...)",
    "q_x": "say queries=posenc.Tokens(x=...), unless the queries are the last of tokens=",
    "q_rotary": "say tokens=posenc.Tokens(rotary=...), and queries= if their positions differ",
    "k_rotary": "say tokens=posenc.Tokens(rotary=...)",
    "sink_tokens": _FIRST,
    "first_tokens": _FIRST,
    "softmax_scale": "say scale=",
    "path": "say implementation=",
    "attn_implementation": "say implementation=",
    "score_mod": _FLEX,
    "block_mask": _FLEX,
}


def advise_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function``: the error for an unknown keyword says what to write instead."""
    accepted = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in accepted:
                raise TypeError(_message(function.__name__, name, accepted))
        return function(*args, **kwargs)

    return checked


def _message(function: str, name: str, accepted: frozenset[str]) -> str:
    advice = _ADVICE.get(name)
    head = f"{function}() has no keyword {name!r}"
    return f"{head}{nearest(name, sorted(accepted))}" if advice is None else f"{head}: {advice}"
