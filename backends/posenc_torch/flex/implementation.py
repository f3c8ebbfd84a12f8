"""Attention by FlexAttention: the bias is its ``score_mod``, the mask its ``block_mask``.

Positions, segments, features, windows, scales and caps enter as tensors, so that a new value
compiles nothing. A mask function is compiled in.

In comments, a *symbol* is a size or number that torch's compiler leaves variable (``SymInt``). A
*larger graph* is a program of the user, under ``torch.compile``, that contains the call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from posenc.backend import (
    Call,
    Hook,
    LogSumExp,
    Planned,
    Refusal,
    bias_by_distance,
    has_bias,
    has_bias_by_distance,
    plan_unless,
)
from posenc_torch.flex import programs, target
from posenc_torch.flex.block_mask import Diagonals, mask_keys
from posenc_torch.flex.call_mask import bias_positions, block_mask_of
from posenc_torch.flex.float_positions import LARGEST
from posenc_torch.flex.kernel_options import kernel_options
from posenc_torch.flex.near_far import bias_at, merge, near_and_far
from posenc_torch.flex.params import (
    fixed_reads,
    label_features,
    read_arrays,
    repeatedly_read_arrays,
)
from posenc_torch.flex.score_mod import DistanceBias, SchemeBias, ScoreSteps, scheme_key
from posenc_torch.sdpa import has_native_mask, is_small
from posenc_torch.tracing import is_transformed

_OLDEST = (2, 11)
_MANY_NUMBERS = 16  # FIRE with 8 units reads 26 and compiles in a minute; 32 take far longer
_SAFE_CHANNELS = 24  # of queries and keys; with as many, the kernel takes products another way


def flex(call: Call) -> tuple[Tensor, LogSumExp | None]:
    """``(B, H, Q, Dv)`` by FlexAttention, and its log-sum-exp if needed."""
    out, lse = _in_parts(call)
    lowest = torch.finfo(torch.float32).min
    return out, None if lse is None else LogSumExp.of_kernel(lse, lowest, call.xp)


def _in_parts(call: Call) -> tuple[Tensor, Tensor | None]:
    """The same, in near and far parts where that pays. The log-sum-exp is ``(B, H, Q)``."""
    if not torch.is_grad_enabled():  # FlexAttention looks at requires_grad of tensors only
        call = _without_gradients(call)
    run = _inside_graph if torch.compiler.is_compiling() else _run
    parts = near_and_far(call, partial(programs.in_one_program, bias_at))
    if not parts:
        return run(call, None)
    outs, logs = [], []
    for part in parts:
        out, lse = run(part.call, part.diagonals)
        assert lse is not None
        outs.append(out)
        logs.append(lse if part.bias is None else lse + part.bias)
    eager = torch.compiler.is_compiling() or programs.replaced_kernel() is not None
    return merge(outs, logs) if eager else programs.compiled_once(merge)(outs, logs)


def _run(call: Call, diagonals: Diagonals | None) -> tuple[Tensor, Tensor | None]:
    """The result of one call of a kernel, and its log-sum-exp if needed."""
    keywords = arguments(call, diagonals)
    run = programs.replaced_kernel() or programs.compiled(_kind(call))
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


def arguments(call: Call, diagonals: Diagonals | None = None) -> dict[str, Any]:
    """The arguments of ``flex_attention``; ``diagonals`` are those of a ``Part``."""
    bias, scale = _bias(call), _common_scale(call)
    mod: SchemeBias | DistanceBias | ScoreSteps | None = bias
    if scale is None or call.softcap is not None or call.extra_bias is not None:
        mod = ScoreSteps.of(call, bias, scaled=scale is not None)
    gathers, mask = mod is not None and mod.gathers, block_mask_of(call, diagonals)
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
        and not programs.is_replaced()
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
    if target.is_cpu(call.q) and not programs.is_replaced():
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
    if not programs.ISOLATES:
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


def _kind(call: Call) -> Hashable:
    """The key of a compiled kernel, which is compiled again for a few lengths, such as 1 query."""
    shapes = (call.q.shape[1], call.k.shape[1], call.q.shape[3], call.v.shape[3])
    return scheme_key(call.scheme), call.q.dtype, call.q.device, shapes, mask_keys(call.mask)


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
        by_distance = programs.in_one_program(form, call)
        if by_distance is not None:
            return by_distance
    batch = call.q.shape[0] if target.is_cpu(call.q) else None
    features = call.query.features, call.key.features
    tokens = bias_positions(call)
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
