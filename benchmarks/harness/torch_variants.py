"""Variants that are measured in PyTorch: attention of this library, and its baselines."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import posenc_torch
from harness import variants
from harness.run import Arrays, Function, tokens_of
from harness.torch_checks import COMPILED
from harness.variants import DENSE, Inputs, Variant
from posenc_torch.flex.block_mask import BLOCK

Given = tuple[Function, Arrays]
SKIPPING = ("flex", "chunked")  # implementations that can skip blocks
_NO_KERNEL = ("No available kernel", "No viable backend")  # what SDPA says
_RECOMPILE_LIMIT = 64
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # since 2.13


def ours(scheme: str, implementation: str, **options: Any) -> Variant:
    """Attention of posenc by name, with options of ``variants.ours``."""
    compiles = implementation in COMPILED
    return variants.ours(scheme, implementation, compiles=compiles, **options)


def baselines() -> list[Variant]:
    """Attention of PyTorch without positions, and with a bias computed beforehand."""
    kernels = {
        "flash": "FLASH_ATTENTION",
        "cudnn": "CUDNN_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
    }
    return [
        Variant("none torch sdpa", _sdpa),
        *[Variant(f"none torch sdpa {n}", partial(_kernel, kind)) for n, kind in kernels.items()],
        Variant("none torch flex", _flex, compiles=True),
        Variant("alibi torch sdpa mask", _masked, dense=True, exact=False),
    ]


def of_this_library(few: tuple[int, ...] = ()) -> list[Variant]:
    """Every implementation, those with goals first, at every length."""
    found = [
        ours("alibi", implementation, skip=skip)
        for implementation in sorted(posenc_torch.IMPLEMENTATIONS, key=_last)
        for skip in ((True, False) if implementation in SKIPPING else (None,))
    ]
    for implementation in sorted(posenc_torch.IMPLEMENTATIONS, key=_last):
        found += [
            ours("t5", implementation),
            ours("t5", implementation, learns=True),
            ours("slopes", implementation, learns=True),
        ]
    return found + [
        ours("none", implementation)
        for implementation in posenc_torch.IMPLEMENTATIONS
        if implementation != "reference"
    ]


def _last(implementation: str) -> bool:
    return implementation in DENSE


def trials(lengths: tuple[int, ...] = ()) -> list[Variant]:
    """FlexAttention with this library's public ``score_mod``, without and with kernel options."""
    return [
        Variant(
            f"alibi score_mod{name}", partial(_score_mod, options),
            role="trial", compiles=True, lengths=lengths,
        )
        for name, options in (
            ("", {}), (" USE_TMA", {"USE_TMA": True}), (" FLASH", {"BACKEND": "FLASH"})
        )
    ]  # fmt: skip


def peers() -> list[Variant]:
    """Attention of other libraries, where they are installed."""
    found = []
    if importlib.util.find_spec("flash_attn") is not None:
        biased = partial(_flash_attn, biased=True)
        found += [
            Variant("none flash_attn", _flash_attn, role="peer"),
            Variant("alibi flash_attn", biased, role="peer"),
        ]
    if importlib.util.find_spec("flash_attn_interface") is not None:
        found += [Variant("none flash_attn_interface", _flash_attn_3, role="peer")]
    if importlib.util.find_spec("xformers") is not None:
        found += [Variant("none xformers", _xformers, role="peer")]
    return found


def _sdpa(inputs: Inputs) -> Given:
    """The kernel that PyTorch chooses."""
    return lambda a: sdpa(*tokens_of(a), is_causal=True), {}


def _kernel(name: str, inputs: Inputs) -> Given:
    backend = getattr(SDPBackend, name)

    def call(arrays: Arrays) -> Tensor:
        try:
            with sdpa_kernel(backend):
                return sdpa(*tokens_of(arrays), is_causal=True)
        except RuntimeError as error:
            if any(words in str(error) for words in _NO_KERNEL):
                raise NotImplementedError(f"this device has no kernel {name}") from error
            raise

    return call, {}


