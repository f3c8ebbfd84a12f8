"""Key bytes: bytes of a text that only a far repeat predicts.

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
    """Which targets of windows ``tokens (N, L + 1)`` are key bytes, booleans ``(N, L)``.

    A repeat at distance ``d`` predicts a byte if the byte and the ``CONTEXT`` bytes before it stand
    ``d`` bytes earlier too. Of a key byte, some repeat is further away than ``near``, and none is
    nearer.
    """
    data = np.ascontiguousarray(tokens, dtype=np.uint8)
    return _key_bytes(data.tobytes(), data.shape, near)


@functools.lru_cache(maxsize=64)  # the same windows are scored for every scheme and seed
def _key_bytes(data: bytes, shape: tuple[int, int], near: int) -> Tokens:
    tokens = np.frombuffer(data, np.uint8).reshape(shape)
    found = {False: np.zeros(shape, bool), True: np.zeros(shape, bool)}
    for distance in range(1, shape[1] - CONTEXT):
        same = tokens[:, distance:] == tokens[:, :-distance]
        whole = same[:, CONTEXT:].copy()  # from the first byte with enough of them before it
        for n in range(CONTEXT):
            whole &= same[:, n : n - CONTEXT]
        found[distance > near][:, distance + CONTEXT :] |= whole
    return (found[True] & ~found[False])[:, 1:]
