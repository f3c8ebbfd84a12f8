"""The reference: attention with any scheme on any array library. All others must equal it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.attn.arguments import check_shapes, namespace
from posenc.attn.call import Call, prepare
from posenc.attn.fully_masked import may_be_fully_masked, zero_fully_masked
from posenc.attn.implementations import Implementation, attend
from posenc.attn.keywords import advise_unknown
from posenc.attn.options import MaskFunction, Options, float_arrays
from posenc.evaluate import as_column, as_row
from posenc.params import as_mapping, working_dtype
from posenc.protocol import Array, Namespace, PositionScheme


@advise_unknown
def attention(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    causal: bool = False,
    *,
    q_pos: Array | None = None,
    k_pos: Array | None = None,
    q_seg: Array | None = None,
    k_seg: Array | None = None,
    q_axes: Array | None = None,
    k_axes: Array | None = None,
    k_valid: Array | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    sink_tokens: int = 0,
    bias: Array | None = None,
    mask: Array | MaskFunction | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str = "auto",
    k_transformed: bool = False,
    x: Array | None = None,
    q_x: Array | None = None,
    q_features: Mapping[str, Array] | None = None,
    k_features: Mapping[str, Array] | None = None,
    return_lse: bool = False,
    xp: Namespace | None = None,
) -> Any:
    """``softmax(scale * transform(q) @ transform(k).T + bias) @ v``, dense, on any array library.

    Heads are axis 1 and tokens axis 2, ``(B, H, L, D)``; ``posenc_jax`` has them the other way.

    Parameters
    ----------
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``; ``Hk`` divides ``H``, and head
        ``h`` uses key and value head ``h // (H // Hk)``.
    scheme, params
        The positional encoding and its learned arrays by name.
    causal
        A query sees keys at ``k_pos <= q_pos`` only.
    q_pos, k_pos
        Integer positions, ``(L,)`` or ``(B, L)``, in any order; both or neither. They decide order:
        tokens that share a position see each other under a causal mask. Default: the ends of q and
        k align, ``q_pos = K - Q .. K - 1``.
    q_seg, k_seg
        Integer segments, ``(L,)`` or ``(B, L)``, both or neither; a query sees its own only.
    q_axes, k_axes
        Places that the scheme encodes instead of positions, ``(L, axes)`` or ``(B, L, axes)``; both
        or neither. Order, masks and sums stay those of positions. Give a model's repeated
        ``position_ids`` (image tokens, tree decoding) as places. Default: the position on every
        axis.
    k_valid
        Which keys exist, booleans ``(B, K)``: no query sees the others.
    window
        A width: a query sees keys at ``|q_pos - k_pos| < window`` only. Or ``(left, right)``: at
        ``-left <= k_pos - q_pos <= right``, None for no bound.
    sink_tokens
        Keys at positions ``0 .. sink_tokens - 1`` of the query's segment are inside of the window,
        wherever the query is (StreamingLLM). Without a window it changes nothing.
    bias
        Added to the scores after that of the scheme, ``(B or 1, H or 1, Q, K)``; ``-inf`` hides.
    mask
        Which query sees which key, besides all else: booleans ``(B or 1, H or 1, Q, K)``, or an
        elementwise function of ``(q_pos, k_pos)`` or of ``(q_pos, k_pos, q_seg, k_seg)``.
    softcap
        Scaled scores become ``softcap * tanh(score / softcap)``, before bias and mask (Gemma 2).
    scale
        Of the scores; default ``scheme.scale(D)``.
    implementation
        ``"auto"`` or ``"reference"``: the core has this one.
    k_transformed
        ``k`` comes from a cache that holds keys already transformed.
    x, q_x
        For a scheme with ``hidden_features``: hidden states ``(B, K, C)`` of the keys' tokens, and
        ``(B, Q, C)`` of the queries'. By default queries are the last of the keys' tokens, or the
        same where both have the same positions. A scheme without such features ignores them.
    q_features, k_features
        Features by name, ``(B, H, L)`` or ``(B, H, L, M)``, instead of computing them: from a
        cache, see ``posenc.features``.
    return_lse
        Whether to return the log-sum-exp too.

    Returns
    -------
    ``(B, H, Q, Dv)`` in q's dtype. A row that may see nothing is 0, with zero gradients. Where
    positions, segments or a mask are given, NaN or infinity in a query that sees no key, or in a
    key that no query sees, reaches neither results nor gradients; one that any query sees may reach
    all. With ``return_lse`` also ``log(sum(exp(score)))`` of each row, a sink included,
    ``(B, H, Q)`` in the working float; ``-inf`` where nothing is seen.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    NotImplementedError
        The named implementation cannot serve the call; says why.
    """
    options: Options = {
        "q_pos": q_pos, "k_pos": k_pos, "q_seg": q_seg, "k_seg": k_seg, "q_axes": q_axes,
        "k_axes": k_axes, "k_valid": k_valid, "window": window, "sink_tokens": sink_tokens,
        "bias": bias, "mask": mask, "softcap": softcap, "scale": scale,
        "k_transformed": k_transformed, "x": x, "q_x": q_x, "q_features": q_features,
        "k_features": k_features, "return_lse": return_lse,
    }  # fmt: skip
    xp = xp or namespace(q=q, k=k, v=v)
    check_shapes(q, k, v, xp=xp)
    work = working_dtype([q, k, v, *float_arrays(options), *as_mapping(params).values()], xp=xp)
    q_wide, k_wide, v_wide = (xp.astype(a, work) for a in (q, k, v))
    call = prepare(q_wide, k_wide, v_wide, scheme, params, causal, xp=xp, **options)
    out, lse = attend(_IMPLEMENTATIONS, call, implementation)
    out = xp.astype(out, q.dtype)
    return (out, lse) if return_lse else out


def dense(call: Call) -> tuple[Array, Array]:
    """Attention by its definition, with the whole of the scores in memory, in the working float.

    ``(B, H, Q, Dv)``, and the log of the sum of ``exp(score)``, ``(B, H, Q)``: the lowest finite
    number where nothing is seen. The sink of a call is not in it.
    """
    xp = call.xp
    batch, heads, q_len, dim = call.q.shape
    kv_heads = call.k.shape[1]
    q, k, v = call.q, call.k, call.v
    bias, seen = call.bias_and_visible()
    if seen is not None and may_be_fully_masked(call):
        q, k, v = zero_fully_masked(q, k, v, seen, xp=xp)
    # Queries are scaled, not scores: compilers make one operation of "score * scale - highest", and
    # then the highest score less itself is not 0, but the rounding of the product.
    grouped = xp.reshape(q * call.scale, (batch, kv_heads, -1, q_len, dim))
    scores = xp.matmul(grouped, xp.matrix_transpose(k)[:, :, None, :, :])
    scores = call.cap_scores(xp.reshape(scores, (batch, heads, q_len, -1)))
    if "adjust_scores" in call.scheme.hooks():
        at = as_column(call.query.encoded_pos), as_row(call.key.encoded_pos)
        params = call.views()
        scores = call.scheme.adjust_scores(scores, *at, visible=seen, params=params, xp=xp)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        # No finite score is lower, so that the highest of a row is one of those that are seen.
        scores = xp.where(seen, scores, xp.finfo(scores.dtype).min)
    highest = xp.max(scores, axis=-1, keepdims=True)
    weights = xp.exp(scores - highest)
    if seen is not None:
        weights = xp.where(seen, weights, 0.0)
    total = xp.sum(weights, axis=-1, keepdims=True)
    some = xp.where(total == 0, 1.0, total)
    weights = weights / some
    weights = xp.reshape(weights, (batch, kv_heads, -1, q_len, weights.shape[-1]))
    out = xp.reshape(xp.matmul(weights, v[:, :, None, :, :]), (batch, heads, q_len, -1))
    return out, (highest + xp.log(some))[..., 0]


_IMPLEMENTATIONS = (Implementation("reference", dense, whole_rows=True),)
