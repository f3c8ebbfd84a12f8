"""``Mask``: which keys a query sees, beside their segments; masks of callers and their parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

from posenc.apply.shapes import as_column, as_row, common_size
from posenc.contract.checks import check_count, check_flag, check_window
from posenc.contract.fields import check_equality
from posenc.contract.protocol import Array, Namespace, Window
from posenc.contract.tokens import Tokens
from posenc.positions.integers import visible

MaskFunction: TypeAlias = Callable[..., Array]


class Blocks(NamedTuple):
    """The lowest and the highest position in each block of tokens, as arrays that broadcast.

    Those of queries are ``(B or 1, n, 1)``, and those of keys ``(B or 1, 1, m)``.
    """

    low: Array
    high: Array


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees. ``a & b`` shows what both show.

    ``causal=True``, ``window=`` and ``mask=`` of ``attention`` are combined by ``&`` too. Segments
    and padding are facts of ``Tokens``, and hide in addition.

    A mask of your own is a frozen dataclass that inherits from this class, whose ``==`` compares
    all of its fields. It defines ``pairs``, and ``blocks`` if implementations shall skip what it
    hides::

        @dataclass(frozen=True)
        class Dilated(posenc.Mask):
            step: int

            def pairs(self, q, k, xp):
                return (q.pos - k.pos) % self.step == 0

    Attributes
    ----------
    causal
        A query sees only keys at ``k_pos <= q_pos``.
    left, right
        A query sees only keys at ``-left <= k_pos - q_pos <= right``; None for no bound.
    first_tokens
        Keys at positions ``0 .. first_tokens - 1`` of the query's segment are inside the window
        ``left, right``, wherever the query is (StreamingLLM). No effect without a window.
    function
        An elementwise function of ``(q_pos, k_pos)`` or of ``(q_pos, k_pos, q_seg, k_seg)``: True
        where a query sees a key. It must be pure: a backward pass may call it again. In JAX it is
        static: a new function compiles again, and ``chunked`` serves none that reads a traced
        value.
    array
        Booleans ``(B or 1, H or 1, Q, K)``, True where a query sees a key.
    parts
        Further masks, all of which must show a key; ``&`` puts them there.
    """

    __array_ufunc__: ClassVar[None] = None  # so that NumPy leaves "array & mask" to the mask

    causal: bool = False
    left: int | None = None
    right: int | None = None
    first_tokens: int = 0
    function: MaskFunction | None = None
    array: Array | None = None
    parts: tuple[Mask, ...] = ()

    def __and__(self, other: Any) -> Mask:
        if not isinstance(other, Mask) and not callable(other) and not hasattr(other, "dtype"):
            return NotImplemented
        return _join(normal(self), normal(as_mask(other)))

    def __rand__(self, other: Any) -> Mask:
        return as_mask(other) & self

    @property
    def window(self) -> Window | None:
        """``(left, right)``; None if neither is a bound."""
        return None if self.left is None and self.right is None else (self.left, self.right)

    @property
    def plain(self) -> bool:
        """Whether it is at most causal, with a window and first tokens."""
        return self.array is None and self.function is None and not self.parts

    def pairs(self, q: Tokens, k: Tokens, xp: Namespace) -> Array | None:
        """Whether a query sees a key, elementwise; None if every query sees every key.

        ``pos`` and ``seg`` of ``q`` and of ``k`` broadcast against each other: ``(..., Q, 1)`` and
        ``(..., 1, K)``, or, inside a kernel, one number each. ``seg`` is None without segments.
        """
        seen: Array | None = visible(
            q.pos, k.pos,
            causal=self.causal, window=self.window, first_tokens=self.first_tokens,
        )  # fmt: skip
        whole = normal(self)
        terms = [part.pairs(q, k, xp) for part in whole.parts]
        for term in (*terms, whole.array):
            if term is not None:
                seen = term if seen is None else seen & term
        return seen

    def blocks(self, q: Blocks, k: Blocks) -> tuple[Array | None, Array | None]:
        """Which blocks of queries and keys have a visible pair, and in which all pairs are.

        ``(some, every)``, booleans for each pair of blocks. ``some`` may be True without need, and
        ``every`` False; None says so for all blocks. Implementations skip a block only where
        ``some`` is False. The default of a mask of your own is ``(None, None)``.
        """
        if type(self).pairs is not Mask.pairs:
            return None, None
        some = every = (q.low <= k.high) | True
        if self.causal:
            some, every = some & (k.low <= q.high), every & (k.high <= q.low)
        if (window := self.window) is not None:
            any_inside, all_inside = _inside(q.low - k.high, q.high - k.low, window, some)
            if self.first_tokens:
                any_inside = any_inside | ((k.high >= 0) & (k.low < self.first_tokens))
                all_inside = all_inside | ((k.low >= 0) & (k.high < self.first_tokens))
            some, every = some & any_inside, every & all_inside
        whole = normal(self)
        for part in whole.parts:
            of_part, all_of_part = part.blocks(q, k)
            some = some if of_part is None else some & of_part
            every = every & (False if all_of_part is None else all_of_part)
        return some, every if whole.array is None else every & False

    def offsets(self) -> Window:
        """``(left, right)``: hidden are all keys outside ``-left <= k_pos - q_pos <= right``."""
        if type(self).pairs is not Mask.pairs:
            return None, None
        left, right = self.left, self.right
        if self.first_tokens:
            left = right = None
        right = _least(right, 0 if self.causal else None)
        for part in self.parts:
            own = part.offsets()
            left, right = _least(left, own[0]), _least(right, own[1])
        return left, right


