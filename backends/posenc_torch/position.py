"""A module that owns a scheme's learned params."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn

import posenc
from posenc.checks import check_scheme
from posenc.protocol import PositionScheme
from posenc_torch.attention import attention


class Position(nn.Module):
    """A positional encoding as a module: it owns the learned params, and nothing else.

    There are no buffers: constants and angles are made in the call, so that neither ``.to(dtype)``
    nor loading a checkpoint can round them.

    A model that holds it may be wrapped: ``fully_shard``, ``DistributedDataParallel``. Sharded by
    itself it needs ``register_fsdp_forward_method(position, "attend")``, and likewise for
    ``"embed"``, because it has no ``forward``. Where params or tokens are ``DTensor``, call it
    under ``implicit_replication()``, for what is made in the call is the same in every process,
    with ``path="sdpa"`` for a learned bias, else ``"reference"``: PyTorch shards no other kernel.

    Parameters
    ----------
    scheme
        Any ``PositionScheme``.
    device, dtype
        Of the params.
    """

    def __init__(
        self,
        scheme: PositionScheme,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_scheme(scheme)
        self.scheme = scheme
        for name, spec in scheme.param_specs().items():
            empty = torch.empty(spec.shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
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

        ``pos`` is ``(L,)`` or ``(B, L)``, default ``0 .. L - 1``. Without one, ``x`` itself.
        """
        if pos is None:
            pos = torch.arange(x.shape[-2], device=x.device)
        term = posenc.embedding(self.scheme, pos, self.params, xp=xp)
        if term is None:
            return x
        if not x.is_floating_point() or x.shape[-2:] != term.shape[-2:]:
            raise ValueError(
                f"x must be floating and end in the length of pos and the width of the embedding, "
                f"{tuple(term.shape[-2:])}, got {tuple(x.shape)} of {x.dtype}"
            )
        return (x + term).to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        """``posenc_torch.attention`` with this scheme and these params."""
        return attention(q, k, v, self.scheme, self.params, **keywords)

    def extra_repr(self) -> str:
        return repr(self.scheme)


def _placed_like(param: Tensor, value: Tensor) -> Tensor:
    """``value`` itself, or that of the first process laid out as ``param``, if it is a DTensor."""
    if not hasattr(param, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import, and not everywhere

    return distribute_tensor(value, param.device_mesh, param.placements)
