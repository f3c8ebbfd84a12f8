"""Attention in parts: some queries at a time, against their visible keys, in memory ``O(H L)``.

A part has some heads, some queries, and the range of visible keys that are not negligible. It is
one call of ``scaled_dot_product_attention`` (SDPA), with its slice of the bias as ``attn_mask``.
SDPA has no softcap, and no log-sum-exp with a gradient. If a call needs either, each part computes
all of its scores instead. The backward pass recomputes each part. Nothing is compiled, and training
works on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posenc.backend import (
    Call,
    as_column,
    as_row,
    bias_by_distance,
    bias_by_key,
    bias_tile,
    has_bias,
    may_be_fully_masked,
    visible_by_distance,
    visible_pairs,
)
from posenc_torch.chunked.parts import Part, parts
from posenc_torch.fully_masked import is_true, zero_fully_masked
from posenc_torch.sdpa import has_native_mask, is_small, mask_dtype, masked_sdpa, promoted
from posenc_torch.tables import read_by_distance
from posenc_torch.tracing import is_traced, is_transformed

WHY_NOT_COMPILED = (
    "posenc 'chunked' chooses key blocks from tensor values, which a compiled graph does not have"
)


@torch.compiler.disable(reason=WHY_NOT_COMPILED)  # type: ignore[no-untyped-call,untyped-decorator]
def chunked(call: Call) -> tuple[Tensor, Tensor | None]:
    """``(B, H, Q, Dv)``, part by part, and the log-sum-exp ``(B, H, Q)`` where it is needed."""
    tensors = _tensors(call)
    result = _Parts.apply(  # type: ignore[no-untyped-call]  # torch annotates no apply
        _Job.of(call, tensors), *tensors.values()
    )
    return result if isinstance(result, tuple) else (result, None)


def _tensors(call: Call) -> dict[str, Tensor]:
    """The tensors that parts slice, by name: q, k, v, and those that the bias is computed from.

    The caller's bias is ``extra_bias``. For the scheme's bias there is a ``table`` by distance, or
    else the scheme's arrays and features.
    """
    q, k, v = promoted(call)
    tensors = {"q": q, "k": k, "v": v}
    if call.extra_bias is not None:
        tensors["extra_bias"] = call.extra_bias
    if (table := bias_by_distance(call)) is not None:
        tensors["table"] = table
    elif has_bias(call.scheme):
        tensors |= {f"query.{name}": array for name, array in call.query.features.items()}
        tensors |= {f"key.{name}": array for name, array in call.key.features.items()}
        tensors |= {f"params.{name}": array for name, array in call.arrays.items()}
    return tensors


def unsupported(call: Call) -> str | None:
    """Why a call cannot be cut into parts."""
    if torch.compiler.is_compiling():
        return None  # the disabled function raises, or breaks the graph where that is allowed
    if is_traceable_wrapper_subclass(call.q):
        return f"it slices q many times, which is slow where q is a {type(call.q).__name__}"
    if call.q.device.type == "meta" or isinstance(call.q, FakeTensor):
        return "it chooses key blocks from tensor values, and these tensors have none"
    if is_traced():
        return "it chooses key blocks from tensor values, which a traced program does not have"
    if is_transformed():
        return "its backward pass supports torch.autograd, not torch.func or forward mode"
    return None


def not_preferred(call: Call) -> str | None:
    """Why ``"auto"`` skips it."""
    if torch.compiler.is_compiling():
        return "it chooses key blocks from tensor values, and would break a compiled graph"
    if has_native_mask(call):
        return "SDPA needs no mask for this call"
    if is_small(call):
        return "each head has few scores, and SDPA takes them in one call"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not tested on {call.q.device.type}"
    return None


class _Job(NamedTuple):
    """A call without the values of its tensors, and the parts into which it is cut.

    Attributes
    ----------
    call
        The call, with tensors that hold no values.
    names
        Names of the tensors that autograd keeps.
    table_has_mask
        Whether the table of the bias by distance can also hold the mask, as ``-inf``. Then every
        query sees its own key.
    sees_itself
        Whether every query sees its own key, if no bias hides it.
    bias_is_finite
        Whether it is known that no bias hides a key.
    whole_scores
        Whether a part computes all of its scores itself, without SDPA.
    parts
        The parts, in the order of queries.
    """

    call: Call
    names: tuple[str, ...]
    table_has_mask: bool
    sees_itself: bool
    bias_is_finite: bool
    whole_scores: bool
    parts: Sequence[Part]

    @classmethod
    def of(cls, call: Call, tensors: Mapping[str, Tensor]) -> _Job:
        table, dtype = tensors.get("table"), mask_dtype(tensors["q"])
        whole_scores = call.needs_lse or call.softcap is not None
        mask_by_distance = call.query.seg is None and call.mask is None and call.sink_tokens == 0
        table_has_mask = (
            table is not None
            and mask_by_distance
            and not whole_scores
            and _peaks_at_own_key(call, table, dtype)
        )
        # Only autograd keeps tensors for a backward pass: it knows when to free them.
        bare = replace(
            call, q=_meta_like(call.q), k=_meta_like(call.k), v=_meta_like(call.v),
            arrays={name: _meta_like(array) for name, array in call.arrays.items()},
            query=call.query._replace(features={}), key=call.key._replace(features={}),
            extra_bias=None, sink=None,
        )  # fmt: skip
        return cls(
            bare, tuple(tensors), table_has_mask, _sees_itself(call),
            bias_by_key(call) is not None, whole_scores, tuple(parts(call)),
        )  # fmt: skip

    def slices(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a part, as views."""
        return {name: self._slice(name, part, tensor) for name, tensor in tensors.items()}

    def _slice(self, name: str, part: Part, tensor: Tensor) -> Tensor:
        """The view of one tensor that a part reads; its name says which axes it has."""
        kind, _, param = name.partition(".")
        if kind == "q":
            return tensor[:, part.heads, part.queries]
        if kind in ("k", "v"):
            group = self.call.q.shape[1] // self.call.k.shape[1]
            first, last = part.heads.start // group, -(-part.heads.stop // group)
            return tensor[:, first:last, part.keys]
        if kind in ("query", "key"):
            tokens = part.queries if kind == "query" else part.keys
            return _head_slice(part, tensor)[:, :, tokens]
        if kind in ("extra_bias", "mask"):
            return _head_slice(part, tensor)[:, :, part.queries, part.keys]
        if kind == "table":
            return _head_rows(part, tensor)[:, self._distances(part)]
        spec = self.call.scheme.param_specs().get(param)
        return _head_rows(part, tensor) if spec is None or spec.per_head else tensor

    def _distances(self, part: Part) -> slice:
        """The columns of the table that hold the distances of a part."""
        first = part.keys.start - part.queries.stop + self.call.q.shape[2]
        count = part.queries.stop - part.queries.start + part.keys.stop - part.keys.start - 1
        return slice(first, first + count)

    def own_key_bias(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The bias of a query's own key, which is at distance 0, for every head."""
        table = tensors.get("table")
        return None if table is None else table.detach()[:, self.call.k.shape[2] - 1]

    def attend(
        self, part: Part, tensors: Mapping[str, Tensor], own_key_bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one part from its slices, and the log-sum-exp if the call needs it."""
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        if "table" not in tensors:
            bias, mask = self._tile(part, tensors)
            if mask is not None and may_be_fully_masked(self.call):
                q, k, v = zero_fully_masked(q, k, v, mask)
            return self._softmax(q, k, v, bias, mask)
        # Queries are reversed: each row of the bias is then the previous one, shifted by one.
        table = self._table(part, tensors["table"], own_key_bias, mask_dtype(q))
        bias, mask = _toeplitz(table, q.shape[2]), None
        if not self.table_has_mask:
            finite = bias != -torch.inf
            mask, bias = self._mask(part), torch.where(finite, bias, 0.0)
            mask = finite if mask is None else finite & mask.flip(2)
            if may_be_fully_masked(self.call):
                q, k, v = zero_fully_masked(q.flip(2), k, v, mask)
                q = q.flip(2)
        out, lse = self._softmax(q.flip(2), k, v, bias, mask)
        return out.flip(2), None if lse is None else lse.flip(2)

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one part under its bias and mask, and the log-sum-exp if needed."""
        if not self.whole_scores:
            return masked_sdpa(q, k, v, bias, mask, scale=self.call.scale), None
        return _attend_with_lse(self.call, q, k, v, bias, mask)

    def _table(
        self, part: Part, table: Tensor, own_key_bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The bias of a part by distance, with the mask in it if ``table_has_mask``."""
        if not self.table_has_mask:
            return table
        visible = visible_by_distance(self.call)[self._distances(part)]
        table = torch.where(visible, table, -torch.inf)
        if dtype == table.dtype or own_key_bias is None:
            return table
        # Softmax does not change, and half precision then holds the bias of near keys.
        return (table - _head_rows(part, own_key_bias)[:, None]).to(dtype)

    def _tile(
        self, part: Part, tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Bias and mask of a part, pair by pair."""
        call, mask, bias = self.call, self._mask(part), tensors.get("extra_bias")
        if has_bias(call.scheme):
            query, key = call.query.select(part.queries), call.key.select(part.keys)
            term = bias_tile(
                call.scheme, as_column(query.encoded_pos), as_row(key.encoded_pos),
                {name: tensors[f"params.{name}"] for name in call.arrays},
                query=_with_prefix(tensors, "query"), key=_with_prefix(tensors, "key"),
                dtype=call.dtype, xp=call.xp, read=read_by_distance, consecutive=call.in_order,
            )  # fmt: skip
            bias = term if bias is None or term is None else bias + term
            bias = tensors.get("extra_bias") if bias is None else bias
        if bias is None:
            return None, mask
        if self.sees_itself and (self.bias_is_finite or is_true(bias.detach().amin() > -torch.inf)):
            # Adding takes an eighth of the time of where(mask, bias, -inf).
            hidden = None if mask is None else torch.where(mask, 0.0, -torch.inf).to(bias.dtype)
            return bias if hidden is None else bias + hidden, None
        finite = bias != -torch.inf
        mask = finite if mask is None else mask & finite
        return torch.where(finite, bias, 0.0), mask

    def _mask(self, part: Part) -> Tensor | None:
        """The visible pairs of a part; None if all pairs are visible."""
        call, mask = self.call, self.call.mask
        if isinstance(mask, Tensor):
            mask = self._slice("mask", part, mask)
        return visible_pairs(
            call, call.query.select(part.queries), call.key.select(part.keys), mask
        )


def _sees_itself(call: Call) -> bool:
    """Whether every query sees its own key, if no bias hides it."""
    in_window = all(side is None or side >= 0 for side in call.window or ())
    return in_window and not may_be_fully_masked(call)


def _head_rows(part: Part, array: Tensor) -> Tensor:
    """The heads of a part, from ``(H or 1, ...)``."""
    return array if array.shape[0] == 1 else array[part.heads]


def _head_slice(part: Part, array: Tensor) -> Tensor:
    """The heads of a part, from ``(B, H or 1, ...)``."""
    return array if array.shape[1] == 1 else array[:, part.heads]


def _with_prefix(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of one kind, by their names without the prefix."""
    prefix = f"{kind}."
    return {name.removeprefix(prefix): a for name, a in tensors.items() if name.startswith(prefix)}


def _attend_with_lse(
    call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of a part and its log-sum-exp from all of its scores, in the working dtype."""
    dtype, group = call.dtype, q.shape[1] // k.shape[1]
    q, k, v = (a.to(dtype) for a in (q, k, v))
    if group > 1:
        k, v = (a.repeat_interleave(group, dim=1) for a in (k, v))
    scores = call.cap_scores((q * call.scale) @ k.mT)
    if bias is not None:
        scores = scores + bias
    if mask is None:
        lse = scores.logsumexp(dim=-1)
        return torch.exp(scores - lse[..., None]) @ v, lse
    scores = torch.where(mask, scores, torch.finfo(dtype).min)
    row_max = scores.amax(dim=-1, keepdim=True).detach()
    weights = torch.where(mask, torch.exp(scores - row_max), 0.0)
    row_sum = weights.sum(dim=-1, keepdim=True)
    divisor = torch.where(row_sum == 0, 1.0, row_sum)  # 0 in a fully masked row
    return (weights / divisor) @ v, (row_max + divisor.log())[..., 0]


class _Parts(torch.autograd.Function):
    """Attention part by part; the backward pass recomputes each part."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        by_name = dict(zip(job.names, tensors, strict=True))
        q, own_key_bias = by_name["q"], job.own_key_bias(by_name)
        dtype = job.call.dtype if job.whole_scores else q.dtype
        out = q.new_zeros((*q.shape[:3], by_name["v"].shape[3]), dtype=dtype)
        lse = q.new_full(q.shape[:3], torch.finfo(job.call.dtype).min, dtype=job.call.dtype)
        for part in job.parts:
            part_out, part_lse = job.attend(part, job.slices(part, by_name), own_key_bias)
            out[:, part.heads, part.queries] = part_out
            if part_lse is not None:
                lse[:, part.heads, part.queries] = part_lse
        return (out, lse) if job.whole_scores else out

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(d_results[0]):
            raise NotImplementedError(
                "implementation 'chunked' has first derivatives only, of one result at a time "
                "(create_graph and is_grads_batched ask for more): use implementation='reference'"
            )
        job: _Job = ctx.job
        by_name = dict(zip(job.names, ctx.saved_tensors, strict=True))
        needs_grad = dict(zip(job.names, ctx.needs_input_grad[1:], strict=True))
        q, own_key_bias, used = by_name["q"], job.own_key_bias(by_name), set()
        # Sums over hundreds of parts need float32.
        sums = {
            name: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for name, t in by_name.items()
            if needs_grad[name]
        }
        # As in the forward pass; a backward pass may be called inside autocast.
        with torch.autocast(q.device.type, enabled=False):
            for part in job.parts:
                tensors = {n: t.detach() for n, t in job.slices(part, by_name).items()}
                leaves = [tensors[name].requires_grad_() for name in sums]
                with torch.enable_grad():
                    results = [r for r in job.attend(part, tensors, own_key_bias) if r is not None]
                pairs = [
                    (result, d_result[:, part.heads, part.queries])
                    for result, d_result in zip(results, d_results, strict=True)
                    if result.requires_grad  # False if no leaf takes part
                ]
                if not pairs:
                    continue
                outputs, d_outputs = zip(*pairs, strict=True)
                d_leaves = torch.autograd.grad(outputs, leaves, d_outputs, allow_unused=True)
                for (name, total), d_leaf in zip(
                    job.slices(part, sums).items(), d_leaves, strict=True
                ):
                    if d_leaf is not None:
                        total += d_leaf
                        used.add(name)
        return None, *(sums[n].to(t.dtype) if n in used else None for n, t in by_name.items())


def _meta_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype without values."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _toeplitz(table: Tensor, count: int) -> Tensor:
    """``(1, H or 1, n, K)``: row ``i`` is ``table[:, i : i + K]``; a view."""
    keys, (step, one) = table.shape[1] - count + 1, table.stride()
    return table.as_strided((1, table.shape[0], count, keys), (0, step, one, one))


def _peaks_at_own_key(call: Call, table: Tensor, dtype: torch.dtype) -> bool:
    """Whether the bias of a query's own key is finite and, for a mask in half precision, highest.

    For such a mask the bias of the own key is subtracted. The rest is then at most 0, and half
    precision holds it best for the keys with the largest bias.
    """
    own = table[:, call.k.shape[2] - 1 : call.k.shape[2]]
    if dtype == table.dtype:
        return bool(torch.isfinite(own).all())
    return bool((torch.isfinite(own) & ((table <= own) | ~visible_by_distance(call))).all())
