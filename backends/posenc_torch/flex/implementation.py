"""Attention by FlexAttention: the bias is its ``score_mod``, the mask its ``block_mask``.

Each kind of call has its own compiled entry, so its recompilations do not count towards the user's
limit. Positions, segments, features, windows, scales and caps enter as tensors, so that a new value
compiles nothing. A mask function is compiled in.

In comments, a *symbol* is a size or number that torch's compiler leaves variable (``SymInt``). A
*larger graph* is a program of the user, under ``torch.compile``, that contains the call.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes

from posenc.backend import (
    Call,
    Hook,
    Mask,
    Planned,
    Refusal,
    bias_by_distance,
    has_bias,
    has_bias_by_distance,
    may_have_negligible_blocks,
    negligible_blocks,
    plan_unless,
)
from posenc_torch.flex import target
from posenc_torch.flex.api import block_mask_inputs
from posenc_torch.flex.block_mask import (
    BLOCK,
    BlockMaskInputs,
    Diagonals,
    TokenIntegers,
    mask_keys,
)
from posenc_torch.flex.float_positions import LARGEST
from posenc_torch.flex.kernel_options import kernel_options
from posenc_torch.flex.near_far import bias_at, merge, near_and_far
from posenc_torch.flex.params import (
    fixed_reads,
    label_features,
    read_arrays,
    repeatedly_read_arrays,
)
from posenc_torch.flex.ranges import lists_of_diagonals, needed_lists, takes_ranges
from posenc_torch.flex.score_mod import DistanceBias, SchemeBias, ScoreSteps, scheme_key
from posenc_torch.sdpa import has_native_mask, is_small
from posenc_torch.tracing import is_transformed

_T = TypeVar("_T")
# Recompilations allowed per scheme, head count and dtype; they do not count towards the user's.
_RECOMPILE_LIMIT = 256
COMPILER: dict[str, Any] = {
    "fullgraph": True, "recompile_limit": _RECOMPILE_LIMIT, "isolate_recompiles": True,
}  # fmt: skip
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # since 2.13
_OLDEST = (2, 11)
_MANY_NUMBERS = 16  # FIRE with 8 units reads 26 and compiles in a minute; 32 take far longer
_SAFE_CHANNELS = 24  # of queries and keys; with as many, the kernel takes products another way
_MIN_BLOCKS = 8  # of keys: with fewer, skipping blocks saves little
# The function that replaces the compiled kernel, inside replace_kernel.
_kernel: ContextVar[Callable[..., Any] | None] = ContextVar("kernel", default=None)


def flex(call: Call) -> tuple[Tensor, Tensor | None]:
    """``(B, H, Q, Dv)`` by FlexAttention, and its log-sum-exp ``(B, H, Q)`` if needed."""
    if not torch.is_grad_enabled():  # FlexAttention looks at requires_grad of tensors only
        call = _without_gradients(call)
    run = _inside_graph if torch.compiler.is_compiling() else _run
    parts = near_and_far(call, partial(_in_one_program, bias_at))
    if not parts:
        return run(call, None)
    outs, logs = [], []
    for part in parts:
        out, lse = run(part.call, part.diagonals)
        assert lse is not None
        outs.append(out)
        logs.append(lse if part.bias is None else lse + part.bias)
    eager = torch.compiler.is_compiling() or _kernel.get() is not None
    return merge(outs, logs) if eager else _compiled_once(merge)(outs, logs)


def _run(call: Call, diagonals: Diagonals | None) -> tuple[Tensor, Tensor | None]:
    """What ``flex`` returns for one call of a kernel."""
    keywords = arguments(call, diagonals)
    run = _kernel.get() or _compiled(_kind(call))
    return split_lse(run(**keywords | {"scale": repr(keywords["scale"])}))


def split_lse(result: Any) -> tuple[Tensor, Tensor | None]:
    """FlexAttention's result and log-sum-exp; that of a fully masked row is the lowest float."""
    if isinstance(result, Tensor):
        return result, None
    out, aux = result
    return out, aux.lse.clamp(min=torch.finfo(aux.lse.dtype).min)


