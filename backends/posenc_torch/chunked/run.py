"""A call in parts, or some whole rows at a time where a scheme adjusts rows; or its segments."""

from __future__ import annotations

from torch import Tensor

from posenc.backend import Call, LogSumExp, adjusts_rows
from posenc_torch.chunked.job import Job
from posenc_torch.chunked.parts import most_queries
from posenc_torch.chunked.passes import Fused, Recomputed
from posenc_torch.chunked.rows import by_rows
from posenc_torch.chunked.segments import by_segments, side_by_side
from posenc_torch.chunked.table import table_of
from posenc_torch.chunked.tensors import tensors_of
from posenc_torch.chunked.whole_scores import needs_whole_scores
from posenc_torch.sdpa import has_native_mask, sdpa


def run(call: Call) -> tuple[Tensor, LogSumExp | None]:
    """``(B, H, Q, Dv)``, and its log-sum-exp where it is needed."""
    if (rows := side_by_side(call)) is not None:
        return by_segments(call, rows, _of_segment), None
    return _whole(call)


def _of_segment(call: Call) -> Tensor:
    """Attention inside a segment; by SDPA itself where it has the mask, or makes one part."""
    if needs_whole_scores(call) or adjusts_rows(call):
        return _whole(call)[0]
    at_once = has_native_mask(call) or call.q.shape[2] <= most_queries()
    return (sdpa(call) if at_once else _whole(call))[0]


def _whole(call: Call) -> tuple[Tensor, LogSumExp | None]:
    return by_rows(call) if adjusts_rows(call) else by_parts(call)


def by_parts(call: Call) -> tuple[Tensor, LogSumExp | None]:
    """The same, part by part."""
    job, tensors = Job.of(call, tensors_of(call, table_of(call)))
    way = Fused if job.fused else Recomputed
    result = way.apply(job, *tensors.values())  # type: ignore[no-untyped-call]  # as torch has it
    if isinstance(result, Tensor):
        return result, None
    out, *lse = result
    return out, LogSumExp(*lse)
