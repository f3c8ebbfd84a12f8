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

from posenc.backend import (
    Call,
    as_column,
    as_row,
    bias_by_distance,
    bias_tile,
    has_bias,
    may_be_fully_masked,
    visible_by_distance,
    visible_pairs,
)
from posenc_torch.chunked.parts import Part, parts
from posenc_torch.fully_masked import zero_fully_masked
from posenc_torch.sdpa import has_native_mask, is_small, masked, promoted

WHY_NOT_COMPILED = "posenc 'chunked' reads from values which keys leave a trace, which no graph can"


@torch.compiler.disable(reason=WHY_NOT_COMPILED)
def chunked(call: Call) -> tuple[Tensor, Tensor | None]:
    """``(B, H, Q, Dv)``, part by part, and the log-sum-exp ``(B, H, Q)`` where it is needed."""
    tensors = _tensors(call)
    found = _Parts.apply(_Job.of(call, tensors), *tensors.values())
    return found if isinstance(found, tuple) else (found, None)


def _tensors(call: Call) -> dict[str, Tensor]:
    """What parts are made of, and gradients may be asked for: q, k and v, and the bias by distance
    as ``table``, or else the arrays of the scheme, features, and the bias that is added.
    """
    q, k, v = promoted(call)
    found = {"q": q, "k": k, "v": v}
    if call.extra_bias is not None:
        found["extra_bias"] = call.extra_bias
    if (table := bias_by_distance(call)) is not None:
        found["table"] = table
    elif has_bias(call.scheme):
        found |= {f"query.{name}": array for name, array in call.query.features.items()}
        found |= {f"key.{name}": array for name, array in call.key.features.items()}
        found |= {f"params.{name}": array for name, array in call.arrays.items()}
    return found


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
    if has_native_mask(call):
        return "SDPA needs no mask for this call"
    if is_small(call):
        return "the scores of a head are few, and SDPA takes them in one call"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not tried on {call.q.device.type}"
    return None