def _inside_graph(call: Call, diagonals: Diagonals | None) -> tuple[Tensor, Tensor | None]:
    """What ``_run`` returns, inside a larger graph."""
    for array in (call.q, call.k, call.v):  # kernels take no symbols for heads and head_dim
        torch._dynamo.mark_static(array, 1)
        torch._dynamo.mark_static(array, 3)
    copy = _copy if target.is_cpu(call.q) else _identity
    keywords = arguments(replace(call, q=copy(call.q)), diagonals)
    out, lse = split_lse(flex_attention(**keywords))
    return copy(out), lse


def kernel(query: Tensor, key: Tensor, value: Tensor, *, scale: str, **options: Any) -> Any:
    """FlexAttention with the scale as a string, which torch's compiler never makes a symbol."""
    return flex_attention(query, key, value, scale=float(scale), **options)


def arguments(call: Call, diagonals: Diagonals | None = None) -> dict[str, Any]:
    """The arguments of ``flex_attention``; ``diagonals`` are those of a ``Part``."""
    bias, scale = _bias(call), _common_scale(call)
    mod: SchemeBias | DistanceBias | ScoreSteps | None = bias
    if scale is None or call.softcap is not None or call.extra_bias is not None:
        mod = ScoreSteps.of(call, bias, scaled=scale is not None)
    gathers, mask = mod is not None and mod.gathers, _block_mask(call, diagonals)
    copied, split = (bool(getattr(bias, name, ())) for name in ("copied", "split"))
    options = kernel_options(
        call, gathers=gathers, copied=copied, split=split, masked=mask is not None
    )
    return {
        "query": _widened(call.q),
        "key": _widened(call.k),
        "value": call.v,
        "score_mod": None if mod is None else mod.score_mod,
        "block_mask": mask,
        "scale": 1.0 if scale is None else scale,
        "enable_gqa": call.q.shape[1] != call.k.shape[1],
        "kernel_options": options,
        "return_aux": AuxRequest(lse=True) if call.needs_lse else None,
    }


def _common_scale(call: Call) -> float | None:
    """The scale of a call if it is a common one, which kernels compile in; else None."""
    dim = call.q.shape[3]
    common = (dim**-0.5, 1.0, 1 / dim, (dim / 2) ** -0.5)  # the last: channels were doubled
    return next((s for s in common if s == call.scale), None)


def _identity(array: Tensor) -> Tensor:
    return array


def _copy(array: Tensor) -> Tensor:
    """A copy that the compiler does not remove.

    In a larger graph, the kernel for a CPU (PyTorch 2.13) fails if its queries are a view of an
    earlier result. It also fails if the compiler fuses an elementwise operation to its result.
    """
    return torch.cat([array, array[..., :1]], dim=-1)[..., : array.shape[-1]]


def _without_gradients(call: Call) -> Call:
    """The call with all differentiable tensors detached."""
    return replace(
        call,
        q=call.q.detach(),
        k=call.k.detach(),
        v=call.v.detach(),
        arrays={name: a.detach() for name, a in call.arrays.items()},
        query=call.query.map_features(torch.detach),
        key=call.key.map_features(torch.detach),
        extra_bias=None if call.extra_bias is None else call.extra_bias.detach(),
    )


def plan(call: Call) -> Planned | Refusal:
    """How FlexAttention serves a call, or why it cannot."""
    return plan_unless(_why_not(call), Planned(flex, without_lse=_without_lse(call)))


def _why_not(call: Call) -> str | None:
    if torch.__version__ < _OLDEST:  # type: ignore[operator]  # a TorchVersion takes tuples too
        return f"it needs PyTorch 2.11 or newer, this is {torch.__version__}"
    if (
        torch.compiler.is_compiling()
        and not _is_replaced()
        and (backend := target.eager_backend()) is not None
    ):
        return (
            f"torch.compile(backend={backend!r}) generates no kernel, and FlexAttention then takes "
            "memory for Q x K scores: use backend='inductor'"
        )
    # Torch fails there, and a block mask that is kept for later calls would be part of it.
    if not torch.compiler.is_compiling() and is_transformed():
        return "FlexAttention has neither torch.func nor forward mode"
    if call.dtype == torch.float64:
        return "compiled FlexAttention has no float64"
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"q, k and v differ in dtype: {call.q.dtype}, {call.k.dtype}, {call.v.dtype}"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not tested on {call.q.device.type}"
    on_cpu = target.is_cpu(call.q)
    if not on_cpu and min(call.q.shape[3], call.v.shape[3]) < 16:
        dim = min(call.q.shape[3], call.v.shape[3])
        return f"on a GPU it needs a head_dim of at least 16, got {dim}"
    features = label_features(call.query.features, call.key.features)
    tensors = (call.q, call.k, call.v, call.extra_bias, *features.values(), *call.arrays.values())
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if needs_grad and on_cpu:
        return "FlexAttention has no backward pass on a CPU"
    return _multiple_reads(call) if needs_grad else None


