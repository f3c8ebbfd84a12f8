"""Groups of a model's parameters for an optimizer: learned positions, matrices, and the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from posenc.backend import (
    check_positive,
)
from posenc_torch.position import Position


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    position_lr_scale: float = 10.0,
    weight_decay: float = 0.01,
) -> list[dict[str, Any]]:
    """Groups for ``torch.optim.AdamW``, as ``posenc compare`` trains: position params learn faster.

    Adam moves every number by about ``lr`` per step, and a bias has to grow to units where a
    weight moves by hundredths. So position params get ``lr * position_lr_scale``, and no weight
    decay. Of all others, arrays of two axes and more decay. A parameter that modules share comes
    once.

    Parameters
    ----------
    model
        A module that holds at least one ``Position`` or ``Positions``; these own position params.
    lr
        Learning rate of all others. A scheduler that multiplies each group's rate keeps the ratio.
    position_lr_scale
        Factor on it for position params.
    weight_decay
        Of matrices.

    Returns
    -------
    Up to three dicts: matrices, other params, position params. One that would be empty is left out.

    Raises
    ------
    ValueError
        The model holds no ``Position``; a number is negative.
    """
    if not lr >= 0:
        raise ValueError(f"lr must be at least 0, got {lr!r}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay!r}")
    fast = lr * check_positive("position_lr_scale", position_lr_scale)
    own = {id(p) for p in _of_positions(model)}
    others = [p for p in model.parameters() if id(p) not in own]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.ndim >= 2], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in others if p.ndim < 2], "lr": lr, "weight_decay": 0.0},
        {
            "params": [p for p in model.parameters() if id(p) in own],
            "lr": fast,
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def _of_positions(model: nn.Module) -> list[Tensor]:
    found = [module for module in model.modules() if isinstance(module, Position)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no posenc_torch.Position: position_lr_scale would have "
            "no effect"
        )
    return [p for position in found for p in position.parameters()]