def _masked(inputs: Inputs) -> Given:
    """As before FlexAttention: the whole bias, in q's dtype."""
    at = torch.arange(inputs.length, device=inputs.runner.device)
    bias = inputs.slopes[:, None, None] * (at - at[:, None])
    mask = bias.masked_fill_(at > at[:, None], -torch.inf)[None].to(inputs.d_out.dtype)
    return lambda a: sdpa(*tokens_of(a), attn_mask=a["mask"]), {"mask": mask}


def _flex(inputs: Inputs) -> Given:
    return _flex_call(inputs, "none torch flex", None, {})


def _score_mod(options: dict[str, Any], inputs: Inputs) -> Given:
    missing = options.keys() - FlexKernelOptions.__annotations__.keys()
    if missing:
        raise NotImplementedError(f"torch {torch.__version__} has no option {', '.join(missing)}")
    if options.get("BACKEND") == "FLASH" and not _has_flash_kernels():
        raise NotImplementedError("flash_attn.cute is not installed")
    mod = posenc_torch.score_mod(inputs.schemes["alibi"], device=inputs.d_out.device)
    return _flex_call(inputs, f"alibi {options}", mod, options)


def _flex_call(inputs: Inputs, name: str, mod: Any, options: dict[str, Any]) -> Given:
    mask = causal_blocks(inputs.length, inputs.d_out.device)
    # Lengths are whole blocks; a kernel for any length would check each of them.
    own = {"IS_DIVISIBLE": True, **options}
    run = own_program(name)

    def call(arrays: Arrays) -> Tensor:
        if torch.is_grad_enabled() and inputs.runner.device == "cpu":
            raise NotImplementedError("FlexAttention has no backward pass on a CPU")
        return run(*tokens_of(arrays), mod, mask, own)

    return call, {}


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mod: Any, mask: BlockMask, options: dict[str, Any]
) -> Any:
    return flex_attention(q, k, v, mod, mask, kernel_options=options)


@cache
def own_program(name: str) -> Callable[..., Any]:
    """FlexAttention compiled for one variant, with a limit of recompilations of its own.

    Dynamo counts compilations per code object. Other calls of ``flex_attention`` in the process
    would use up the limit of a shared one.
    """
    function = FunctionType(_attend.__code__.replace(), _attend.__globals__, name)
    if _ISOLATES:
        options = {"recompile_limit": _RECOMPILE_LIMIT, "isolate_recompiles": True}
        return torch.compile(function, fullgraph=True, **options)
    run = torch.compile(function, fullgraph=True)

    def with_limit(*args: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            return run(*args)

    return with_limit


def _has_flash_kernels() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """The causal mask of whole blocks: the diagonal in between, all below it seen whole."""
    rows = torch.arange(length // BLOCK, dtype=torch.int32, device=device)
    # As many of each list as the count says; the rest may be in any order.
    diagonal = (rows + rows[:, None]) % len(rows)
    below = rows.expand(len(rows), -1).contiguous()
    lists = (torch.ones_like(rows), diagonal, rows, below)
    return BlockMask.from_kv_blocks(
        *(a[None, None] for a in lists),
        BLOCK_SIZE=BLOCK,
        mask_mod=_causal,
        seq_lengths=(length, length),
    )


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _swap(arrays: Arrays) -> list[Tensor]:
    """``(B, L, H, D)``, a view."""
    return [a.transpose(1, 2) for a in tokens_of(arrays)]


def _flash_attn(inputs: Inputs, biased: bool = False) -> Given:
    from flash_attn import flash_attn_func

    options: dict[str, Any] = {"alibi_slopes": inputs.slopes} if biased else {}
    return lambda a: flash_attn_func(*_swap(a), causal=True, **options).transpose(1, 2), {}


def _flash_attn_3(inputs: Inputs) -> Given:
    from flash_attn_interface import flash_attn_func

    def call(arrays: Arrays) -> Tensor:
        out = flash_attn_func(*_swap(arrays), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call, {}


def _xformers(inputs: Inputs) -> Given:
    from xformers import ops

    mask = ops.LowerTriangularMask()
    return lambda a: ops.memory_efficient_attention(*_swap(a), mask).transpose(1, 2), {}