def _without_lse(call: Call) -> str | None:
    """Why there is no log-sum-exp."""
    # Compiled for a CPU, PyTorch 2.13 raises NotImplementedError; the eager definition has one.
    if target.is_cpu(call.q) and not _is_replaced():
        return "compiled for a CPU, FlexAttention returns none"
    return None


def _multiple_reads(call: Call) -> str | None:
    """Why the backward pass does not support the bias: it reads a learned array several times."""
    if not has_bias(call.scheme) or _reads_by_distance(call):
        return None
    query, key = call.query.features, call.key.features
    arrays = {**call.arrays, **label_features(query, key)}
    multiple = repeatedly_read_arrays(call.scheme, call.arrays, query, key)
    learned = [name for name in multiple if arrays[name].requires_grad]
    if not learned:
        return None
    return (
        "FlexAttention's backward pass allows one read of each learned array or feature per score; "
        f"this bias reads {learned} more often"
    )


def not_preferred(call: Call) -> str | None:
    """Why ``"auto"`` skips it."""
    if target.is_cpu(call.q):
        return "on a CPU it compiles for seconds, and has no backward pass"
    if not _ISOLATES:
        return f"it is tested on PyTorch 2.13 and newer, this is {torch.__version__}"
    if has_native_mask(call):
        return "SDPA needs no mask for this call"
    if is_small(call):
        return "each head has few scores, and SDPA takes them without a compiler"
    if (count := _count_learned_numbers(call)) > _MANY_NUMBERS:
        return (
            f"its backward pass would add to {count} learned numbers for every score, and compile "
            "for minutes"
        )
    return None


def _count_learned_numbers(call: Call) -> int:
    """How many single numbers of learned arrays the bias reads, as a network does."""
    learns = torch.is_grad_enabled() and any(a.requires_grad for a in call.arrays.values())
    if not learns or not has_bias(call.scheme) or _reads_by_distance(call):
        return 0
    fixed = fixed_reads(call.scheme, call.arrays, call.query.features, call.key.features)
    return sum(len(indices) for name, indices in fixed.items() if call.arrays[name].requires_grad)


def uncompiled() -> AbstractContextManager[None]:
    """Inside, calls run FlexAttention's eager definition, without a compiler."""
    return replace_kernel(kernel)


