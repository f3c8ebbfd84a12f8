"""Definitions by the labels of ``posenc compare``, for an audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc.audit.candidate import Sizes
from posenc.contract.protocol import PositionScheme
from posenc.makers import make, maker_of
from posenc.schemes import Sum

_SIZES = ("num_heads", "head_dim", "max_len", "train_len")


@dataclass(frozen=True)
class Definition:
    """What a label defines: a scheme for given sizes, and the window of its layer.

    Attributes
    ----------
    label
        One layer of ``posenc compare``: ``rope:layout=interleaved``, ``rope+alibi``, ``alibi@512``.
    window
        The window of the layer; None without one.
    pinned
        Sizes that the label names itself, as ``rope:head_dim=128``: the function has no others.
    """

    label: str
    window: int | None = None
    pinned: Mapping[str, int] = field(default_factory=dict)
    _parts: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def scheme(self, sizes: Sizes) -> PositionScheme:
        """The scheme for a model of these sizes; ``pinned`` ones take precedence.

        Raises
        ------
        TypeError, ValueError
            An option is wrong, or is missing.
        """
        given = {
            "num_heads": sizes.num_heads,
            "head_dim": sizes.head_dim,
            "max_len": sizes.max_len,
            **self.pinned,
        }
        made = [make(name, **given, **options) for name, options in self._parts]
        return made[0] if len(made) == 1 else Sum(*made)


def definition(label: str) -> Definition:
    """The definition of a label.

    Options that ``compare`` fits to a training length need ``train_len`` in the label; without it
    they are those of the class: ``t5`` has buckets in both directions here, and
    ``t5:train_len=512`` those of a decoder.

    Raises
    ------
    ValueError
        The label does not follow the grammar, names several layers, or a scheme that is unknown.
    """
    from posenc.study.specs import parse  # the grammar is that of the command ``compare``

    layers = parse(label)
    if len(layers) > 1:
        raise ValueError(f"label must name one layer, got {len(layers)} in {label!r}")
    pinned: dict[str, int] = {}
    parts = []
    for part in layers[0].parts:
        maker_of(part.name)
        options = dict(part.options)
        pinned |= {name: options.pop(name) for name in _SIZES if name in options}
        parts.append((part.name, options))
    return Definition(label, layers[0].window, pinned, tuple(parts))


def window_of(label: str) -> int | None:
    """The window that ends a label; None without one."""
    last = label.rpartition("@")[2]
    return int(last) if "@" in label and last.isdigit() else None


def sizes_of(scheme: PositionScheme) -> dict[str, int]:
    """Sizes that a scheme is made for."""
    parts = scheme.schemes if isinstance(scheme, Sum) else (scheme,)
    found: dict[str, int] = {}
    for part in parts:
        inside = getattr(part, "scheme", None)
        if isinstance(inside, PositionScheme):
            found |= sizes_of(inside)
        own = ((name, getattr(part, name, None)) for name in ("num_heads", "head_dim", "max_len"))
        found |= {name: size for name, size in own if isinstance(size, int)}
    return found
