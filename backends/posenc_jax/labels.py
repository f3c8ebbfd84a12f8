"""Labels of a model's params for an optimizer: learned positions, matrices, and the rest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from posenc_jax.position import Position, Positions


def param_labels(params: Any, names: str | Collection[str] = ()) -> Any:
    """Labels for ``optax.multi_transform``: ``"position"``, ``"decay"`` or ``"no_decay"``.

    Position params are the leaves of ``Position`` and ``Positions``. Of the others, arrays of two
    and more axes get ``"decay"``. ``posenc compare`` trains like this::

        optax.multi_transform(
            {
                "decay": optax.adamw(lr, weight_decay=0.1),
                "no_decay": optax.adamw(lr, weight_decay=0),
                "position": optax.adamw(position_lr_scale * lr, weight_decay=0),
            },
            posenc_jax.param_labels,
        )

    Parameters
    ----------
    params
        Any pytree.
    names
        Keys or attributes below which every leaf is a position param, such as ``("position",)``:
        for models that keep their params in plain dicts.

    Returns
    -------
    A tree like ``params`` with a label for every leaf.

    Raises
    ------
    ValueError
        Nothing in ``params`` is a ``Position`` or ``Positions``, or below one of ``names``.
    """
    keys = {names} if isinstance(names, str) else set(names)
    has_positions = False

    def label(path: tuple[Any, ...], node: Any) -> Any:
        nonlocal has_positions
        if _is_position(node) or any(_name(step) in keys for step in path):
            has_positions = True
            return jax.tree.map(lambda _: "position", node)
        return jax.tree.map(lambda x: "decay" if np.ndim(x) >= 2 else "no_decay", node)

    # A scheme without learned arrays has no leaf, but counts as a position.
    labels = jax.tree_util.tree_map_with_path(
        label, params, is_leaf=lambda node: _is_position(node) or not jax.tree.leaves(node)
    )
    if not has_positions:
        raise ValueError(
            "params holds no posenc_jax.Position or Positions, and nothing below a key of "
            f"names={sorted(map(str, keys))}"
        )
    return labels


def _is_position(node: Any) -> bool:
    return isinstance(node, Position | Positions)


def _name(step: Any) -> Any:
    """The key or attribute of one step of a path; None for an index of a list."""
    return getattr(step, "key", getattr(step, "name", None))