@contextmanager
def replace_kernel(function: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls run ``function``, with the arguments of ``kernel``, instead of compiling."""
    token = _kernel.set(function)
    try:
        yield
    finally:
        _kernel.reset(token)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # untyped in torch
def _is_replaced() -> bool:
    """Whether ``replace_kernel`` is active."""
    # A constant for the compiler, because not every Dynamo traces a ContextVar.
    return _kernel.get() is not None


@lru_cache(None)
def _compiled(kind: Hashable) -> Callable[..., Any]:
    """The compiled ``kernel`` for a kind of call.

    Torch limits recompilations per code object. Each kind has a new code object, so the number of
    kinds in a process has no limit.
    """
    return _compile(FunctionType(kernel.__code__.replace(), kernel.__globals__, kernel.__name__))


def _kind(call: Call) -> Hashable:
    """The key of a compiled kernel, which is compiled again for a few lengths, such as 1 query."""
    shapes = (call.q.shape[1], call.k.shape[1], call.q.shape[3], call.v.shape[3])
    return scheme_key(call.scheme), call.q.dtype, call.q.device, shapes, mask_keys(call.mask)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, with a high limit of recompilations."""
    if _ISOLATES:
        return torch.compile(function, **COMPILER)
    run = torch.compile(function, fullgraph=True)

    def with_limit(*args: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            return run(*args, **options)

    return with_limit


def _widened(x: Tensor) -> Tensor:
    """``x`` with channels of zeros, where a CPU's kernel would spoil a row.

    For up to 16 channels, PyTorch 2.13 stores the scores of a last tile of 8 keys as a tile of 16.
    The other 8, of what lies behind the keys in memory, become the first maxima of 8 rows.
    """
    missing = _SAFE_CHANNELS - x.shape[-1]
    return x if missing <= 0 or not target.is_cpu(x) else torch.nn.functional.pad(x, (0, missing))


def _bias(call: Call) -> SchemeBias | DistanceBias | None:
    """The form of the scheme's bias that a kernel computes fastest; None for no bias."""
    if not has_bias(call.scheme):
        return None
    if _reads_by_distance(call):
        in_graph = torch.compiler.is_compiling() and not target.is_cpu(call.q)
        form = DistanceBias.by_amount if in_graph else _distance_bias
        by_distance = _in_one_program(form, call)
        if by_distance is not None:
            return by_distance
    batch = call.q.shape[0] if target.is_cpu(call.q) else None
    features = call.query.features, call.key.features
    tokens = _bias_positions(call)
    bias = SchemeBias.of(
        call.scheme, call.arrays, call.dtype, tokens, features, batch=batch, copied=_copied(call)
    )
    # Positions of callers may be larger. Inside a larger graph no other can be traced.
    small = call.aligned and call.query.places is None and call.k.shape[2] <= LARGEST
    if target.is_cpu(call.q) or not small or torch.compiler.is_compiling():
        return bias
    return bias.with_float_positions()


def _copied(call: Call) -> tuple[str, ...]:
    """Names of the arrays that a bias reads and a call learns: kernels load copies."""
    learned = [n for n, a in call.arrays.items() if a.requires_grad]
    if not learned or not torch.is_grad_enabled():
        return ()
    read = read_arrays(call.scheme, call.arrays, call.query.features, call.key.features)
    return tuple(name for name in learned if name in read)


def _distance_bias(call: Call) -> DistanceBias | None:
    table = bias_by_distance(replace(call, extra_bias=None))
    return None if table is None else DistanceBias.of(call, table)


def _reads_by_distance(call: Call) -> bool:
    """Whether the kernel reads the bias from a table by distance.

    A bias with a key bias, such as ALiBi's, is computed: if it depends on distance alone, it is
    linear in distance, and a multiplication or two is cheaper than a load.
    """
    linear = Hook.KEY_BIAS in call.scheme.hooks()
    return not linear and has_bias_by_distance(replace(call, extra_bias=None))


def _mask_positions(call: Call) -> tuple[TokenIntegers, TokenIntegers]:
    """Positions of queries and keys, which the mask depends on."""
    is_index = call.aligned and call.q.shape[2] == call.k.shape[2]
    if not target.is_cpu(call.q):
        q, k = call.query.pos, call.key.pos
        return TokenIntegers.of(q, is_index=is_index), TokenIntegers.of(k, is_index=call.aligned)
    return _cpu_integers(call, call.query.pos, call.key.pos, is_index=is_index)


def _bias_positions(call: Call) -> tuple[TokenIntegers, TokenIntegers]:
    """Places of queries and keys if they are given, else positions: the bias reads them."""
    query, key = call.query.places, call.key.places
    if query is None or key is None:
        return _mask_positions(call)
    if not target.is_cpu(call.q):
        return TokenIntegers.of(query), TokenIntegers.of(key)
    return _cpu_integers(call, query, key)


def _cpu_integers(
    call: Call, query: Tensor, key: Tensor, *, is_index: bool = False
) -> tuple[TokenIntegers, TokenIntegers]:
    """Positions or places for a kernel on a CPU: int32, with a row for each batch element."""
    batch = call.q.shape[0]
    q, k = (
        TokenIntegers.of(values.to(torch.int32), batch=batch, is_index=is_index)
        for values in (query, key)
    )
    return q, k


def _block_mask(call: Call, diagonals: Diagonals | None = None) -> BlockMask | None:
    """The mask of a call, without its negligible blocks; None for no mask, on a GPU."""
    hides = call.causal or call.window or not call.mask.plain or diagonals is not None
    unmasked = not hides and call.query.seg is None
    as_ranges = takes_ranges(call)
    if (
        call.skip_blocks
        and call.k.shape[2] > _MIN_BLOCKS * BLOCK
        and may_have_negligible_blocks(call)
    ):
        inputs = _mask_inputs(call)
        if as_ranges:
            with torch.no_grad():
                lists = _in_one_program(needed_lists, call)
            if lists is not None:
                return inputs.block_mask_of_lists(lists)
        else:
            any_visible, all_visible = inputs.visible_blocks()
            kept = _not_negligible(call, all_visible)
            if kept is not None:
                return inputs.block_mask(any_visible[:, None] & kept, all_visible[:, None] & kept)
    # On a CPU FlexAttention without a block mask takes threads * L * L memory.
    if unmasked and not target.is_cpu(call.q):
        return None
    # A cached mask must hold values, which traced tensors do not have.
    traced = torch.compiler.is_compiling() or bool(_modes())
    if call.aligned and call.query.seg is None and call.mask.plain and not traced:
        lengths = call.q.shape[2], call.k.shape[2]
        return _plain_mask(*lengths, call.mask, call.query.pos.device, as_ranges, diagonals)
    inputs = _mask_inputs(call)._replace(diagonals=diagonals)
    return _whole_mask(inputs, as_ranges=as_ranges)


def _not_negligible(call: Call, all_visible: Tensor) -> Tensor | None:
    """Which blocks are not negligible, in the shape of ``all_visible``; None for all blocks."""
    q_padded, k_padded = all_visible.shape[-2:]
    q_blocks, k_blocks = (-(-a.shape[2] // BLOCK) for a in (call.q, call.k))
    whole = all_visible[..., :q_blocks, :k_blocks]
    with torch.no_grad():
        skipped = _in_one_program(negligible_blocks, call, BLOCK, all_visible=whole)
    if skipped is None or not target.is_cpu(call.q):
        return None if skipped is None else ~skipped
    return torch.nn.functional.pad(~skipped, (0, k_padded - k_blocks, 0, q_padded - q_blocks))


def _in_one_program(function: Callable[..., _T], call: Call, *args: Any, **options: Any) -> _T:
    """``function(call, ...)``; on a GPU compiled, instead of a kernel for each operation."""
    if target.is_cpu(call.q) or torch.compiler.is_compiling() or _kernel.get() is not None:
        return function(call, *args, **options)
    with warnings.catch_warnings():
        # Dynamo traces cached functions of array_api_compat, which return the same either way.
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_")
        # Dynamo asks every array for its gradient.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        result: _T = _compiled_once(function)(call, *args, **options)
        return result


@lru_cache(None)
def _compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return _compile(function)


def _mask_inputs(call: Call) -> BlockMaskInputs:
    """The tokens and the mask options of a call, from which its block mask is computed."""
    q_pos, k_pos = _mask_positions(call)
    q_seg = k_seg = None
    if call.query.seg is not None and call.key.seg is not None:
        segments, batch = (call.query.seg, call.key.seg), call.q.shape[0]
        if not target.is_cpu(call.q):
            q_seg, k_seg = (TokenIntegers.of(seg) for seg in segments)
        else:
            q_seg, k_seg = (TokenIntegers.of(seg.long(), batch=batch) for seg in segments)
    return BlockMaskInputs(q_pos, k_pos, q_seg, k_seg, call.mask)


@lru_cache(8)
def _plain_mask(
    q_len: int,
    k_len: int,
    mask: Mask,
    device: torch.device,
    as_ranges: bool,
    diagonals: Diagonals | None = None,
) -> BlockMask:
    """The mask of default positions, cached because layers and steps ask for the same one."""
    with torch.inference_mode(False):  # a training step cannot use inference tensors
        inputs = block_mask_inputs(q_len, k_len, mask, device=device)._replace(diagonals=diagonals)
        return _whole_mask(inputs, as_ranges=as_ranges)


def _whole_mask(inputs: BlockMaskInputs, *, as_ranges: bool) -> BlockMask:
    """The mask of all visible blocks."""
    if not as_ranges:
        return inputs.block_mask(*(blocks[:, None] for blocks in inputs.visible_blocks()))
    index = torch.arange(inputs.q_pos.blocks, dtype=torch.int32, device=inputs.q_pos.values.device)
    return inputs.block_mask_of_lists(lists_of_diagonals(index, inputs.diagonals or (None, None)))
