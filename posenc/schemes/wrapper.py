"""A scheme around another one: what it does not write itself is that of the scheme inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posenc.contract.hooks import Hook, overridden
from posenc.contract.params import head_count
from posenc.contract.protocol import PositionScheme


class Wrapper(PositionScheme):
    """Base of schemes around another one, as ``Sink``, in their field ``scheme``.

    Every method and fact is that of ``scheme``; a subclass, a frozen dataclass, writes what it
    changes. Learned arrays keep their names.
    """

    scheme: PositionScheme

    def __init_subclass__(cls, **facts: Any) -> None:
        super().__init_subclass__(**facts)
        cls._hooks = overridden(cls, Wrapper)

    def __post_init__(self) -> None:
        inside = self.scheme
        papers = (inside.paper if inside.hooks() else "", type(self).paper)
        self._declare(
            relative=inside.relative, axes=inside.axes, shared=inside.shared,
            whole_rows=inside.whole_rows, key_paths=inside.key_paths,
            mixes_heads=inside.mixes_heads,
            paper="; ".join(filter(None, papers)),
        )  # fmt: skip

    def hooks(self) -> frozenset[Hook]:
        return self.scheme.hooks() | self._hooks

    def at_length(self, length: int) -> PositionScheme:
        own: Any = self  # its subclasses are dataclasses
        longer = self.scheme.at_length(length)
        changed: PositionScheme = own if longer is self.scheme else replace(own, scheme=longer)
        return changed


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Wrapper, *args: Any, **keywords: Any) -> Any:
        return getattr(self.scheme, name)(*args, **keywords)

    forward.__name__, forward.__doc__ = name, f"As ``{name}`` of the scheme."
    return forward


# ``fitted`` is of the class. All others are forwarded, those too that a later version adds.
for _name, _method in vars(PositionScheme).items():
    if callable(_method) and not _name.startswith("_") and _name not in vars(Wrapper):
        setattr(Wrapper, _name, _forward(_name))


def heads_around(scheme: PositionScheme, num_heads: int | None, *, advice: str = "") -> int | None:
    """The number of heads of a scheme around another: ``num_heads``, or else that of ``scheme``.

    None is an error that ends with ``advice``, if there is any.
    """
    own = head_count(scheme)
    heads = own if num_heads is None else num_heads
    if heads is None and advice:
        raise ValueError(f"num_heads: {type(scheme).__name__} does not have it; {advice}")
    if own is not None and own != heads:
        raise ValueError(f"num_heads={heads}: the scheme has {own}: {scheme}")
    return heads
