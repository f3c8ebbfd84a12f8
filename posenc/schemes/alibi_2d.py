"""2-D ALiBi: a penalty linear in the distance between two patches of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posenc.contract.protocol import Array, Namespace, ParamSpec, PositionScheme
from posenc.schemes.alibi import ALiBi

Metric = Literal["euclidean", "city_block"]


@dataclass(frozen=True)
class ALiBi2D(
    PositionScheme, axes=2, relative=True, paper="Fuller, Millard, Green 2023, arXiv 2311.00566"
):
    """``bias = -m_h * distance(place_i, place_j)`` on two axes, with the slopes of ``ALiBi``.

    Text, with the same coordinate on each axis, has the bias of ``ALiBi`` times ``sqrt(2)``
    (Euclidean) or 2 (city block).

    Parameters
    ----------
    num_heads
        Number of heads ``H``.
    metric
        ``"euclidean"``: the length of the straight line (CROMA); ``"city_block"``: rows plus
        columns.
    slopes
        As in ``ALiBi``: ``"paper"``, ``"geometric"``, or one number per head.
    learned
        Whether the slopes are a learned array ``slopes (H,)`` that starts from these values.

    The city block is not in the paper.
    """

    num_heads: int
    metric: Metric = "euclidean"
    slopes: str | Sequence[float] = "paper"
    learned: bool = False
    _alibi: ALiBi = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        alibi = ALiBi(self.num_heads, self.slopes, learned=self.learned)
        object.__setattr__(self, "slopes", alibi.slopes)
        object.__setattr__(self, "_alibi", alibi)

    def head_slopes(self) -> tuple[float, ...]:
        """The slope of each head."""
        return self._alibi.head_slopes()

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return self._alibi.param_specs()

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return self._alibi.constants()

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        m, sides = params["slopes"], (params.query["places"], params.key["places"])
        rows, columns = (xp.astype(xp.abs(sides[0][a] - sides[1][a]), m.dtype) for a in (0, 1))
        if self.metric == "city_block":
            return -m * (rows + columns)
        return -m * xp.sqrt(rows * rows + columns * columns)
