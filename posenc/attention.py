"""The reference: attention with any scheme on any array library. Every other path must equal it."""

from __future__ import annotations

from collections.abc import Mapping

from posenc.call import Call, check_shapes, namespace, prepare
from posenc.checks import check_choice
from posenc.keywords import answering
from posenc.params import named, working_dtype
from posenc.protocol import Array, Namespace, PositionScheme
from posenc.unseen import may_be_unseen, without_unseen


@answering
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
    window: int | None = None,
    scale: float | None = None,
    path: str = "auto",
    k_transformed: bool = False,
    x: Array | None = None,
    q_coords: Array | None = None,
    k_coords: Array | None = None,
    xp: Namespace | None = None,
) -> Array:
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
        Integer positions, ``(L,)`` or ``(B, L)``, in any order; both or neither. Default: the ends
        of q and k align, ``q_pos = K - Q .. K - 1``.
    q_seg, k_seg
        Integer segments, ``(L,)`` or ``(B, L)``, both or neither; a query sees its own only.
    window
        A query sees keys at ``|q_pos - k_pos| < window`` only.
    scale
        Of the scores; default ``scheme.scale(D)``.
    path
        ``"auto"`` or ``"reference"``: the core has this one.
    k_transformed
        ``k`` comes from a cache that holds keys already transformed.
    x, q_coords, k_coords
        For a gated scheme: hidden states ``(B, K, C)`` of the keys' tokens, or the coordinates
        ``(B, H, Q)`` and ``(B, H, K)`` themselves. A scheme without gates ignores ``x``.

    Returns
    -------
    ``(B, H, Q, Dv)`` in q's dtype. A row that may see nothing is 0, with zero gradients. Where
    positions or segments are given, NaN or infinity in a query that sees no key, or in a key that
    no query sees, reaches neither results nor gradients; one that any query sees may reach all.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    """
    check_choice("path", path, ("auto", "reference"))
    xp = xp or namespace(q=q, k=k, v=v)
    check_shapes(q, k, v, xp=xp)
    work = working_dtype([q, k, v, x, *named(params).values()], xp=xp)
    call = prepare(
        xp.astype(q, work), xp.astype(k, work), xp.astype(v, work), scheme, params, causal,
        q_pos=q_pos, k_pos=k_pos, q_seg=q_seg, k_seg=k_seg, window=window, scale=scale,
        k_transformed=k_transformed, x=x, q_coords=q_coords, k_coords=k_coords, xp=xp,
    )  # fmt: skip
    return xp.astype(dense(call), q.dtype)


def dense(call: Call) -> Array:
    """Attention by its definition, with the whole of the scores in memory, in the working float."""
    xp = call.xp
    batch, heads, q_len, dim = call.q.shape
    kv_heads = call.k.shape[1]
    q, k, v = call.q, call.k, call.v
    bias, seen = call.allowed_bias()
    if seen is not None and may_be_unseen(call):
        q, k, v = without_unseen(q, k, v, seen, xp=xp)
    # Queries are scaled, not scores: compilers make one operation of "score * scale - highest", and
    # then the highest score less itself is not 0, but the rounding of the product.
    grouped = xp.reshape(q * call.scale, (batch, kv_heads, -1, q_len, dim))
    scores = xp.matmul(grouped, xp.matrix_transpose(k)[:, :, None, :, :])
    scores = xp.reshape(scores, (batch, heads, q_len, -1))
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        # No finite score is lower, so that the highest of a row is one of those that are seen.
        scores = xp.where(seen, scores, xp.finfo(scores.dtype).min)
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    if seen is not None:
        weights = xp.where(seen, weights, 0.0)
    total = xp.sum(weights, axis=-1, keepdims=True)
    weights = weights / xp.where(total == 0, 1.0, total)
    weights = xp.reshape(weights, (batch, kv_heads, -1, q_len, weights.shape[-1]))
    out = xp.matmul(weights, v[:, :, None, :, :])
    return xp.reshape(out, (batch, heads, q_len, -1))