@dataclass(frozen=True)
class _Function(Mask):
    """A mask as a function of positions, or of positions and segments."""

    of: MaskFunction
    with_segments: bool

    def pairs(self, q: Tokens, k: Tokens, xp: Namespace) -> Array:
        segments = (q.seg, k.seg) if self.with_segments else ()
        seen: Array = self.of(q.pos, k.pos, *segments)
        return seen


def is_function(mask: Mask) -> bool:
    """Whether a part of a mask is a function of the caller."""
    return isinstance(mask, _Function)


causal = Mask(causal=True)
"""A query sees only keys at ``k_pos <= q_pos``."""


def window(size: int | Window, *, first: int = 0) -> Mask:
    """A window: ``W`` for ``|q_pos - k_pos| < W``, or ``(left, right)`` as in ``Mask``.

    ``first`` tokens of the query's segment are inside it too, wherever the query is (StreamingLLM).

    >>> window(4).window
    (3, 3)
    """
    left, right = check_window(size) or (None, None)
    return Mask(left=left, right=right, first_tokens=check_count("first", first, least=0))


def as_mask(given: Any) -> Mask:
    """A mask from ``mask=``: a ``Mask``, a function, booleans, or None."""
    if isinstance(given, Mask):
        return given
    if given is None:
        return _ALL
    if callable(given) and not hasattr(given, "dtype"):
        return Mask(function=given)
    return Mask(array=given)


_ALL = Mask()
_STANDARD = tuple(each.name for each in fields(Mask))


def normal(mask: Mask) -> Mask:
    """The same mask with a function, and a mask of the caller's own, among its ``parts``."""
    own = type(mask).pairs is not Mask.pairs
    if not own and mask.function is None:
        return mask
    parts = mask.parts
    if mask.function is not None:
        parts = (*parts, _as_part(mask.function))
    if own:
        _check_own(mask)
        parts = (*parts, mask)
    return Mask(
        causal=mask.causal, left=mask.left, right=mask.right, first_tokens=mask.first_tokens,
        array=mask.array, parts=parts,
    )  # fmt: skip


def complete_mask(causal_flag: Any, size: Any, given: Any) -> Mask:
    """The mask of a call: ``causal=``, ``window=`` and ``mask=`` in one, in normal form."""
    left, right = check_window(size) or (None, None)
    short = Mask(causal=check_flag("causal", causal_flag), left=left, right=right)
    if given is None:
        return short
    whole = normal(as_mask(given))
    check_flag("mask.causal", whole.causal)
    check_window((whole.left, whole.right))
    # Positions are below 2**30, and a larger number may not fit 32 bits.
    first = min(check_count("mask.first_tokens", whole.first_tokens, least=0), 2**30)
    if first != whole.first_tokens:
        whole = replace(whole, first_tokens=first)
    return _join(short, whole)


def _join(a: Mask, b: Mask) -> Mask:
    """What two masks in normal form both show."""
    parts = (*a.parts, *b.parts)
    first, bounds = a.first_tokens or b.first_tokens, (a.left, a.right)
    if a.window is None:
        first, bounds = b.first_tokens, (b.left, b.right)
    elif b.window is None:
        first = a.first_tokens
    elif a.first_tokens or b.first_tokens:  # two windows, whose first tokens are not of both
        first = a.first_tokens
        parts = (*parts, Mask(left=b.left, right=b.right, first_tokens=b.first_tokens))
    else:
        bounds = _least(a.left, b.left), _least(a.right, b.right)
    array = b.array if a.array is None else a.array if b.array is None else a.array & b.array
    return Mask(
        causal=a.causal or b.causal, left=bounds[0], right=bounds[1], first_tokens=first,
        array=array, parts=parts,
    )  # fmt: skip


