"""Attention in parts: some queries at a time, against their visible keys, in memory ``O(H L)``.

A part has some heads, some queries, and the range of visible keys that are not negligible. It is
one call of ``scaled_dot_product_attention`` (SDPA), with its slice of the bias as ``attn_mask``.
SDPA has no softcap, and no log-sum-exp with a gradient. If a call needs either, each part computes
all of its scores instead. The backward pass of SDPA's kernel for CPUs gets the log-sum-exp of the
forward pass; elsewhere, each part is computed again. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posenc.backend import (
    Call,
    Planned,
    Refusal,
    Tokens,
    as_column,
    as_row,
    bias_by_distance,
    bias_by_key,
    bias_tile,
    has_bias,
    may_be_fully_masked,
    plan_unless,
    visible_by_distance,
    visible_pairs,
)
from posenc_torch.chunked import fused
from posenc_torch.chunked.parts import Part, parts
from posenc_torch.chunked.scores import Scores
from posenc_torch.fully_masked import is_true, zero_fully_masked
from posenc_torch.sdpa import (
    as_attn_mask,
    has_native_mask,
    is_small,
    mask_dtype,
    masked_sdpa,
    promoted,
    sees_itself,
)
from posenc_torch.tables import read_by_distance
from posenc_torch.tracing import is_traced, is_transformed

WHY_NOT_COMPILED = (
    "posenc 'chunked' chooses key blocks from tensor values, which a compiled graph does not have"
)


@torch.compiler.disable(reason=WHY_NOT_COMPILED)  # type: ignore[no-untyped-call,untyped-decorator]
def chunked(call: Call) -> tuple[Tensor, Tensor | None]:
    """``(B, H, Q, Dv)``, part by part, and the log-sum-exp ``(B, H, Q)`` where it is needed."""
    job, tensors = _Job.of(call, _tensors(call))
    way = _Fused if job.fused else _Recomputed
    result = way.apply(job, *tensors.values())  # type: ignore[no-untyped-call]  # as torch has it
    return result if isinstance(result, tuple) else (result, None)


def _tensors(call: Call) -> dict[str, Tensor]:
    """The tensors that parts slice, by name: q, k, v, and those that the bias is computed from.

    The caller's bias is ``extra_bias``. For the scheme's bias there is a ``table`` by distance, or
    else the scheme's arrays and features. A mask by distance without a bias has a table of 0.
    """
    q, k, v = promoted(call)
    tensors = {"q": q, "k": k, "v": v}
    if call.extra_bias is not None:
        tensors["extra_bias"] = call.extra_bias
    if (table := _table(call)) is not None:
        tensors["table"] = table
    elif has_bias(call.scheme):
        tensors |= {f"query.{name}": array for name, array in call.query.features.items()}
        tensors |= {f"key.{name}": array for name, array in call.key.features.items()}
        tensors |= {f"params.{name}": array for name, array in call.arrays.items()}
    return tensors


def _table(call: Call) -> Tensor | None:
    """The bias by distance, ``(H or 1, Q + K - 1)``; see ``_tensors``."""
    if has_bias(call.scheme) or call.extra_bias is not None or not call.in_order:
        return bias_by_distance(call)
    hides = call.causal or call.window is not None
    if not (hides and _mask_is_by_distance(call) and sees_itself(call)):
        return None
    distances = call.q.shape[2] + call.k.shape[2] - 1
    return torch.zeros((1, distances), dtype=call.dtype, device=call.q.device)


def _whole_scores(call: Call) -> bool:
    """Whether a part has to compute all of its scores itself, without SDPA."""
    return call.needs_lse or call.softcap is not None


def _mask_is_by_distance(call: Call) -> bool:
    """Whether distances decide which keys are visible, and SDPA can add the mask."""
    plain = call.query.seg is None and call.mask.plain and call.mask.first_tokens == 0
    return plain and not _whole_scores(call)


def plan(call: Call) -> Planned | Refusal:
    """How a call is cut into parts, or why it cannot be."""
    return plan_unless(_why_not(call), Planned(chunked))


def _why_not(call: Call) -> str | None:
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
    far
        A distance to earlier keys from which on all have the same bias, some of them visible. None
        if there is none, or if the table does not hold the whole mask.
    fused
        Whether a part calls SDPA's kernel for CPUs itself, which tells the log-sum-exp.
    parts
        The parts, the largest first.
    """

    call: Call
    names: tuple[str, ...]
    table_has_mask: bool
    sees_itself: bool
    bias_is_finite: bool
    whole_scores: bool
    fused: bool
    far: int | None
    parts: Sequence[Part]

    @classmethod
    def of(cls, call: Call, tensors: dict[str, Tensor]) -> tuple[_Job, dict[str, Tensor]]:
        """The job, and its tensors by name; a table may now hold the mask."""
        table, dtype = tensors.get("table"), mask_dtype(tensors["q"])
        whole_scores = _whole_scores(call)
        table_has_mask = (
            table is not None
            and _mask_is_by_distance(call)
            and _peaks_at_own_key(call, table, dtype)
        )
        if table is not None and table_has_mask:
            tensors = {**tensors, "table": _with_mask(call, table, dtype)}
        # Only autograd keeps tensors for a backward pass: it knows when to free them.
        bare = replace(
            call, q=_meta_like(call.q), k=_meta_like(call.k), v=_meta_like(call.v),
            arrays={name: _meta_like(array) for name, array in call.arrays.items()},
            query=call.query.with_features({}), key=call.key.with_features({}),
            extra_bias=None, sink=None,
        )  # fmt: skip
        job = cls(
            bare, tuple(tensors), table_has_mask, sees_itself(call),
            bias_by_key(call) is not None, whole_scores,
            not whole_scores and _is_fused(call, tensors),
            _far(call) if table_has_mask else None, _largest_first(parts(call)),
        )  # fmt: skip
        return job, tensors

    def slices(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a part, as views."""
        return {name: self._slice(name, part, tensor) for name, tensor in tensors.items()}

    def _slice(self, name: str, part: Part, tensor: Tensor) -> Tensor:
        """What a part reads of one tensor: a view, or a copy where its keys are two ranges."""
        views, axis = self.views(name, part, tensor)
        return views[0] if len(views) == 1 else torch.cat(views, dim=axis)

    def views(self, name: str, part: Part, tensor: Tensor) -> tuple[list[Tensor], int]:
        """The views of one tensor that a part reads, and the axis along which they follow.

        The name says which axes it has. There are several views where the part's keys are two
        ranges.
        """
        kind, _, param = name.partition(".")
        if kind == "q":
            return [tensor[:, part.heads, part.queries]], 2
        if kind in ("k", "v"):
            group = self.call.q.shape[1] // self.call.k.shape[1]
            first, last = part.heads.start // group, -(-part.heads.stop // group)
            return [tensor[:, first:last, keys] for keys in part.ranges], 2
        if kind == "query":
            return [_head_slice(part, tensor)[:, :, part.queries]], 2
        if kind == "key":
            return [_head_slice(part, tensor)[:, :, keys] for keys in part.ranges], 2
        if kind in ("extra_bias", "mask"):
            rows = _head_slice(part, tensor)[:, :, part.queries]
            return [rows[..., keys] for keys in part.ranges], 3
        if kind == "table":
            rows = _head_rows(part, tensor)
            return [rows[:, self._distances(part.queries, keys)] for keys in part.ranges], 1
        spec = self.call.scheme.param_specs().get(param)
        return [_head_rows(part, tensor) if spec is None or spec.per_head else tensor], 0

    def _distances(self, queries: slice, keys: slice) -> slice:
        """The columns of the table that hold the distances of some queries and keys."""
        first = keys.start - queries.stop + self.call.q.shape[2]
        return slice(first, first + queries.stop - queries.start + keys.stop - keys.start - 1)

    def far_keys(self, part: Part) -> int:
        """How many keys, from the first one, have the same bias for all queries of a part."""
        if self.far is None:
            return 0
        first_pos = part.queries.start + self.call.k.shape[2] - self.call.q.shape[2]
        count: int = min(part.keys.stop, first_pos - self.far + 1) - part.keys.start
        return max(0, count)

    def table_gradient(
        self, part: Part, tensors: Mapping[str, Tensor], scores: Scores, out: Tensor
    ) -> Tensor:
        """The gradient of a part's columns of the table.

        The gradients of a row's scores sum to 0, so that of all far keys is minus the rest.
        """
        table, far_keys = tensors["table"], self.far_keys(part)
        near = scores.near(far_keys, out) if far_keys else scores
        counts = (near.k.shape[2],) if far_keys else part.key_counts
        sums = near.sums_by_distance(counts)
        sums = sums.sum_to_size(len(table), sums.shape[1])
        if not far_keys:
            return sums
        d_table = torch.zeros_like(table)
        d_table[:, far_keys:] = sums
        nearest_far = self.call.k.shape[2] - 1 - cast(int, self.far)
        d_table[:, nearest_far - self._distances(part.queries, part.keys).start] -= sums.sum(1)
        return d_table

    def attend(self, part: Part, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Attention of one part from its slices, and the log-sum-exp if the call needs it."""
        one = self.masked(part, tensors)
        if self.whole_scores:
            out, lse = _attend_with_lse(self.call, *one)
            return _turned(out, tensors), _turned(lse, tensors)
        return _turned(masked_sdpa(*one, scale=self.call.scale), tensors), None

    def masked(self, part: Part, tensors: Mapping[str, Tensor]) -> _Masked:
        """One part's queries, keys and values, and the bias and mask between them.

        With a table, queries are in reverse order: each row of the bias is then the previous one,
        shifted by one.
        """
        q, k, v = _turned(tensors["q"], tensors), tensors["k"], tensors["v"]
        if "table" not in tensors:
            bias, mask = self._tile(part, tensors)
        else:
            table, mask = tensors["table"], None
            if self.table_has_mask:
                table = table.to(mask_dtype(q))
            bias = _toeplitz(table, q.shape[2], part.key_counts)
            if not self.table_has_mask:
                finite = bias != -torch.inf
                mask, bias = self._mask(part), torch.where(finite, bias, 0.0)
                mask = finite if mask is None else finite & mask.flip(2)
        if mask is not None and may_be_fully_masked(self.call):
            q, k, v = zero_fully_masked(q, k, v, mask)
        return _Masked(q, k, v, bias, mask)

    def _tile(
        self, part: Part, tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Bias and mask of a part, pair by pair."""
        call, mask, bias = self.call, self._mask(part), tensors.get("extra_bias")
        if has_bias(call.scheme):
            query, key = call.query.select(part.queries), _keys_of(part, call.key)
            term = bias_tile(
                call.scheme, as_column(query.encoded_pos), as_row(key.encoded_pos),
                {name: tensors[f"params.{name}"] for name in call.arrays},
                query=_with_prefix(tensors, "query"), key=_with_prefix(tensors, "key"),
                dtype=call.dtype, xp=call.xp, read=read_by_distance,
                consecutive=call.in_order and part.first is None,
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
        if mask.array is not None:
            mask = replace(mask, array=self._slice("mask", part, mask.array))
        query, key = call.query.select(part.queries), _keys_of(part, call.key)
        return visible_pairs(mask, query, key, call.xp)


class _Masked(NamedTuple):
    """Queries, keys and values of a part; a bias and a mask, if any, for each of their pairs."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None


def _turned(rows: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Rows ``(B, H, Q, ...)`` in reverse order if there is a table."""
    return rows.flip(2) if "table" in tensors else rows


def _keys_of(part: Part, side: Tokens) -> Tokens:
    """Positions and segments of a part's keys, whose features are elsewhere."""
    if part.first is None:
        return side.select(part.keys)
    pos, seg, places = (
        None if a is None else torch.cat([a[..., keys] for keys in part.ranges], dim=-1)
        for a in (side.pos, side.seg, side.places)
    )
    return Tokens(pos, seg, places, features={})


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
    if mask is not None:
        scores = torch.where(mask, scores, torch.finfo(dtype).min)
    # Not the log-sum-exp: where scores are large, it has few digits left for the sum.
    row_max = scores.amax(dim=-1, keepdim=True).detach()
    weights = torch.exp(scores - row_max)
    if mask is not None:
        weights = torch.where(mask, weights, 0.0)
    row_sum = weights.sum(dim=-1, keepdim=True)
    divisor = torch.where(row_sum == 0, 1.0, row_sum)  # 0 in a fully masked row
    return (weights / divisor) @ v, (row_max + divisor.log())[..., 0]


class _Fused(torch.autograd.Function):
    """Attention by SDPA's kernel for CPUs, which gives each part's log-sum-exp to its gradient."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor:
        by_name = dict(zip(job.names, tensors, strict=True))
        q = by_name["q"]
        out = q.new_zeros((*q.shape[:3], by_name["v"].shape[3]))
        # Arrays of their own for each part would lie between those that the next parts need, and
        # leave gaps too small for them: memory that grows with the square of the length.
        kept = fused.kept(q, by_name["v"]) if any(ctx.needs_input_grad) else None
        for part in job.parts:
            slices = job.slices(part, by_name)
            one = job.masked(part, slices)
            term, fully_masked = as_attn_mask(one.bias, one.mask, mask_dtype(q))
            result = fused.forward(one.q, one.k, one.v, term, job.call.scale)
            part_out = result.out[..., : out.shape[3]]
            if fully_masked is not None:
                part_out = torch.where(fully_masked, 0.0, part_out)
            out[:, part.heads, part.queries] = _turned(part_out, slices)
            for whole, own in zip(kept or (), result, strict=False):
                whole[:, part.heads, part.queries] = own
        ctx.job = job
        ctx.save_for_backward(*tensors, *(kept or ()))
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        _only_first_derivatives(d_out)
        job: _Job = ctx.job
        *given, outs, lses = ctx.saved_tensors
        by_name = dict(zip(job.names, given, strict=True))
        sums = _Sums(job, by_name, ctx.needs_input_grad[1:])
        # A backward pass may be called inside autocast.
        with torch.autocast(d_out.device.type, enabled=False):
            for part in job.parts:
                out, lse = (a[:, part.heads, part.queries] for a in (outs, lses))
                tensors = {n: t.detach() for n, t in job.slices(part, by_name).items()}
                leaves = [n for n in sums.names if n not in ("q", "k", "v", "table")]
                learned = {n: tensors[n].requires_grad_() for n in leaves}
                with torch.set_grad_enabled(bool(learned)):
                    q, k, v, bias, mask = job.masked(part, tensors)
                d_part = _turned(d_out[:, part.heads, part.queries], tensors)
                detached = None if bias is None else bias.detach()
                term, fully_masked = as_attn_mask(detached, mask, mask_dtype(q))
                if fully_masked is not None:
                    d_part = torch.where(fully_masked, 0.0, d_part)
                result = fused.Result(out, lse)
                d_q, d_k, d_v = fused.backward(d_part, q, k, v, result, term, job.call.scale)
                sums.add(part, {"q": _turned(d_q, tensors), "k": d_k, "v": d_v})
                if (
                    bias is None
                    or term is None
                    or not (bias.requires_grad or "table" in sums.names)
                ):
                    continue
                scores = Scores.of(
                    d_part, q, k, v, term, lse, scale=job.call.scale, dtype=job.call.dtype
                )
                if "table" in sums.names:
                    sums.add(part, {"table": job.table_gradient(part, tensors, scores, out)})
                    continue
                d_bias = scores.gradients().sum_to_size(bias.shape)
                d_learned = torch.autograd.grad(
                    bias, list(learned.values()), d_bias, allow_unused=True
                )
                sums.add(part, dict(zip(learned, d_learned, strict=True)))
        return None, *sums.results()


class _Recomputed(torch.autograd.Function):
    """Attention part by part; the backward pass computes each part again, with autograd."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        by_name = dict(zip(job.names, tensors, strict=True))
        q = by_name["q"]
        dtype = job.call.dtype if job.whole_scores else q.dtype
        out = q.new_zeros((*q.shape[:3], by_name["v"].shape[3]), dtype=dtype)
        lse = q.new_full(q.shape[:3], torch.finfo(job.call.dtype).min, dtype=job.call.dtype)
        for part in job.parts:
            part_out, part_lse = job.attend(part, job.slices(part, by_name))
            out[:, part.heads, part.queries] = part_out
            if part_lse is not None:
                lse[:, part.heads, part.queries] = part_lse
        return (out, lse) if job.whole_scores else out

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor) -> tuple[Tensor | None, ...]:
        _only_first_derivatives(d_results[0])
        job: _Job = ctx.job
        by_name = dict(zip(job.names, ctx.saved_tensors, strict=True))
        sums = _Sums(job, by_name, ctx.needs_input_grad[1:])
        # As in the forward pass; a backward pass may be called inside autocast.
        with torch.autocast(by_name["q"].device.type, enabled=False):
            for part in job.parts:
                tensors = {n: t.detach() for n, t in job.slices(part, by_name).items()}
                leaves = [tensors[name].requires_grad_() for name in sums.names]
                with torch.enable_grad():
                    results = [r for r in job.attend(part, tensors) if r is not None]
                pairs = [
                    (result, d_result[:, part.heads, part.queries])
                    for result, d_result in zip(results, d_results, strict=True)
                    if result.requires_grad  # False if no leaf takes part
                ]
                if not pairs:
                    continue
                outputs, d_outputs = zip(*pairs, strict=True)
                d_leaves = torch.autograd.grad(outputs, leaves, d_outputs, allow_unused=True)
                sums.add(part, dict(zip(sums.names, d_leaves, strict=True)))
        return None, *sums.results()


def _only_first_derivatives(d_result: Tensor) -> None:
    """Refuse second derivatives, and several first ones at a time."""
    if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(d_result):
        raise NotImplementedError(
            "implementation 'chunked' has first derivatives only, of one result at a time "
            "(create_graph and is_grads_batched ask for more): use implementation='reference'"
        )


class _Sums:
    """Gradients of a job's tensors, to which parts add.

    Sums over hundreds of parts need float32. Each query is in one part.
    """

    def __init__(
        self, job: _Job, tensors: Mapping[str, Tensor], needs_grad: Sequence[bool]
    ) -> None:
        self._job, self._tensors = job, tensors
        self._totals = {
            name: torch.zeros_like(
                t, dtype=t.dtype if name == "q" else torch.promote_types(t.dtype, torch.float32)
            )
            for (name, t), needed in zip(tensors.items(), needs_grad, strict=True)
            if needed
        }
        self._used: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that need a gradient."""
        return tuple(self._totals)

    def add(self, part: Part, gradients: Mapping[str, Tensor | None]) -> None:
        """Add the gradients of a part; None is one of 0, others than ``names`` are ignored."""
        for name, whole in self._totals.items():
            gradient = gradients.get(name)
            if gradient is None:
                continue
            self._used.add(name)
            totals, axis = self._job.views(name, part, whole)
            pieces: Sequence[Tensor] = (gradient,)
            if len(totals) > 1:
                pieces = torch.split(gradient, [total.shape[axis] for total in totals], dim=axis)
            for total, own in zip(totals, pieces, strict=True):
                if name == "q":
                    total.copy_(own)
                else:
                    total += own

    def results(self) -> list[Tensor | None]:
        """The gradient of each tensor in its dtype; None if no part uses it."""
        return [
            self._totals[name].to(t.dtype) if name in self._used else None
            for name, t in self._tensors.items()
        ]


def _meta_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype without values."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _toeplitz(table: Tensor, count: int, key_counts: Sequence[int]) -> Tensor:
    """``(1, H or 1, n, K)``: row ``i`` is ``table[:, i : i + K]``; a view.

    Of two ranges of keys each has its own columns, and the result is a copy.
    """
    step, one = table.stride()
    columns = torch.split(table, [count + keys - 1 for keys in key_counts], dim=1)
    views = [
        own.as_strided((1, table.shape[0], count, keys), (0, step, one, one))
        for own, keys in zip(columns, key_counts, strict=True)
    ]
    return views[0] if len(views) == 1 else torch.cat(views, dim=3)


def _is_fused(call: Call, tensors: Mapping[str, Tensor]) -> bool:
    """Whether parts call SDPA's kernel for CPUs themselves.

    Not for a bias that is learned in half precision: its gradient would have the rounding of the
    result.
    """
    q, k, v, *others = tensors.values()
    learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in others)
    return (q.dtype == call.dtype or not learned) and fused.fused(q, k, v)


def _largest_first(some: Iterable[Part]) -> tuple[Part, ...]:
    """Parts in the order of their numbers of keys, so that each fits into the memory of the last.

    Under a causal mask, in the order of queries, each is larger than all before it.
    """
    return tuple(sorted(some, key=lambda part: -sum(part.key_counts)))


def _far(call: Call) -> int | None:
    """The nearest distance of far keys, if they are visible; see ``_Job``."""
    left, k_len = call.scheme.constant_beyond()[0], call.k.shape[2]
    if left is None or left >= k_len:
        return None
    return left if is_true(visible_by_distance(call)[k_len - 1 - left]) else None


def _with_mask(call: Call, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias by distance with ``-inf`` at hidden distances, for a mask in ``dtype``."""
    visible = torch.where(visible_by_distance(call), table, -torch.inf)
    if dtype == table.dtype:
        return visible
    # Softmax does not change, and half precision then holds the bias of near keys.
    return visible - table.detach()[:, call.k.shape[2] - 1, None]


def _peaks_at_own_key(call: Call, table: Tensor, dtype: torch.dtype) -> bool:
    """Whether the bias of a query's own key is finite and, for a mask in half precision, highest.

    For such a mask the bias of the own key is subtracted. The rest is then at most 0, and half
    precision holds it best for the keys with the largest bias.
    """
    own = table[:, call.k.shape[2] - 1 : call.k.shape[2]]
    if dtype == table.dtype:
        return bool(torch.isfinite(own).all())
    return bool((torch.isfinite(own) & ((table <= own) | ~visible_by_distance(call))).all())
