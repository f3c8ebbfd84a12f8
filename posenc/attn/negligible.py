"""Negligible keys: under a bias that decays, weights of far keys round to nothing.

A row of attention is a mean of values with the weights ``exp(score) / sum(exp(score))``. The
query's own key bounds the sum from below. The norms of queries and keys and the bias bound every
other score from above. A key is negligible if::

    |scale| |q_i| max|k| + b_ij  <=  scale q_i.k_own + b_i,own - ln(K) - ln(4 / eps)

Then all negligible keys of a row together have at most ``eps / 4`` of its weight, with the ``eps``
of q's dtype. Results change by less than half a rounding of the largest value. Gradients change by
less than half a rounding of the largest term that each sum could hold. The bound is proven.

Blocks of negligible keys need not be computed. In the other blocks, entries of a bias by distance
that are negligible for all queries may be ``-inf``. Without that, a weight may be a subnormal
number, with which some processors calculate a hundred times more slowly.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from posenc.apply.feature_needs import reads_features
from posenc.attn.bias_forms import (
    bias_by_distance,
    bias_by_key,
    has_bias_by_distance,
    has_bias_by_key,
    visible_by_distance,
)
from posenc.attn.blocks import block_max, pad_neg_inf
from posenc.attn.call import Call
from posenc.contract.operations import device
from posenc.contract.protocol import Array, Namespace, PositionScheme
from posenc.positions.integers import visible


def negligible_blocks(call: Call, block: int, *, all_visible: Array | None = None) -> Array | None:
    """Which blocks of keys are negligible for every query of a block of queries.

    Parameters
    ----------
    call
        A call of attention with concrete or traced values; the values decide.
    block
        Number of queries, and of keys, in a block.
    all_visible
        ``(B or 1, nq, nk)``, from ``visible_blocks``: pairs of blocks in which all pairs are
        visible. It helps if queries do not see their own keys.

    Returns
    -------
    Booleans ``(B, H, nq, nk)``. None unless the bias is a sum of terms with a form by distance or
    by key. None too if all terms are learned tables, whose values rarely span the margin: 13 in
    bfloat16 and 24 in float32 at 1024 keys.
    """
    bounds = Bounds.of(call)
    return None if bounds is None else bounds.blocks(block, all_visible=all_visible)


class Bounds(NamedTuple):
    """What decides which keys of a call are negligible.

    Attributes
    ----------
    call
        The call.
    keys, table
        The bias as a part by key, ``(B or 1, H or 1, K)``, plus a part by distance,
        ``(H or 1, Q + K - 1)``; None for a part that it has not.
    max_score
        The largest possible score of each query without bias, ``(B, H, Q)``.
    own_score
        The score of its own key without bias; ``-inf`` if the query does not see that.
    own_bias
        The bias of its own key, of a shape that broadcasts.
    """

    call: Call
    keys: Array | None
    table: Array | None
    max_score: Array
    own_score: Array
    own_bias: Array

    @classmethod
    def of(cls, call: Call) -> Bounds | None:
        """Those of a call; None where ``negligible_blocks`` is."""
        if not may_have_negligible_blocks(call):
            return None
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        keys, table = _parts_of_bias(call)
        own_bias = None
        if keys is not None:
            own_bias = keys[..., max(0, k_len - q_len) :]
        if table is not None:
            own_bias = _add(own_bias, table[None, :, k_len - 1 : k_len])  # at distance 0
        if own_bias is None:
            return None
        if q_len > k_len:  # then no own score is finite
            own_bias = own_bias[..., :1]
        return cls(call, keys, table, *_score_bounds(call), own_bias)

    def blocks(self, block: int, *, all_visible: Array | None = None) -> Array:
        """``negligible_blocks``."""
        call, xp, max_bias, min_bias = self.call, self.call.xp, None, None
        if self.keys is not None:
            max_bias = block_max(self.keys, block, xp)[..., None, :]
            if all_visible is not None and self.table is None:
                min_bias = -block_max(-self.keys, block, xp)[..., None, :]
        if self.table is not None:
            by_distance = _max_bias_between_blocks(call, self.table, block)[None, ...]
            max_bias = _add(max_bias, by_distance)
        assert max_bias is not None  # a bias has a part
        # For each block of queries, the least of (a score in the sum) - (the largest possible one).
        lowest = -block_max(self.max_score - (self.own_score + self.own_bias), block, xp)
        if all_visible is not None and min_bias is not None:
            seen_bias = xp.where(all_visible[:, None, :, :], min_bias, -math.inf)
            # The score of a visible key is at least its bias less the largest score.
            gap = xp.max(seen_bias, axis=-1) - 2 * block_max(self.max_score, block, xp)
            lowest = xp.maximum(lowest, gap)
        size = sum(_largest(part, xp) for part in (self.keys, self.table) if part is not None)
        return max_bias <= (lowest - self._margin() - self._rounding(size))[..., None]

    def distances(self, table: Array) -> Array:
        """Which entries of the bias by distance are negligible for every query, ``(H, Q + K - 1)``.

        Without ``skip_blocks``: those with weights below the square root of the smallest normal
        number, 2**-63 of the largest weight in float32.
        """
        own_bias = table[:, self.call.k.shape[2] - 1, None]
        return table <= own_bias - self.depths(table)

    def depths(self, table: Array) -> Array:
        """How far an entry of ``distances`` is at least below that of distance 0, ``(H, 1)``."""
        call, xp = self.call, self.call.xp
        spread = xp.max(self.max_score - self.own_score, axis=(0, 2))[:, None]
        margin = entry_margin(call, self._log_keys()[0])
        return spread + margin + self._rounding(_largest(table, xp))

    def _margin(self) -> Array:
        """``ln(K) + ln(4 / eps)``."""
        return _of_keys(self.call, self._log_keys())

    def _log_keys(self) -> Array:
        """``ln(K)``, ``(1, 1, 1)``."""
        call, xp = self.call, self.call.xp
        # From an array: a compiler would fold that of a Python number and fix the length.
        return xp.log(xp.full_like(self.max_score[:1, :1, :1], call.k.shape[2]))

    def _rounding(self, size: Array) -> Array:
        """A bound on rounding errors of the comparison; ``size`` bounds the bias.

        A rounding is ``eps / 2``, relative. Norms and own scores of ``D`` channels take at most
        ``2 D + 20`` in units of the largest score. In units of the bias, all sums take at most 16,
        and 4 more for each further term: two of bounds, and two of biases.
        """
        call, xp = self.call, self.call.xp
        eps, terms = float(xp.finfo(call.dtype).eps), len(call.scheme.bias_terms())
        largest = xp.max(self.max_score)
        return eps * ((6 + 2 * terms) * size + (call.q.shape[3] + 10) * largest)


def entry_margin(call: Call, log_keys: Any) -> Any:
    """How far below another score of its row one must provably be for an entry to be negligible.

    ``log_keys`` is ``ln(K)``, a number or an array.
    """
    if call.skip_blocks:
        return _of_keys(call, log_keys)
    return -math.log(float(call.xp.finfo(call.dtype).smallest_normal)) / 2


def _of_keys(call: Call, log_keys: Any) -> Any:
    return log_keys + math.log(4 / float(call.xp.finfo(call.q.dtype).eps))


def may_have_negligible_blocks(call: Call) -> bool:
    """Whether ``negligible_blocks`` can return an array for this call, whatever its values."""
    # A mask or cap of the caller may change the term of a query's own key in its sum.
    if not call.plain or call.mask.first_tokens != 0:
        return False
    terms = call.bias_terms()
    if all(_has_table(term.scheme) for term in terms):
        return False
    return all(has_bias_by_distance(term) or has_bias_by_key(term) for term in terms)


def _parts_of_bias(call: Call) -> tuple[Array | None, Array | None]:
    """A bias as a part by key plus a part by distance; None for a part that it has not.

    Both are None if it is no such sum. FoX with T5's table has both parts.
    """
    if (keys := bias_by_key(call)) is not None:
        return keys, None
    table = None
    for term in call.bias_terms():
        if (by_distance := bias_by_distance(term)) is not None:
            table = _add(table, by_distance)
        elif (by_key := bias_by_key(term)) is not None:
            keys = _add(keys, by_key)
        else:
            return None, None
    return keys, table


def _add(total: Array | None, term: Array) -> Array:
    return term if total is None else total + term


def _has_table(scheme: PositionScheme) -> bool:
    """Whether the bias of a scheme reads a learned per-head table."""
    tables = any(s.per_head and len(s.shape) > 1 for s in scheme.param_specs().values())
    return tables and not reads_features(scheme)


def _score_bounds(call: Call) -> tuple[Array, Array]:
    """The largest possible score of each query, and the score of its own key, without bias.

    Both are ``(B, H, Q)``. If the query does not see its own key, the second is ``-inf``.
    """
    xp, (batch, heads, q_len, _), k_len = call.xp, call.q.shape, call.k.shape[2]
    max_score = max_scores(call, call.q, call.k)
    if q_len > k_len:
        return max_score, xp.full_like(max_score, -math.inf)
    first = k_len - q_len
    q, k = (xp.astype(a, call.dtype, copy=False) for a in (call.q, call.k))
    # Not vecdot: a GPU may multiply matrices in TF32, and the bound would be none.
    own_score = call.scale * xp.sum(_by_key_head(call, q, k) * k[:, :, None, first:, :], axis=-1)
    own_score = xp.reshape(own_score, (batch, heads, q_len))
    segments: tuple[Array, ...] = ()
    query, key = call.query, call.key.select(slice(first, None))
    if query.seg is not None and key.seg is not None:
        segments = query.seg, key.seg
    mask = visible(query.pos, key.pos, *segments, causal=call.causal, window=call.window)
    if mask is None:
        return max_score, own_score
    mask = mask[None, None, :] if len(mask.shape) == 1 else mask[:, None, :]
    return max_score, xp.where(mask, own_score, -math.inf)


def max_scores(call: Call, q: Array, k: Array) -> Array:
    """The largest possible score of each query without bias, ``(B, H, Q)``: a product of norms.

    ``q`` and ``k`` are those of a call or of a part of it.
    """
    xp = call.xp
    longest = xp.max(_norms(call, k), axis=-1)[:, :, None, None]
    norms = _by_key_head(call, _norms(call, q), k)
    return xp.reshape(abs(call.scale) * longest * norms, q.shape[:3])


def max_score(call: Call, q: Array, k: Array) -> Array:
    """The largest of ``max_scores``."""
    xp = call.xp
    q, k = (xp.max(_norms(call, a), axis=-1)[..., None] for a in (q, k))
    return abs(call.scale) * xp.max(k[:, :, None] * _by_key_head(call, q, k))


def _norms(call: Call, x: Array) -> Array:
    """The norms of vectors, and what squares of very small numbers may lose by underflow."""
    xp = call.xp
    norms = xp.linalg.vector_norm(xp.astype(x, call.dtype, copy=False), axis=-1)
    return norms + math.sqrt(x.shape[3] * float(xp.finfo(call.dtype).smallest_normal))


def _by_key_head(call: Call, q: Array, k: Array) -> Array:
    """Queries, or what has their first axes, ``(B, Hk, H / Hk, ...)``."""
    (batch, heads, *rest), kv_heads = q.shape, k.shape[1]
    return call.xp.reshape(q, (batch, kv_heads, heads // kv_heads, *rest))


def _largest(bias: Array, xp: Namespace) -> Array:
    """The largest absolute value of a bias that is finite."""
    return xp.max(xp.where(xp.isfinite(bias), xp.abs(bias), 0.0))


def _max_bias_between_blocks(call: Call, table: Array, block: int) -> Array:
    """The largest bias between a block of queries and a block of keys, ``(H or 1, nq, nk)``.

    Block ``a`` of queries and block ``b`` of keys differ by ``(b - a) n - (K - Q)``, plus or minus
    less than ``n``. Their distances lie in two neighbouring stretches of ``n`` distances.
    """
    xp, q_len, k_len = call.xp, call.q.shape[2], call.k.shape[2]
    q_blocks, k_blocks = -(-q_len // block), -(-k_len // block)
    table = xp.where(visible_by_distance(call), table, -math.inf)
    # The first stretch ends at the distance of the last query block and the first key block.
    stretches = block_max(pad_neg_inf(table, q_blocks * block - q_len, 0, xp), block, xp)
    stretches = pad_neg_inf(stretches, 0, q_blocks + k_blocks - stretches.shape[-1], xp)
    pairs = xp.maximum(stretches[..., :-1], stretches[..., 1:])
    a, b = (xp.arange(n, device=device(table)) for n in (q_blocks, k_blocks))
    ahead = b[None, :] - a[:, None] + (q_blocks - 1)
    max_bias = xp.take(pairs, xp.reshape(ahead, (-1,)), axis=-1)
    return xp.reshape(max_bias, (-1, q_blocks, k_blocks))
