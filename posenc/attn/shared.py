"""What the layers of one forward pass have in common, made when the first of them needs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from posenc.apply.feature_needs import has_features

if TYPE_CHECKING:
    from posenc.attn.arguments import Sides
    from posenc.attn.call import Call

T = TypeVar("T")


def _no_mode() -> Any:
    return None


def nothing_kept(name: Hashable, make: Callable[[], T]) -> T:
    """``make()``: what ``Made.once`` is outside of a pass."""
    return make()


@dataclass(eq=False)
class Made:
    """Values by name, each with the mode of the framework in which it was made.

    Attributes
    ----------
    mode
        Returns what a value depends on beside its arguments, such as whether gradients are
        recorded, or which function is traced; compared by ``==``. ``NotImplemented``: values may
        not be kept now.
    making
        A context in which values are made.
    """

    mode: Callable[[], Any] = _no_mode
    making: Callable[[], AbstractContextManager[Any]] = nullcontext
    _kept: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)

    def find(self, name: Hashable) -> Any:
        """What was made in this mode; None if nothing was."""
        kept = self._kept.get(name)
        return kept[1] if kept is not None and kept[0] == self.mode() else None

    def values(self) -> list[Any]:
        """All that is kept, in any mode."""
        return [value for _, value in self._kept.values()]

    def keep(self, name: Hashable, value: T) -> T:
        """``value``, which ``find`` gives from now on."""
        if (mode := self.mode()) is not NotImplemented:
            self._kept[name] = mode, value
        return value

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """``make()``, or what it gave before in this mode."""
        kept, mode = self._kept.get(name), self.mode()
        if kept is not None and kept[0] == mode:
            found: T = kept[1]
            return found
        with self.making():
            made = make()
        if mode is not NotImplemented:
            self._kept[name] = mode, made
        return made


@dataclass(eq=False)
class Shared:
    """What layers with an equal scheme, the same params and the same mask have in common.

    Attributes
    ----------
    made
        Values of these layers: ``"sides"`` and ``"mask"``, the completed tokens and mask;
        ``"call"``, that of the first layer without its vectors, if the others differ from it in
        vectors alone; ``("turn", role)``, what transforms queries or keys in such calls.
    of_pass
        Values of all layers of the pass, such as angles.
    rotary_key
        Layers with the same number have the same angles.
    runs
        Functions of vectors alone, by what is fixed in them.
    differs_in_vectors
        Whether the latest call differs from those of other layers in vectors alone.
    """

    made: Made
    of_pass: Made
    rotary_key: Hashable = 0
    runs: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    differs_in_vectors: bool = False

    def keep(self, call: Call) -> bool:
        """Whether calls of other layers will differ from ``call`` in vectors alone."""
        scheme = call.scheme
        of_vectors = has_features(scheme) or scheme.key_paths or bool(call.regions)
        of_vectors = of_vectors or call.extra_bias is not None
        padded = call.query.seg is not None and scheme.param_specs()
        self.differs_in_vectors = not of_vectors and not padded
        if not self.differs_in_vectors:
            return False
        nothing: Any = None
        self.made.keep("call", replace(call, q=nothing, k=nothing, v=nothing))
        return True

    def once_of_tokens(self, call: Call, name: str, make: Callable[[], T]) -> T:
        """``make()``, or what it gave for other calls of the same tokens and mask."""
        sides: Sides | None = self.made.find("sides")
        same = sides is not None and (
            call.query.pos is sides.query.pos
            and call.key.pos is sides.key.pos
            and call.query.seg is sides.query.seg
            and call.key.seg is sides.key.seg
            and call.mask is self.made.find("mask")
        )
        return self.made.once(name, make) if same else make()

    def once(self, call: Call, name: str, make: Callable[[], T]) -> T:
        """``make()``, or what it gave for a layer whose call differs in vectors alone."""
        first: Call | None = self.made.find("call")
        same = first is not None and (
            call.scheme is first.scheme
            and call.arrays is first.arrays
            and call.query is first.query
            and call.key is first.key
            and call.mask is first.mask
            and call.extra_bias is None
        )
        if same:
            return self.made.once(name, make)
        # Where a backward pass computes a layer again, it must find what it kept the first time.
        with self.made.making() if self.differs_in_vectors else nullcontext():
            return make()
