"""Examples of a task, and how a model answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

NO_ANSWER = -1
Integers = np.ndarray[Any, Any]
# Of tokens and labels (N, T), inside a window or not: losses in nats, and whether it is right.
Answer = Callable[[Integers, Integers, int | None], tuple[Integers, Integers]]


class Examples(NamedTuple):
    """``N`` examples of ``T`` tokens; all arrays are ``(N, T)`` and hold integers."""

    tokens: Integers
    """What the model reads, from 0 to ``vocabulary - 1``."""
    labels: Integers
    """What it must answer at each token, from what it has read so far; ``NO_ANSWER`` for none."""
    groups: Integers | None = None
    """To which group an answer belongs, from 0, if the class names ``groups``."""
