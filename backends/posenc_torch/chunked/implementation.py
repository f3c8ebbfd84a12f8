"""Attention in parts: some queries at a time, against their visible keys, in memory ``O(H L)``.

A part has some heads, some queries, and the range of visible keys that are not negligible. It is
one call of ``scaled_dot_product_attention`` (SDPA), with its slice of the bias as ``attn_mask``.
SDPA has no softcap, and no log-sum-exp with a gradient. If a call needs either, each part computes
all of its scores instead. The backward pass of SDPA's kernel for CPUs gets the log-sum-exp of the
forward pass; elsewhere, each part is computed again. Nothing is compiled.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posenc.backend import (
    Call,
    LogSumExp,
    Planned,
    Refusal,
    adjusts_rows,
    is_exporting,
    plan_unless,
)
from posenc_torch.chunked.run import run
from posenc_torch.chunked.segments import side_by_side
from posenc_torch.sdpa import has_native_mask, is_small
from posenc_torch.tracing import is_traced, is_transformed

_FEWEST_TOKENS = 384  # measured on a CPU, single calls and passes
_LOOPS = "its loop over blocks of queries cannot be traced; 'reference' can"
_TRACED = "it chooses key blocks from tensor values, which a traced program does not have"


def chunked(call: Call) -> tuple[Tensor, LogSumExp | None]:
    """``(B, H, Q, Dv)``, and its log-sum-exp where it is needed."""
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
        from posenc_torch.chunked import uncompiled

        return uncompiled.run(call)
    return run(call)


def plan(call: Call) -> Planned | Refusal:
    """How a call is cut into parts, or why it cannot be."""
    return plan_unless(_why_not(call), Planned(chunked, pairs_in_pass=0))


def _why_not(call: Call) -> str | None:
    if is_exporting(torch):
        return _LOOPS if adjusts_rows(call) else f"{_TRACED}; 'sdpa' can be exported"
    if torch.compiler.is_compiling():
        return None  # the disabled function raises, or breaks the graph where that is allowed
    if is_traceable_wrapper_subclass(call.q):
        return f"it slices q many times, which is slow where q is a {type(call.q).__name__}"
    if call.q.device.type == "meta" or isinstance(call.q, FakeTensor):
        return "it is for tensors that have values, and these tensors have none"
    if is_traced():
        return _LOOPS if adjusts_rows(call) else _TRACED
    if is_transformed():
        return "its backward pass supports torch.autograd, not torch.func or forward mode"
    return None


def not_preferred(call: Call) -> str | None:
    """Why ``"auto"`` skips it."""
    if torch.compiler.is_compiling():
        return "it chooses its blocks one by one, and would break a compiled graph"
    if adjusts_rows(call):
        return _rows_not_preferred(call)
    if has_native_mask(call):
        return "SDPA needs no mask for this call"
    if is_small(call) and not _pays_by_segments(call):
        return "each head has few scores, and SDPA takes them in one call"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not tested on {call.q.device.type}"
    return None


def _pays_by_segments(call: Call) -> bool:
    """Whether segments side by side take less time as calls of their own than under a mask."""
    return call.q.shape[2] >= _FEWEST_TOKENS and side_by_side(call) is not None


def _rows_not_preferred(call: Call) -> str | None:
    if is_small(call):
        return "each head has few scores, and the reference has second derivatives"
    if call.q.device.type != "cpu":
        return f"some rows at a time were not measured on {call.q.device.type}"
    return None
