"""A call in parts, or some whole rows at a time where a scheme adjusts rows."""

from __future__ import annotations

from torch import Tensor

from posenc.backend import Call, LogSumExp, adjusts_rows
from posenc_torch.chunked.job import Job
from posenc_torch.chunked.passes import Fused, Recomputed
from posenc_torch.chunked.rows import by_rows
from posenc_torch.chunked.table import table_of
from posenc_torch.chunked.tensors import tensors_of


def run(call: Call) -> tuple[Tensor, LogSumExp | None]:
    """``(B, H, Q, Dv)``, and its log-sum-exp where it is needed."""
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
