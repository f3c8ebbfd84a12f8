"""Key bytes and key tokens: those of a text that only a far repeat predicts.

Text's mean loss hides how well a model uses a long context: nearly all bytes follow from near ones.
The loss of these bytes alone does not; Fang et al. 2024, arXiv 2410.23771, have a measure of this
kind that needs a second model.
"""

from __future__ import annotations

import functools

import numpy as np

from posenc.study.windows import Tokens

CONTEXT = 8  # bytes before a byte that must repeat with it


def key_bytes(tokens: Tokens, near: int) -> Tokens:
    """The ``key_tokens`` of bytes, or tokens of a file, after ``CONTEXT`` of them."""
    data = np.ascontiguousarray(tokens)
    return _key_bytes(data.tobytes(), data.dtype.str, data.shape, near)


@functools.lru_cache(maxsize=64)  # the same windows are scored for every scheme and seed
def _key_bytes(data: bytes, dtype: str, shape: tuple[int, int], near: int) -> Tokens:
    return key_tokens(np.frombuffer(data, dtype).reshape(shape), near, CONTEXT)


def key_tokens(tokens: Tokens, near: int, context: int) -> Tokens:
    """Which targets of windows ``tokens (N, L + 1)`` are key tokens, booleans ``(N, L)``.

    A repeat at distance ``d`` predicts a token if the token and the ``context`` tokens before it
    stand ``d`` tokens earlier too. Of a key token, some repeat is further away than ``near``, and
    none is nearer.
    """
    found = np.zeros(tokens.shape, bool)
    if tokens.shape[1] > context:
        found[:, context:] = _distances_back(_runs(tokens, context)) > near
    return found[:, 1:]


def _runs(tokens: Tokens, context: int) -> Tokens:
    """Numbers ``(N, L + 1 - context)``, equal where the token and those before it are equal."""
    _, one = np.unique(tokens, return_inverse=True)
    one = runs = one.reshape(tokens.shape).astype(np.int64)
    for n in range(1, context + 1):
        pairs = runs[:, :-1] * (int(one.max()) + 1) + one[:, n:]
        _, runs = np.unique(pairs, return_inverse=True)
        runs = runs.reshape(pairs.shape)
    return runs


def _distances_back(numbers: Tokens) -> Tokens:
    """How far before each place of a row the same number stands last; 0 for nowhere."""
    back = np.zeros(numbers.shape, np.int64)
    for row, own in enumerate(numbers):
        order = np.argsort(own, kind="stable")
        same = own[order[1:]] == own[order[:-1]]
        back[row, order[1:]] = np.where(same, order[1:] - order[:-1], 0)
    return back
