"""Losses of logits of any framework, a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from posenc.contract.operations import device
from posenc.study.tasks.examples import NO_ANSWER

Array = np.ndarray[Any, Any]
# Of tokens and labels (N, T): losses in nats, and whether the likeliest token is the label.
Answers = Callable[[Array, Array], tuple[Array, Array]]
CELLS = 1 << 26  # logits that are turned into float32 at once: 256 MiB


def answers_of(logits: Callable[[Array], Any], cells: int = CELLS) -> Answers:
    """The losses of a model that turns tokens ``(N, T)`` into logits ``(N, T, V)``."""

    def answers(tokens: Array, labels: Array) -> tuple[Array, Array]:
        return losses_of(logits(tokens), labels, cells)

    return answers


def losses_of(logits: Any, labels: Array, cells: int = CELLS) -> tuple[Array, Array]:
    """``log sum_v exp(x_v) - x_label`` of logits ``x (N, T, V)``, and whether they are right.

    Both are ``(N, T)``, with 0 and False where the label is ``NO_ANSWER``. Computed in float32, or
    in float64 if the logits are, for about ``cells`` logits at once.

    Raises
    ------
    ValueError
        The logits have another shape, or a loss is not finite.
    """
    logits = logits.detach() if hasattr(logits, "detach") else logits
    shape = tuple(logits.shape)
    if len(shape) != 3 or shape[:2] != labels.shape or shape[2] <= int(labels.max(initial=0)):
        raise ValueError(
            f"logits must be (N, T, V) = ({labels.shape[0]}, {labels.shape[1]}, more than "
            f"{int(labels.max(initial=0))}), got {shape}"
        )
    xp = array_namespace(logits)
    precise = xp.float64 if logits.dtype == xp.float64 else xp.float32
    many = max(1, cells // max(1, shape[0] * shape[2]))
    found, right = [], []
    for first in range(0, shape[1], many):
        part = xp.astype(logits[:, first : first + many, :], precise)
        asked = np.maximum(labels[:, first : first + many], 0)
        index = xp.asarray(asked, device=device(part))
        top = xp.max(part, axis=-1)
        total = top + xp.log(xp.sum(xp.exp(part - top[..., None]), axis=-1))
        own = xp.take_along_axis(part, index[..., None], axis=-1)[..., 0]
        found.append(_numpy(total - own))
        right.append(_numpy(xp.argmax(part, axis=-1)) == asked)
    asked = labels != NO_ANSWER
    loss = np.where(asked, np.concatenate(found, axis=1), 0.0)
    if not np.isfinite(loss).all():
        row, at = np.argwhere(~np.isfinite(loss))[0]
        raise ValueError(f"the loss at position {at} of window {row} is {loss[row, at]}")
    return loss, asked & np.concatenate(right, axis=1)


def _numpy(x: Any) -> Array:
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)
