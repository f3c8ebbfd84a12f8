"""Variants that are measured in PyTorch: attention of this library, and its baselines."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import posenc_torch
from harness.speed import DENSE, Variant, first_params, name_of, schemes
from harness.torch_checks import COMPILED
from posenc_torch.flex.block_mask import BLOCK

Call = Callable[[], Tensor]
SKIPPING = ("flex", "chunked")  # implementations that can skip blocks
_NO_KERNEL = ("No available kernel", "No viable backend")  # what SDPA says
_RECOMPILE_LIMIT = 64
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # since 2.13


class Inputs:
    """Normal q, k and v that ask for gradients, a gradient of the result, and params."""

    def __init__(self, heads: int, length: int, dim: int, dtype: torch.dtype, device: str) -> None:
        shape = (1, heads, length, dim)
        drawn = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
        self.q, self.k, self.v = (a.requires_grad_() for a in drawn[:3])
        self.d_out = drawn[3]
        self.schemes = schemes(heads)

    @property
    def tokens(self) -> list[Tensor]:
        """What attention gets; it asks for gradients where they are recorded.

        On a CPU FlexAttention refuses tensors that ask for them, recorded or not.
        """
        tokens = [self.q, self.k, self.v]
        return tokens if torch.is_grad_enabled() else [a.detach() for a in tokens]

    def params(self, scheme: str, learns: bool) -> dict[str, Tensor]:
        """Learned arrays; they ask for gradients if asked."""
        return {
            name: torch.tensor(value, device=self.q.device).requires_grad_(learns)
            for name, value in first_params(scheme, self.schemes[scheme]).items()
        }


def ours(
    scheme: str, implementation: str, *, learns: bool = False, skip: bool | None = None
) -> Variant:
    """Attention of posenc by name; ``skip=False`` also computes negligible blocks."""
    options = {} if skip is None else {"skip_blocks": skip}

    def ready(inputs: Inputs, params: dict[str, Tensor]) -> Call:
        kind = inputs.schemes[scheme]
        return lambda: posenc_torch.attention(
            *inputs.tokens, kind, params, causal=True, implementation=implementation, **options
        )

    name = name_of(scheme, implementation, learns, skip)
    dense, compiles = implementation in DENSE and scheme != "none", implementation in COMPILED
    return Variant(name, ready, role="ours", dense=dense, compiles=compiles, learns=learns)


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


def of_this_library() -> list[Variant]:
    """Every implementation, those with goals first."""
    variants = [
        ours("alibi", implementation, skip=skip)
        for implementation in sorted(posenc_torch.IMPLEMENTATIONS, key=_last)
        for skip in ((True, False) if implementation in SKIPPING else (None,))
    ]
    for implementation in sorted(posenc_torch.IMPLEMENTATIONS, key=_last):
        variants += [
            ours("t5", implementation),
            ours("t5", implementation, learns=True),
            ours("slopes", implementation, learns=True),
        ]
    return variants + [
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
    variants = []
    if importlib.util.find_spec("flash_attn") is not None:
        biased = partial(_flash_attn, biased=True)
        variants += [
            Variant("none flash_attn", _flash_attn, role="peer"),
            Variant("alibi flash_attn", biased, role="peer"),
        ]
    if importlib.util.find_spec("flash_attn_interface") is not None:
        variants += [Variant("none flash_attn_interface", _flash_attn_3, role="peer")]
    if importlib.util.find_spec("xformers") is not None:
        variants += [Variant("none xformers", _xformers, role="peer")]
    return variants


def _sdpa(inputs: Inputs, params: dict[str, Tensor]) -> Call:
    """The kernel that PyTorch chooses."""
    return lambda: sdpa(*inputs.tokens, is_causal=True)


def _kernel(name: str, inputs: Inputs, params: dict[str, Tensor]) -> Call:
    backend = getattr(SDPBackend, name)

    def call() -> Tensor:
        try:
            with sdpa_kernel(backend):
                return sdpa(*inputs.tokens, is_causal=True)
        except RuntimeError as error:
            if any(words in str(error) for words in _NO_KERNEL):
                raise NotImplementedError(f"this device has no kernel {name}") from error
            raise

    return call


def _masked(inputs: Inputs, params: dict[str, Tensor]) -> Call:
    """As before FlexAttention: the whole bias, in q's dtype."""
    at = torch.arange(inputs.q.shape[2], device=inputs.q.device)
    bias = _slopes(inputs)[:, None, None] * (at - at[:, None])
    mask = bias.masked_fill_(at > at[:, None], -torch.inf)[None].to(inputs.q.dtype)
    return lambda: sdpa(*inputs.tokens, attn_mask=mask)


def _flex(inputs: Inputs, params: dict[str, Tensor]) -> Call:
    return _flex_call(inputs, "none torch flex", None, {})


def _score_mod(options: dict[str, Any], inputs: Inputs, params: dict[str, Tensor]) -> Call:
    missing = options.keys() - FlexKernelOptions.__annotations__.keys()
    if missing:
        raise NotImplementedError(f"torch {torch.__version__} has no option {', '.join(missing)}")
    if options.get("BACKEND") == "FLASH" and not _has_flash_kernels():
        raise NotImplementedError("flash_attn.cute is not installed")
    mod = posenc_torch.score_mod(inputs.schemes["alibi"], device=inputs.q.device)
    return _flex_call(inputs, f"alibi {options}", mod, options)


def _flex_call(inputs: Inputs, name: str, mod: Any, options: dict[str, Any]) -> Call:
    mask = causal_blocks(inputs.q.shape[2], inputs.q.device)
    # Lengths are whole blocks; a kernel for any length would check each of them.
    own = {"IS_DIVISIBLE": True, **options}
    run = own_program(name)

    def call() -> Tensor:
        if torch.is_grad_enabled() and inputs.q.device.type == "cpu":
            raise NotImplementedError("FlexAttention has no backward pass on a CPU")
        return run(*inputs.tokens, mod, mask, own)

    return call


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


def _swap(inputs: Inputs) -> Sequence[Tensor]:
    """``(B, L, H, D)``, a view."""
    return [a.transpose(1, 2) for a in inputs.tokens]


def _slopes(inputs: Inputs) -> Tensor:
    slopes = inputs.schemes["alibi"].head_slopes()
    return torch.tensor(slopes, dtype=torch.float32, device=inputs.q.device)


def _flash_attn(inputs: Inputs, params: dict[str, Tensor], biased: bool = False) -> Call:
    from flash_attn import flash_attn_func

    options: dict[str, Any] = {"alibi_slopes": _slopes(inputs)} if biased else {}
    return lambda: flash_attn_func(*_swap(inputs), causal=True, **options).transpose(1, 2)


def _flash_attn_3(inputs: Inputs, params: dict[str, Tensor]) -> Call:
    from flash_attn_interface import flash_attn_func

    def call() -> Tensor:
        out = flash_attn_func(*_swap(inputs), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def _xformers(inputs: Inputs, params: dict[str, Tensor]) -> Call:
    from xformers import ops

    mask = ops.LowerTriangularMask()
    return lambda: ops.memory_efficient_attention(*_swap(inputs), mask).transpose(1, 2)
