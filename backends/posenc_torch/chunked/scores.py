"""The gradient of scores, of which that of a learned bias is a sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_SCORES = 2**20  # at a time: a few arrays of them then stay in a cache


class Scores(NamedTuple):
    """The scores of a part, and what their gradient is computed from, in the working dtype.

    Attributes
    ----------
    d_out
        The gradient of the result, ``(B, H, Q, Dv)``.
    q, k, v
        Of every head, queries scaled.
    term
        What SDPA calls ``attn_mask``: ``(B or 1, H or 1, Q, K)``.
    lse
        The log-sum-exp of all scores of a row, ``(B, H, Q)``.
    mean
        The gradient of a weight, averaged over the weights of a row: ``(B, H, Q, 1)``. None if all
        keys of the row are there to average over.
    """

    d_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    term: Tensor
    lse: Tensor
    mean: Tensor | None = None

    @classmethod
    def of(
        cls, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, term: Tensor, lse: Tensor,
        *, scale: float, dtype: torch.dtype,
    ) -> Scores:  # fmt: skip
        """From the arrays of a part, as SDPA gets them."""
        group = q.shape[1] // k.shape[1]
        d_out, q, k, v, lse = (a.to(dtype) for a in (d_out, q, k, v, lse))
        if group > 1:
            k, v = (a.repeat_interleave(group, dim=1) for a in (k, v))
        return cls(d_out, q * scale, k, v, term, lse)

    def near(self, first: int, out: Tensor) -> Scores:
        """Those of the keys from ``first`` on; ``out`` is the result of all keys."""
        return self._replace(
            k=self.k[:, :, first:], v=self.v[:, :, first:], term=self.term[..., first:],
            mean=torch.linalg.vecdot(self.d_out, out[..., : self.v.shape[3]])[..., None],
        )  # fmt: skip

    def gradients(self) -> Tensor:
        """``w * (d_out @ v.T - mean)`` of the weights ``w``, ``(B, H, Q, K)``."""
        weights = self.q @ self.k.mT
        weights.add_(self.term).sub_(self.lse[..., None]).exp_()
        d_out, mean = self.d_out, self.mean
        if mean is not None:
            return (d_out @ self.v.mT).sub_(mean).mul_(weights)
        # The scores of the forward pass were rounded in another way. With weights that do not add
        # up to 1, the gradients of a row would not add up to 0, which sums over rows make worse.
        total = weights.sum(-1, keepdim=True)
        total = torch.where(total > 0, total, 1.0)
        d_weights = (d_out / total) @ self.v.mT
        mean = torch.linalg.vecdot(weights, d_weights)[..., None] / total
        return d_weights.sub_(mean).mul_(weights)

    def sums_by_distance(self, key_counts: Sequence[int]) -> Tensor:
        """Gradients summed to ``(H, Q + K - 1)`` distances; queries are in reverse order.

        The distances of several ranges of keys follow each other.
        """
        sums = []
        for few in self._by_heads():
            ranges = torch.split(few.gradients().sum(0), list(key_counts), dim=-1)
            sums.append(torch.cat([_sum_by_distance(keys) for keys in ranges], dim=-1))
        return torch.cat(sums)

    def _by_heads(self) -> Iterator[Scores]:
        batch, heads, queries, _ = self.q.shape
        step = max(1, _SCORES // max(1, batch * queries * self.k.shape[2]))
        for start in range(0, heads, step):
            few = slice(start, start + step)
            yield Scores(
                self.d_out[:, few], self.q[:, few], self.k[:, few], self.v[:, few],
                self.term if self.term.shape[1] == 1 else self.term[:, few], self.lse[:, few],
                None if self.mean is None else self.mean[:, few],
            )  # fmt: skip


def _sum_by_distance(scores: Tensor) -> Tensor:
    """``(H, Q, K)`` summed to ``(H, Q + K - 1)``: row ``i`` begins ``i`` columns later."""
    heads, queries, keys = scores.shape
    width = queries + keys - 1
    sheared = scores.new_zeros((heads, queries, width))
    sheared.as_strided(scores.shape, (queries * width, width + 1, 1)).copy_(scores)
    return sheared.sum(1)