def _least(a: int | None, b: int | None) -> int | None:
    """The lesser of two bounds; None is no bound."""
    return a if b is None else b if a is None else min(a, b)


def _check_own(mask: Mask) -> None:
    """Refuse a class whose equality does not see its own fields: calls would mix its masks up."""
    kind = type(mask)
    if "__dataclass_fields__" not in vars(kind) and set(vars(mask)) > set(_STANDARD):
        raise TypeError(
            f"mask: {kind.__name__} must be a frozen dataclass, so that masks with other values "
            "are not equal; decorate it with @dataclass(frozen=True)"
        )
    check_equality("mask", mask)


def _inside(low: Array, high: Array, window: Window, like: Array) -> tuple[Array, Array]:
    """Whether any, and whether all of ``q_pos - k_pos`` in ``low .. high`` are inside a window."""
    left, right = window
    any_inside = all_inside = like | True
    if left is not None:
        any_inside, all_inside = any_inside & (low <= left), all_inside & (high <= left)
    if right is not None:
        any_inside, all_inside = any_inside & (high >= -right), all_inside & (low >= -right)
    return any_inside, all_inside


def _as_part(function: MaskFunction) -> _Function:
    """A function of two or four arguments as a part of a mask."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C, such as torch.ge
        return _Function(function, False)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        name for name, p in signature.parameters.items()
        if p.kind in kinds and p.default is inspect.Parameter.empty
    ]  # fmt: skip
    if len(needed) not in (2, 4):
        raise ValueError(
            f"mask must be booleans (B or 1, H or 1, Q, K), or a function of (q_pos, k_pos) or of "
            f"(q_pos, k_pos, q_seg, k_seg), got a function of {len(needed)} arguments: {signature}"
        )
    if needed[0] in ("b", "b_idx", "batch", "batch_idx"):
        raise ValueError(
            f"mask must be a function of (q_pos, k_pos) or of (q_pos, k_pos, q_seg, k_seg), got "
            f"{signature}: leave out batch and head of FlexAttention's mask_mod"
        )
    return _Function(function, len(needed) == 4)


def as_columns(tokens: Tokens) -> Tokens:
    """Positions and segments ``(L,)`` or ``(B, L)`` of queries, for ``Mask.pairs``."""
    return Tokens(as_column(tokens.pos), None if tokens.seg is None else as_column(tokens.seg))


def as_rows(tokens: Tokens) -> Tokens:
    """Positions and segments ``(L,)`` or ``(B, L)`` of keys, for ``Mask.pairs``."""
    return Tokens(as_row(tokens.pos), None if tokens.seg is None else as_row(tokens.seg))


def check_parts(mask: Mask, query: Tokens, key: Tokens, xp: Namespace) -> None:
    """Check each part on the first query and key: it returns one boolean for each pair."""
    q, k = (side.select(slice(0, 1)) for side in (query, key))
    has_segments = q.seg is not None and k.seg is not None
    at = (as_columns(q), as_rows(k)) if has_segments else (
        Tokens(as_column(q.pos)), Tokens(as_row(k.pos))
    )  # fmt: skip
    batches = [a.shape[0] for a in (q.pos, k.pos, q.seg, k.seg) if a is not None and a.ndim == 2]
    for part in mask.parts:
        if isinstance(part, _Function) and part.with_segments and not has_segments:
            raise ValueError(
                "mask is a function of (q_pos, k_pos, q_seg, k_seg), but there are no segments: "
                "give tokens with seg, or a function of (q_pos, k_pos)"
            )
        _check_pairs(part, at, common_size(*batches), xp)


def _check_pairs(part: Mask, at: tuple[Tokens, Tokens], batch: int, xp: Namespace) -> None:
    result: Any = part.pairs(*at, xp)
    if result is None and not is_function(part):
        return
    if not hasattr(result, "dtype") or not xp.isdtype(result.dtype, "bool"):
        kind = getattr(result, "dtype", type(result).__name__)
        raise TypeError(
            f"mask must return booleans, True where a query sees a key, got {kind}; "
            "numbers to add to scores are bias="
        )
    shape, largest = tuple(result.shape), (batch, 1, 1, 1)
    fits = len(shape) <= 4 and all(
        have in (1, want) for have, want in zip(reversed(shape), reversed(largest), strict=False)
    )
    if not fits:
        raise ValueError(
            "mask must return one boolean for each pair of positions, elementwise; for one query "
            f"and one key it returned shape {shape}"
        )
