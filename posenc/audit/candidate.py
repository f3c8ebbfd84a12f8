"""``Candidate``: somebody's implementation of a scheme, as an audit calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from posenc.contract.protocol import PositionScheme

Kind = Literal["rotation", "bias", "attention", "embedding"]
KINDS: tuple[str, ...] = get_args(Kind)


class CannotExpressError(Exception):
    """The implementation has no option for what is asked; the message says which."""


def said(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


@dataclass(frozen=True)
class Sizes:
    """Sizes that a function is made for."""

    num_heads: int
    head_dim: int
    max_len: int


@dataclass(frozen=True)
class Candidate:
    """An implementation of one scheme.

    Attributes
    ----------
    make
        ``make(sizes) -> function``. It raises ``CannotExpressError`` for sizes that the
        implementation does not have. The function has the form of its ``kind``:

        * rotation: ``f(x, pos)``, ``x (B, H, L, D)`` and ``pos (B, L)`` integers, to ``x``'s shape;
        * bias: ``f(num_heads, q_pos, k_pos) -> (H, Q, K)``, positions ``(Q,)`` and ``(K,)``;
        * attention: ``f(q, k, v, ...)``, ``(B, H, L, D)``, whose further parameters are given by
          name, those of them that it has;
        * embedding: ``f(pos)``, ``pos (B, L)``, to ``(B, L, D)``, ``D = num_heads * head_dim``; or
          to ``(L, D)``, if it has one row alone.
    scheme
        ``scheme(sizes)`` is the definition that it should equal.
    label
        The definition as a label of ``posenc compare``.
    framework
        ``numpy``, ``torch`` or ``jax``: whose arrays it takes.
    library, version, subject, path
        See ``Record``.
    params
        Learned arrays of the definition, by name, or a function from sizes to these. Default:
        ``posenc.audit.gold.drawn_params(scheme)``, which an adapter loads into its module. A
        function that has a parameter of such a name is given the array.
    reproducer
        Python that makes ``f``, in which ``{num_heads}``, ``{head_dim}`` and ``{max_len}`` stand
        for sizes; the audit appends a call.
    dtypes
        Dtypes of its arrays.
    differentiable
        Whether gradients are audited, too.
    window
        The window of an attention; its label ends with it, as ``alibi@512``.
    pinned
        Sizes that it has alone, as ``{"head_dim": 128}``; the grid is asked at these.
    """

    make: Callable[[Sizes], Callable[..., Any]]
    kind: Kind
    scheme: Callable[[Sizes], PositionScheme]
    label: str
    framework: str = "numpy"
    library: str = ""
    version: str = ""
    subject: str = ""
    path: str = "eager"
    params: Mapping[str, Any] | Callable[[Sizes], Mapping[str, Any]] = field(default_factory=dict)
    reproducer: str = ""
    dtypes: tuple[str, ...] = ("float32",)
    differentiable: bool = True
    window: int | None = None
    pinned: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
