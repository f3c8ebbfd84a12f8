"""Attention with any scheme in PyTorch, and the choice among its implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc.backend import (
    Call,
    Explanation,
    Implementation,
    Options,
    PositionScheme,
    advise_unknown,
    as_mapping,
    attend,
    check_shapes,
    dense,
    explain_choice,
    float_arrays,
    hold_with,
    make_constants_with,
    prepare,
    rotate_with,
    working_dtype,
)
from posenc_torch import folded, sdpa
from posenc_torch.chunked import implementation as chunked
from posenc_torch.constants import constant
from posenc_torch.flex import implementation as flex
from posenc_torch.rotation import hold, rotate

make_constants_with(constant, xp=xp)
hold_with(hold, xp=xp)
rotate_with(rotate, xp=xp)


@advise_unknown
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: PositionScheme,
    params: Mapping[str, Any] | None = None,
    causal: bool = False,
    *,
    implementation: str = "auto",
    skip_blocks: bool = True,
    **options: Unpack[Options],
) -> Any:
    """``softmax(scale * transform(q) @ transform(k).T + bias) @ v`` in the layout of torch.

    Heads are axis 1 and tokens axis 2, ``(B, H, L, D)``; ``posenc_jax`` has ``(B, L, H, D)``.
    Autocast rounds q, k and v to its dtype, and nothing else.

    Parameters
    ----------
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``, like
        ``torch.nn.functional.scaled_dot_product_attention``.
    implementation
        A name of ``IMPLEMENTATIONS``, or ``"auto"``: the first that is preferred for the call.
        ``"flex"`` is FlexAttention with the bias inside the kernel, compiled on the first call.
        ``"chunked"`` computes blocks of queries one after another, in ``O(L)`` memory.
        ``"folded"`` folds a key bias into the head dimension. ``"sdpa"`` passes the whole bias to
        ``scaled_dot_product_attention`` as its mask. ``"reference"`` computes the definition.
    skip_blocks
        Whether ``"flex"`` and ``"chunked"`` skip key blocks that are provably negligible under a
        bias that decays (``posenc.attn.negligible``). If all values are finite, results then change
        by less than half a rounding of the largest value.
    scheme, params, causal, options
        As in ``posenc.attention``: positions, segments, places, ``k_valid``, ``window``,
        ``sink_tokens``, ``bias``, ``mask``, ``softcap``, ``scale``, ``k_transformed``, hidden
        states ``x`` and ``q_x``, features, ``return_lse``.

    Returns
    -------
    ``(B, H, Q, Dv)`` in q's dtype, differentiable in q, k, v, x, bias, features and params. A
    fully masked row is 0, with zero gradients. NaN in fully masked queries and keys does not
    spread, as in ``posenc.attention``, except with ``"flex"``. ``return_lse`` adds the log-sum-exp.

    Raises
    ------
    NotImplementedError
        The named implementation cannot serve this call; the message says why.
    TypeError, ValueError
        A wrong argument; the message has its name, its value and what is accepted.
    """
    half = _autocast(q)
    with nullcontext() if half is None else torch.autocast(q.device.type, enabled=False):
        call = _call(q, k, v, scheme, params, causal, half, skip_blocks, options)
        out, lse = attend(_IMPLEMENTATIONS, call, implementation)
        out = out if out.dtype == q.dtype else out.to(q.dtype)
        return (out, lse) if call.wants_lse else out


@advise_unknown
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: PositionScheme,
    params: Mapping[str, Any] | None = None,
    causal: bool = False,
    *,
    implementation: str = "auto",
    skip_blocks: bool = True,
    **options: Unpack[Options],
) -> Explanation:
    """Which implementation ``attention`` takes for the same arguments, and why not the others.

    A dict that prints as text: ``implementation`` is the name, ``others`` maps names to reasons.
    """
    half = _autocast(q)
    with nullcontext() if half is None else torch.autocast(q.device.type, enabled=False):
        call = _call(q, k, v, scheme, params, causal, half, skip_blocks, options)
        return explain_choice(_IMPLEMENTATIONS, call, implementation)


def _autocast(q: Tensor) -> torch.dtype | None:
    """The dtype to which autocast rounds q, k and v; None if autocast is off.

    ``attention`` computes with autocast switched off. Otherwise autocast would also round biases,
    cumulative sums and bounds of scores.
    """
    kind = q.device.type if isinstance(q, Tensor) else "none"
    enabled = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else None


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: PositionScheme,
    params: Mapping[str, Any] | None,
    causal: bool,
    half: torch.dtype | None,
    skip_blocks: bool,
    options: Options,
) -> Call:
    """The checked call; under autocast its transformed q, k and v are rounded to ``half``."""
    _check_not_nested({"q": q, "k": k, "v": v, **options})
    tensors = _promote_float64(q, k, v, [*float_arrays(options), *as_mapping(params).values()])
    call = prepare(*tensors, scheme, params, causal, skip_blocks=skip_blocks, xp=xp, **options)
    if half is None or call.dtype == torch.float64:
        return call
    return replace(_round(call, half), regions=tuple(_round(r, half) for r in call.regions))


def _round(call: Call, half: torch.dtype) -> Call:
    return replace(call, q=call.q.to(half), k=call.k.to(half), v=call.v.to(half))


def _check_not_nested(arguments: Mapping[str, Any]) -> None:
    """Reject nested tensors: they have several lengths, so default positions are undefined."""
    for name, array in arguments.items():
        if isinstance(array, Tensor) and array.is_nested:
            raise TypeError(
                f"{name} is a nested tensor, only tensors of one length are accepted: concatenate "
                "the sequences, with q_pos, k_pos, q_seg and k_seg of "
                "posenc.positions.packed(lengths), or pad them"
            )


def _promote_float64(
    q: Tensor, k: Tensor, v: Tensor, others: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; in float64 if any argument is, so that a transform does not round them."""
    if working_dtype([q, k, v, *others], xp=xp) != torch.float64:
        return q, k, v
    check_shapes(q, k, v, xp=xp)
    return q.double(), k.double(), v.double()


def _reference(call: Call) -> tuple[Tensor, Tensor]:
    """The definition, with q, k and v in the working dtype."""
    q, k, v = (x.to(call.dtype) for x in (call.q, call.k, call.v))
    return dense(replace(call, q=q, k=k, v=v))


_IMPLEMENTATIONS = (
    Implementation(
        "flex",
        flex.flex,
        unsupported=flex.unsupported,
        not_preferred=flex.not_preferred,
        without_lse=flex.without_lse,
    ),
    Implementation(
        "chunked",
        chunked.chunked,
        unsupported=chunked.unsupported,
        not_preferred=chunked.not_preferred,
    ),
    Implementation(
        "folded",
        folded.folded,
        unsupported=folded.unsupported,
        not_preferred=folded.not_preferred,
        without_lse=sdpa.without_lse,
    ),
    Implementation(
        "sdpa",
        sdpa.sdpa,
        unsupported=sdpa.unsupported,
        without_lse=sdpa.without_lse,
        takes_sink=True,
    ),
    Implementation("reference", _reference, whole_rows=True),
)
IMPLEMENTATIONS = tuple(implementation.name for implementation in _IMPLEMENTATIONS)
