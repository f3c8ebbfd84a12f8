"""The reference: dense attention with any scheme on any array library.

Every other implementation must give the same results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from posenc.apply.shapes import as_column, as_row
from posenc.attn.arguments import Arguments, check_shapes
from posenc.attn.call import Call
from posenc.attn.channel_decay import has_channel_decay
from posenc.attn.fully_masked import may_be_fully_masked, zero_fully_masked
from posenc.attn.implementations import Implementation, Planned, choose
from posenc.attn.keywords import advise_unknown
from posenc.attn.masks import Mask, MaskFunction
from posenc.attn.merge import LogSumExp, public_lse
from posenc.attn.prepare import prepare
from posenc.contract.operations import detached, exp_of_scores, own_dtypes, shared_namespace
from posenc.contract.params import as_mapping, working_dtype
from posenc.contract.protocol import Array, Hook, Namespace, PositionScheme, Window
from posenc.contract.tokens import Tokens


@advise_unknown
def attention(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    causal: bool = False,
    *,
    window: int | Window | None = None,
    mask: Mask | Array | MaskFunction | None = None,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    k_transformed: bool = False,
    implementation: str = "auto",
    return_lse: bool = False,
    xp: Namespace | None = None,
) -> Any:
    """``softmax(scale * transform(q) @ transform(k).T + bias) @ v``, dense, on any array library.

    Arrays are ``(B, H, L, D)``: heads are axis 1 and tokens axis 2. ``posenc_jax`` takes
    ``(B, L, H, D)``.

    Parameters
    ----------
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``. ``Hk`` divides ``H``: query head
        ``h`` uses key and value head ``h // (H // Hk)``.
    scheme, params
        The positional encoding, and its learned arrays by name.
    causal
        A query sees only keys at ``k_pos <= q_pos``: short for ``mask=posenc.causal``.
    window
        A width: a query sees only keys at ``|q_pos - k_pos| < window``. Or ``(left, right)``: only
        keys at ``-left <= k_pos - q_pos <= right``, None for no bound. Short for
        ``mask=posenc.window(...)``.
    mask
        A further ``Mask``, several of them combined by ``&``: ``posenc.causal & posenc.window(512,
        first=4)``. Or booleans ``(B or 1, H or 1, Q, K)``, True where a query sees a key. Or an
        elementwise function of ``(q_pos, k_pos)`` or of ``(q_pos, k_pos, q_seg, k_seg)``.
    tokens
        What is known of the keys' tokens: positions, segments, places, padding, hidden states,
        features (``Tokens``). They are the queries' too, of which there may be fewer: the last
        ones. ``posenc.positions.packed`` and ``left_padded`` make them.
    queries
        The tokens of the queries, if they are others: in cross-attention, or to decode in another
        order. Positions, segments and places are in both or in neither.
    bias
        Added to the scores after the scheme's bias, ``(B or 1, H or 1, Q, K)``; ``-inf`` masks.
    softcap
        Scaled scores become ``softcap * tanh(score / softcap)``, before bias and mask (Gemma 2).
    scale
        Factor of the scores; default ``scheme.scale(D)``.
    k_transformed
        Whether ``k`` is already transformed, as it may be in a cache.
    implementation
        ``"auto"`` or ``"reference"``, the only one in the core.
    return_lse
        Whether to return the log-sum-exp too.

    Returns
    -------
    ``(B, H, Q, Dv)`` in q's dtype. A fully masked row is 0, with zero gradients.

    With ``return_lse`` also ``log(sum(exp(score)))`` of each row, including a sink: ``(B, H, Q)``
    in the working dtype, float32 or float64, and ``-inf`` for a fully masked row.

    NaN or infinity in padding does no harm if ``tokens`` or a mask of one's own tell that it is
    padding. In a query that then sees no key, and in a key that no query sees, it reaches neither
    results nor gradients. In a key that any query sees, it may reach all results. So it may in keys
    that only a window at default positions hides, or a bias of ``-inf``. Hidden states must be
    finite.
    So must tokens that only a mask or positions hide, not segments or ``exists``, if a transform
    or features with learned arrays read them: gradients of these are sums over all tokens, and 0
    times NaN is NaN.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; the message has its name, its value, and what is accepted.
    NotImplementedError
        The named implementation cannot serve the call; the message says why.
    """
    given = Arguments(
        window, mask, tokens, queries, bias, softcap, scale, k_transformed, return_lse
    )
    xp = xp or shared_namespace(q=q, k=k, v=v)
    check_shapes(q, k, v, xp=xp)
    work = working_dtype([q, k, v, *given.floats(), *as_mapping(params).values()], xp=xp)
    q_wide, k_wide, v_wide = (xp.astype(a, work) for a in (q, k, v))
    with own_dtypes(xp):
        call = prepare(q_wide, k_wide, v_wide, scheme, params, causal, given, xp=xp)
        _, planned = choose(_IMPLEMENTATIONS, call, implementation)
        out, lse = planned.run(call)
        out = xp.astype(out, q.dtype)
        return (out, public_lse(lse, call)) if return_lse else out


def dense(call: Call) -> tuple[Array, LogSumExp]:
    """Attention by its definition, in the working dtype, with all scores in memory.

    Returns ``(B, H, Q, Dv)`` and its log-sum-exp. A fully masked row is 0.
    The sink of the call is not included.
    """
    xp = call.xp
    batch, heads, q_len, _ = call.q.shape
    kv_heads = call.k.shape[1]
    q, k, v = call.q, call.k, call.v
    bias, visible = call.bias_and_visible()
    if visible is not None and may_be_fully_masked(call):
        q, k, v = zero_fully_masked(q, k, v, visible, xp=xp)
    # Queries are scaled, not scores. Compilers would fuse "score * scale - highest" into one
    # operation. The highest score minus itself is then the rounding of the product instead of 0.
    left, right = (two_channels(a, xp) for a in (q * call.scale, k))
    grouped = xp.reshape(left, (batch, kv_heads, -1, q_len, left.shape[3]))
    scores = xp.matmul(grouped, xp.matrix_transpose(right)[:, :, None, :, :])
    scores = xp.reshape(scores, (batch, heads, q_len, -1))
    if has_channel_decay(call.scheme):
        every = xp.repeat(k, heads // kv_heads, axis=1)
        scores = call.channel_decay().apply(scores, q * call.scale, every)
    scores = call.cap_scores(scores)
    if call.softcap is not None:
        # None is above it. Without this, compilers fuse "softcap * tanh - highest" likewise.
        scores = xp.where(scores > call.softcap, call.softcap, scores)
    if Hook.ADJUST_SCORES in call.scheme.hooks():
        at = as_column(call.query.encoded_pos), as_row(call.key.encoded_pos)
        params = call.views(rows=True)
        scores = call.scheme.adjust_scores(scores, *at, visible=visible, params=params, xp=xp)
        hidden = scores == -math.inf  # as a bias of -inf does
        visible = ~hidden if visible is None else visible & ~hidden
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        # No finite score is lower, so the highest score of a row is that of a visible key.
        scores = xp.where(visible, scores, xp.finfo(scores.dtype).min)
    # No result depends on it, so its gradients would cancel. In JAX they may be NaN: XLA computes
    # scores again with other roundings, and then none of a row equals the highest one.
    highest = xp.max(detached(scores, xp), axis=-1, keepdims=True)
    weights = exp_of_scores(scores - highest, xp)
    if visible is not None:
        weights = xp.where(visible, weights, 0.0)
    total = xp.sum(weights, axis=-1, keepdims=True)
    lse = LogSumExp.of_weights(highest[..., 0], total[..., 0], xp)
    total = xp.where(total == 0, 1.0, total)  # a fully masked row stays 0
    weights = weights / total
    weights = xp.reshape(weights, (batch, kv_heads, -1, q_len, weights.shape[-1]))
    out = xp.reshape(xp.matmul(weights, v[:, :, None, :, :]), (batch, heads, q_len, -1))
    return out, lse


def two_channels(array: Array, xp: Namespace) -> Array:
    """``(B, H, L, D)`` with a second channel of zeros if ``D`` is 1; it changes no product.

    Of single channels compilers make one operation of a product and of what is subtracted from it.
    """
    return xp.concat([array, xp.zeros_like(array)], axis=-1) if array.shape[3] == 1 else array


_IMPLEMENTATIONS = (
    Implementation("reference", lambda call: Planned(dense), decays=True, whole_rows=True),
)
