"""Modules that hold the learned params of one scheme, or of the schemes of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn

import posenc
from posenc import Mask, Rotary, Tokens
from posenc.backend import (
    LayerFacts,
    LayerPlan,
    PositionScheme,
    SchemeWarning,
    Window,
    add_embedding,
    advise_unknown,
    arguments_of_pass,
    attention_part,
    check_count,
    check_layer,
    check_scheme,
    has_embedding,
    is_exporting,
)
from posenc_torch.api import attention
from posenc_torch.bound import Bound
from posenc_torch.tracing import constant_in_programs

_USE = (
    "call x = positions.embed(x) once, before the first layer, and "
    "positions[layer].attend(q, k, v) in each"
)


class _SingleCalls:
    """Attention of one layer alone."""

    window: int | None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, **keywords: Any) -> Any:
        raise NotImplementedError

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        *,
        window: int | Window | EllipsisType | None = ...,
        mask: Mask | Tensor | Callable[..., Tensor] | None = None,
        tokens: Tokens | None = None,
        queries: Tokens | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        k_transformed: bool = False,
        implementation: str = "auto",
        skip_blocks: bool = True,
        return_lse: bool = False,
    ) -> Any:
        """``posenc_torch.attention`` with this scheme, these params and the layer's window.

        ``window=`` in a call replaces that of the layer; ``window=None`` is no window. A scheme
        with an embedding warns once if ``embed`` was never called. ``causal=True`` at default
        positions is a ``ValueError`` if k is longer than the input of the last ``embed`` at default
        positions: the queries were then embedded as if they were the first tokens. Compiled
        programs do not check this.
        """
        return self._attend(
            q, k, v, causal, window=self.window if window is ... else window, mask=mask,
            tokens=tokens, queries=queries, bias=bias, softcap=softcap, scale=scale,
            k_transformed=k_transformed, implementation=implementation, skip_blocks=skip_blocks,
            return_lse=return_lse,
        )  # fmt: skip


class Position(_SingleCalls, nn.Module):
    """The positional encoding of one layer as a module, which holds only the learned params.

    For a model of several layers use ``Positions``: it adds an embedding once, and layers share the
    params that their scheme shares. There are no buffers. Constants and angles are computed in the
    call, so neither ``.to(dtype)`` nor loading a checkpoint rounds them.

    A model with a ``Position`` may be wrapped by ``fully_shard`` or ``DistributedDataParallel``. If
    the ``Position`` itself is sharded, call ``register_fsdp_forward_method(position, "attend")``,
    and the same for ``"embed"``, because it has no ``forward``. ``fully_shard`` takes no scalars,
    of which FIRE learns two: name them in its ``ignored_params``, and average their gradients. With
    ``DTensor`` params or tokens, call it under ``implicit_replication()``, because every process
    computes the same constants. There use ``implementation="sdpa"`` for a learned bias, else
    ``"reference"``: PyTorch shards no other kernel.

    Parameters
    ----------
    scheme
        Any ``PositionScheme``.
    window
        Window of the layer: a query sees keys at ``|q_pos - k_pos| < window``. Default: all keys.
    device, dtype
        Device and dtype of the params.
    """

    def __init__(
        self,
        scheme: PositionScheme,
        *,
        window: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_scheme(scheme)
        self.scheme = scheme
        self.window = None if window is None else check_count("window", window)
        specs = scheme.param_specs()
        self._names = tuple(specs)  # kept, because every call of a layer reads the params
        for name, spec in specs.items():
            empty = torch.empty(spec.shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        # State of calls, which is not in the state_dict. Only schemes with an embedding use it.
        self._unembedded = True
        self._embedded_len: int | None = None  # tokens of the last embed at default positions
        self.reset_parameters()

    @property
    def params(self) -> dict[str, Tensor]:
        """Learned arrays by name, as every function of posenc takes them."""
        return {name: getattr(self, name) for name in self._names}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw initial values again, with torch's default generator."""
        if not self.params or any(p.is_meta for p in self.params.values()):
            return
        seed = int(torch.randint(2**62, ()))
        for name, value in posenc.init_params(self.scheme, seed).items():
            self.params[name].copy_(_distribute_like(self.params[name], torch.from_numpy(value)))

    def embed(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        """Token embeddings ``x (B, L, dim)`` plus the scheme's embedding of ``pos``.

        ``pos`` is ``(L,)`` or ``(B, L)``, default ``0 .. L - 1``. Give it while decoding, because
        ``embed`` does not know the length of the cache. Without an embedding, returns ``x`` itself.
        """
        self._record_embed(x.shape[-2] if pos is None else None)
        if pos is None:
            pos = torch.arange(x.shape[-2], device=x.device)
        term = posenc.embedding(self.scheme, pos, self.params, xp=xp)
        return x if term is None else add_embedding(x, term, xp=xp)

    def rotary(self, tokens: Tokens | Tensor, *, dtype: torch.dtype | None = None) -> Rotary | None:
        """``posenc.rotary`` of this scheme, for ``Tokens(rotary=...)``."""
        return posenc.rotary(self.scheme, tokens, self.params, dtype=dtype, xp=xp)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, **keywords: Any) -> Any:
        scheme, params = attention_part(self.scheme, self.params)
        out = attention(q, k, v, scheme, params, causal, **keywords)
        self.check_embedded(k, causal, keywords["tokens"])
        return out

    def _record_embed(self, length: int | None) -> None:
        if has_embedding(self.scheme) and not is_exporting(torch):
            self._unembedded = False
            # A program that reads a length from here would be compiled again for each length.
            known = not torch.compiler.is_compiling() and type(length) is int
            self._embedded_len = length if known else None

    def check_embedded(self, k: Tensor, causal: bool, tokens: Tokens | None) -> None:
        """Check that ``embed`` was called, and with as many tokens, if the scheme has one."""
        if not has_embedding(self.scheme) or is_exporting(torch):
            return
        if self._unembedded:
            self._unembedded = False
            _warn_unembedded(type(self.scheme).__name__)
        elif not torch.compiler.is_compiling():
            default = tokens is None or tokens.pos is None
            _check_embedded_len(self._embedded_len, k, causal and default)

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"{self.scheme!r}{window}"


