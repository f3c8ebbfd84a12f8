"""Attention with any scheme in PyTorch, and the choice among its implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc.backend import (
    Arguments,
    Call,
    Explanation,
    Implementation,
    LogSumExp,
    Mask,
    Operations,
    Planned,
    PositionScheme,
    Shared,
    Tokens,
    Window,
    advise_unknown,
    as_mapping,
    check_shapes,
    choose,
    dense,
    explain_choice,
    prepare,
    provide,
    public_lse,
    working_dtype,
)
from posenc_torch import folded, repeated, sdpa
from posenc_torch.activations import softplus
from posenc_torch.chunked import implementation as chunked
from posenc_torch.constants import constant
from posenc_torch.flex import implementation as flex
from posenc_torch.hiding_bias import as_mask
from posenc_torch.network import network
from posenc_torch.repeated import OfVectors
from posenc_torch.rotation import hold, rotate
from posenc_torch.sharing import angles_in, numbers_in
from posenc_torch.tables import take_along_axis
from posenc_torch.tracing import autocast_dtype, has_values, own_dtypes
from posenc_torch.weights import exp

provide(
    Operations(
        constant=constant,
        hold=hold,
        rotate=rotate,
        network=network,
        take_along_axis=take_along_axis,
        cumulative_sum=torch.cumsum,
        exp=exp,
        softplus=softplus,
        sigmoid=torch.sigmoid,
        leaky_relu=torch.nn.functional.leaky_relu,
        own_dtypes=own_dtypes,
        detach=Tensor.detach,
        has_values=has_values,
    ),
    xp=xp,
)


@advise_unknown
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: PositionScheme,
    params: Mapping[str, Any] | None = None,
    causal: bool = False,
    *,
    window: int | Window | None = None,
    mask: Mask | Tensor | Callable[..., Tensor] | None = None,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    k_transformed: bool = False,
    implementation: str = "auto",
    skip_blocks: bool = True,
    return_lse: bool = False,
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
        by less than half a rounding of the largest value. On a CPU,
        ``"chunked"``, and ``"sdpa"`` in training, give such keys weight 0 in the blocks that they
        compute, and without it those whose weight in float32 is provably below 2**-63 of the
        largest.
    scheme, params, causal, window, mask, tokens, queries, bias, softcap, scale
        As in ``posenc.attention``; so are ``k_transformed`` and ``return_lse``.

    Returns
    -------
    ``(B, H, Q, Dv)`` in q's dtype, differentiable in q, k, v, bias, params, hidden states and
    features. A fully masked row is 0, with zero gradients. NaN in fully masked queries and keys
    does not spread, as in ``posenc.attention``, except with ``"flex"``. ``return_lse`` adds the
    log-sum-exp.

    Raises
    ------
    NotImplementedError
        The named implementation cannot serve this call; the message says why.
    TypeError, ValueError
        A wrong argument; the message has its name, its value and what is accepted.
    """
    given = Arguments(
        window, mask, tokens, queries, bias, softcap, scale, k_transformed, return_lse
    )
    also = scheme, params, causal, given, implementation, skip_blocks
    if (kind := repeated.kind_of(q, k, v, *also)) is None:
        return attend_in_pass(q, k, v, *also, None, wants_run=False)[0]
    if (run := repeated.find(kind)) is not None:
        return run(q, k, v)
    shared = repeated.shared_of(kind, scheme, causal, given)
    out, made = attend_in_pass(q, k, v, *also, shared, wants_run=shared is not None)
    if shared is not None:
        repeated.keep(kind, made)
    return out


@advise_unknown
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: PositionScheme,
    params: Mapping[str, Any] | None = None,
    causal: bool = False,
    *,
    window: int | Window | None = None,
    mask: Mask | Tensor | Callable[..., Tensor] | None = None,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    k_transformed: bool = False,
    implementation: str = "auto",
    skip_blocks: bool = True,
    return_lse: bool = False,
) -> Explanation:
    """Which implementation ``attention`` takes for the same arguments, and why not the others.

    A dict that prints as text: ``implementation`` is the name, ``others`` maps names to reasons.
    """
    given = Arguments(
        window, mask, tokens, queries, bias, softcap, scale, k_transformed, return_lse
    )
    half = autocast_dtype(q)
    with own_dtypes():
        call = _call(q, k, v, scheme, params, causal, half, skip_blocks, given)
        return explain_choice(_IMPLEMENTATIONS, call, implementation)


