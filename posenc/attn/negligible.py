"""Blocks of keys that leave no trace: under a bias that decays, far keys round to nothing.

A row of attention is a mean of values by the weights ``exp(score) / sum(exp(score))``. A key that a
query surely sees, its own, bounds the sum from below; the lengths of queries and keys and the bias
bound every other score from above. A key is negligible where::

    |scale| |q_i| max|k| + b_ij  <=  scale q_i.k_own + b_i,own - ln(K) - ln(4 / eps)

Then all negligible keys of a row have at most ``eps / 4`` of its weight together, ``eps`` being
that of q's dtype: results differ by less than half a rounding of the largest value, gradients by
less than half a rounding of the largest that each sum could hold. A proven bound; nothing is
guessed.
"""

from __future__ import annotations

import math

from array_api_compat import device

from posenc.attn.bias_forms import (
    bias_by_distance,
    bias_by_key,
    has_distances,
    has_key_bias,
    visible_by_distance,
)
from posenc.attn.blocks import block_max, pad_neg_inf
from posenc.attn.call import Call
from posenc.evaluate import reads_features
from posenc.positions import visible
from posenc.protocol import Array, PositionScheme


def negligible_blocks(call: Call, block: int, *, whole: Array | None = None) -> Array | None:
    """Which blocks of keys no query of a block of queries need see.

    Parameters
    ----------
    call
        A call of attention; its values decide.
    block
        So many queries, and so many keys, make a block.
    whole
        ``(B or 1, nq, nk)``: pairs of blocks in which every query sees every key, if that is known.
        It helps where queries do not see their own keys.

    Returns
    -------
    Booleans ``(B, H, nq, nk)``, or None for a bias that has neither of the cheaper forms, and for a
    learned table: what it holds would have to span more than the margin, 13 in bfloat16 and 24 in
    float32 at 1024 keys, to spare anything.
    """
    xp, (q_len, k_len) = call.xp, (call.q.shape[2], call.k.shape[2])
    if not may_have_negligible_blocks(call):
        return None
    least = None
    if (bias := bias_by_key(call)) is not None:
        own = bias[..., max(0, k_len - q_len) :]
        most = block_max(bias, block, xp)[..., None, :]
        if whole is not None:
            least = -block_max(-bias, block, xp)[..., None, :]
    elif (bias := bias_by_distance(call)) is not None:
        own = bias[None, :, k_len - 1 : k_len]  # at distance 0
        most = _between_blocks(call, bias, block)[None, ...]
    else:
        return None
    reach, floor = _scores(call, own)
    # What every query of a block has in its sum, less the largest score that it may have.
    lowest = -block_max(reach - floor, block, xp)
    if whole is not None and least is not None:
        seen = xp.where(whole[:, None, :, :], least, -math.inf)
        lowest = xp.maximum(lowest, xp.max(seen, axis=-1) - 2 * block_max(reach, block, xp))
    # An array, because a compiler keeps the logarithm of a number, and with it the number.
    all_keys = xp.log(xp.full_like(reach[:1, :1, :1], k_len))
    margin = all_keys + math.log(4 / float(xp.finfo(call.q.dtype).eps))
    return most <= (lowest - margin - _rounding(call, bias, reach))[..., None]


def may_have_negligible_blocks(call: Call) -> bool:
    """Whether the bias has a form that ``negligible_blocks`` can judge, whatever its values."""
    judged = has_key_bias(call) or has_distances(call)
    # The caller's own mask or cap may change what a query's own key adds to its sum.
    return judged and call.plain and call.sink_tokens == 0 and not _is_table(call.scheme)


def _is_table(scheme: PositionScheme) -> bool:
    tables = any(s.per_head and len(s.shape) > 1 for s in scheme.param_specs().values())
    return tables and not reads_features(scheme)


def _scores(call: Call, own: Array) -> tuple[Array, Array]:
    """How large a score of each query may be, and one that is in its sum, both ``(B, H, Q)``.

    ``own`` is the bias of its own key. A query that does not see that may have an empty sum.
    """
    xp, (batch, heads, q_len, dim) = call.xp, call.q.shape
    kv_heads, k_len = call.k.shape[1], call.k.shape[2]
    q, k = (xp.astype(a, call.dtype) for a in (call.q, call.k))
    q = xp.reshape(q, (batch, kv_heads, heads // kv_heads, q_len, dim))
    # Squares of very small numbers are 0: so much a length may be larger than it is computed.
    lost = math.sqrt(dim * float(xp.finfo(call.dtype).smallest_normal))
    longest = xp.max(xp.linalg.vector_norm(k, axis=-1), axis=-1)[:, :, None, None] + lost
    reach = abs(call.scale) * longest * (xp.linalg.vector_norm(q, axis=-1) + lost)
    reach = xp.reshape(reach, (batch, heads, q_len))
    if q_len > k_len:
        return reach, xp.full_like(reach, -math.inf)
    first = k_len - q_len
    score = call.scale * xp.vecdot(q, k[:, :, None, first:, :], axis=-1)
    score = xp.reshape(score, (batch, heads, q_len)) + own
    segments: tuple[Array, ...] = ()
    query, key = call.query, call.key.select(slice(first, None))
    if query.seg is not None and key.seg is not None:
        segments = query.seg, key.seg
    seen = visible(query.pos, key.pos, *segments, causal=call.causal, window=call.window)
    if seen is None:
        return reach, score
    seen = seen[None, None, :] if len(seen.shape) == 1 else seen[:, None, :]
    return reach, xp.where(seen, score, -math.inf)


def _rounding(call: Call, bias: Array, reach: Array) -> Array:
    """How far the numbers compared may be off: one rounding a channel, some of the bias."""
    xp = call.xp
    size = xp.max(xp.where(xp.isfinite(bias), xp.abs(bias), 0.0))
    eps = float(xp.finfo(call.dtype).eps)
    return eps * (8 * size + call.q.shape[3] * xp.max(reach))


def _between_blocks(call: Call, table: Array, block: int) -> Array:
    """The highest bias between a block of queries and one of keys, ``(H or 1, nq, nk)``.

    Aligned blocks ``a`` and ``b`` hold the distances ``(b - a) n - (K - Q)``, give or take less
    than ``n``: those of two neighbouring stretches of ``n`` distances.
    """
    xp, q_len, k_len = call.xp, call.q.shape[2], call.k.shape[2]
    q_blocks, k_blocks = -(-q_len // block), -(-k_len // block)
    table = xp.where(visible_by_distance(call), table, -math.inf)
    # The first stretch ends where the last block of queries meets the first of keys.
    stretches = block_max(pad_neg_inf(table, q_blocks * block - q_len, 0, xp), block, xp)
    stretches = pad_neg_inf(stretches, 0, q_blocks + k_blocks - stretches.shape[-1], xp)
    pairs = xp.maximum(stretches[..., :-1], stretches[..., 1:])
    a, b = (xp.arange(n, device=device(table)) for n in (q_blocks, k_blocks))
    ahead = b[None, :] - a[:, None] + (q_blocks - 1)
    found = xp.take(pairs, xp.reshape(ahead, (-1,)), axis=-1)
    return xp.reshape(found, (-1, q_blocks, k_blocks))
