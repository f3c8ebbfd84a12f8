"""The gradient of scores, of which that of a learned bias is a sum.

Scores that are computed for it give the gradients of q, k and v as well, by three products. SDPA's
backward pass would compute the scores a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posenc_torch.weights import exp_

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
    scale, group
        The factor of queries, and how many heads shared keys and values.
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
    scale: float
    group: int
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
        return cls(d_out, q * scale, k, v, term, lse, scale, group)

    def near(self, first: int, out: Tensor) -> Scores:
        """Those of the keys from ``first`` on; ``out`` is the result of all keys."""
        return self._replace(
            k=self.k[:, :, first:], v=self.v[:, :, first:], term=self.term[..., first:],
            mean=torch.linalg.vecdot(self.d_out, out[..., : self.v.shape[3]])[..., None],
        )  # fmt: skip

    def gradients(self) -> Gradients:
        """``w * (d_out @ v.T - mean)`` of the weights ``w``, ``(B, H, Q, K)``."""
        weights = self.q @ self.k.mT
        weights = exp_(weights.add_(self.term).sub_(self.lse[..., None]))
        d_out, mean = self.d_out, self.mean
        if mean is not None:
            return Gradients((d_out @ self.v.mT).sub_(mean).mul_(weights), weights, d_out)
        # The scores of the forward pass were rounded in another way. With weights that do not add
        # up to 1, the gradients of a row would not add up to 0, which sums over rows make worse.
        total = weights.sum(-1, keepdim=True)
        total = torch.where(total > 0, total, 1.0)
        d_out = d_out / total
        d_weights = d_out @ self.v.mT
        mean = torch.linalg.vecdot(weights, d_weights)[..., None] / total
        return Gradients(d_weights.sub_(mean).mul_(weights), weights, d_out)

    def sums(self, reduce: Callable[[Gradients], Tensor], axis: int) -> Tensor:
        """The gradients of some heads at a time, reduced, and joined along the heads' axis."""
        return _joined([reduce(few.gradients()) for few in self.by_heads()], axis)

    def of_bias(self, bias: Tensor) -> tuple[Tensor, Vectors]:
        """The gradient of a bias ``(B or 1, H or 1, Q, K)``, and those of q, k and v."""
        d_bias, vectors = self.sums_and_vectors(lambda few: few.of(bias), 1)
        return d_bias.sum_to_size(bias.shape), vectors

    def sums_and_vectors(
        self, reduce: Callable[[Gradients], Tensor], axis: int
    ) -> tuple[Tensor, Vectors]:
        """The same, and the gradients of q, k and v."""
        sums: list[Tensor] = []
        vectors: list[Vectors] = []
        for few in self.by_heads():
            gradients = few.gradients()
            sums.append(reduce(gradients))
            vectors.append(gradients.of_vectors(few))
        d_q, d_k, d_v = (_joined(each, 1) for each in zip(*vectors, strict=True))
        if self.group > 1:
            batch, heads = self.k.shape[:2]
            groups = batch, heads // self.group, self.group
            d_k, d_v = (a.reshape(*groups, *a.shape[2:]).sum(2) for a in (d_k, d_v))
        return _joined(sums, axis), Vectors(d_q, d_k, d_v)

    def by_heads(self) -> Iterator[Scores]:
        """So few heads at a time that their scores stay in a cache."""
        batch, heads, queries, _ = self.q.shape
        step = max(1, _SCORES // max(1, batch * queries * self.k.shape[2]))
        if step >= heads:
            yield self
            return
        for start in range(0, heads, step):
            few = slice(start, start + step)
            yield self._replace(
                d_out=self.d_out[:, few], q=self.q[:, few], k=self.k[:, few], v=self.v[:, few],
                term=self.term if self.term.shape[1] == 1 else self.term[:, few],
                lse=self.lse[:, few], mean=None if self.mean is None else self.mean[:, few],
            )  # fmt: skip


class Vectors(NamedTuple):
    """The gradients of q, k and v: ``(B, H, Q, D)``, ``(B, H, K, D)`` and ``(B, H, K, Dv)``."""

    q: Tensor
    k: Tensor
    v: Tensor


class Gradients(NamedTuple):
    """The gradients of scores, and what those of vectors are computed from.

    Attributes
    ----------
    scores
        ``(B, H, Q, K)``.
    weights
        The weights of a row, up to a factor: ``(B, H, Q, K)``. Of near keys alone, not of a row.
    d_out
        The gradient of the result divided by that factor, ``(B, H, Q, Dv)``.
    """

    scores: Tensor
    weights: Tensor
    d_out: Tensor

    def of_vectors(self, of: Scores) -> Vectors:
        """The gradients of q, k and v, for each head."""
        d_q = (self.scores @ of.k).mul_(of.scale)
        return Vectors(d_q, self.scores.mT @ of.q, self.weights.mT @ self.d_out)

    def of(self, bias: Tensor) -> Tensor:
        """Those of scores summed to the axes of a bias, which has one head or all."""
        batch, heads, queries, keys = bias.shape
        return self.scores.sum_to_size(batch, min(heads, self.scores.shape[1]), queries, keys)


class Diagonals:
    """Sums of ``(B, H, Q, K)`` to ``(H, Q + K - 1)`` distances; queries are in reverse order.

    The distances of several ranges of keys follow each other.
    """

    def __init__(self, key_counts: Sequence[int]) -> None:
        self._key_counts = list(key_counts)
        self._sheared: dict[torch.Size, Tensor] = {}

    def sums(self, few: Gradients) -> Tensor:
        """Those of the gradients of scores."""
        scores = few.scores[0] if few.scores.shape[0] == 1 else few.scores.sum(0)
        ranges = torch.split(scores, self._key_counts, dim=-1)
        return _joined([self._sums(keys) for keys in ranges], -1)

    def _sums(self, scores: Tensor) -> Tensor:
        """Row ``i`` begins ``i`` columns later. Around the scores the array stays 0."""
        heads, queries, keys = scores.shape
        width = queries + keys - 1
        if scores.shape not in self._sheared:
            self._sheared[scores.shape] = scores.new_zeros((heads, queries, width))
        sheared = self._sheared[scores.shape]
        sheared.as_strided(scores.shape, (queries * width, width + 1, 1)).copy_(scores)
        return sheared.sum(1)


def _joined(arrays: Sequence[Tensor], axis: int) -> Tensor:
    return arrays[0] if len(arrays) == 1 else torch.cat(list(arrays), dim=axis)
