"""A learned number per head and distance, clipped at the largest distance of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posenc.contract.fields import Count
from posenc.contract.protocol import Array, Arrays, Namespace, ParamSpec, PositionScheme, Window


@dataclass(frozen=True)
class RelativeTable(PositionScheme, relative=True, paper="Shaw et al. 2018, arXiv 1803.02155"):
    """``bias = table[h, clip(j - i, -K, K) + K]`` with ``K = max_distance``.

    The simplest learned relative bias. Vision models use it without clipping, because distances in
    a window are few (Swin: Liu et al. 2021, arXiv 2103.14030, equation 4); T5 shares numbers
    between far distances.

    Learned array: ``table (H, 2K + 1)``, normal at first, with standard deviation 0.02. With
    ``bidirectional=False``: ``table[h, clip(i - j, 0, K)]``, ``(H, K + 1)``.

    ``posenc.make("relative_table", train_len=T)`` changes the defaults for a decoder trained at
    length ``T``, so that training sees every number: ``bidirectional=False`` and
    ``max_distance=min(128, T - 1)``.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    max_distance
        The largest distance ``K`` with a number of its own; farther keys share it.
    bidirectional
        Whether keys after the query have numbers of their own. If not, they count as distance 0.
        It does not mask.

    Section 3.2 has the clipping, and learns a vector instead of a number.
    """

    num_heads: Count
    max_distance: Count = 128
    bidirectional: bool = True

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        if "train_len" not in sizes:
            return {}
        longest = max(1, sizes["train_len"] - 1)
        return {"bidirectional": False, "max_distance": min(128, longest)}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        size = 2 * self.max_distance + 1 if self.bidirectional else self.max_distance + 1
        return {"table": ParamSpec((self.num_heads, size))}

    def constant_beyond(self) -> Window:
        return self.max_distance, self.max_distance if self.bidirectional else 0

    def caution(self, *, causal: bool) -> str | None:
        if not causal or not self.bidirectional:
            return None
        return (
            "causal=True masks later keys, so half of its table is never read; "
            "RelativeTable(bidirectional=False) has numbers for earlier keys only"
        )

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array:
        if self.bidirectional:
            at = xp.clip(k - q, -self.max_distance, self.max_distance) + self.max_distance
        else:
            at = xp.clip(q - k, 0, self.max_distance)
        return params["table"][at]
