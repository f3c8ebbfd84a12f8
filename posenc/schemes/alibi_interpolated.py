"""Interpolated ALiBi: slopes shrink with the context, so that far keys stay as near as in training.

``interpolate_from`` is a length ``L0``, such as the training length. Then ``at_length(L)``
multiplies slopes by ``min(1, L0 / L)``. ``length`` is the ``L`` that ``at_length`` has set. By
default slopes are the same at every length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posenc.contract.protocol import Array, Hook, PositionScheme


class InterpolatedALiBi(PositionScheme):
    """Base of ``ALiBi``, with slopes for the length of a context."""

    interpolate_from: int | None
    length: int | None

    def check_length(self) -> None:
        """Check that a length comes with the length that slopes are meant for, if there is one."""
        if self.length is not None and self.interpolate_from is None:
            raise ValueError(f"length={self.length} needs interpolate_from, the length of slopes")
        if self.interpolate_from is None:
            self._leave_out(Hook.AT_LENGTH)

    def at_length(self, length: int) -> PositionScheme:
        own: Any = self  # its subclasses are dataclasses
        longer: PositionScheme = (
            own if self.interpolate_from is None else replace(own, length=length)
        )
        return longer

    def interpolate(self, slopes: Array) -> Array:
        """Slopes at the length of the context."""
        if self.interpolate_from is None or self.length is None:
            return slopes
        return min(1.0, self.interpolate_from / self.length) * slopes
