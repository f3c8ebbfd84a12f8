"""RoPE: rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posenc.angles.fixed import Turns
from posenc.contract.checks import check_channels
from posenc.contract.fields import Count, Positive
from posenc.contract.operations import rotated
from posenc.contract.protocol import Array, Arrays, Namespace, PositionScheme, Role
from posenc.schemes.rope_of_hf import OfHuggingFace
from posenc.schemes.scalings import Proportional, Scaling

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class RoPE(OfHuggingFace, PositionScheme, paper="Su et al. 2021, arXiv 2104.09864"):
    """Rotation of channel pairs by ``pos * base**(-2k/R)``, ``k = 0 .. R/2 - 1``.

    The dot product of a query and a key then depends on positions only through the difference.

    Parameters
    ----------
    head_dim
        Channels per head, ``D``, even.
    base
        Base of the frequencies.
    layout
        Which channels pair up: ``"half"``, ``(k, k + R/2)`` (HF Llama, NeoX); ``"interleaved"``,
        ``(2k, 2k + 1)`` (Meta Llama, GPT-J).
    rotary_dim
        Only the first ``R`` channels rotate (GPT-J, NeoX); even, at most ``D``. Default: all.
    scaling
        What changes the frequencies, as ``posenc.schemes.YaRN(factor=4, train_len=4096)``. Default:
        nothing.

    Equation 34.
    """

    head_dim: Count
    base: Positive = 10_000.0
    layout: Layout = "half"
    rotary_dim: Count | None = None
    scaling: Scaling | None = None
    _turns: Turns = field(init=False, repr=False, compare=False)
    _frequencies: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _factors: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name, dim = "head_dim", self.head_dim
        if self.rotary_dim is not None:
            name, dim = "rotary_dim", self.rotary_dim
        if dim % 2:
            raise ValueError(f"{name} must be even, got {dim}: rotation acts on pairs of channels")
        if dim > self.head_dim:
            raise ValueError(f"rotary_dim must be at most head_dim={self.head_dim}, got {dim}")
        scaling = Scaling() if self.scaling is None else self.scaling
        if not isinstance(scaling, Scaling):
            named = f"; by name it is a scheme, as rope_{scaling}" if type(scaling) is str else ""
            raise TypeError(
                "scaling must be a Scaling of posenc.schemes, such as PI(factor=4), or None, "
                f"got {scaling!r}{named}"
            )
        if isinstance(scaling, Proportional) and dim < self.head_dim:
            raise ValueError(
                "rotary_dim must be None with Proportional, whose pairs are those of the whole "
                f"head, got {dim}"
            )
        exact = scaling.frequencies(self.base, dim)
        # Computed here, because a compiler of transforms and scales traces no constructions.
        object.__setattr__(self, "_turns", Turns(exact))
        object.__setattr__(self, "_frequencies", tuple(map(float, exact)))
        object.__setattr__(self, "_factors", (scaling.amplitude, scaling.score_factor))

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines; 1.0 in most scalings."""
        return self._factors[0]

    def frequencies(self) -> tuple[float, ...]:
        """The ``R/2`` scaled frequencies, in radians per position."""
        return self._frequencies

    def scale(self, head_dim: int) -> float:
        return super().scale(head_dim) * self._factors[1]

    def at_length(self, length: int) -> RoPE:
        if self.scaling is None:
            return self
        scaling = self.scaling.at_length(length)
        return self if scaling is self.scaling else replace(self, scaling=scaling)

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        check_channels("x", x, self.head_dim)
        tables = self.tables(x, pos, params=params, xp=xp)
        return rotate(x, tables["sin"], tables["cos"], layout=self.layout, xp=xp)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        sin, cos = self.sincos(pos[..., None], params, dtype=dtype, xp=xp)
        return {"sin": sin, "cos": cos}

    def sincos(
        self, pos: Array, params: Arrays, *, dtype: Any, xp: Namespace
    ) -> tuple[Array, Array]:
        """Sines and cosines ``(..., R/2)`` at ``pos (..., 1)``, or at ``(..., R/2)``, one a pair.

        They are times the factor of the scaling.
        """
        sin, cos = self._turns.sincos_each(pos, dtype=dtype, xp=xp)
        factor = self.attention_factor
        return (sin, cos) if factor == 1 else (factor * sin, factor * cos)


def check_heads(x: Array, heads: int, name: str) -> None:
    """Check that ``x (..., L, D)`` has the heads of angles that are per head of the queries."""
    if len(x.shape) < 3 or x.shape[-3] != heads:
        raise ValueError(
            f"x {tuple(x.shape)} must have the {heads} heads of the angles: {name} turns the keys "
            "of each query head by its own; repeat k and v"
        )


def rotate(x: Array, sin: Array, cos: Array, *, layout: Layout, xp: Namespace) -> Array:
    """Rotate the first ``2n`` channels of ``x (..., D)`` by angles with these sines ``(..., n)``.

    It is computed in the dtype of the sines; the cast to that of ``x`` is the last step.
    """
    width = 2 * sin.shape[-1]
    part = x if width == x.shape[-1] else x[..., :width]
    part = xp.astype(part, sin.dtype, copy=False)
    turned = rotated(part, sin, cos, interleaved=layout == "interleaved", xp=xp)
    if turned is None:
        turned = _LAYOUTS[layout](part, sin, cos, xp)
    turned = xp.astype(turned, x.dtype, copy=False)
    return turned if width == x.shape[-1] else xp.concat([turned, x[..., width:]], axis=-1)


def _half(x: Array, sin: Array, cos: Array, xp: Namespace) -> Array:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return xp.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _interleaved(x: Array, sin: Array, cos: Array, xp: Namespace) -> Array:
    # Compilers read pairs faster than every second channel.
    pairs = xp.reshape(x, (*x.shape[:-1], x.shape[-1] // 2, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = xp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return xp.reshape(turned, x.shape)


_LAYOUTS = {"half": _half, "interleaved": _interleaved}
