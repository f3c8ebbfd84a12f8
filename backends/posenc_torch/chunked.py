"""Attention in parts: some queries at a time, against the keys that they may see, in memory
``O(H L)``.

A part is one call of ``scaled_dot_product_attention``: some heads, some queries, and the range of
keys that they see and that leave a trace, with their part of the bias as its mask. The backward
pass computes each part anew. Nothing is compiled, and learning works on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posenc.call import Call
from posenc.evaluate import bias_tile, column, row
from posenc.lowerings import by_distance, has_bias, seen_by_distance
from posenc.positions import visible
from posenc.unseen import may_be_unseen
from posenc_torch.parts import Part, parts
from posenc_torch.sdpa import few_scores, knows_mask, masked, same_dtype
from posenc_torch.unseen import without_unseen

WHY_NOT_COMPILED = "posenc 'chunked' reads from values which keys leave a trace, which no graph can"


@torch.compiler.disable(reason=WHY_NOT_COMPILED)
def chunked(call: Call) -> Tensor:
    """``(B, H, Q, Dv)``, part by part."""
    tensors = _tensors(call)
    return _Parts.apply(_Job.of(call, tensors), *tensors.values())


def _tensors(call: Call) -> dict[str, Tensor]:
    """What parts are made of, and gradients may be asked for: q, k and v, and the bias by distance
    as ``table``, or else the arrays of the scheme and coordinates.
    """
    q, k, v = same_dtype(call)
    found: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    if (table := by_distance(call)) is not None:
        found["table"] = table
    elif has_bias(call.scheme):
        found |= {"q_coords": call.q_coords, "k_coords": call.k_coords}
        found |= {f"params.{name}": array for name, array in call.arrays.items()}
    return {name: t for name, t in found.items() if t is not None}


def refuses(call: Call) -> str | None:
    """Why a call cannot be cut."""
    if torch.compiler.is_compiling():
        return None  # what is disabled says so itself, and breaks the graph where that is allowed
    if is_traceable_wrapper_subclass(call.q):
        return f"it slices q many times, and q is a {type(call.q).__name__}"
    if call.q.device.type == "meta" or isinstance(call.q, FakeTensor):
        return "which keys leave a trace is read from values, and the tensors hold none"
    if torch.jit.is_tracing() or any(m.is_infra_mode() for m in _modes()):
        return "which keys leave a trace is read from values, and a trace keeps none"
    if _transformed() or forward_ad._current_level >= 0:
        return "its backward pass is written for torch.autograd, not for torch.func or forward mode"
    return None


def avoided(call: Call) -> str | None:
    """Why ``"auto"`` passes by."""
    if torch.compiler.is_compiling():
        return "it reads from values which keys leave a trace, and would break a compiled graph"
    if knows_mask(call):
        return "SDPA needs no mask for this call"
    if few_scores(call):
        return "the scores of a head are few, and SDPA takes them in one call"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not tried on {call.q.device.type}"
    return None


class _Job(NamedTuple):
    """A call without its tensors, and how it is cut.

    ``final``: the bias by distance holds visibility too, and every query sees its own key.
    """

    call: Call
    names: tuple[str, ...]
    final: bool
    parts: Sequence[Part]

    @classmethod
    def of(cls, call: Call, tensors: Mapping[str, Tensor]) -> _Job:
        table, dtype = tensors.get("table"), tensors["q"].dtype
        final = table is not None and call.q_seg is None and _peaks(call, table, dtype)
        # Only autograd keeps tensors for a backward pass: it knows when to let go of them.
        bare = replace(
            call, q=_shape_of(call.q), k=_shape_of(call.k), v=_shape_of(call.v),
            arrays={name: _shape_of(array) for name, array in call.arrays.items()},
            q_coords=None, k_coords=None,
        )  # fmt: skip
        return cls(bare, tuple(tensors), final, tuple(parts(call)))

    def slices(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a part is made of: views."""
        return {name: self._slice(name, part, tensor) for name, tensor in tensors.items()}

    def _slice(self, name: str, part: Part, tensor: Tensor) -> Tensor:
        if name in ("q", "q_coords"):
            return tensor[:, part.heads, part.queries]
        if name in ("k", "v"):
            group = self.call.q.shape[1] // self.call.k.shape[1]
            first, last = part.heads.start // group, -(-part.heads.stop // group)
            return tensor[:, first:last, part.keys]
        if name == "k_coords":
            return tensor[:, part.heads, part.keys]
        if name == "table":
            return self._own(part, tensor)[:, self._reach(part)]
        spec = self.call.scheme.param_specs().get(name.removeprefix("params."))
        return self._own(part, tensor) if spec is None or spec.per_head else tensor

    @staticmethod
    def _own(part: Part, array: Tensor) -> Tensor:
        return array if array.shape[0] == 1 else array[part.heads]

    def _reach(self, part: Part) -> slice:
        """Where the distances of a part lie in the table."""
        first = part.keys.start - part.queries.stop + self.call.q.shape[2]
        count = part.queries.stop - part.queries.start + part.keys.stop - part.keys.start - 1
        return slice(first, first + count)

    def peak(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The bias of every head at distance 0."""
        table = tensors.get("table")
        return None if table is None else table.detach()[:, self.call.k.shape[2] - 1]

    def attend(self, part: Part, own: Mapping[str, Tensor], peak: Tensor | None) -> Tensor:
        """Attention of one part, from its slices."""
        q, k, v = own["q"], own["k"], own["v"]
        if "table" not in own:
            bias, seen = self._tile(part, own)
            if seen is not None and may_be_unseen(self.call):
                q, k, v = without_unseen(q, k, v, seen)
            return masked(q, k, v, bias, seen, scale=self.call.scale)
        # Queries in reverse, for then each row of the bias is the one before, one step further.
        bias, seen = _rows(self._line(part, own["table"], peak, q.dtype), q.shape[2]), None
        if not self.final:
            finite = bias != -torch.inf
            seen, bias = self._seen(part), torch.where(finite, bias, 0.0)
            seen = finite if seen is None else finite & seen.flip(2)
            if may_be_unseen(self.call):
                q, k, v = without_unseen(q.flip(2), k, v, seen)
                q = q.flip(2)
        out = masked(q.flip(2), k, v, bias, seen, scale=self.call.scale)
        return out.flip(2)

    def _line(self, part: Part, table: Tensor, peak: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The bias of a part by distance; as a mask if it is final."""
        if not self.final:
            return table
        line = torch.where(seen_by_distance(self.call)[self._reach(part)], table, -torch.inf)
        if dtype == line.dtype or peak is None:
            return line
        return (line - self._own(part, peak)[:, None]).to(dtype)

    def _tile(self, part: Part, own: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Bias and visibility of a part, pair by pair."""
        call, seen = self.call, self._seen(part)
        if not has_bias(call.scheme):
            return None, seen
        at = column(call.q_pos[..., part.queries]), row(call.k_pos[..., part.keys])
        if "q_coords" in own:
            at = own["q_coords"][..., :, None], own["k_coords"][..., None, :]
        arrays = {name: own[f"params.{name}"] for name in call.arrays}
        bias = bias_tile(call.scheme, *at, arrays, dtype=call.dtype, xp=call.xp)
        if bias is None:
            return None, seen
        finite = bias != -torch.inf
        seen = finite if seen is None else seen & finite
        return torch.where(finite, bias, 0.0), seen

    def _seen(self, part: Part) -> Tensor | None:
        call = self.call
        segments: tuple[Any, ...] = ()
        if call.q_seg is not None and call.k_seg is not None:
            segments = column(call.q_seg[..., part.queries]), row(call.k_seg[..., part.keys])
        return visible(
            column(call.q_pos[..., part.queries]), row(call.k_pos[..., part.keys]), *segments,
            causal=call.causal, window=call.window,
        )  # fmt: skip


class _Parts(torch.autograd.Function):
    """Attention part by part; the backward pass computes each part once more."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        named = dict(zip(job.names, tensors, strict=True))
        q, peak = named["q"], job.peak(named)
        out = q.new_zeros((*q.shape[:3], named["v"].shape[3]))
        for part in job.parts:
            out[:, part.heads, part.queries] = job.attend(part, job.slices(part, named), peak)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(d_out):
            raise NotImplementedError(
                "path 'chunked' has first derivatives only, of one result at a time (create_graph "
                "and is_grads_batched ask for more): path='reference' has all"
            )
        job: _Job = ctx.job
        named = dict(zip(job.names, ctx.saved_tensors, strict=True))
        asked = dict(zip(job.names, ctx.needs_input_grad[1:], strict=True))
        peak, used = job.peak(named), set()
        # As wide as a sum of hundreds of parts needs.
        sums = {
            name: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for name, t in named.items()
            if asked[name]
        }
        for part in job.parts:
            own = {n: t.detach() for n, t in job.slices(part, named).items()}
            leaves = [own[name].requires_grad_() for name in sums]
            with torch.enable_grad():
                out = job.attend(part, own, peak)
            if not out.requires_grad:  # what learns has no part in it
                continue
            d_part = d_out[:, part.heads, part.queries]
            found = torch.autograd.grad(out, leaves, d_part, allow_unused=True)
            for (name, into), more in zip(job.slices(part, sums).items(), found, strict=True):
                if more is not None:
                    into += more
                    used.add(name)
        return None, *(sums[n].to(t.dtype) if n in used else None for n, t in named.items())


def _shape_of(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype that holds nothing."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _rows(line: Tensor, count: int) -> Tensor:
    """``(1, H or 1, n, K)``: row ``i`` is ``line[:, i : i + K]``; a view."""
    keys, (step, one) = line.shape[1] - count + 1, line.stride()
    return line.as_strided((1, line.shape[0], count, keys), (0, step, one, one))


def _peaks(call: Call, table: Tensor, dtype: torch.dtype) -> bool:
    """Whether no row is blind and, where half precision must hold it, none peaks elsewhere."""
    own = table[:, call.k.shape[2] - 1 : call.k.shape[2]]
    if dtype == table.dtype:
        return bool(torch.isfinite(own).all())
    return bool((torch.isfinite(own) & ((table <= own) | ~seen_by_distance(call))).all())
