"""T5 relative bias: a learned number per head and bucket of relative position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc.contract.checks import check_count
from posenc.contract.fields import Count
from posenc.contract.protocol import Array, Arrays, Namespace, ParamSpec, PositionScheme, Window


@dataclass(frozen=True)
class T5Bias(
    PositionScheme,
    relative=True,
    shared=True,
    paper="Raffel et al. 2020, arXiv 1910.10683",
):
    """``bias = table[h, bucket(j - i)]``, ``table`` of shape ``(num_heads, num_buckets)``.

    HF and fairseq store the table as ``(num_buckets, num_heads)``: transpose it. If both numbers
    are equal, the mistake cannot be detected.

    With ``B`` buckets per direction and ``E = B // 2``, a distance ``n < E`` has bucket ``n``. A
    larger one has bucket ``min(B - 1, E + floor(ln(n/E) / ln(max_distance/E) * (B - E)))``. The
    code compares distances with integer thresholds, so all frameworks agree exactly.

    ``posenc.make("t5", train_len=T)`` changes the defaults for a decoder trained at length ``T``,
    so that training sees every bucket: ``causal=True``, ``num_buckets=min(32, T)``,
    ``max_distance=T``. The class and ``make`` without ``train_len`` have the defaults below.

    Parameters
    ----------
    num_heads
        Number of heads ``H``; the learned ``table`` is ``(H, num_buckets)``.
    num_buckets
        Number of buckets. Unless ``causal``, half are for keys up to the query and half for keys
        after it.
    max_distance
        The last bucket begins somewhat below this distance. Keep it within the training length:
        buckets of distances that training never sees keep their random initial values.
    causal
        Whether all buckets are for keys up to the query; later keys count as distance 0. It does
        not mask.
    scaled
        Whether scores are multiplied by ``1/sqrt(D)``. T5 checkpoints need False.

    Section 2.1.
    """

    num_heads: Count
    num_buckets: int = 32
    max_distance: Count = 128
    causal: bool = False
    scaled: bool = True
    _thresholds: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("num_buckets", self.num_buckets, least=2 if self.causal else 4)
        if not self.causal and self.num_buckets % 2:
            raise ValueError(f"num_buckets must be even unless causal, got {self.num_buckets}")
        exact = self._per_direction // 2
        if self.max_distance <= exact:
            raise ValueError(
                f"max_distance must exceed {exact}, the number of distances with a bucket each, "
                f"got {self.max_distance}"
            )
        object.__setattr__(
            self, "_thresholds", _thresholds(self._per_direction, exact, self.max_distance)
        )

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        """Default options for the sizes of a model: with ``train_len``, those of a decoder."""
        if "train_len" not in sizes:
            return {}
        # At least 2: fewer causal buckets are an error, as is max_distance of half their number.
        train_len = max(2, sizes["train_len"])
        return {"causal": True, "num_buckets": min(32, train_len), "max_distance": train_len}

    @property
    def _per_direction(self) -> int:
        """Buckets for one direction; a causal scheme has one direction."""
        return self.num_buckets if self.causal else self.num_buckets // 2

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {"table": ParamSpec((self.num_heads, self.num_buckets))}

    def caution(self, *, causal: bool) -> str | None:
        if not causal or self.causal:
            return None
        return (
            "causal=True masks later keys, so half of its buckets are never read; "
            "T5Bias(causal=True) uses all buckets for earlier keys, as decoders and "
            "`posenc compare` do"
        )

    def scale(self, head_dim: int) -> float:
        return super().scale(head_dim) if self.scaled else 1.0

    def constant_beyond(self) -> Window:
        last = (self._per_direction // 2, *self._thresholds)[-1]
        return last, 0 if self.causal else last

    def bucket(self, rel: Array, *, xp: Namespace) -> Array:
        """The bucket of a relative position ``rel = k_pos - q_pos``, in its shape and dtype."""
        later = rel > 0
        zero = xp.zeros_like(rel)
        distance = xp.where(later, zero, -rel) if self.causal else xp.abs(rel)
        exact = self._per_direction // 2
        bucket = xp.where(distance < exact, distance, zero + exact)
        for threshold in self._thresholds:
            bucket = bucket + xp.astype(distance >= threshold, rel.dtype)
        if self.causal:
            return bucket
        return bucket + xp.where(later, zero + self._per_direction, zero)

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        return params["table"][self.bucket(k - q, xp=xp)]


def _thresholds(buckets: int, exact: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket ``exact + t`` for ``t >= 1``, in exact integers.

    It is the smallest ``n`` with ``n**w * exact**t >= exact**w * max_distance**t``, where
    ``w = buckets - exact``.
    """
    width = buckets - exact

    def smallest(t: int) -> int:
        low, high = exact, max_distance
        while low < high:
            middle = (low + high) // 2
            reached = middle**width * exact**t >= exact**width * max_distance**t
            low, high = (low, middle) if reached else (middle + 1, high)
        return low

    return tuple(smallest(t) for t in range(1, width))
