"""The kernels of a GPU, run by Triton's interpreter on a CPU and compared with the reference.

It calls ``flex_attention`` with posenc's ``score_mod`` and ``block_mask``. Import it after
``fake_cuda.load_hooks``, with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch._guards import detect_fake_mode
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.runtime.triton_helpers import libdevice
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch.nn.attention import flex_attention as public
from triton.runtime import interpreter

import posenc
import posenc_torch
from compile_only.flex.cases import (
    Case,
    caller_options,
    make_scheme,
    prepare_call,
    tokens_of,
)
from compile_only.flex.fake_cuda import fake_cuda
from compile_only.flex.inductor import empty
from posenc.apply.feature_needs import reads_hidden
from posenc.backend import PartialAttention, add_sink, merge_parts
from posenc_torch.flex import call_mask, near_far, programs, target
from posenc_torch.flex import implementation as flex

HEADS = 2
LENGTHS = 512, 300  # whole blocks, and a last block that is partly beyond the end


class InterpretedKernel:
    """A generated kernel, with the interface that the generated code calls."""

    def __init__(self, name: str, source: str) -> None:
        self._kernel = getattr(PyCodeCache.load(source), name)

    def run(self, *args: Any, stream: Any) -> None:
        meta, config = self._kernel.inductor_meta, self._kernel.configs[0]
        names = [n for n in self._kernel.fn.arg_names if n not in config.kwargs]
        extra = meta.get("extra_launcher_args", [])
        grid = GridExpr.from_meta(meta, config)
        sizes = grid.eval_slow(dict(zip([*names, *extra], args, strict=True)))
        self._kernel.fn[sizes](*args[: len(args) - len(extra)], **config.kwargs)


@contextlib.contextmanager
def _correct_bfloat16() -> Iterator[None]:
    """Inside, bfloat16 is right: the interpreter multiplies its bits, and rounds it towards 0."""
    builder, dot = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.create_dot
    convert = interpreter._convert_float

    def to_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def multiply(own: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(own, to_float32(a), to_float32(b), *rest)

    def round_float(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        even = bits + 0x7FFF + ((bits >> 16) & 1)  # no NaN is expected
        return (even >> 16).astype(np.uint16)

    with (
        mock.patch.object(builder, "create_dot", multiply),
        mock.patch.object(interpreter, "_convert_float", round_float),
    ):
        yield


@contextlib.contextmanager
def _add_functions() -> Iterator[None]:
    """Inside, there are ``tanh`` and ``log1p``: the interpreter has no functions of libdevice."""

    def tanh(x: Any) -> Any:
        return 2 / (1 + tl.exp(-2 * x)) - 1

    def log1p(x: Any) -> Any:
        return tl.log(1 + x)

    with mock.patch.object(libdevice, "tanh", tanh), mock.patch.object(libdevice, "log1p", log1p):
        yield


def gpu_backend(graph: Any, inputs: list[Any]) -> Any:
    """A ``torch.compile`` backend that compiles a graph of CPU tensors as for a GPU."""
    needs_grad = any(a.requires_grad for a in inputs)
    for node in graph.graph.nodes:
        if "flex_attention" in str(node.target):  # a CPU's graph leaves the log-sum-exp out
            (at,) = [n for n, a in enumerate(node.args) if isinstance(a, dict)]
            node.update_arg(at, node.args[at] | {"OUTPUT_LOGSUMEXP": needs_grad})
    with detect_fake_mode(inputs):
        on_gpu = [
            empty(a.shape, a.stride(), a.dtype, "cuda").requires_grad_(a.requires_grad)
            for a in inputs
        ]
    return compile_fx(graph, on_gpu)


def errors(case: Case, length: int) -> dict[str, float]:
    """Errors of the result and of all gradients, each relative to the largest reference value."""
    scheme = make_scheme(case, HEADS)
    rng = np.random.default_rng(0)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    qkv = [normal(1, HEADS, length, case.dim).to(dtype).requires_grad_() for _ in range(3)]
    d_out = normal(1, HEADS, length, case.dim).to(dtype)
    x = -normal(1, length, HEADS).abs().requires_grad_()
    params = {n: torch.tensor(a).requires_grad_() for n, a in posenc.init_params(scheme).items()}
    reads_x = reads_hidden(scheme)
    bias = normal(1, HEADS, length, length).requires_grad_()
    options = caller_options(case, lambda: bias)
    learned = [*params.values(), *([x] if reads_x else []), *([bias] if options else [])]
    tokens = tokens_of(case, length, x if reads_x else None, torch.as_tensor)

    with (
        fake_cuda(InterpretedKernel),
        _correct_bfloat16(),
        _add_functions(),
        # It allows no gradients on a CPU. Dynamo traces no mock.
        mock.patch.object(public, "_validate_device", lambda *_: None),  # noqa: PT008
        mock.patch.object(target, "KINDS", ()),  # arguments as a GPU gets them
        mock.patch.object(call_mask, "_MIN_BLOCKS", 0),
        mock.patch.object(programs, "compiled_once", lambda function: function),
        mock.patch.object(near_far, "MIN_BLOCKS", 2),
    ):
        run = torch.compile(
            public.flex_attention, backend=gpu_backend, fullgraph=True, dynamic=False
        )
        call = prepare_call(*qkv, scheme, params, options | {"tokens": tokens})
        with programs.replace_kernel(
            lambda **given: run(**given | {"scale": float(given["scale"])})
        ):
            out = _attend(call)
        results = [out, *torch.autograd.grad(out, [*qkv, *learned], d_out)]

    wide = [a.detach().double().requires_grad_() for a in (*qkv, *learned)]
    wide_params = dict(zip(params, wide[3:], strict=False))
    options |= {"bias": wide[-1]} if options else {}
    reference = posenc_torch.attention(
        *wide[:3], scheme, wide_params, not options, implementation="reference",
        tokens=replace(tokens, x=wide[-1]) if reads_x else tokens, **options,
    )  # fmt: skip
    expected = [reference, *torch.autograd.grad(reference, wide, d_out.double())]
    names = ["forward", "q", "k", "v", *params, *(["x"] if reads_x else []), "bias"]
    return {
        name: float((a - b).detach().abs().max() / b.detach().abs().max())
        for name, a, b in zip(names[: len(results)], results, expected, strict=True)
    }


def _attend(call: Any) -> Any:
    """The result, with regions merged and the call's sink put in by the log-sum-exp."""
    parts = [PartialAttention(*flex.flex(part)) for part in call.regions or (call,)]
    part = merge_parts(parts, call) if call.regions else parts[0]
    return part.out if call.sink is None else add_sink(part, call).out.to(part.out.dtype)
