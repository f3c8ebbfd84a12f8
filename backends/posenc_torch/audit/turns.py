"""What a rotary module and the function that applies its angles do to unit vectors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posenc_torch.audit.attention_code import Unclear

_SEEN = 1e-3
"""Sines below it may be rounding: their pairs are not looked for."""


@dataclass(frozen=True)
class Turns:
    """The rotation of one type of layers, measured; see ``posenc.audit.readers.Facts``."""

    frequencies: Mapping[int, tuple[float, ...]]
    layout: str
    rotary_dim: int
    factor: float
    sections: tuple[int, ...] | None

    @classmethod
    def measure(
        cls, rotary: Any, rotate: Callable[..., Any], kind: str, lengths: Sequence[int]
    ) -> Turns:
        """Measure a rotary module on the CPU.

        Raises
        ------
        Unclear
            It holds no frequencies, or takes other arguments than those of transformers 5.
        """
        run = _Run(rotary, rotate, kind)
        held = run.held()
        factor = math.sqrt(float(run.scores([0, 0, 0]).diagonal().abs().mean()))
        scores = run.scores([1, 1, 1]) / factor**2
        layout, order = _pairs(scores)
        measured = torch.atan2(
            scores[order[:, 0], order[:, 1]].abs(), scores[order[:, 0], order[:, 0]]
        )
        own = _in_order(held, measured)
        frequencies = {}
        for length in lengths:
            run.tables([length - 1] * 3)
            frequencies[length] = tuple(run.held()[own].tolist())
        run.tables([0, 0, 0])
        return cls(frequencies, layout, 2 * len(held), factor, run.axes(order))


class _Run:
    """Calls of a rotary module and of the function that applies its angles."""

    def __init__(self, rotary: Any, rotate: Callable[..., Any], kind: str) -> None:
        self.rotary, self.rotate, self.kind = rotary, rotate, kind
        given = inspect.signature(rotary.forward).parameters
        self.by_type = "layer_type" in given
        unknown = set(given) - {"x", "position_ids", "layer_type", "kwargs"}
        needed = {name for name in unknown if given[name].default is inspect.Parameter.empty}
        if needed:
            raise Unclear(f"{type(rotary).__name__} needs {', '.join(sorted(needed))} too")
        self.axial = "expand(3," in inspect.getsource(inspect.unwrap(type(rotary).forward))

    def held(self) -> Tensor:
        """The frequencies that the module holds now, in float64."""
        buffers = dict(self.rotary.named_buffers())
        for name in (f"{self.kind}_inv_freq", "inv_freq"):
            if name in buffers:
                return buffers[name].detach().double()
        raise Unclear(f"{type(self.rotary).__name__} holds no inv_freq")

    def tables(self, place: Sequence[int]) -> Any:
        """What the module returns at one place of three axes."""
        at = torch.tensor(place)[:, None, None] if self.axial else torch.tensor([[place[0]]])
        more = {"layer_type": self.kind} if self.by_type else {}
        return self.rotary(torch.zeros(1, 1, 1), position_ids=at, **more)

    def scores(self, place: Sequence[int]) -> Tensor:
        """``(R, R)``: unit vectors turned at ``place``, times those turned at 0."""
        width = 2 * len(self.held())
        turned, still = (self._turned(self.tables(at), width) for at in (place, [0, 0, 0]))
        return turned @ still.T

    def _turned(self, tables: Any, width: int) -> Tensor:
        """``(R, R)``: each unit vector, as a head of its own, turned."""
        units = torch.eye(width)[None, :, None]
        known = {"q": units, "k": units, "x": units, "tensor": units, "xq": units, "xk": units}
        if isinstance(tables, Tensor):
            known["freqs_cis"] = tables
        else:
            known["cos"], known["sin"] = tables
        given = {}
        for name, one in inspect.signature(self.rotate).parameters.items():
            if name in known:
                given[name] = known[name]
            elif one.default is inspect.Parameter.empty:
                raise Unclear(f"{self.rotate.__name__} needs {name} too")
        out = self.rotate(**given)
        found = out[0] if isinstance(out, tuple) else out
        return found[0, :, 0].double()

    def axes(self, order: Tensor) -> tuple[int, ...] | None:
        """The axis of each pair; of each channel, first ones before second ones, if they differ."""
        if not self.axial:
            return None
        turned = []
        for axis in range(3):
            # Angles of half a turn and more at some place, whatever the frequency.
            moved = torch.zeros(2 * len(order), dtype=torch.float64)
            for at in (1, 10**3, 10**6):
                place = [at if axis == other else 0 for other in range(3)]
                scores = self.scores(place)
                moved = torch.maximum(moved, (scores.diagonal() - self._still()).abs())
            turned.append(moved)
        axis_of = torch.stack(turned).argmax(0)
        first, second = axis_of[order[:, 0]].tolist(), axis_of[order[:, 1]].tolist()
        return tuple(first) if first == second else tuple(first + second)

    def _still(self) -> Tensor:
        return self.scores([0, 0, 0]).diagonal()


def _pairs(scores: Tensor) -> tuple[str, Tensor]:
    """The layout, and the two channels of each pair, ``(R/2, 2)``."""
    width = len(scores)
    pairs = torch.arange(width // 2)
    known = {
        "half": torch.stack([pairs, pairs + width // 2], 1),
        "interleaved": torch.stack([2 * pairs, 2 * pairs + 1], 1),
    }
    off = scores - torch.diag(scores.diagonal())
    first = off[0]
    partner = int(first.abs().argmax())
    for name, order in known.items():
        rest = off.clone()
        rest[order[:, 0], order[:, 1]] = 0
        rest[order[:, 1], order[:, 0]] = 0
        if float(rest.abs().max()) < _SEEN and first.abs().max() >= _SEEN:
            back = float(first[partner]) < 0
            return f"{name}{', the other way' if back else ''}", order
    if float(off.abs().max()) < _SEEN:
        raise Unclear("unit vectors do not turn from position 0 to 1")
    raise Unclear(f"channel 0 turns with channel {partner}, and others are no layout known here")


def _in_order(held: Tensor, measured: Tensor) -> Tensor:
    """Indices into the held frequencies, so that they are in the order of the pairs."""
    same = torch.arange(len(held))
    for own in (same, held.argsort(descending=True)):
        turned = torch.remainder(held[own] + math.pi, 2 * math.pi) - math.pi
        if float((turned.abs() - measured).abs().max()) < _SEEN:
            return own
    raise Unclear("the angles at position 1 are not the frequencies that the module holds")