@dataclass(frozen=True)
class OtherWindow(_SingleCalls):
    """A ``Position`` that layers share, for a layer with another window.

    It is no module: its params are in the ``state_dict`` of the shared ``Position``.
    """

    position: Position
    window: int | None

    @property
    def scheme(self) -> PositionScheme:
        """The scheme that layers share."""
        return self.position.scheme

    @property
    def params(self) -> Mapping[str, Tensor]:
        """The learned arrays that layers share."""
        return self.position.params

    def embed(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        """``Position.embed``."""
        return self.position.embed(x, pos)

    def rotary(self, tokens: Tokens | Tensor, *, dtype: torch.dtype | None = None) -> Rotary | None:
        """``Position.rotary``."""
        return self.position.rotary(tokens, dtype=dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, **keywords: Any) -> Any:
        return self.position._attend(q, k, v, causal, **keywords)

    def check_embedded(self, k: Tensor, causal: bool, tokens: Tokens | None) -> None:
        """``Position.check_embedded``."""
        self.position.check_embedded(k, causal, tokens)


class Positions(nn.Module):
    """The positional encodings of a model, one ``Position`` per layer.

    Call ``bound = positions.bind(causal=True)`` once in a forward pass. Then ``bound.embed(x)``
    before the first layer, and ``for block, attend in zip(blocks, bound)``: a block calls
    ``attend(q, k, v)``. Single calls are ``positions.embed(x)`` and
    ``positions[layer].attend(q, k, v)``.

    Layers with an equal scheme that is ``shared`` (T5) or has an embedding use the same module. If
    their windows differ, they get views of it, ``OtherWindow``, with the same methods. Each learned
    array is in the ``state_dict`` once, under the first layer that uses it: ``"0.table"``.

    Pass a layer its ``Position`` in the call. A block that keeps one as a submodule writes it to
    the ``state_dict`` a second time.

    Parameters
    ----------
    scheme
        A ``PositionScheme`` for every layer, or a list or tuple of them through which layers cycle,
        or a ``LayerPlan``, such as those of ``posenc.presets``.
    layers
        Number of layers; a plan has its own.
    windows
        None, one window for every layer, or a list or tuple of windows and Nones through which
        layers cycle: ``windows=[512, 512, None]``. A plan has its own.
    device, dtype
        Device and dtype of the params.
    """

    def __init__(
        self,
        scheme: PositionScheme | Sequence[PositionScheme] | LayerPlan,
        layers: int | None = None,
        *,
        windows: int | Sequence[int | None] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan = LayerPlan.of(scheme, layers, windows)
        # Plain tuples, because torch's compiler can read them.
        self._names = tuple(str(layer) for layer in plan.sources)
        self._rotary_layers = plan.rotary_layers
        self._windows = plan.windows
        self._facts = LayerFacts.of_plan(plan)
        self._differs = tuple(
            plan.windows[layer] != plan.windows[source] for layer, source in enumerate(plan.sources)
        )
        for layer in plan.first_layers:
            scheme, window = plan.schemes[layer], plan.windows[layer]
            position = Position(scheme, window=window, device=device, dtype=dtype)
            self.add_module(str(layer), position)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, layer: int) -> Position | OtherWindow:
        """The encoding of a layer; layers that share params and window get the same module."""
        return self._at(check_layer(layer, len(self)))

    def __iter__(self) -> Iterator[Position | OtherWindow]:
        return iter([self._at(layer) for layer in range(len(self))])

    def _at(self, layer: int) -> Position | OtherWindow:
        # Looked up each time, because a wrapper may replace a module.
        module: Any = self._modules[self._names[layer]]
        return OtherWindow(module, self._windows[layer]) if self._differs[layer] else module

    def forward(self, *_: Any, **__: Any) -> None:
        """Not defined: ``embed`` and ``positions[layer].attend`` are called by name."""
        raise TypeError(f"Positions are not called; {_USE}")

    def attend(self, *_: Any, **__: Any) -> None:
        """Not defined: each layer has its own."""
        raise TypeError(f"Positions are of all layers, and attend is of one; {_USE}")

    def embed(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        """Token embeddings ``x (B, L, dim)`` plus the embedding of each scheme, as in ``Position``.

        Each embedding is added once, however many layers have its scheme.
        """
        position: Any  # a wrapper may replace a Position
        for position in self.children():
            x = position.embed(x, pos)
        return x

    @advise_unknown
    def bind(
        self,
        tokens: Tokens | None = None,
        queries: Tokens | None = None,
        causal: bool = False,
        *,
        window: int | Window | EllipsisType | None = ...,
        mask: Mask | Tensor | Callable[..., Tensor] | None = None,
        implementation: str = "auto",
        skip_blocks: bool = True,
    ) -> Bound:
        """One forward pass over the layers: what tokens and mask alone decide is made once.

        ``bound = positions.bind(causal=True)``, ``x = bound.embed(x)``, then ``for block, attend in
        zip(blocks, bound)``: in a block ``out = attend(q, k, v)``, or ``attend(q, k, v, x=hidden)``
        for a scheme that reads hidden states. A ``Position`` that is itself sharded has single
        calls alone: a pass reads its params without the hooks that gather them.

        Parameters
        ----------
        tokens, queries, causal, mask, implementation, skip_blocks
            As in ``posenc_torch.attention``, for every layer.
        window
            Likewise, in place of the layers' own; None for no window.

        Raises
        ------
        TypeError, ValueError
            ``tokens`` or ``queries`` is no ``Tokens``. A layer raises for everything else.
        """
        given = arguments_of_pass(tokens, queries, window, mask)
        return Bound(
            list(self), self._facts, self.embed, given, causal, implementation, skip_blocks
        )

    def rotary(
        self, tokens: Tokens | Tensor, *, dtype: torch.dtype | None = None
    ) -> tuple[Rotary | None, ...]:
        """``posenc.rotary`` for each layer, computed once for all layers that can share it.

        For ``Tokens(rotary=...)`` of calls outside a pass; ``bind`` does it for a pass. None for a
        layer whose scheme has none.
        """
        made: dict[int, Rotary | None] = {}
        for layer in self._rotary_layers:
            if layer not in made:
                made[layer] = self._at(layer).rotary(tokens, dtype=dtype)
        return tuple([made[layer] for layer in self._rotary_layers])

    def reset_parameters(self) -> None:
        """Draw all initial values again, with torch's default generator."""
        position: Any  # a wrapper may replace a Position
        for position in self.children():
            position.reset_parameters()

    def extra_repr(self) -> str:
        return f"layers={len(self)}"


# The compiler runs it while tracing, because Dynamo cannot trace a warning.
@constant_in_programs
def _warn_unembedded(name: str) -> None:
    warnings.warn(
        f"{name} adds an embedding to the tokens, but attend was called before embed, so attention "
        "has no positions; call x = position.embed(x) once, before the first layer",
        SchemeWarning,
        stacklevel=4,
    )


def _check_embedded_len(length: int | None, k: Tensor, in_order: bool) -> None:
    """The last ``embed`` at default positions had all tokens of k."""
    if in_order and length is not None and length < k.shape[2]:
        raise ValueError(
            f"the last embed put {length} tokens at the default positions 0 .. {length - 1}, but k "
            f"has {k.shape[2]} tokens, and attend puts the last query at the last key by default; "
            "give embed the positions of its tokens, pos="
        )


def _distribute_like(param: Any, value: Tensor) -> Tensor:
    """``value``; if ``param`` is a DTensor, that of the first process, distributed likewise."""
    if not hasattr(param, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import, not in every build

    return distribute_tensor(value, param.device_mesh, param.placements)
