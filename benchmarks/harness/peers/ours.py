"""posenc's side of any scheme of the catalogue."""

from __future__ import annotations

from typing import Any

import posenc
from harness.peers.side import Inputs, Leaf, Side
from harness.run import Runner
from posenc.apply.feature_needs import reads_hidden
from posenc.contract.protocol import Hook, PositionScheme


def ours(stage: str, runner: Runner, inputs: Inputs) -> Side:
    """What a user of posenc calls for a stage."""
    scheme = _at_length(inputs.scheme, inputs.sizes.length)
    pos, names = inputs.positions, inputs.params
    if stage == "attention":
        return _attention(scheme, runner, inputs)
    if stage in ("transform", "rotation"):
        # The second has its angles already, as the layers of a model.
        held = {"rotary": posenc.rotary(scheme, pos)} if stage == "rotation" else {}

        def transform(q: Any, k: Any, *own: Any) -> tuple[Any, Any]:
            params = dict(zip(names, own, strict=True))
            return (
                posenc.transform(scheme, q, pos, role="query", params=params, **held),
                posenc.transform(scheme, k, pos, role="key", params=params, **held),
            )

        return Side(transform, _leaves(inputs, "q", "k"))
    if stage == "bias":
        return Side(
            lambda *own: posenc.bias(scheme, pos, pos, dict(zip(names, own, strict=True))),
            _leaves(inputs),
        )
    return Side(
        lambda *own: posenc.embedding(scheme, pos, dict(zip(names, own, strict=True))),
        _leaves(inputs),
    )


def _attention(scheme: PositionScheme, runner: Runner, inputs: Inputs) -> Side:
    names, axes = inputs.params, runner.axes
    reads = ("x",) if reads_hidden(scheme) else ()
    leaves = inputs.tokens(axes, "v")

    def call(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        options = {"tokens": posenc.Tokens(x=rest[0])} if reads else {}
        params = dict(zip(names, rest[len(reads) :], strict=True))
        return runner.attention(q, k, v, scheme, params, causal=True, **options)

    return Side(call, leaves | _leaves(inputs, *reads), axes)


def _leaves(inputs: Inputs, *tokens: str) -> dict[str, Leaf]:
    return {
        name: inputs.leaf(name) for name in (*tokens, *(f"params.{name}" for name in inputs.params))
    }


def _at_length(scheme: PositionScheme, length: int) -> PositionScheme:
    """With the frequencies for this length, where a scheme has others for each."""
    return scheme.at_length(length) if Hook.AT_LENGTH in scheme.hooks() else scheme
