"""CoPE: positions that count gates computed from the scores.

Not the clipped RoPE of the same name, which is ``rope_clip_hann``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posenc.contract.checks import check_channels, check_count, check_finite
from posenc.contract.fields import Count
from posenc.contract.operations import cumulative_sum, device, take_along_axis
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec
from posenc.schemes.activations import sigmoid


@dataclass(frozen=True)
class CoPE(
    PositionScheme,
    whole_rows="the position of a key counts gates of all later keys",
    paper="Golovneva et al. 2024, arXiv 2405.18719",
):
    """``s_ij + q_i . e[p_ij]``, where ``p_ij`` counts the gates of the keys from ``j`` on.

    ``g_it = sigmoid(s_it)`` of the scaled score of each visible key, 0 of a masked one. ``p_ij``
    sums ``g_it`` over the keys at the position of ``j`` or after it, whatever their order in
    memory, and is at most ``npos - 1``. Between two integers, ``q_i . e`` is interpolated.

    Learned array: ``e (npos, D)``, which all heads share, 0 at first. So a CoPE begins as NoPE.

    ``chunked`` and the reference compute it, in whole rows. The position of a key needs the scores
    of all later keys, but a fused kernel sees a tile of scores at a time.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``.
    npos
        Number of positions: all from ``npos - 1`` on are one.
    init_std
        Standard deviation of the first values of ``e``.

    Equations 3 to 6. As in the paper's listing, gates come from scaled scores, and ``q_i . e`` is
    not scaled.
    """

    head_dim: Count
    npos: int = 64
    init_std: float = 0.0

    def __post_init__(self) -> None:
        check_count("npos", self.npos, least=2)
        if check_finite("init_std", self.init_std) < 0:
            raise ValueError(f"init_std must be 0 or more, got {self.init_std}")

    def param_specs(self) -> Mapping[str, ParamSpec]:
        std = self.init_std
        return {
            "e": ParamSpec(
                (self.npos, self.head_dim),
                lambda rng, shape: std * rng.standard_normal(shape),
                per_head=False,
            )
        }

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {"e": FeatureSpec(self._of_positions, of="query", reads="vectors")}

    def _of_positions(
        self, q: Array, pos: Array, *, scale: float, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("q", q, self.head_dim)
        return xp.matmul(q, xp.matrix_transpose(params["e"]))

    def adjust_scores(
        self, scores: Array, q: Array, k: Array, *, visible: Array | None, params: Any,
        xp: Namespace,
    ) -> Array:  # fmt: skip
        gates = sigmoid(scores, xp)
        if visible is not None:
            gates = xp.where(visible, gates, 0.0)
        sums = sums_from(gates, k, in_order=params.in_order, xp=xp)
        counted = xp.clip(sums, max=self.npos - 1)
        whole, table = xp.floor(counted), params.query["e"]
        low, part = xp.astype(whole, xp.arange(1).dtype), counted - whole
        return scores + (
            table[low] * (1 - part) + table[xp.clip(low + 1, max=self.npos - 1)] * part
        )


def sums_from(
    values: Array, pos: Array, *, own: bool = True, in_order: bool, xp: Namespace
) -> Array:
    """For each key, the sum of ``values (B, H, Q, K)`` at its position ``(B, 1, 1, K)`` or later.

    ``own=False``: at later positions only. ``in_order`` is that of ``params``.
    """
    if in_order:  # the last key first, so that small sums stay small
        sums = xp.flip(cumulative_sum(xp.flip(values, axis=-1), axis=-1, xp=xp), axis=-1)
        if own:
            return sums
        return xp.concat([sums[..., 1:], xp.zeros_like(sums[..., :1])], axis=-1)

    def take(values: Array, index: Array) -> Array:
        if index.shape[0] == 1:  # the same of all rows, which is faster
            return xp.take(values, index[0, 0, 0, :], axis=-1)
        return take_along_axis(values, xp.broadcast_to(index, values.shape), axis=-1, xp=xp)

    order = xp.argsort(-pos, axis=-1)
    sums = cumulative_sum(take(values, order), axis=-1, xp=xp)
    # Keys at one position see each other: each takes the sum at the last of them in this order, or
    # at the last of the run before.
    length = pos.shape[-1]
    index = xp.arange(length, dtype=order.dtype, device=device(pos))
    at_pos = take_along_axis(pos, order, axis=-1, xp=xp)
    differs, always = at_pos[..., 1:] != at_pos[..., :-1], at_pos[..., :1] == at_pos[..., :1]
    last = xp.concat([differs, always], axis=-1)
    ends = xp.sort(xp.where(last, index, length), axis=-1)
    ended = xp.astype(last, order.dtype)
    run = cumulative_sum(ended, axis=-1, xp=xp) - ended
    run = take_along_axis(run, xp.argsort(order), axis=-1, xp=xp)
    if own:
        return take(sums, take_along_axis(ends, run, axis=-1, xp=xp))
    before = take_along_axis(ends, xp.clip(run - 1, min=0), axis=-1, xp=xp)
    return xp.where(run > 0, take(sums, before), 0.0)
