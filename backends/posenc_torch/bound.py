"""One forward pass: what its layers have in common is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import array_api_compat.torch as xp
import torch
from torch import Tensor

from posenc import Tokens
from posenc.backend import (
    Arguments,
    LayerFacts,
    LayerPlan,
    PassState,
    PositionScheme,
    Shared,
    attention_part,
    reads_hidden,
    tokens_to_embed,
    transformed_keys,
    with_hidden,
)
from posenc_torch.api import attend_in_pass
from posenc_torch.sharing import is_alone, making, mode, of_vectors

if TYPE_CHECKING:
    from posenc_torch.position import OtherWindow, Position


@dataclass(frozen=True)
class PlainLayer:
    """A layer whose learned arrays are held elsewhere."""

    scheme: PositionScheme
    params: Mapping[str, Tensor]
    window: int | None

    def check_embedded(self, k: Tensor, causal: bool, tokens: Tokens | None) -> None:
        """Nothing: who holds the arrays adds embeddings too."""


AfterVectors: TypeAlias = tuple[
    PositionScheme, Mapping[str, Any] | None, bool, Arguments, str, bool
]
"""Scheme, params, causal, the rest, implementation, skip_blocks."""
BoundLayer: TypeAlias = "Position | OtherWindow | PlainLayer"


class Bound:
    """The positional encodings of a model in one forward pass, which ``Positions.bind`` returns.

    One callable per layer: ``out = attend(q, k, v)`` for ``attend`` in ``bound``, or
    ``bound[layer](q, k, v)``. What tokens and mask alone decide, such as angles, biases by distance
    and dense masks of short calls, is made when the first layer needs it; layers with an equal
    scheme and the same params share it, and gradients of learned arrays go through it. Results are
    those of ``positions[layer].attend``, bit for bit. Only where layers share learned arrays, their
    gradients add up in another order.

    All layers must have the batch, lengths, dtype and device of the first. Make a new one for each
    forward pass: nothing is kept beyond the object. Where learned arrays, positions or a mask have
    changed in place, all is made again. Inside ``torch.compile``, ``torch.func`` and where a
    backward pass computes layers again, every layer makes its own; a compiler finds what they have
    in common. Inside a selective checkpoint (``create_selective_checkpoint_contexts``), which looks
    for the same operations again, use single calls.
    """

    def __init__(
        self,
        layers: Sequence[BoundLayer],
        facts: LayerFacts,
        embed: Callable[[Tensor, Tensor | None], Tensor],
        given: Arguments,
        causal: bool,
        implementation: str = "auto",
        skip_blocks: bool = True,
    ) -> None:
        self._layers = [Attend(self, each, n) for n, each in enumerate(layers)]
        self._embed = embed
        self.given, self.causal = given, causal
        self.implementation, self.skip_blocks = implementation, skip_blocks
        self.state = PassState(facts, mode, making)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the tokens and the mask of this pass."""
        found: list[Any] = []
        self.given.map(found.append)
        return tuple(each for each in found if isinstance(each, Tensor))

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Attend]:
        return iter(self._layers)

    def __getitem__(self, layer: int) -> Attend:
        """The attention of a layer."""
        return self._layers[layer]

    @property
    def plan(self) -> LayerPlan:
        """Scheme and window of each layer, for a model that attends by itself."""
        own = [attend.position for attend in self]
        return LayerPlan(tuple(p.scheme for p in own), tuple(p.window for p in own))

    def params(self, layer: int) -> Mapping[str, Tensor]:
        """The learned arrays of a layer's scheme by name."""
        return self[layer].position.params

    def embed(self, x: Tensor) -> Tensor:
        """Token embeddings ``x (B, L, dim)`` plus the embedding of each scheme that has one.

        At the positions of the queries, or of the last ``L`` of ``tokens``.
        """
        return self._embed(x, tokens_to_embed(self.given, x.shape[-2]).pos)


