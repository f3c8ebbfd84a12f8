"""Attention through FlexAttention: a scheme's bias is its ``score_mod``, visibility its block mask.

Each kind of call has a compiled entry, with recompilations counted apart from the user's own.
What changes from call to call enters as tensors: positions, segments, features, windows, scales and
caps, so that a new one compiles nothing. A mask that is a function is compiled in.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes

from posenc.backend import (
    Call,
    Mask,
    Window,
    bias_by_distance,
    has_bias,
    has_bias_by_distance,
    may_have_negligible_blocks,
    negligible_blocks,
)
from posenc_torch.flex.api import sight_of
from posenc_torch.flex.block_mask import BLOCK, Places, Sight, known
from posenc_torch.flex.params import labelled, loads
from posenc_torch.flex.score_mod import Bias, ByDistance, Scored, name_of
from posenc_torch.sdpa import has_native_mask, is_small

# So many programs for each scheme, head count and dtype, counted apart from the user's own.
_KINDS = 256
COMPILER: dict[str, Any] = {
    "fullgraph": True, "recompile_limit": _KINDS, "isolate_recompiles": True,
}  # fmt: skip
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # PyTorch 2.13
_OLDEST = (2, 11)
# A gathered tile goes through shared memory. With torch's own choices an H200 has too little of it,
# and the kernel that is compiled instead spills 12 kB a thread (benchmarks/flex_without_gpu.py).
FOR_TABLES = {"fwd_BLOCK_N": 64, "fwd_num_warps": 8, "bwd_num_stages": 2}
_FEW = 8  # blocks of keys of which no bias is steep enough to spare much
_entry: Callable[..., Any] | None = None


def flex(call: Call) -> tuple[Tensor, Tensor | None]:
    """``(B, H, Q, Dv)`` by FlexAttention, and its log-sum-exp ``(B, H, Q)`` if needed."""
    if not torch.is_grad_enabled():  # FlexAttention asks tensors alone whether something learns
        call = _without_gradients(call)
    if torch.compiler.is_compiling():
        return _inside(call)
    given = arguments(call)
    run = _entry or _compiled(_kind(call))
    return with_lse(run(**given | {"scale": repr(given["scale"])}))


def with_lse(found: Any) -> tuple[Tensor, Tensor | None]:
    """What FlexAttention returns, apart; a row that sees nothing has the lowest finite number."""
    if isinstance(found, Tensor):
        return found, None
    out, more = found
    return out, more.lse.clamp(min=torch.finfo(more.lse.dtype).min)


def _inside(call: Call) -> tuple[Tensor, Tensor | None]:
    """As part of a larger graph that someone compiles."""
    for array in (call.q, call.k, call.v):  # heads and channels, which no kernel has as symbols
        torch._dynamo.mark_static(array, 1)
        torch._dynamo.mark_static(array, 3)
    own = _own_memory if call.q.device.type == "cpu" else _as_it_is
    out, lse = with_lse(flex_attention(**arguments(replace(call, q=own(call.q)))))
    return own(out), lse


def kernel(query: Tensor, key: Tensor, value: Tensor, *, scale: str, **options: Any) -> Any:
    """FlexAttention for a scale in letters, which torch's compiler never makes a symbol."""
    return flex_attention(query, key, value, scale=float(scale), **options)


def arguments(call: Call) -> dict[str, Any]:
    """What FlexAttention is called with."""
    bias, scale = _bias(call), _usual_scale(call)
    mod: Bias | ByDistance | Scored | None = bias
    if scale is None or call.softcap is not None or call.extra_bias is not None:
        mod = Scored.of(call, bias, scaled=scale is not None)
    by_table = mod is not None and mod.gathers and call.q.device.type != "cpu"
    return {
        "query": call.q,
        "key": call.k,
        "value": call.v,
        "score_mod": None if mod is None else mod.score_mod,
        "block_mask": _block_mask(call),
        "scale": 1.0 if scale is None else scale,
        "enable_gqa": call.q.shape[1] != call.k.shape[1],
        "kernel_options": FOR_TABLES if by_table else None,
        "return_aux": AuxRequest(lse=True) if call.needs_lse else None,
    }


def _usual_scale(call: Call) -> float | None:
    """The scale of a call where it is one of a few, each of which may be compiled in."""
    dim = call.q.shape[3]
    return next((s for s in (dim**-0.5, 1.0, 1 / dim) if s == call.scale), None)


def _as_it_is(array: Tensor) -> Tensor:
    return array


