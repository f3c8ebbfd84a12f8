"""Checks that a peer computes what posenc does, and then times both in alternating calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.clock import Speed, take_turns
from harness.peers.ours import ours
from harness.peers.side import (
    Difference,
    Inputs,
    Peer,
    Side,
    Sizes,
    from_peer,
    label,
    missing,
    to_peer,
)
from harness.record import fault, finite
from harness.run import STEP, Arrays, Runner, Shape
from posenc.testing import Host
from posenc.testing.tolerances import rounding_bound

Row = dict[str, Any]
_OURS = "posenc"


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    ``clock`` is processor time, or wall time where several threads work. ``seconds`` are spent on
    a comparison, in ``rounds`` at least and at most.
    """

    sizes: Sizes
    clock: Callable[[], float] = time.process_time
    seconds: float = 4.0
    rounds: tuple[int, int] = (5, 50)


@dataclass(frozen=True)
class Group:
    """Peers that compute the same, so that one run alternates all of them and posenc."""

    scheme: str
    options: tuple[tuple[str, Any], ...]
    stage: str
    kind: str
    mode: str
    peers: tuple[Peer, ...]

    @property
    def framework(self) -> str:
        """Which arrays its peers take."""
        return self.peers[0].framework

    def label_of(self, peer: Peer) -> str:
        """What ``--only`` is matched with."""
        scheme = label(self.scheme, dict(self.options))
        return f"{self.stage} {scheme} {self.kind} {peer.framework} {self.mode} {peer.library}"


def groups(
    peers: Sequence[Peer], sizes: Sizes, chosen: Callable[[str], object] = lambda name: True
) -> list[Group]:
    """The comparisons, those of one kind together."""
    found: dict[Any, list[Peer]] = {}
    for peer in peers:
        options = tuple(sorted(peer.options_for(sizes).items()))
        for mode in peer.modes:
            for kind in peer.passes:
                key = peer.scheme, options, peer.stage, kind, mode
                if chosen(Group(*key, peers=()).label_of(peer)):
                    found.setdefault(key, []).append(peer)
    return [Group(*key, peers=tuple(members)) for key, members in found.items()]


def rows(
    group: Group,
    runner: Runner,
    plan: Plan,
    modules: Mapping[str, str],
) -> Iterator[Row]:
    """One record per peer of a comparison, also for those that were not measured."""
    inputs = Inputs(group.scheme, dict(group.options), plan.sizes, runner.array)
    runner.reset()
    own = ours(group.stage, runner, inputs)
    if group.kind == STEP and not own.leaves:
        return
    run = Prepared(runner, group, inputs, own)
    expected = run.values()
    shapes = [a.shape for a in expected[0]]
    runs: dict[Any, Callable[[], Any]] = {_OURS: run.call}
    records: list[Row] = []
    for number, peer in enumerate(group.peers):
        row: Row = {
            "stage": group.stage,
            "scheme": label(group.scheme, dict(group.options)),
            "name": group.scheme,
            "pass": group.kind,
            "framework": runner.name,
            "mode": group.mode,
            "library": peer.library,
            "call": peer.call,
        }
        records.append(row)
        reason = missing(peer.library, modules[peer.library])
        if reason is not None:
            row |= {"status": "missing", "reason": reason}
            continue
        try:
            other = Prepared(runner, group, inputs, peer.ready(inputs), shapes)
            row |= verdict(other.values(), expected, peer.differs, inputs)
        except Exception as error:  # a peer may fail in any way, and that is a result
            row |= {"status": "failed", **fault(error)}
            continue
        if row["status"] == "equal":
            runs[number] = other.call
    if len(runs) > 1:
        _time(runs, records, plan)
    yield from records


