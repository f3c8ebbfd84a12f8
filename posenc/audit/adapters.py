"""What an adapter of a library is made of: candidates, and which positions a library can take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from posenc.audit.candidate import Candidate, CannotExpressError, Kind, Sizes
from posenc.contract.protocol import PositionScheme
from posenc.schemes import ALiBi
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
    return Candidate(
        make, kind, scheme or (lambda sizes: scheme_of(label, sizes)), label, framework,
        library=library, version=version(library), subject=subject, **more,
    )  # fmt: skip


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


def run_of(pos: Any) -> tuple[int, int]:
    """The start and the length of positions that are one run, the same in every row.

    Raises
    ------
    CannotExpressError
        They are not.
    """
    row = row_of(pos)
    start, length = int(row[0]), len(row)
    if not np.array_equal(row, np.arange(start, start + length)):
        raise CannotExpressError("its positions are one run; it takes no others")
    return start, length


def row_of(pos: Any) -> Host:
    """Positions ``(B, L)`` that every row shares, as ``(L,)``, if they increase.

    Raises
    ------
    CannotExpressError
        Rows differ, or they do not increase.
    """
    rows = np.atleast_2d(np.asarray(pos))
    if np.any(rows != rows[0]):
        raise CannotExpressError("it has no positions per row")
    if np.any(np.diff(rows[0]) <= 0):
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
