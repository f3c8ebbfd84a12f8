"""The law of a step of decoding: one token per sequence, each sequence at another position."""

from __future__ import annotations

import numpy as np

from posenc.contract.tokens import Tokens
from posenc.testing.framework import Framework
from posenc.testing.law import law
from posenc.testing.places import of_tokens
from posenc.testing.scheme_case import SchemeCase
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

_OFFSETS = (33, 129, 1)
_KEYS = 4  # that each sequence has cached, the query's own among them


@law("framework")
def rows_of_one_token_have_positions_of_their_own(case: SchemeCase, framework: Framework) -> None:
    """One token per sequence, each at another offset: as each sequence alone.

    A fast path for length 1 that takes the positions of the first sequence is right in a batch of
    equal lengths, and in a prefill.
    """
    low, high = case.positions
    ends = np.clip(_OFFSETS, low + _KEYS - 1, high)[:, None]
    pos = ends - np.arange(_KEYS)[::-1]
    tensors = case.tensors(1, _KEYS, batch=len(ends))
    # Products of few bits may be 0: rounding then decides for a scheme that asks for their sign.
    tensors["q"] = tensors["q"] + 2.0**-12
    whole = case.call(tensors, causal=True, tokens=Tokens(pos))
    found = whole.attend(framework, "reference")
    for row in range(len(ends)):
        own = {name: array[row : row + 1] for name, array in tensors.items()}
        alone = case.call(own, causal=True, tokens=Tokens(pos[row : row + 1]))
        expected = alone.attend(framework, "reference")
        what = f"sequence {row} of {len(ends)}"
        where = of_tokens("query", ends[row : row + 1])
        assert_near(found[row : row + 1], expected, ATTENTION_TOL["float32"], what, where=where)
