"""Attention with any scheme in PyTorch, on the implementation that serves the call."""

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
    prepare,
    working_dtype,
)
from posenc_torch import folded
from posenc_torch.chunked import implementation as chunked
from posenc_torch.flex import implementation as flex
from posenc_torch.sdpa import refuses, sdpa, without_lse


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

    Heads are axis 1 and tokens axis 2, ``(B, H, L, D)``; ``posenc_jax`` has them the other way.
    Under autocast q, k and v are rounded to its dtype, and nothing else is.

    Parameters
    ----------
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``, like
        ``torch.nn.functional.scaled_dot_product_attention``.
    implementation
        A name of ``IMPLEMENTATIONS``, or ``"auto"``: the first of them that serves the call well.
        ``"flex"`` is FlexAttention with the bias inside the kernel, compiled on the first call;
        ``"chunked"`` takes queries in parts, in ``O(L)`` memory; ``"folded"`` folds a key bias
        into the head dimension; ``"sdpa"`` gives the whole bias to
        ``scaled_dot_product_attention`` as its mask; ``"reference"`` is the definition.
    skip_blocks
        Whether ``"flex"`` and ``"chunked"`` leave out blocks of keys that provably round to nothing
        under a bias that decays (``posenc.attn.negligible``). Results of finite values then differ
        by less than half a rounding of the largest.
    scheme, params, causal, options
        As in ``posenc.attention``: positions, segments, places, ``k_valid``, ``window``,
        ``sink_tokens``, ``bias``, ``mask``, ``softcap``, ``scale``, ``k_transformed``, hidden
        states ``x`` and ``q_x``, features, ``return_lse``.

    Returns
    -------
    ``(B, H, Q, Dv)`` in q's dtype, differentiable in q, k, v, x, bias, features and params. A row
    that may see nothing is 0, with zero gradients. NaN in what nobody sees reaches nothing, as in
    ``posenc.attention``, but for ``"flex"``. With ``return_lse`` also the log-sum-exp.

    Raises
    ------
    NotImplementedError
        The named implementation cannot serve this call; says why.
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    """
    half = _autocast(q)
    with nullcontext() if half is None else torch.autocast(q.device.type, enabled=False):
        call = _call(q, k, v, scheme, params, causal, half, skip_blocks, options)
        out, lse = attend(_IMPLEMENTATIONS, call, implementation)
        return (out.to(q.dtype), lse) if call.wants_lse else out.to(q.dtype)


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

    A dict that prints well: ``implementation``, the name, and ``others``, name -> reason.
    """
    half = _autocast(q)
    with nullcontext() if half is None else torch.autocast(q.device.type, enabled=False):
        call = _call(q, k, v, scheme, params, causal, half, skip_blocks, options)
        return explain_choice(_IMPLEMENTATIONS, call, implementation)


def _autocast(q: Tensor) -> torch.dtype | None:
    """What autocast makes of queries, keys and values; None where it is off.

    It is off inside: it would also round biases, sums of gates and bounds of scores.
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
    _check_not_nested({"q": q, "k": k, "v": v, **options})
    tensors = _widened(q, k, v, [*float_arrays(options), *as_mapping(params).values()])
    call = prepare(*tensors, scheme, params, causal, skip_blocks=skip_blocks, xp=xp, **options)
    if half is None or call.dtype == torch.float64:
        return call
    return replace(_rounded(call, half), regions=tuple(_rounded(r, half) for r in call.regions))


def _rounded(call: Call, half: torch.dtype) -> Call:
    return replace(call, q=call.q.to(half), k=call.k.to(half), v=call.v.to(half))


def _check_not_nested(given: Mapping[str, Any]) -> None:
    """A nested tensor has no length that positions could be counted to."""
    for name, array in given.items():
        if isinstance(array, Tensor) and array.is_nested:
            raise TypeError(
                f"{name} is a nested tensor, accepted are those of one length: put the sequences "
                "one after another, with q_pos, k_pos, q_seg and k_seg of "
                "posenc.positions.packed(lengths), or pad them"
            )


def _widened(
    q: Tensor, k: Tensor, v: Tensor, others: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, in float64 if anything is: before a transform could round them."""
    if working_dtype([q, k, v, *others], xp=xp) != torch.float64:
        return q, k, v
    check_shapes(q, k, v, xp=xp)
    return q.double(), k.double(), v.double()


def _reference(call: Call) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(call.dtype) for x in (call.q, call.k, call.v))
    return dense(replace(call, q=q, k=k, v=v))


_IMPLEMENTATIONS = (
    Implementation(
        "flex", flex.flex,
        unsupported=flex.refuses, not_preferred=flex.avoided, without_lse=flex.without_lse,
    ),
    Implementation(
        "chunked",
        chunked.chunked,
        unsupported=chunked.refuses,
        not_preferred=chunked.avoided,
    ),
    Implementation(
        "folded", folded.folded,
        unsupported=folded.refuses, not_preferred=folded.avoided, without_lse=without_lse,
    ),
    Implementation("sdpa", sdpa, unsupported=refuses, without_lse=without_lse, takes_sink=True),
    Implementation("reference", _reference, whole_rows=True),
)  # fmt: skip
IMPLEMENTATIONS = tuple(implementation.name for implementation in _IMPLEMENTATIONS)
