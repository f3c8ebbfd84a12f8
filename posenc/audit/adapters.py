"""What an adapter of a library is made of: candidates, and which positions a library can take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from posenc.audit.candidate import Candidate, CannotExpressError, Sizes
from posenc.audit.candidate import Kind as Kind  # for adapters
from posenc.contract.protocol import PositionScheme
from posenc.schemes import ALiBi, NoPE
from posenc.testing.framework import Host


def candidate(
    library: str,
    subject: str,
    label: str,
    kind: Kind,
    make: Callable[[Sizes], Callable[..., Any]],
    scheme: Callable[[Sizes], PositionScheme] | None = None,
    *,
    framework: str,
    **more: Any,
) -> Candidate:
    """A candidate of a library of which the installed version is named.

    ``scheme`` is by default what the label defines; ``more`` are other fields of the candidate.
    """
    from posenc.audit.labels import definition, window_of

    return Candidate(
        make, kind, scheme or (lambda sizes: scheme_of(label, sizes)), label, framework,
        library=library, version=version(library), subject=subject, window=window_of(label),
        pinned=definition(label).pinned if label else {}, **more,
    )  # fmt: skip


def lacking(
    library: str, subject: str, why: str, label: str = "", *, framework: str = "numpy"
) -> Candidate:
    """A row that says why nothing is compared: posenc or the library has no such scheme."""

    def make(sizes: Sizes) -> Callable[..., Any]:
        raise CannotExpressError(why)

    return candidate(
        library, subject, label, "attention", make, lambda sizes: NoPE(), framework=framework
    )


def scheme_of(label: str, sizes: Sizes) -> PositionScheme:
    """The definition of a label."""
    from posenc.audit.labels import definition

    return definition(label).scheme(sizes)


def params_of(label: str, sizes: Sizes) -> Mapping[str, Host]:
    """The learned arrays that the audit gives the definition, for the library's weights."""
    from posenc.audit.gold import drawn_params

    return drawn_params(scheme_of(label, sizes))


def causal_alibi(sizes: Sizes, **options: Any) -> PositionScheme:
    """ALiBi whose bias goes on as one line for keys after the query, ``m_h * (k - q)``.

    The paper is about causal models, whose mask hides these keys; many libraries have this line.
    """
    slopes = ALiBi(sizes.num_heads, **options).head_slopes()
    later = [-float(slope) for slope in slopes]
    return ALiBi(sizes.num_heads, noncausal="two_sided", later_slopes=later, **options)


def bias_of_keys(build: Callable[[int, int], Any]) -> Callable[[int, Any, Any], Host]:
    """``f(num_heads, q_pos, k_pos)`` of a bias of keys alone, ``build(H, K) -> (H, K)``.

    The softmax of a row does not see what is subtracted from the whole row; so this is each number
    less that at the query.
    """

    def f(num_heads: int, q_pos: Any, k_pos: Any) -> Host:
        q, k = np.asarray(q_pos), np.asarray(k_pos)
        length = max(2, int(max(q.max(), k.max())) + 1)
        table = _unrounded(np.asarray(build(num_heads, length), np.float64))
        return np.asarray(table[:, None, k] - table[:, q, None], np.float32)

    return f


def _unrounded(table: Host) -> Host:
    """Lines ``(H, K)`` without float32's rounding of the product.

    Scores have this rounding at the size of a key's position, and the difference of two keys would
    show it at the size of a distance. What is further from the line than that stays as it is.
    """
    origin = 0 if np.all(table[:, 0] == 0) else table.shape[1] - 1
    slopes = table[:, 1] - table[:, 0] if origin == 0 else table[:, -1] - table[:, -2]
    line = slopes[:, None] * (np.arange(table.shape[1]) - origin)
    return np.where(np.abs(table - line) <= 2.0**-23 * np.abs(line), line, table)


def row_of(pos: Any, *, in_order: bool = True) -> Host:
    """Positions ``(B, L)`` that every row shares, as ``(L,)``; ``in_order``: they increase.

    Raises
    ------
    CannotExpressError
        Rows differ, or they do not increase.
    """
    rows = np.atleast_2d(np.asarray(pos))
    if np.any(rows != rows[0]):
        raise CannotExpressError("it has no positions per row")
    if in_order and np.any(np.diff(rows[0]) <= 0):
        raise CannotExpressError("its positions count from the first token; it takes no others")
    return np.asarray(rows[0])


def square_of(q_pos: Any, k_pos: Any) -> tuple[int, int]:
    """The numbers of queries and of keys, where keys count from 0 and queries are the last of them.

    Raises
    ------
    CannotExpressError
        They are no such positions.
    """
    q, k = np.asarray(q_pos), np.asarray(k_pos)
    in_order = np.array_equal(k, np.arange(len(k)))
    if not in_order or not np.array_equal(q, k[len(k) - len(q) :]):
        raise CannotExpressError("it takes numbers of queries and keys, and no positions")
    return len(q), len(k)
