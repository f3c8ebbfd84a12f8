"""M-RoPE: the channel pairs of one RoPE, shared out among time, height and width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from posenc.contract.checks import check_channels, check_count
from posenc.contract.operations import constant_array, device
from posenc.contract.protocol import Array, Arrays, Namespace, PositionScheme, Role
from posenc.schemes.rope import Layout, RoPE, rotate
from posenc.schemes.scalings import Scaling

Order = Literal["chunked", "interleaved", "ernie", "hunyuan"]


@dataclass(frozen=True)
class MRoPE(PositionScheme, paper="Wang et al. 2024, arXiv 2409.12191"):
    """RoPE in which each channel pair turns by the coordinate of one axis.

    Pair ``k`` turns by ``place[axis(k)] * base**(-2k/R)``, ``k = 0 .. n - 1``, ``n = R/2``. A place
    is ``(time, height, width)``: see ``posenc.positions.mixed``, or ``hunyuan_mixed`` for that
    layout. Text has equal coordinates on all axes, and is then rotated exactly as by ``RoPE``.
    Angles are as exact as those of ``RoPE``.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``, even.
    sections
        How many pairs each axis gets, in the order that ``layout`` says; they add up to ``n``.
        Default: the proportions of the model that ``layout`` names first.
    layout
        Which axis each pair belongs to.

        - ``"chunked"``: blocks of ``sections`` pairs, one for each axis in order (Qwen2-VL
          ``16, 24, 24``; GLM-4V ``8, 12, 12``).
        - ``"interleaved"``: with ``A`` axes, axis ``a > 0`` gets the pairs ``a, a + A, ...``, as
          many as its section; axis 0 all others (Qwen3-VL ``24, 20, 20``).
        - ``"ernie"``: sections of height, width, time. Height and width take turns, then time
          follows (ERNIE 4.5 VL ``22, 22, 20``).
        - ``"hunyuan"``: blocks of ``2 * sections`` *channels*, not pairs, one for each axis in
          order (HunyuanOCR ``16, 16, 16, 16``). The two channels of a pair may get two axes. They
          are then no rotation, and scores no function of differences, as in the released model,
          unless all coordinates of a token are equal.
    base
        Base of the frequencies.
    rotary_dim
        Only the first ``R`` channels rotate, as in ``RoPE``. Default: all.
    scaling
        What changes the frequencies, as in ``RoPE``. Default: nothing.
    pairing
        Which channels pair up: ``"half"``, ``(k, k + n)``; ``"interleaved"``, ``(2k, 2k + 1)``
        (GLM-4V). It is ``layout`` of ``RoPE``. Default: ``"interleaved"`` for ``"ernie"``, else
        ``"half"``.

    Section 2.1. The other layouts are those of the models' released code.
    """

    head_dim: int
    sections: Sequence[int] | None = None
    layout: Order = "chunked"
    base: float = 10_000.0
    rotary_dim: int | None = None
    scaling: Scaling | None = None
    pairing: Layout | None = None
    _rope: RoPE = field(init=False, repr=False, compare=False)
    _axis_of: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        usual: Layout = "interleaved" if self.layout == "ernie" else "half"
        rope = RoPE(self.head_dim, self.base, self.pairing or usual, self.rotary_dim, self.scaling)
        if self.layout == "hunyuan" and rope.layout != "half":
            raise ValueError("pairing must be 'half' with layout='hunyuan', got 'interleaved'")
        pairs = len(rope.frequencies())
        given = _SECTIONS[self.layout](pairs) if self.sections is None else self.sections
        sections = _check_sections(given, pairs, rope)
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "_rope", rope)
        object.__setattr__(self, "_axis_of", _AXES[self.layout](sections))
        self._declare(axes=len(sections))

    @staticmethod
    def from_hf(
        rope_parameters: Any,
        *,
        head_dim: int | None = None,
        max_position_embeddings: int | None = None,
        layout: Order | None = None,
        pairing: Layout | None = None,
    ) -> MRoPE:
        """The scheme that a configuration of Hugging Face transformers, 4 or 5, describes.

        Parameters
        ----------
        rope_parameters, head_dim, max_position_embeddings
            As in ``RoPE.from_hf``; ``rope_parameters`` has ``mrope_section``.
        layout, pairing
            As in ``MRoPE``. A whole configuration says them by its ``model_type``. Default for
            other dictionaries: ``"interleaved"`` with ``mrope_interleaved``, ``"hunyuan"`` with
            ``xdrope_section``, else ``"chunked"``; pairs of ``RoPE.from_hf``.

        Raises
        ------
        TypeError, ValueError
            As in ``RoPE.from_hf``, or ``mrope_section`` is missing.
        """
        hf = import_module("posenc.hf")  # by name: the room is above this one
        found: MRoPE = hf.mrope_from_hf(
            rope_parameters,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            layout=layout,
            pairing=pairing,
        )
        return found

    @property
    def rope(self) -> RoPE:
        """The ``RoPE`` that rotates a token with equal coordinates, such as one of text."""
        return self._rope

    def scale(self, head_dim: int) -> float:
        return self._rope.scale(head_dim)

    def at_length(self, length: int) -> MRoPE:
        rope = self._rope.at_length(length)
        return self if rope is self._rope else replace(self, scaling=rope.scaling)

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        tables = self.tables(x, pos, params=params, xp=xp)
        turned = [
            rotate(x, tables[f"sin{n}"], tables[f"cos{n}"], layout=self._rope.layout, xp=xp)
            for n in range(len(self._axis_of))
        ]
        if len(turned) == 1:
            return turned[0]
        half = len(self._axis_of[0])
        return xp.concat([turned[0][..., :half], turned[1][..., half:]], axis=-1)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        places = pos[..., None] if self.axes == 1 else pos
        tables: dict[str, Array] = {}
        for n, axis_of in enumerate(self._axis_of):
            index = constant_array(axis_of, dtype=xp.int32, device=device(pos), xp=xp)
            at = xp.take(places, index, axis=-1)
            tables[f"sin{n}"], tables[f"cos{n}"] = self._rope.sincos(at, params, dtype=dtype, xp=xp)
        return tables


def _check_sections(given: Any, pairs: int, rope: RoPE) -> tuple[int, ...]:
    try:
        sections = tuple(check_count("sections", n, least=0) for n in given)
    except TypeError:
        raise TypeError(
            f"sections must be a number of pairs for each axis, got {given!r}"
        ) from None
    if not sections or sum(sections) != pairs:
        raise ValueError(
            f"sections must add up to {pairs}, half of the channels that rotate, got {given!r}"
        )
    return sections


def _chunked(sections: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (tuple(axis for axis, count in enumerate(sections) for _ in range(count)),)


def _interleaved(sections: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    axes, pairs = len(sections), sum(sections)
    taken = {
        axis + axes * n: axis for axis, count in enumerate(sections) if axis for n in range(count)
    }
    if max(taken, default=0) >= pairs:
        raise ValueError(
            f"sections after the first must be at most a part 1/{axes} of all with "
            f"layout='interleaved', got {sections}"
        )
    return (tuple(taken.get(pair, 0) for pair in range(pairs)),)


def _ernie(sections: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if len(sections) != 3 or sections[0] != sections[1]:
        raise ValueError(
            "sections must be (height, width, time) with as many pairs for height as for width, "
            f"with layout='ernie', got {sections}"
        )
    return ((1, 2) * sections[0] + (0,) * sections[2],)


def _hunyuan(sections: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    channels, half = _chunked(tuple(2 * count for count in sections))[0], sum(sections)
    return channels[:half], channels[half:]


_AXES: Mapping[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], ...]]] = {
    "chunked": _chunked, "interleaved": _interleaved, "ernie": _ernie, "hunyuan": _hunyuan,
}  # fmt: skip
"""The axis of each pair; for Hunyuan of each pair's first channel, then of its second."""


def _by_parts(
    part: int, whole: int, *, time_last: bool = False
) -> Callable[[int], tuple[int, ...]]:
    """``part / whole`` of the pairs for height and for width each, the rest for time."""

    def sections(pairs: int) -> tuple[int, ...]:
        count = part * pairs // whole
        rest = pairs - 2 * count
        return (count, count, rest) if time_last else (rest, count, count)

    return sections


_SECTIONS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "chunked": _by_parts(3, 8),
    "interleaved": _by_parts(5, 16),
    "ernie": _by_parts(11, 32, time_last=True),
    "hunyuan": lambda pairs: (pairs - 3 * (pairs // 4), *[pairs // 4] * 3),
}
"""Sections in the proportions of released models: of 64 pairs, exactly theirs."""
