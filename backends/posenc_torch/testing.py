"""PyTorch for the laws of ``posenc.testing``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import array_api_compat.torch
import numpy as np
import torch
from torch import Tensor

from posenc.backend import Arguments, LayerFacts, LayerPlan
from posenc.testing import Framework, Function, Host
from posenc_torch.api import IMPLEMENTATIONS, attention
from posenc_torch.bound import Bound, PlainLayer
from posenc_torch.chunked.parts import WHY_NOT_COMPILED, small_blocks
from posenc_torch.flex.programs import uncompiled


class Torch(Framework):
    """PyTorch on one device, eager and compiled."""

    xp = array_api_compat.torch
    implementations = IMPLEMENTATIONS
    dtypes = ("float64", "float32", "float16", "bfloat16")
    compilers = ("aot_eager", "inductor")
    differentiable = True

    def __init__(self, device: str = "cpu") -> None:
        self.name = "torch" if device == "cpu" else f"torch-{device}"
        self._device = torch.device(device)

    def array(self, array: Host, dtype: str) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._device, getattr(torch, dtype))

    def host(self, array: Tensor) -> Host:
        array = array.detach()
        wide = array.float() if array.dtype == torch.bfloat16 else array
        return wide.cpu().numpy().copy()

    @contextmanager
    def precision_scope(self, dtypes: Sequence[str]) -> Iterator[None]:
        """Eager FlexAttention, since laws would compile it a hundred times; small blocks, so that
        short calls have several.
        """
        with warnings.catch_warnings():
            for message in (
                "`torch.jit.script",
                "flex_attention called without torch.compile",
            ):
                warnings.filterwarnings("ignore", message=message)
            with uncompiled(), small_blocks(8):
                yield

    def compile(self, function: Function, compiler: str) -> Function:
        return _compile(function, compiler)

    def attend(self, implementation: str, tensors: Mapping[str, Tensor], **options: Any) -> Any:
        arguments: dict[str, Any] = dict(tensors)
        return attention(**arguments, implementation=implementation, **options)

    def attend_in_pass(
        self, implementation: str, tensors: Mapping[str, Tensor], layers: int, **options: Any
    ) -> Tensor:
        given = dict(options)
        plan, params = LayerPlan.of(given.pop("scheme"), layers), given.pop("params")
        q, k, v = (tensors[name] for name in "qkv")
        own = [PlainLayer(scheme, params, None) for scheme in plan.schemes]
        named = ("k_transformed", "scale", "softcap")
        of_call: dict[str, Any] = {name: given.pop(name) for name in named if name in given}
        of_call |= {n: a for n, a in tensors.items() if n == "bias"}
        causal = given.pop("causal", False)
        bound = Bound(
            own, LayerFacts.of_plan(plan), lambda x, _: x, Arguments(**given), causal,
            implementation,
        )  # fmt: skip
        outs: list[Tensor] = [attend(q, k, v, **of_call) for attend in bound]
        return outs[-1]

    def pullback(
        self,
        function: Function,
        arrays: dict[str, Tensor],
        names: Sequence[str],
        d_out: Host,
        compiler: str | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: arrays[name].requires_grad_() for name in names}
        run = function if compiler is None else self.compile(function, compiler)
        out = run(self.xp, arrays)
        assert out is not None
        if out.requires_grad:
            out.backward(torch.tensor(d_out).to(out))
        return out, {
            name: torch.zeros_like(a) if a.grad is None else a.grad for name, a in leaves.items()
        }


@lru_cache(64)
def _compile(function: Function, compiler: str) -> Function:
    torch._dynamo.reset()  # one function at a time: the process has one limit of recompilations
    whole: Function = torch.compile(function, fullgraph=True, backend=compiler, dynamic=False)

    def compiled(xp: Any, arrays: dict[str, Tensor]) -> Tensor | None:
        try:
            return whole(xp, arrays)
        except torch._dynamo.exc.Unsupported as reason:
            if WHY_NOT_COMPILED not in str(reason):
                raise
            raise NotImplementedError(WHY_NOT_COMPILED) from None

    return compiled