class _Job(NamedTuple):
    """A call without its tensors, and how it is cut.

    ``final``: the bias by distance holds visibility too, and every query sees its own key.
    ``whole_scores``: SDPA does not have what is asked for of the scores of a part.
    """

    call: Call
    names: tuple[str, ...]
    final: bool
    whole_scores: bool
    parts: Sequence[Part]

    @classmethod
    def of(cls, call: Call, tensors: Mapping[str, Tensor]) -> _Job:
        table, dtype = tensors.get("table"), tensors["q"].dtype
        whole_scores = call.needs_lse or call.softcap is not None
        alone = call.query.seg is None and call.mask is None and not whole_scores
        windowed = call.sink_tokens == 0  # what is by distance knows no positions
        final = table is not None and alone and windowed and _peaks(call, table, dtype)
        # Only autograd keeps tensors for a backward pass: it knows when to let go of them.
        bare = replace(
            call, q=_shape_of(call.q), k=_shape_of(call.k), v=_shape_of(call.v),
            arrays={name: _shape_of(array) for name, array in call.arrays.items()},
            query=call.query._replace(features={}), key=call.key._replace(features={}),
            extra_bias=None, sink=None,
        )  # fmt: skip
        return cls(bare, tuple(tensors), final, whole_scores, tuple(parts(call)))

    def slices(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a part is made of: views."""
        return {name: self._slice(name, part, tensor) for name, tensor in tensors.items()}

    def _slice(self, name: str, part: Part, tensor: Tensor) -> Tensor:
        kind, _, own = name.partition(".")
        if kind == "q":
            return tensor[:, part.heads, part.queries]
        if kind in ("k", "v"):
            group = self.call.q.shape[1] // self.call.k.shape[1]
            first, last = part.heads.start // group, -(-part.heads.stop // group)
            return tensor[:, first:last, part.keys]
        if kind in ("query", "key"):
            tokens = part.queries if kind == "query" else part.keys
            return _of_heads(part, tensor)[:, :, tokens]
        if kind in ("extra_bias", "mask"):
            return _of_heads(part, tensor)[:, :, part.queries, part.keys]
        if kind == "table":
            return self._own(part, tensor)[:, self._reach(part)]
        spec = self.call.scheme.param_specs().get(own)
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

    def attend(
        self, part: Part, own: Mapping[str, Tensor], peak: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one part and, if it is asked for, the log-sum-exp, from its slices."""
        q, k, v = own["q"], own["k"], own["v"]
        if "table" not in own:
            bias, seen = self._tile(part, own)
            if seen is not None and may_be_fully_masked(self.call):
                q, k, v = zero_fully_masked(q, k, v, seen)
            return self._softmax(q, k, v, bias, seen)
        # Queries in reverse, for then each row of the bias is the one before, one step further.
        bias, seen = _rows(self._line(part, own["table"], peak, q.dtype), q.shape[2]), None
        if not self.final:
            finite = bias != -torch.inf
            seen, bias = self._seen(part), torch.where(finite, bias, 0.0)
            seen = finite if seen is None else finite & seen.flip(2)
            if may_be_fully_masked(self.call):
                q, k, v = zero_fully_masked(q.flip(2), k, v, seen)
                q = q.flip(2)
        out, lse = self._softmax(q.flip(2), k, v, bias, seen)
        return out.flip(2), None if lse is None else lse.flip(2)

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if not self.whole_scores:
            return masked(q, k, v, bias, seen, scale=self.call.scale), None
        return _by_scores(self.call, q, k, v, bias, seen)

    def _line(self, part: Part, table: Tensor, peak: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The bias of a part by distance; as a mask if it is final."""
        if not self.final:
            return table
        line = torch.where(visible_by_distance(self.call)[self._reach(part)], table, -torch.inf)
        if dtype == line.dtype or peak is None:
            return line
        return (line - self._own(part, peak)[:, None]).to(dtype)

    def _tile(self, part: Part, own: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Bias and visibility of a part, pair by pair."""
        call, seen, bias = self.call, self._seen(part), own.get("extra_bias")
        if has_bias(call.scheme):
            query, key = call.query.select(part.queries), call.key.select(part.keys)
            found = bias_tile(
                call.scheme, as_column(query.encoded_pos), as_row(key.encoded_pos),
                {name: own[f"params.{name}"] for name in call.arrays},
                query=_under(own, "query"), key=_under(own, "key"), dtype=call.dtype, xp=call.xp,
            )  # fmt: skip
            bias = found if bias is None or found is None else bias + found
            bias = own.get("extra_bias") if bias is None else bias
        if bias is None:
            return None, seen
        finite = bias != -torch.inf
        seen = finite if seen is None else seen & finite
        return torch.where(finite, bias, 0.0), seen

    def _seen(self, part: Part) -> Tensor | None:
        call, mask = self.call, self.call.mask
        if isinstance(mask, Tensor):
            mask = self._slice("mask", part, mask)
        return visible_pairs(
            call, call.query.select(part.queries), call.key.select(part.keys), mask
        )


def _of_heads(part: Part, array: Tensor) -> Tensor:
    """The heads of a part, of ``(B, H or 1, ...)``."""
    return array if array.shape[1] == 1 else array[:, part.heads]


def _under(own: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Slices of one kind, by name."""
    prefix = f"{kind}."
    return {name.removeprefix(prefix): a for name, a in own.items() if name.startswith(prefix)}


def _by_scores(
    call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of a part and its log-sum-exp from all of its scores, in the working float.

    What SDPA does not have: a log-sum-exp that has a gradient, and a cap of scores.
    """
    dtype, group = call.dtype, q.shape[1] // k.shape[1]
    q, k, v = (a.to(dtype) for a in (q, k, v))
    if group > 1:
        k, v = (a.repeat_interleave(group, dim=1) for a in (k, v))
    scores = call.cap_scores((q * call.scale) @ k.mT)
    if bias is not None:
        scores = scores + bias
    if seen is None:
        lse = scores.logsumexp(dim=-1)
        return torch.exp(scores - lse[..., None]) @ v, lse
    scores = torch.where(seen, scores, torch.finfo(dtype).min)
    highest = scores.amax(dim=-1, keepdim=True).detach()
    weights = torch.where(seen, torch.exp(scores - highest), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    some = torch.where(total == 0, 1.0, total)
    return (weights / some) @ v, (highest + some.log())[..., 0]


class _Parts(torch.autograd.Function):
    """Attention part by part; the backward pass computes each part once more."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        named = dict(zip(job.names, tensors, strict=True))
        q, peak = named["q"], job.peak(named)
        wide = job.call.dtype if job.whole_scores else q.dtype
        out = q.new_zeros((*q.shape[:3], named["v"].shape[3]), dtype=wide)
        lse = q.new_full(q.shape[:3], torch.finfo(job.call.dtype).min, dtype=job.call.dtype)
        for part in job.parts:
            found, log = job.attend(part, job.slices(part, named), peak)
            out[:, part.heads, part.queries] = found
            if log is not None:
                lse[:, part.heads, part.queries] = log
        return (out, lse) if job.whole_scores else out

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(d_results[0]):
            raise NotImplementedError(
                "implementation 'chunked' has first derivatives only, of one result at a time "
                "(create_graph "
                "and is_grads_batched ask for more): implementation='reference' has all"
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
                results = [r for r in job.attend(part, own, peak) if r is not None]
            both = [
                (result, d_result[:, part.heads, part.queries])
                for result, d_result in zip(results, d_results, strict=True)
                if result.requires_grad  # else what learns has no part in it
            ]
            if not both:
                continue
            results, d_part = zip(*both, strict=True)
            found = torch.autograd.grad(results, leaves, d_part, allow_unused=True)
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
    return bool((torch.isfinite(own) & ((table <= own) | ~visible_by_distance(call))).all())
