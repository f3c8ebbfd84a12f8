"""Hooks: the methods that change what a model computes, and which of them a scheme has."""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Any


class Hook(StrEnum):
    """The methods that change what a model computes; ``hooks()`` says which a scheme has."""

    EMBEDDING = auto()
    TRANSFORM = auto()
    ROTARY = auto()
    BIAS = auto()
    KEY_BIAS = auto()
    BIAS_FACTOR = auto()
    CHANNEL_DECAY = auto()
    ADJUST_SCORES = auto()
    SINK = auto()
    REGIONS = auto()
    SCALE = auto()
    AT_LENGTH = auto()


class Hooked:
    """Base of a class whose hooks do nothing; a subclass has those that it overrides."""

    _hooks: frozenset[Hook] = frozenset()

    def __init_subclass__(cls, **facts: Any) -> None:
        super().__init_subclass__(**facts)
        _refuse_former_members(cls)
        base = next(kind for kind in cls.__mro__ if Hooked in kind.__bases__)
        cls._hooks = overridden(cls, base)

    def hooks(self) -> frozenset[Hook]:
        """Return the methods of ``Hook`` that this scheme overrides."""
        return self._hooks

    def _leave_out(self, hook: Hook) -> None:
        """Have no such hook, as the fields of this instance say; for ``__post_init__``."""
        object.__setattr__(self, "_hooks", self._hooks - {hook})


def overridden(cls: type, base: type) -> frozenset[Hook]:
    """The hooks that a class overrides, of those of a base."""
    own = {hook for hook in Hook if getattr(cls, hook) is not getattr(base, hook)}
    # A class that inherits ``rotary`` and writes its own transform may change positions first.
    writer = {n: next(c for c in cls.__mro__ if n in vars(c)) for n in ("rotary", "transform")}
    if not issubclass(writer["rotary"], writer["transform"]):
        own -= {Hook.ROTARY}
    return frozenset(own)


_FORMER = (
    "gate", "cumulative", "hidden_features", "query_features", "key_features", "lookback",
    "reads_features",
)  # fmt: skip


def _refuse_former_members(cls: type) -> None:
    """A ``TypeError`` for a method that was part of the contract once, and would be ignored."""
    for name in _FORMER:
        if callable(value := getattr(cls, name, None)) or type(value) is tuple:
            what = "a gate is a feature now" if name == "gate" else "it is of a feature now"
            raise TypeError(
                f"{cls.__name__}.{name}: {what}; declare features by name in feature_specs(), "
                "as {'c': FeatureSpec(self.gates, of='key', cumulative=True)}"
            )