def _own_memory(array: Tensor) -> Tensor:
    """A copy that no compiler takes out again.

    The kernel for a CPU (PyTorch 2.13) fails in a larger graph on queries that are a view of what
    came before, and on an elementwise operation fused to its result.
    """
    return torch.cat([array, array[..., :1]], dim=-1)[..., : array.shape[-1]]


def _without_gradients(call: Call) -> Call:
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


def refuses(call: Call) -> str | None:
    """Why FlexAttention cannot serve a call."""
    if torch.__version__ < _OLDEST:
        return f"it needs PyTorch 2.11 or newer, this is {torch.__version__}"
    if call.dtype == torch.float64:
        return "compiled FlexAttention has no float64"
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"q, k and v differ in dtype: {call.q.dtype}, {call.k.dtype}, {call.v.dtype}"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not tried on {call.q.device.type}"
    on_cpu = call.q.device.type == "cpu"
    if not on_cpu and min(call.q.shape[3], call.v.shape[3]) < 16:
        return f"on a GPU it takes heads of at least 16 channels, not {call.q.shape[3]}"
    features = labelled(call.query.features, call.key.features)
    tensors = (call.q, call.k, call.v, call.extra_bias, *features.values(), *call.arrays.values())
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if learns and on_cpu:
        return "FlexAttention has no backward pass on a CPU"
    return _several_loads(call) if learns else None


def without_lse(call: Call) -> str | None:
    """Why there is no log-sum-exp."""
    # PyTorch 2.13, which raises NotImplementedError; eagerly there is one.
    if call.q.device.type == "cpu" and _entry is None:
        return "compiled for a CPU, FlexAttention returns none"
    return None


def _several_loads(call: Call) -> str | None:
    """Which learned array the bias loads more than once for a pair: no backward pass has that."""
    if not has_bias(call.scheme) or _reads_distances(call):
        return None
    query, key = call.query.features, call.key.features
    known_as = {**call.arrays, **labelled(query, key)}
    several = loads(call.scheme, call.arrays, query, key)
    found = [name for name in several if known_as[name].requires_grad]
    if not found:
        return None
    return (
        "its backward pass takes one load of each learned array or feature that has a gradient, "
        f"the bias has more of {found}"
    )


def avoided(call: Call) -> str | None:
    """Why ``"auto"`` passes by."""
    if call.q.device.type == "cpu":
        return "on a CPU it compiles for seconds, and has no backward pass"
    if not _ISOLATES:
        return f"its tests run on PyTorch 2.13 and newer, this is {torch.__version__}"
    if has_native_mask(call):
        return "SDPA needs no mask for this call"
    if is_small(call):
        return "the scores of a head are few, and SDPA takes them without a compiler"
    return None


def uncompiled() -> AbstractContextManager[None]:
    """The same calls through FlexAttention's eager definition, without a compiler: for tests."""
    return _through(kernel)


@contextmanager
def _through(entry: Callable[..., Any]) -> Iterator[None]:
    global _entry
    before, _entry = _entry, entry
    try:
        yield
    finally:
        _entry = before


@lru_cache(None)
def _compiled(kind: Hashable) -> Callable[..., Any]:
    """One for each kind of call, so that no limit of recompilations is that of a process.

    Each has a code object of its own, to which torch counts.
    """
    return _compile(FunctionType(kernel.__code__.replace(), kernel.__globals__, kernel.__name__))


