"""What Inductor generates for the calls, captured without running it, and what ptxas makes of it.

Import it after ``fake_cuda.load_hooks``.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._inductor import ir
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

import posenc
import posenc_torch
from compile_only.flex.cases import (
    HEADS,
    Case,
    caller_options,
    make_scheme,
    prepare_call,
    tokens_of,
)
from compile_only.flex.fake_cuda import SHARED, fake_cuda
from posenc.apply.feature_needs import reads_hidden
from posenc_torch.flex import implementation as flex


def kernel_sources(case: Case) -> list[tuple[str, str]]:
    """Name and source of every kernel of a call and its gradients. Nothing runs."""
    sources: list[tuple[str, str]] = []
    mode = FakeTensorMode()
    load = GraphLowering._compile_to_module_lines

    def load_without_running(graph: Any, code: Any) -> Any:
        """The module that would run the kernels, with outputs without values."""
        layouts = [_output_layout(graph, output) for output in graph.graph_outputs]

        def call(args: list[Any]) -> list[Any]:
            args.clear()
            with mode:
                return [empty(*one) if isinstance(one, tuple) else one for one in layouts]

        module = load(graph, code)
        return types.SimpleNamespace(call=call, __file__=module.__file__, runner=None)

    def keep(name: str, source: str) -> None:
        sources.append((name, source))

    with (
        fake_cuda(keep),
        mock.patch.object(GraphLowering, "_compile_to_module_lines", load_without_running),
        mode,
        torch.set_grad_enabled(not case.decoding),
    ):
        attend = torch.compile(_attend, fullgraph=True) if case.graph else _attend
        # A length becomes a symbol once the compiler has seen two.
        for length in [case.length // 2, case.length] if case.dynamic else [case.length]:
            sources.clear()
            _call_on_fake_tensors(case, length, attend)
    return sources


def _call_on_fake_tensors(case: Case, length: int, attend: Callable[..., Any]) -> None:
    """A forward pass and, unless it decodes, a backward pass."""
    scheme = make_scheme(case, HEADS)

    def fake(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)

    lengths = 1 if case.decoding else length, length, length
    dtype = getattr(torch, case.dtype)
    q, k, v = (fake(2, HEADS, n, case.dim, dtype=dtype) for n in lengths)
    x = fake(2, length, HEADS) if reads_hidden(scheme) else None
    params = {name: fake(*a.shape) for name, a in posenc.init_params(scheme).items()}
    options = caller_options(case, lambda: fake(1, HEADS, lengths[0], length))
    options["tokens"] = tokens_of(
        case, length, x, lambda a: empty(a.shape, (1,), torch.int32, "cuda")
    )
    out = attend(q, k, v, scheme, params, dict(case.kernel_options), options)
    if not case.decoding:
        out.backward(torch.empty_like(out))


def _attend(
    q: Any, k: Any, v: Any, scheme: Any, params: Any, kernel_options: Any, options: Any
) -> Any:
    """The call of a user, or one with kernel options, which posenc does not have."""
    if not kernel_options:
        options = {"causal": "mask" not in options, **options}
        return posenc_torch.attention(q, k, v, scheme, params, implementation="flex", **options)
    call = prepare_call(q, k, v, scheme, params, options)
    arguments = flex.arguments(call) | {"kernel_options": kernel_options}
    return flex.split_lse(torch.compile(flex_attention)(**arguments))[0]


def _output_layout(graph: Any, output: Any) -> Any:
    """Size, stride, dtype and device of an output; the output itself if it is no tensor."""
    if isinstance(output, ir.NoneAsConstantBuffer):
        return None
    hint = graph.sizevars.optimization_hint
    if isinstance(output, ir.ShapeAsConstantBuffer):
        return hint(output.expr)
    lengths = [tuple(map(hint, a)) for a in (output.get_size(), output.get_stride())]
    return *lengths, output.get_dtype(), output.get_device()


def empty(size: Any, stride: Any, dtype: Any, device: Any) -> Any:
    """An empty tensor of a layout."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def compile_kernel(name: str, source: str, folder: Path | None = None) -> dict[str, Any]:
    """What ptxas reports of a kernel, compiled as torch would compile it."""
    triton.knobs.compilation.always_compile = True  # a kernel from the cache has no log
    triton.knobs.nvidia.dump_ptxas_log = True
    with fake_cuda(lambda *_: None):
        kernel = getattr(PyCodeCache.load(source), name)
        config = copy.deepcopy(kernel.configs[0])
        binary, report = _binary(kernel, config)
        requested = binary.metadata.shared
        if requested > SHARED:  # torch then tries one stage before it fails
            config.num_stages = 1
            binary, report = _binary(kernel, config)
    if folder is not None:
        for stage in ("ttgir", "ptx"):
            (folder / f"{name}.{stage}").write_text(str(binary.asm[stage]))
        (folder / f"{name}.cubin").write_bytes(binary.asm["cubin"])
    (registers,) = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return {
        "requested": requested,
        "registers": int(registers),
        "spills": sum(map(int, spills)),
        "shared": binary.metadata.shared,
        "warps": binary.metadata.num_warps,
        "stages": binary.metadata.num_stages,
    }


def _binary(kernel: Any, config: Any) -> tuple[Any, str]:
    """A compiled kernel, and what ptxas printed."""
    with contextlib.redirect_stdout(io.StringIO()) as log:
        return kernel._precompile_config(config).kernel, log.getvalue()
