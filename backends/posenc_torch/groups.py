"""Groups of a model's parameters for an optimizer: learned positions, matrices, and the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from posenc.backend import check_finite, check_positive
from posenc_torch.position import Position


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    position_lr_scale: float = 10.0,
    weight_decay: float = 0.01,
) -> list[dict[str, Any]]:
    """Parameter groups for ``torch.optim.AdamW``: position params learn faster.

    ``posenc compare`` trains with the same groups. Adam moves every value by about ``lr`` per step.
    A bias has to grow to units, while a weight moves by hundredths. So position params get
    ``lr * position_lr_scale`` and no weight decay. Of the others, arrays of two or more axes decay.
    A parameter that modules share comes once.

    Parameters
    ----------
    model
        A module with at least one ``Position`` or ``Positions``, which hold the position params.
    lr
        Learning rate of the other params. A scheduler that multiplies the rate of each group keeps
        the ratio.
    position_lr_scale
        Factor on ``lr`` for position params.
    weight_decay
        Weight decay of matrices.

    Returns
    -------
    Up to three dicts: matrices, other params, position params. Empty groups are left out.

    Raises
    ------
    ValueError
        The model holds no ``Position``, or a number is negative.
    """
    for name, given in (("lr", lr), ("weight_decay", weight_decay)):
        if check_finite(name, given.item() if isinstance(given, Tensor) else given) < 0:
            raise ValueError(f"{name} must be at least 0, got {given!r}")
    position_lr = lr * check_positive("position_lr_scale", position_lr_scale)
    position_ids = {id(p) for p in _position_params(model)}
    others = [p for p in model.parameters() if id(p) not in position_ids]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.ndim >= 2], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in others if p.ndim < 2], "lr": lr, "weight_decay": 0.0},
        {
            "params": [p for p in model.parameters() if id(p) in position_ids],
            "lr": position_lr,
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def _position_params(model: nn.Module) -> list[Tensor]:
    positions = [module for module in model.modules() if isinstance(module, Position)]
    if not positions:
        raise ValueError(
            f"{type(model).__name__} holds no posenc_torch.Position: position_lr_scale would have "
            "no effect"
        )
    return [p for position in positions for p in position.parameters()]
