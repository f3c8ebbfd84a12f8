"""DeBERTa's disentangled attention: content scores relative position, from both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from posenc.contract.checks import check_channels, check_count
from posenc.contract.fields import Count
from posenc.contract.operations import constant_array, device
from posenc.contract.protocol import PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec

Terms = Literal["both", "c2p", "p2c"]


@dataclass(frozen=True)
class DeBERTa(PositionScheme, relative=True, paper="He et al. 2020, arXiv 2006.03654"):
    """``(q_i . k_j + q_i . p_k[r] + k_j . p_q[r]) / sqrt(3 D)`` with ``r = row(i - j)``.

    ``row(n) = clip(b(n) + B, 0, 2B - 1)`` with ``B`` buckets per direction. ``b(n) = n`` up to
    ``m = B // 2``; beyond it ``b(n) = m + ceil(ln(n / m) / ln((max_distance - 1) / m) (m - 1))``,
    and ``b(-n) = -b(n)``. It is computed in integers, so all frameworks agree; transformers uses
    float32, and its rows are the same up to a distance of ``2**20``.

    Learned arrays: ``p_k (H, 2B, D)`` and ``p_q (H, 2B, D)``, normal at first with standard
    deviation 0.02. They are projected already: in a checkpoint ``p_k`` is the key projection of the
    table of relative embeddings (after its norm), ``p_q`` the query projection. The paper's
    equation 4 has ``b(j - i)`` in its last term; the released code has ``b(i - j)`` in both.

    A query and a key need ``2 max_distance + 1`` numbers per head each, so memory is linear in
    their number. With grouped queries, queries of a group score one key by ``p_q`` of their own.

    ``posenc.make("deberta", train_len=T)`` changes the defaults to ``max_distance=min(512, T)``,
    at least 4, and half as many buckets, so that training sees them.

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    head_dim
        Channels per head, ``D``.
    buckets
        ``B``, even. None: a row for each distance below ``max_distance``, as in DeBERTa v1; then
        ``B = max_distance``.
    max_distance
        From this distance on, keys share the last bucket.
    terms
        ``"c2p"``: queries score positions. ``"p2c"``: keys score positions. ``"both"``. Scores are
        divided by ``sqrt(3 D)`` with both, by ``sqrt(2 D)`` with one.

    Equations 3 and 4. The buckets are those of the authors' code of DeBERTa v2 and v3 (arXiv
    2111.09543).
    """

    num_heads: Count
    head_dim: Count
    buckets: int | None = 256
    max_distance: Count = 512
    terms: Terms = "both"
    _rows: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size, far = self.max_distance, list(range(self.max_distance + 1))
        if self.buckets is not None:
            size = check_count("buckets", self.buckets, least=2)
            if size % 2:
                raise ValueError(f"buckets must be even, got {size}")
            if self.max_distance <= size // 2 + 1:
                raise ValueError(
                    f"max_distance must exceed buckets // 2 + 1 = {size // 2 + 1}, "
                    f"got {self.max_distance}"
                )
            far = _buckets(size // 2, self.max_distance)
        signed = [*(-b for b in reversed(far)), *far[1:]]
        rows = tuple(min(max(b + size, 0), 2 * size - 1) for b in signed)
        object.__setattr__(self, "_rows", rows)

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        """Default options for the sizes of a model: distances that training sees."""
        if "train_len" not in sizes:
            return {}
        longest = max(4, min(512, sizes["train_len"]))
        return {"max_distance": longest, "buckets": longest // 4 * 2}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        size = self.max_distance if self.buckets is None else self.buckets
        spec = ParamSpec((self.num_heads, 2 * size, self.head_dim))
        names = {"c2p": ("p_k",), "p2c": ("p_q",)}.get(self.terms, ("p_k", "p_q"))
        return dict.fromkeys(names, spec)

    def scale(self, head_dim: int) -> float:
        return 1 / math.sqrt((3 if self.terms == "both" else 2) * head_dim)

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        specs = {
            "c2p": FeatureSpec(self._c2p, of="query", reads="vectors"),
            "p2c": FeatureSpec(self._p2c, of="key", reads="vectors"),
        }
        return specs if self.terms == "both" else {self.terms: specs[self.terms]}

    def _c2p(self, q: Array, pos: Array, *, scale: float, params: Arrays, xp: Namespace) -> Array:
        return scale * xp.matmul(q, self._of_distances("q", q, params["p_k"], xp))

    def _p2c(self, k: Array, pos: Array, *, scale: float, params: Arrays, xp: Namespace) -> Array:
        positions = self._of_distances("k", k, params["p_q"], xp)
        heads = params["p_q"].shape[0]
        if k.shape[1] != heads:
            k = xp.repeat(k, heads // k.shape[1], axis=1)
        return scale * xp.matmul(k, positions)

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        at = xp.clip(q - k, -self.max_distance, self.max_distance) + self.max_distance
        if self.terms == "c2p":
            return params.query["c2p"][at]
        if self.terms == "p2c":
            return params.key["p2c"][at]
        return params.query["c2p"][at] + params.key["p2c"][at]

    def _of_distances(self, name: str, vectors: Array, table: Array, xp: Namespace) -> Array:
        """The rows of a table for distances ``-max_distance .. max_distance``, ``(H, D, M)``."""
        check_channels(name, vectors, self.head_dim)
        index = xp.arange(1).dtype
        rows = constant_array(self._rows, dtype=index, device=device(vectors), xp=xp)[:, None]
        # Not take: its gradient in PyTorch is wrong where heads are split over processes.
        rows = xp.broadcast_to(rows, (table.shape[0], rows.shape[0], table.shape[2]))
        return xp.matrix_transpose(xp.take_along_axis(table, rows, axis=1))


def _buckets(exact: int, max_distance: int) -> list[int]:
    """``b(0) .. b(max_distance)``, in exact integers.

    With ``m = exact``, ``b(n)`` is ``m + t`` for the smallest ``t`` with
    ``n**(m - 1) * m**t <= m**(m - 1) * (max_distance - 1)**t``.
    """
    found, t = list(range(exact + 1)), 0
    for n in range(exact + 1, max_distance + 1):
        while n ** (exact - 1) * exact**t > exact ** (exact - 1) * (max_distance - 1) ** t:
            t += 1
        found.append(exact + t)
    return found