def attend_in_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: PositionScheme,
    params: Mapping[str, Any] | None,
    causal: bool,
    given: Arguments,
    implementation: str,
    skip_blocks: bool,
    shared: Shared | None,
    *,
    wants_run: bool,
) -> tuple[Any, OfVectors | None]:
    """``attention`` of a layer, and the same as a function of vectors alone, for other layers.

    The second is None unless it is asked for, and calls of other layers differ in vectors alone.
    """
    half = autocast_dtype(q)
    with own_dtypes():
        call = _call(q, k, v, scheme, params, causal, half, skip_blocks, given, shared)
        kept = call.shared is not None and call.shared.keep(call)
        _, planned = choose(_IMPLEMENTATIONS, call, implementation)
        out, lse = planned.run(call)
        run = None
        if kept and wants_run and call.dtype == working_dtype([q, k, v], xp=xp):
            assert shared is not None
            run = _of_vectors(call, planned, half, shared)
        out = out if out.dtype == q.dtype else out.to(q.dtype)
        return ((out, public_lse(lse, call)) if call.wants_lse else out), run


def _of_vectors(
    call: Call, planned: Planned, half: torch.dtype | None, shared: Shared
) -> OfVectors:
    """Attention as a function of queries, keys and values, for calls equal to this one."""
    turn_q, turn_k = (shared.made.find(("turn", role)) for role in ("query", "key"))
    direct = planned.fixed(call)
    attend = direct or _like(shared.made.find("call"), planned)
    pairs = call.q.shape[1] * call.q.shape[2] * call.k.shape[2] * planned.pairs_in_pass
    numbers = None  # with every call there may be more for each pair
    if direct or not pairs:
        numbers = pairs + (angles_in(shared) if direct else numbers_in(shared))
    rounds = half is not None and call.dtype != torch.float64

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype = q.dtype
        q = q if turn_q is None else turn_q(q)
        k = k if turn_k is None else turn_k(k)
        if rounds:
            q, k, v = q.to(half), k.to(half), v.to(half)
        out = attend(q, k, v)
        return out if out.dtype == dtype else out.to(dtype)

    if half is None:
        return OfVectors(compute, numbers)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with own_dtypes():
            return compute(q, k, v)

    return OfVectors(run, numbers)


def _like(call: Call, planned: Planned) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of calls that differ from ``call`` in vectors alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = planned.run(replace(call, q=q, k=k, v=v))[0]
        return out

    return attend


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: PositionScheme,
    params: Mapping[str, Any] | None,
    causal: bool,
    half: torch.dtype | None,
    skip_blocks: bool,
    given: Arguments,
    shared: Shared | None = None,
) -> Call:
    """The checked call; under autocast its transformed q, k and v are rounded to ``half``."""
    _check_not_nested({"q": q, "k": k, "v": v, **given._asdict()})
    tensors = _promote_float64(q, k, v, [*given.floats(), *as_mapping(params).values()])
    call = prepare(
        *tensors, scheme, params, causal, given, skip_blocks=skip_blocks, shared=shared, xp=xp
    )
    call = as_mask(call)
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
                "the sequences, with tokens=posenc.positions.packed(lengths), or pad them"
            )


def _promote_float64(
    q: Tensor, k: Tensor, v: Tensor, others: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; in float64 if any argument is, so that a transform does not round them."""
    if working_dtype([q, k, v, *others], xp=xp) != torch.float64:
        return q, k, v
    check_shapes(q, k, v, xp=xp)
    return q.double(), k.double(), v.double()


def _reference(call: Call) -> tuple[Tensor, LogSumExp]:
    """The definition, with q, k and v in the working dtype."""
    q, k, v = (x.to(call.dtype) for x in (call.q, call.k, call.v))
    return dense(replace(call, q=q, k=k, v=v))


_IMPLEMENTATIONS = (
    Implementation("flex", flex.plan, flex.not_preferred),
    Implementation("chunked", chunked.plan, chunked.not_preferred, decays=True, whole_rows=True),
    Implementation("folded", folded.plan, folded.not_preferred),
    Implementation("sdpa", sdpa.plan),
    Implementation("reference", lambda call: Planned(_reference), decays=True, whole_rows=True),
)
IMPLEMENTATIONS = tuple(implementation.name for implementation in _IMPLEMENTATIONS)
