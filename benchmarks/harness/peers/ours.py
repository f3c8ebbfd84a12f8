"""posenc's side of any scheme of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import posenc
from harness.peers.side import Axes, Inputs, Leaf, Side
from harness.run import Arrays, Function, Runner, params_of
from posenc.apply.feature_needs import reads_hidden
from posenc.contract.protocol import Hook, PositionScheme


def ours(stage: str, runner: Runner, inputs: Inputs) -> Side:
    """What a user of posenc calls for a stage."""
    scheme, pos = _at_length(inputs.scheme, inputs.sizes.length), inputs.positions
    own = {f"params.{name}": inputs.leaf(f"params.{name}") for name in inputs.params}
    if stage == "attention":
        hidden = {"x": inputs.leaf("x")} if reads_hidden(scheme) else {}
        leaves = inputs.tokens(runner.axes, "v") | hidden | own
        return _side(runner.attend(scheme), leaves, runner.axes)
    if stage in ("transform", "rotation"):
        # The second has its angles already, as the layers of a model.
        held = {"rotary": posenc.rotary(scheme, pos)} if stage == "rotation" else {}

        def transform(arrays: Arrays) -> tuple[Any, ...]:
            params = params_of(arrays)
            return tuple(
                posenc.transform(scheme, arrays[name], pos, role=role, params=params, **held)
                for name, role in (("q", "query"), ("k", "key"))
            )

        return _side(transform, inputs.tokens() | own)
    if stage == "bias":
        return _side(lambda arrays: posenc.bias(scheme, pos, pos, params_of(arrays)), own)
    return _side(lambda arrays: posenc.embedding(scheme, pos, params_of(arrays)), own)


def _side(function: Function, leaves: Mapping[str, Leaf], axes: Axes = None) -> Side:
    """A side from a function of arrays by name."""
    return Side(lambda *own: function(dict(zip(leaves, own, strict=True))), leaves, axes)


def _at_length(scheme: PositionScheme, length: int) -> PositionScheme:
    """With the frequencies for this length, where a scheme has others for each."""
    return scheme.at_length(length) if Hook.AT_LENGTH in scheme.hooks() else scheme