class Attend:
    """Attention of one layer in a forward pass."""

    def __init__(self, bound: Bound, position: BoundLayer, layer: int) -> None:
        self._bound, self.position, self._layer = bound, position, layer
        self._learns = bool(position.scheme.param_specs())
        self._reads_hidden = reads_hidden(position.scheme)
        self._embedded = False

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        x: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        k_transformed: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """``posenc_torch.attention`` with the layer's scheme, params and window, in this pass.

        Parameters
        ----------
        q, k, v
            ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``.
        x
            Hidden states ``(B, K, C)`` of the keys' tokens, of which the queries' are the last;
            only a scheme whose features read them has a use for them. If it reads those of the
            queries, positions that say otherwise are an error where they can be read.
        bias, softcap, scale, k_transformed, return_lse
            As in ``posenc_torch.attention``.
        """
        bound = self._bound
        shared = None if is_alone() else self._of_layer()
        shaped = all(len(getattr(a, "shape", ())) == 4 for a in (q, k))
        if shared is not None and shaped:  # else attention says what is wrong
            bound.state.check(q.shape[0], q.shape[2], k.shape[2], q.dtype, q.device)

        def arguments() -> AfterVectors:
            return self._arguments(q, k, x, bias, softcap, scale, k_transformed, return_lse)

        plain = bias is None and softcap is None and scale is None and not return_lse
        of_vectors = plain and (x is None or not self._reads_hidden)
        return attend_shared(shared, q, k, v, k_transformed if of_vectors else ..., arguments)

    def transform_keys(self, k: Tensor) -> Tensor:
        """Keys ``(B, Hk, L, D)`` of the queries' tokens, transformed, for a cache.

        Then call with ``k_transformed=True``.
        """
        scheme, params = attention_part(self.position.scheme, self.position.params)
        shared = None if is_alone() else self._of_layer()
        turned: Tensor = transformed_keys(k, scheme, params, self._bound.given, shared, xp)
        return turned

    def _of_layer(self) -> Shared:
        """What this layer shares; begun again if a tensor that it is made from has changed.

        An optimiser changes params in place, and a loop of decoding may change positions.
        """
        read = self._bound.tensors
        if self._learns:
            read = (*read, *self.position.params.values())
        version = tuple([None if each.is_inference() else each._version for each in read])
        return self._bound.state.shared(self._layer, version)

    def _arguments(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor | None,
        bias: Tensor | None,
        softcap: float | None,
        scale: float | None,
        k_transformed: bool,
        return_lse: bool,
    ) -> AfterVectors:
        """The arguments of attention after the vectors."""
        bound, position, given = self._bound, self.position, self._bound.given
        if x is not None and self._reads_hidden:
            given = with_hidden(given, x, q.shape[2], position.scheme, xp)
        window = position.window if given.window is ... else given.window
        given = given._replace(
            window=window, bias=bias, softcap=softcap, scale=scale, k_transformed=k_transformed,
            return_lse=return_lse,
        )  # fmt: skip
        if not self._embedded:
            position.check_embedded(k, bound.causal, given.tokens)
            self._embedded = not torch.compiler.is_compiling()
        scheme, params = attention_part(position.scheme, position.params)
        return scheme, params, bound.causal, given, bound.implementation, bound.skip_blocks


def attend_shared(
    shared: Shared | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    also: Any,
    arguments: Callable[[], AfterVectors],
) -> Any:
    """Attention with what layers share, from arguments that are read if no equal call was made.

    ``also`` is what differs between calls beside vectors; ``...`` if this call is like no other.
    """
    vectors = None if shared is None or also is ... else of_vectors(q, k, v)
    if vectors is None or shared is None:
        return attend_in_pass(q, k, v, *arguments(), shared, wants_run=False)[0]
    at = vectors, also
    run = shared.runs.get(at)
    if run is not None:
        return run(q, k, v)
    out, made = attend_in_pass(q, k, v, *arguments(), shared, wants_run=True)
    if made is not None and made.run is not None:
        shared.runs[at] = made.run
    return out