def _kind(call: Call) -> Hashable:
    """What a kernel is compiled for; beside it a few sizes, as of one query or one block."""
    shapes = (call.q.shape[1], call.k.shape[1], call.q.shape[3], call.v.shape[3])
    mask = known(call.mask) if isinstance(call.mask, Mask) else None
    return name_of(call.scheme), call.q.dtype, call.q.device, shapes, mask


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for as many kinds of calls as a process may have."""
    if _ISOLATES:
        return torch.compile(function, **COMPILER)
    run = torch.compile(function, fullgraph=True)

    def with_room(*args: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_KINDS):
            return run(*args, **options)

    return with_room


def _bias(call: Call) -> Bias | ByDistance | None:
    """The form of the bias that a kernel computes fastest."""
    if not has_bias(call.scheme):
        return None
    if (
        _reads_distances(call)
        and (table := bias_by_distance(replace(call, extra_bias=None))) is not None
    ):
        return ByDistance.of(call, table)
    batch = call.q.shape[0] if call.q.device.type == "cpu" else None
    features = call.query.features, call.key.features
    return Bias.of(call.scheme, call.arrays, call.dtype, _where(call), features, batch=batch)


def _reads_distances(call: Call) -> bool:
    """Whether the bias is computed once a distance, and read: buckets, sums and what is learned.

    A gradient then goes to as many numbers as there are distances, not to one a head. What needs
    only constants, numbers of a head, is a multiplication or two, and cheaper than a load.
    """
    simple = call.scheme.constants() and not call.scheme.param_specs()
    return not simple and has_bias_by_distance(replace(call, extra_bias=None))


def _places(call: Call) -> tuple[Places, Places]:
    """Positions, which decide who sees whom."""
    indexed = call.aligned and call.q.shape[2] == call.k.shape[2]
    if call.q.device.type != "cpu":
        q, k = call.query.pos, call.key.pos
        return Places.of(q, indexed=indexed), Places.of(k, indexed=call.aligned)
    return _on_cpu(call, call.query.pos, call.key.pos, indexed=indexed)


def _where(call: Call) -> tuple[Places, Places]:
    """What a bias reads: positions, or places that are given."""
    query, key = call.query.places, call.key.places
    if query is None or key is None:
        return _places(call)
    if call.q.device.type != "cpu":
        return Places.of(query), Places.of(key)
    return _on_cpu(call, query, key)


def _on_cpu(
    call: Call, query: Tensor, key: Tensor, *, indexed: bool = False
) -> tuple[Places, Places]:
    q, k = (
        Places.of(at.to(torch.int32), batch=call.q.shape[0], indexed=indexed) for at in (query, key)
    )
    return q, k


def _block_mask(call: Call) -> BlockMask | None:
    hides = call.causal or call.window is not None or call.mask is not None
    plain = not hides and call.query.seg is None
    if call.skip_blocks and call.k.shape[2] > _FEW * BLOCK and may_have_negligible_blocks(call):
        sight = _sight(call)
        some, every = sight.blocks()
        left = _left(call, every)
        if left is not None:
            return sight.block_mask(some[:, None] & left, every[:, None] & left)
    if plain and call.q.device.type != "cpu":  # there without one it takes threads * L * L memory
        return None
    traced = torch.compiler.is_compiling() or bool(_modes())  # what is kept must hold values
    if call.aligned and call.query.seg is None and call.mask is None and not traced:
        lengths = call.q.shape[2], call.k.shape[2]
        window = call.window, call.sink_tokens
        return _plain_mask(*lengths, call.causal, *window, call.query.pos.device)
    sight = _sight(call)
    return sight.block_mask(*(found[:, None] for found in sight.blocks()))


def _left(call: Call, every: Tensor) -> Tensor | None:
    """Blocks that may leave a trace, as many as there are of ``every``; None for all of them."""
    q_all, k_all = every.shape[-2:]
    q_blocks, k_blocks = (-(-a.shape[2] // BLOCK) for a in (call.q, call.k))
    nothing = _negligible(call, every[..., :q_blocks, :k_blocks])
    if nothing is None or call.q.device.type != "cpu":
        return None if nothing is None else ~nothing
    return torch.nn.functional.pad(~nothing, (0, k_all - k_blocks, 0, q_all - q_blocks))


@torch.no_grad()
def _negligible(call: Call, every: Tensor) -> Tensor | None:
    """Blocks that leave no trace; on a GPU compiled, to read queries and keys once each."""
    if call.q.device.type == "cpu" or torch.compiler.is_compiling():
        return negligible_blocks(call, BLOCK, all_visible=every)
    with warnings.catch_warnings():
        # Dynamo traces array_api_compat's cached look-ups; their result is the same.
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_")
        return _compiled_negligible()(call, BLOCK, all_visible=every)


@lru_cache(1)
def _compiled_negligible() -> Callable[..., Tensor | None]:
    return _compile(negligible_blocks)


def _sight(call: Call) -> Sight:
    q_pos, k_pos = _places(call)
    q_seg = k_seg = None
    if call.query.seg is not None and call.key.seg is not None:
        both = call.query.seg, call.key.seg
        if call.q.device.type != "cpu":
            q_seg, k_seg = (Places.of(seg) for seg in both)
        else:
            q_seg, k_seg = (Places.of(seg.long(), batch=call.q.shape[0]) for seg in both)
    shown = call.causal, call.window, call.sink_tokens, call.mask
    return Sight(q_pos, k_pos, q_seg, k_seg, *shown)


@lru_cache(4)
def _plain_mask(
    q_len: int,
    k_len: int,
    causal: bool,
    window: Window | None,
    sink_tokens: int,
    device: torch.device,
) -> BlockMask:
    """The mask of aligned positions, kept: layers and steps ask for the same one."""
    with torch.inference_mode(False):  # or no training step could use it
        sight = sight_of(
            q_len, k_len, causal=causal, window=window, sink_tokens=sink_tokens, device=device
        )
        return sight.block_mask(*(found[:, None] for found in sight.blocks()))