class Prepared:
    """A side in a framework, and its results in posenc's layout.

    ``shapes`` are those of posenc's results; None for posenc itself.
    """

    def __init__(
        self,
        runner: Runner,
        group: Group,
        inputs: Inputs,
        side: Side,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        self._runner, self._side, self._inputs, self._shapes = runner, side, inputs, shapes
        names, call = list(side.leaves), side.call
        if group.mode == "compile":
            call = runner.compiled(call)

        def function(arrays: Arrays) -> Any:
            return call(*(arrays[name] for name in names))

        arrays = {name: leaf.array for name, leaf in side.leaves.items()}
        self.call = runner.ready(function, arrays, group.kind, learned=names, d_out=self._d_out)

    def values(self) -> tuple[list[Host], dict[str, Host]]:
        """Results, and gradients by name."""
        found, gradients = self.call.answers()
        results, axes = [self._runner.host(a) for a in found], self._side.axes
        shapes = self._whole([a.shape for a in results])
        own = {
            name: from_peer(
                self._runner.host(array),
                self._side.leaves[name].axes,
                self._inputs.host[name].shape,
            )
            for name, array in gradients.items()
        }
        return [from_peer(a, axes, s) for a, s in zip(results, shapes, strict=True)], own

    def _d_out(self, shapes: Sequence[Shape]) -> list[Any]:
        """The same gradients of the results for every side, in its layout."""
        pairs = zip(self._whole(shapes), shapes, strict=True)
        return [
            self._runner.array(to_peer(self._inputs.gradient_of(whole), self._side.axes, own))
            for whole, own in pairs
        ]

    def _whole(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """The results' shapes in posenc's layout."""
        if self._shapes is not None:
            return self._shapes
        axes = self._side.axes
        return [s if axes is None else tuple(s[a] for a in np.argsort(axes)) for s in shapes]


def verdict(
    found: tuple[Sequence[Host], Mapping[str, Host]],
    expected: tuple[Sequence[Host], Mapping[str, Host]],
    differs: Difference | None,
    inputs: Inputs,
) -> Row:
    """Whether a peer's results and gradients are those of posenc, and the largest difference.

    Differences are relative to the largest number, or to 1.
    """
    pairs = [("result", own, right) for own, right in zip(found[0], expected[0], strict=True)]
    pairs += [(name, found[1][name], expected[1][name]) for name in expected[1]]
    checks = []
    for name, own, right in pairs:
        size = max(1.0, float(np.max(np.abs(right), initial=0.0)))
        distance = float(np.max(np.abs(np.float64(own) - np.float64(right)), initial=0.0)) / size
        bound = _rounding(name, inputs) if differs is None else differs.bound(inputs)
        checks.append((distance <= bound, distance, name, bound))
    equal = all(check[0] for check in checks)
    # The largest part of its bound; NaN is larger than any number.
    _, distance, name, bound = max(
        checks, key=lambda c: c[1] / c[3] if np.isfinite(c[1]) else np.inf
    )
    row = {
        "status": "equal" if equal else "differs",
        "difference": finite(distance),
        "of": name,
        "bound": finite(bound),
        "why": "rounding" if differs is None else differs.why,
    }
    if not equal:
        row["reason"] = f"{name} differs from posenc's by {distance:.2g}, allowed {bound:.2g}"
    return row


def _rounding(name: str, inputs: Inputs) -> float:
    """Bound on the difference of two right float32 computations.

    A result sums products over the channels or the keys. A gradient of a param sums over pairs.
    """
    length = inputs.sizes.length
    terms = length * length if name.startswith("params.") else 4 * length
    return 2 * rounding_bound(terms, 1.0)


def _time(runs: Mapping[Any, Callable[[], Any]], records: Sequence[Row], plan: Plan) -> None:
    taken = take_turns(runs, plan.rounds, seconds=plan.seconds, now=plan.clock)
    base = taken[_OURS]
    for name, samples in taken.items():
        if name == _OURS:
            continue
        ratios = [ours / peer for ours, peer in zip(base, samples, strict=True)]
        records[name] |= {
            "status": "measured",
            "ours, ms": Speed.of(base).json(),
            "peer, ms": Speed.of(samples).json(),
            "ratio": Speed.of(ratios).json(),
        }
