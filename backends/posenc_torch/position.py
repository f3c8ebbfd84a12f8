"""Modules that own the learned params of a scheme, and of the schemes of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn

import posenc
from posenc.backend import (
    LayerPlan,
    PositionScheme,
    SchemeWarning,
    add_embedding,
    attention_part,
    check_count,
    check_layer,
    check_scheme,
    has_embedding,
)
from posenc_torch.api import attention


class Position(nn.Module):
    """The positional encoding of one layer as a module: it owns the learned params, nothing else.

    For a model of several layers take ``Positions``: it adds an embedding once, and layers share
    what their scheme shares. There are no buffers: constants and angles are made in the call, so
    that neither ``.to(dtype)`` nor loading a checkpoint can round them.

    A model that holds it may be wrapped: ``fully_shard``, ``DistributedDataParallel``. Sharded by
    itself it needs ``register_fsdp_forward_method(position, "attend")``, and likewise for
    ``"embed"``, because it has no ``forward``. Where params or tokens are ``DTensor``, call it
    under ``implicit_replication()``, for what is made in the call is the same in every process,
    with ``implementation="sdpa"`` for a learned bias, else ``"reference"``: PyTorch shards no
    other kernel.

    Parameters
    ----------
    scheme
        Any ``PositionScheme``.
    window
        Of the layer's attention: a query sees keys at ``|q_pos - k_pos| < window``. Default: all.
    device, dtype
        Of the params.
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
        for name, spec in scheme.param_specs().items():
            empty = torch.empty(spec.shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        # Of calls, so in no state_dict. A scheme without an embedding never touches them.
        self._unembedded = True
        self._placed: int | None = None  # tokens that the last embed put at 0, 1, 2, ...
        self.reset_parameters()

    @property
    def params(self) -> dict[str, Tensor]:
        """Learned arrays by name, as every function of posenc takes them."""
        return {name: getattr(self, name) for name in self.scheme.param_specs()}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw first values anew, from torch's default generator."""
        if not self.params or any(p.is_meta for p in self.params.values()):
            return
        seed = int(torch.randint(2**62, ()))
        for name, value in posenc.init_params(self.scheme, seed).items():
            self.params[name].copy_(_placed_like(self.params[name], torch.from_numpy(value)))

    def embed(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        """Token embeddings ``x (B, L, dim)`` plus the scheme's embedding of ``pos``.

        ``pos`` is ``(L,)`` or ``(B, L)``, default ``0 .. L - 1``: give it while decoding, because
        the length of a cache is not known here. Without an embedding, ``x`` itself.
        """
        self._remember(x.shape[-2] if pos is None else None)
        if pos is None:
            pos = torch.arange(x.shape[-2], device=x.device)
        term = posenc.embedding(self.scheme, pos, self.params, xp=xp)
        return x if term is None else add_embedding(x, term, xp=xp)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        """``posenc_torch.attention`` with this scheme, these params and the layer's window.

        ``window=`` in a call takes the place of the layer's; ``window=None`` is none. A scheme with
        an embedding warns once if ``embed`` was never called. ``causal=True`` at default positions
        is a ``ValueError`` if k is longer than what the last ``embed`` put at default positions:
        the queries were embedded as if they were the first tokens. Compiled programs do not check
        this.
        """
        keywords = {"window": self.window, **keywords}
        out = attention(q, k, v, *attention_part(self.scheme, self.params), **keywords)
        self._check_embedded(k, keywords)
        return out

    def _remember(self, placed: int | None) -> None:
        if has_embedding(self.scheme) and not _exporting():
            self._unembedded = False
            # A program that reads a length from here would be compiled anew for each.
            known = not torch.compiler.is_compiling() and type(placed) is int
            self._placed = placed if known else None

    def _check_embedded(self, k: Tensor, keywords: dict[str, Any]) -> None:
        if not has_embedding(self.scheme) or _exporting():
            return
        if self._unembedded:
            self._unembedded = False
            _warn_unembedded(type(self.scheme).__name__)
        elif not torch.compiler.is_compiling():
            _check_placed(self._placed, k, **keywords)

    def extra_repr(self) -> str:
        own = "" if self.window is None else f", window={self.window}"
        return f"{self.scheme!r}{own}"


@dataclass(frozen=True)
class OtherWindow:
    """A ``Position`` that layers share, as a layer with another window than its own sees it.

    No module: what it holds is in the ``state_dict`` of the one it stands for.
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        """``Position.attend`` inside this window, unless ``window=`` is given."""
        return self.position.attend(q, k, v, **{"window": self.window, **keywords})


class Positions(nn.Module):
    """The positional encodings of a model, one ``Position`` per layer.

    ``positions.embed(x)`` once, before the first layer; then ``positions[layer].attend(q, k, v)``,
    or ``for block, position in zip(blocks, positions)``. Layers with an equal scheme that is
    ``shared`` (T5) or has an embedding are served by one and the same module; where their windows
    differ, by views of it, ``OtherWindow``, with the same methods. Each learned array is in the
    ``state_dict`` once, under the first layer that uses it: ``"0.table"``.

    Hand a layer its ``Position`` in the call. A block that keeps one as a submodule of its own
    writes it to the ``state_dict`` a second time.

    Parameters
    ----------
    scheme
        A ``PositionScheme`` for every layer, or a list or tuple of them that layers take in turn.
    layers
        Number of layers.
    windows
        None, one window for every layer, or a list or tuple of windows and Nones that layers take
        in turn: ``windows=[512, 512, None]``.
    device, dtype
        Of the params.
    """

    def __init__(
        self,
        scheme: PositionScheme | Sequence[PositionScheme],
        layers: int,
        *,
        windows: int | Sequence[int | None] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan = LayerPlan.of(scheme, layers, windows)
        # Plain tuples, which torch's compiler reads.
        self._names = tuple(str(layer) for layer in plan.sources)
        self._windows = plan.windows
        self._differs = tuple(
            plan.windows[layer] != plan.windows[source] for layer, source in enumerate(plan.sources)
        )
        for layer in plan.first_layers:
            scheme, window = plan.schemes[layer], plan.windows[layer]
            one = Position(scheme, window=window, device=device, dtype=dtype)
            self.add_module(str(layer), one)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, layer: int) -> Position | OtherWindow:
        """What serves a layer; layers that share params and window get the same module."""
        return self._at(check_layer(layer, len(self)))

    def __iter__(self) -> Iterator[Position | OtherWindow]:
        return iter([self._at(layer) for layer in range(len(self))])

    def _at(self, layer: int) -> Position | OtherWindow:
        # Made anew each time, because a wrapper may take the place of a module.
        module: Any = self._modules[self._names[layer]]
        return OtherWindow(module, self._windows[layer]) if self._differs[layer] else module

    def embed(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        """Token embeddings ``x (B, L, dim)`` plus the embedding of each scheme, as in ``Position``.

        Each embedding once, however many layers have its scheme.
        """
        for position in self.children():
            x = position.embed(x, pos)
        return x

    def reset_parameters(self) -> None:
        """Draw all first values anew, from torch's default generator."""
        for position in self.children():
            position.reset_parameters()

    def extra_repr(self) -> str:
        return f"layers={len(self)}"


@torch.compiler.assume_constant_result  # a compiler runs it while tracing, and goes on
def _warn_unembedded(name: str) -> None:
    warnings.warn(
        f"{name} adds an embedding to the tokens, and attend was called before embed: attention "
        "knows no positions from it; call x = position.embed(x) once, before the first layer",
        SchemeWarning,
        stacklevel=4,
    )


def _check_placed(
    placed: int | None, k: Tensor, causal: bool = False, q_pos: Tensor | None = None, **_: Any
) -> None:
    """The tokens that the last ``embed`` put at 0, 1, 2, ... are all that k has."""
    if causal and q_pos is None and placed is not None and placed < k.shape[2]:
        raise ValueError(
            f"the last embed put {placed} tokens at the default positions 0 .. {placed - 1}, and k "
            f"has {k.shape[2]}: the default of attend aligns their ends; give embed the positions "
            "of its tokens, pos="
        )


def _exporting() -> bool:
    """Whether ``torch.export`` is tracing, which wants no side effects; PyTorch 2.7 can tell."""
    return getattr(torch.compiler, "is_exporting", bool)()


def _placed_like(param: Tensor, value: Tensor) -> Tensor:
    """``value`` itself, or that of the first process laid out as ``param``, if it is a DTensor."""
    if not hasattr(param, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import, and not everywhere

    return distribute_tensor(value, param.device_mesh, param.placements)
