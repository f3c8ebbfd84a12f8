"""FlexAttention's GPU kernels for posenc, on a machine that has no GPU.

``python benchmarks/flex_without_gpu.py`` prints, for every scheme, dtype, head dimension and pass:
whether Triton and ptxas compile what torch generates for an H200, with which registers, spills and
shared memory, and how far the same kernels, run by Triton's interpreter on a CPU, are from the
definition. What is compiled is ``posenc_torch.attention(implementation="flex")`` on tensors that
say that they are on a GPU and hold nothing; what is run is ``score_mod`` and ``block_mask``.

Needs a C++ compiler, Linux, the CPU wheel of torch, and the triton that the CUDA wheel asks for:
``pip install torch==2.13.0 triton==3.7.1``. It stands on internals of both, hence the versions.
It cannot say how fast a kernel is, nor what only hardware does: order of atomics, tensor cores'
rounding, races.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

PINNED = {"torch": "2.13", "triton": "3.7"}
CAPABILITY = 9, 0  # of an H200, as are the properties below
SHARED = 227 * 2**10  # bytes a block of threads may have; beyond it, a kernel does not start
HEADS, LENGTH = 8, 1024
FEW_HEADS, SHORT = 2, (256, 300)  # for the interpreter: whole blocks, and the end of one
# Of what is run, relative to the largest of the definition. A gradient that sums whole rows, as of
# a slope, keeps the rounding of every weight in it.
BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

# Torch without CUDA knows no such device; slices and autograd ask for one even of fake tensors.
_HOOKS = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace at {
const Device only(DeviceType::CUDA, 0);
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return only; }
  Device getDevice() const override { return only; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(only); }
  void record(void**, const Stream&, DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
"""


def unpinned() -> str | None:
    """Why nothing can be said with what is installed."""
    for name, pinned in PINNED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"it needs {name} {pinned}"
        if not found.startswith(f"{pinned}."):
            return f"it reads internals of {name} {pinned}, this is {found}"
    return None


def _load_hooks() -> None:
    """Before torch is imported, for it asks for its hooks once and keeps the answer."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "hooks.cpp"), Path(folder, "hooks.so")
        source.write_text(_HOOKS)
        lib = root / "lib"
        command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(source)]
        libraries = [f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}", "-o", str(built)]
        subprocess.run([*command, *libraries], check=True)
        ctypes.CDLL(str(built))


@dataclass(frozen=True)
class Case:
    """One row or two of the table."""

    scheme: str
    dtype: str
    dim: int
    length: int = LENGTH
    dynamic: bool = False
    decodes: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def learns(self) -> bool:
        """Whether gradients are asked for."""
        return not self.decodes


def schemes(heads: int, dim: int) -> dict[str, Any]:
    """By the names of the table."""
    import posenc
    from posenc.schemes import Sink, Sum

    class Gated(posenc.PositionScheme):
        """Forget gates, given as they are."""

        cumulative = ("c",)

        def __init__(self, num_heads):
            object.__setattr__(self, "num_heads", num_heads)

        def hidden_features(self, x, *, role, params, xp):
            gates = xp.matrix_transpose(x[..., : self.num_heads])
            return {"c": gates} if role == "key" else {}

        def bias(self, q, k, *, params, xp):
            return params.query["c"] - params.key["c"]

    class Shaw(posenc.PositionScheme):
        """A learned vector for each distance up to 16, seen by the query: a table of each query."""

        relative = True

        def param_specs(self):
            return {"r": posenc.ParamSpec((33, dim), per_head=False)}

        def query_features(self, q, pos, *, scale, params, xp):
            return {"r": scale * xp.matmul(q, xp.matrix_transpose(params["r"]))}

        def bias(self, q, k, *, params, xp):
            return params.query["r"][xp.clip(k - q, -16, 16) + 16]

    return {
        "alibi": posenc.ALiBi(heads),
        "alibi-learned": posenc.ALiBi(heads, learned=True),
        "t5": posenc.T5Bias(heads),
        "gated": Gated(heads),
        "shaw": Shaw(),
        "gated+alibi": Sum(Gated(heads), posenc.ALiBi(heads)),
        "sink": Sink(posenc.ALiBi(heads)),
        "brought": posenc.NoPE(),
        "nope": posenc.NoPE(),
        "rope": posenc.RoPE(dim),
    }


SCHEMES = (
    "alibi", "alibi-learned", "t5", "gated", "nope", "rope", "shaw", "gated+alibi", "sink",
    "brought",
)  # fmt: skip


def options_of(case: Case, bias: Callable[[], Any]) -> dict[str, Any]:
    """What a caller brings: a bias of every pair, a mask that is a function, and a cap."""
    if case.scheme != "brought":
        return {}
    return {"bias": bias(), "softcap": 3.0, "mask": _prefix}


def _prefix(q: Any, k: Any) -> Any:
    return (k <= q) | (k < 40)


def reads_tokens(scheme: Any) -> bool:
    """Whether a scheme has gates of hidden states."""
    return "hidden_features" in scheme.hooks()


# A GPU that is not there


@contextlib.contextmanager
def pretended(kernel: Callable[[str, str], Any]) -> Iterator[None]:
    """Torch believes in an H200. ``kernel(name, source)`` stands for what compiles a kernel."""
    import torch
    import torch._inductor.config as inductor
    import torch._inductor.fx_passes.fuse_attention as patterns
    import triton
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, warp_size=32, total_memory=141 * 2**30,
        shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=SHARED,
        shared_memory_per_multiprocessor=228 * 2**10, L2_cache_size=50 * 2**20, gcnArchName="",
    )  # fmt: skip
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *_: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "_get_device_properties": lambda _: properties,
        "_DeviceGuard": lambda _: contextlib.nullcontext(),
    }
    core = {"_cuda_getDevice": lambda: 0, "_cuda_getCurrentRawStream": lambda _: 0}
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    guards = torch._C._dynamo.guards
    changed = [(torch.cuda, name, value) for name, value in cuda.items()]
    changed += [(torch._C, name, value) for name, value in core.items()]
    changed += [
        (guards, "_empty_strided_cuda", guards._empty_strided_cpu),
        (AsyncCompile, "triton", lambda _, name, source, **__: kernel(name, source)),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (patterns, "_sfdp_init", lambda *_: None),  # it computes constants on the device
    ]
    lifts = torch._C._only_lift_cpu_tensors()
    with contextlib.ExitStack() as stack:
        for where, name, value in changed:
            stack.enter_context(mock.patch.object(where, name, value, create=True))
        stack.enter_context(
            inductor.patch(
                force_disable_caches=True,
                compile_threads=1,
                joint_graph_constant_folding=False,
                use_static_cuda_launcher=False,
            )
        )
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        triton.runtime.driver.set_active(driver)
        torch._C._set_only_lift_cpu_tensors(True)
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()
            torch._C._set_only_lift_cpu_tensors(lifts)


# What is generated, and what it compiles to


def sources(case: Case) -> dict[str, str]:
    """Every kernel that a call and its gradients ask for, by name. Nothing is run."""
    import torch
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict[str, str] = {}
    mode = FakeTensorMode()
    load = GraphLowering._compile_to_module_lines

    def idle(graph: Any, code: Any) -> Any:
        """The module that would run the kernels, with outputs that hold nothing."""
        made = [_layout(graph, output) for output in graph.graph_outputs]

        def call(args: list[Any]) -> list[Any]:
            args.clear()
            with mode:
                return [_empty(*o) if isinstance(o, tuple) else o for o in made]

        module = load(graph, code)
        return types.SimpleNamespace(call=call, __file__=module.__file__, runner=None)

    def keep(name: str, source: str) -> None:
        found[name] = source

    with (
        pretended(keep),
        mock.patch.object(GraphLowering, "_compile_to_module_lines", idle),
        mode,
        torch.set_grad_enabled(case.learns),
    ):
        # A length is a symbol to the compiler once it has seen another.
        for length in [case.length // 2, case.length] if case.dynamic else [case.length]:
            found.clear()
            _train(case, length)
    return found


def _train(case: Case, length: int) -> None:
    """A forward pass and a backward one on tensors that hold nothing."""
    import torch

    import posenc

    scheme = schemes(HEADS, case.dim)[case.scheme]

    def empty(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)

    lengths = 1 if case.decodes else length, length, length
    q, k, v = (empty(2, HEADS, n, case.dim, dtype=getattr(torch, case.dtype)) for n in lengths)
    x = empty(2, length, HEADS) if reads_tokens(scheme) else None
    params = {name: empty(*a.shape) for name, a in posenc.init_params(scheme).items()}
    options = options_of(case, lambda: empty(1, HEADS, lengths[0], length))
    out = _attend(q, k, v, scheme, params, x, dict(case.options), options)
    if case.learns:
        out.backward(torch.empty_like(out))


def _attend(
    q: Any, k: Any, v: Any, scheme: Any, params: Any, x: Any, kernel: Any, options: Any
) -> Any:
    """As a user would, or with options of kernels that posenc does not give."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    import posenc_torch
    from posenc_torch.flex import implementation as flex

    if not kernel:
        options = {"causal": "mask" not in options, "x": x, **options}
        return posenc_torch.attention(q, k, v, scheme, params, implementation="flex", **options)
    call = _call(q, k, v, scheme, params, x, options)
    given = flex.arguments(call) | {"kernel_options": kernel}
    found = torch.compile(flex_attention)(**given)
    return found if isinstance(found, torch.Tensor) else found[0]


def _call(q: Any, k: Any, v: Any, scheme: Any, params: Any, x: Any, options: Any) -> Any:
    """What the implementation serves; causal without a mask of the caller's."""
    import array_api_compat.torch as xp

    from posenc.attn.call import prepare

    return prepare(q, k, v, scheme, params, "mask" not in options, x=x, xp=xp, **options)


def _as_on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    """The same with the options that tensors on a GPU would have."""
    from posenc_torch.flex import implementation as flex

    mod = getattr(given["score_mod"], "__self__", None)
    tables = mod is not None and mod.gathers
    return given | {"kernel_options": flex.FOR_TABLES if tables else None}


def _with_sink(call: Any, found: Any) -> Any:
    """The result, with the call's sink put in by the log-sum-exp."""
    from posenc.attn.merge import PartialAttention, add_sink
    from posenc_torch.flex import implementation as flex

    part = PartialAttention(*flex.with_lse(found))
    return part.out if call.sink is None else add_sink(part, call).out.to(part.out.dtype)


def _layout(graph: Any, output: Any) -> Any:
    """What an output of a graph looks like, or the output if it is no tensor."""
    from torch._inductor import ir

    if isinstance(output, ir.NoneAsConstantBuffer):
        return None
    hint = graph.sizevars.optimization_hint
    if isinstance(output, ir.ShapeAsConstantBuffer):
        return hint(output.expr)
    lengths = [tuple(map(hint, a)) for a in (output.get_size(), output.get_stride())]
    return *lengths, output.get_dtype(), output.get_device()


def _empty(size: Any, stride: Any, dtype: Any, device: Any) -> Any:
    import torch

    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def compiled(name: str, source: str, keep: Path | None = None) -> dict[str, Any]:
    """What ptxas says of a kernel: as torch would have it compiled, by the same calls."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    triton.knobs.compilation.always_compile = True  # a kernel from the cache has no log
    triton.knobs.nvidia.dump_ptxas_log = True
    with pretended(lambda *_: None):
        kernel = getattr(PyCodeCache.load(source), name)
        config = copy.deepcopy(kernel.configs[0])
        binary, report = _binary(kernel, config)
        wanted = binary.metadata.shared
        if wanted > SHARED:  # torch then tries again, and if that fails gives up
            config.num_stages = 1
            binary, report = _binary(kernel, config)
    if keep is not None:
        for stage in ("ttgir", "ptx"):
            (keep / f"{name}.{stage}").write_text(str(binary.asm[stage]))
        (keep / f"{name}.cubin").write_bytes(binary.asm["cubin"])
    (registers,) = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return {
        "wanted": wanted,
        "registers": int(registers),
        "spills": sum(map(int, spills)),
        "shared": binary.metadata.shared,
        "warps": binary.metadata.num_warps,
        "stages": binary.metadata.num_stages,
    }


def _binary(kernel: Any, config: Any) -> tuple[Any, str]:
    """A kernel compiled, and what ptxas printed."""
    with contextlib.redirect_stdout(io.StringIO()) as log:
        return kernel._precompile_config(config).kernel, log.getvalue()


# The same kernels, run


class Interpreted:
    """A generated kernel as the generated code calls it, run by Triton's interpreter."""

    def __init__(self, name: str, source: str) -> None:
        from torch._inductor.codecache import PyCodeCache

        self._kernel = getattr(PyCodeCache.load(source), name)

    def run(self, *args: Any, stream: Any) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        meta, config = self._kernel.inductor_meta, self._kernel.configs[0]
        names = [n for n in self._kernel.fn.arg_names if n not in config.kwargs]
        extra = meta.get("extra_launcher_args", [])
        grid = GridExpr.from_meta(meta, config)
        sizes = grid.eval_slow(dict(zip([*names, *extra], args, strict=True)))
        self._kernel.fn[sizes](*args[: len(args) - len(extra)], **config.kwargs)


@contextlib.contextmanager
def _in_bfloat16() -> Iterator[None]:
    """The interpreter multiplies the bits of bfloat16, and rounds to it towards 0."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, dot = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.create_dot
    convert = interpreter._convert_float

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def multiply(own: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(own, wide(a), wide(b), *rest)

    def round_to(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        even = bits + 0x7FFF + ((bits >> 16) & 1)  # no NaN is expected
        return (even >> 16).astype(np.uint16)

    with (
        mock.patch.object(builder, "create_dot", multiply),
        mock.patch.object(interpreter, "_convert_float", round_to),
    ):
        yield


@contextlib.contextmanager
def _with_tanh() -> Iterator[None]:
    """The interpreter has no functions of libdevice."""
    import triton.language as tl
    from torch._inductor.runtime.triton_helpers import libdevice

    def tanh(x: Any) -> Any:
        return 2 / (1 + tl.exp(-2 * x)) - 1

    with mock.patch.object(libdevice, "tanh", tanh):
        yield


def on_gpu(graph: Any, inputs: list[Any]) -> Any:
    """A compiler of graphs of tensors on a CPU, to what a GPU would run."""
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx

    learns = any(a.requires_grad for a in inputs)
    for node in graph.graph.nodes:
        if "flex_attention" in str(node.target):  # on a CPU it would leave it out
            options = [n for n, a in enumerate(node.args) if isinstance(a, dict)]
            (at,) = options
            node.update_arg(at, node.args[at] | {"OUTPUT_LOGSUMEXP": learns})
    with detect_fake_mode(inputs):
        there = [
            _empty(a.shape, a.stride(), a.dtype, "cuda").requires_grad_(a.requires_grad)
            for a in inputs
        ]
    return compile_fx(graph, there)


def errors(case: Case, length: int) -> dict[str, float]:
    """How far results and gradients are from the definition, relative to the largest."""
    import numpy as np
    import torch
    from torch.nn.attention import flex_attention as public

    import posenc
    import posenc_torch
    from posenc_torch.flex import implementation as flex

    scheme = schemes(FEW_HEADS, case.dim)[case.scheme]
    rng = np.random.default_rng(0)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    qkv = [normal(1, FEW_HEADS, length, case.dim).to(dtype).requires_grad_() for _ in range(3)]
    weight = normal(1, FEW_HEADS, length, case.dim).to(dtype)
    x = -normal(1, length, FEW_HEADS).abs().requires_grad_()
    params = {n: torch.tensor(a).requires_grad_() for n, a in posenc.init_params(scheme).items()}
    gated = reads_tokens(scheme)
    bias = normal(1, FEW_HEADS, length, length).requires_grad_()
    options = options_of(case, lambda: bias)
    learned = [*params.values(), *([x] if gated else []), *([bias] if options else [])]

    run = torch.compile(public.flex_attention, backend=on_gpu, fullgraph=True, dynamic=False)
    with (
        pretended(Interpreted),
        _in_bfloat16(),
        _with_tanh(),
        # It allows no gradients on a CPU. Dynamo traces no mock.
        mock.patch.object(public, "_validate_device", lambda *_: None),  # noqa: PT008
    ):
        call = _call(*qkv, scheme, params, x if gated else None, options)
        out = _with_sink(call, run(**_as_on_gpu(flex.arguments(call))))
        found = [out, *torch.autograd.grad(out, [*qkv, *learned], weight)]

    exact = [a.detach().double().requires_grad_() for a in (*qkv, *learned)]
    own = dict(zip(params, exact[3:], strict=False))
    options |= {"bias": exact[-1]} if options else {}
    expected = posenc_torch.attention(
        *exact[:3], scheme, own, not options, implementation="reference",
        x=exact[-1] if gated else None, **options,
    )  # fmt: skip
    expected = [expected, *torch.autograd.grad(expected, exact, weight.double())]
    names = ["forward", "q", "k", "v", *params, *(["x"] if gated else []), "bias"][: len(found)]
    return {
        name: float((a - b).detach().abs().max() / b.detach().abs().max())
        for name, a, b in zip(names, found, expected, strict=True)
    }


# The table

COLUMNS = "registers", "spills", "shared", "warps", "stages"


def _options(text: str) -> tuple[tuple[str, Any], ...]:
    """FlexAttention's kernel options."""
    pairs = (pair.split("=") for pair in text.split(","))
    return tuple((name, json.loads(value)) for name, value in pairs)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    add("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    add("--dims", nargs="+", type=int, default=[64, 128], help="head dimensions")
    add("--length", type=int, default=LENGTH, help="of what is compiled")
    add("--dynamic", action="store_true", help="compile for any length")
    add("--options", type=_options, default=(), help="kernel options: fwd_BLOCK_N=64,...")
    add("--decoding", action="store_true", help="also a single query")
    add("--keep", type=Path, help="a folder for sources, TTGIR, PTX and cubins")
    add("--no-run", action="store_true", help="compile only")
    add("--interpret", help=argparse.SUPPRESS)
    return parser.parse_args()


def _told(case: Case, keep: Path | None) -> dict[str, dict[str, Any] | str]:
    """What is to be said of each pass: numbers, or why there are none."""
    passes = ["decoding"] if case.decodes else ["forward", "backward"]
    try:
        kernels = sources(case)
    except Exception as error:
        return dict.fromkeys(passes, _line(error))
    folder = None
    if keep is not None:
        folder = keep / "-".join(map(str, (case.scheme, case.dtype, case.dim, *passes[:1])))
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in kernels.items():
            (folder / f"{name}.py").write_text(source)
    told: dict[str, dict[str, Any] | str] = {}
    for name, source in kernels.items():
        if "_tem_" not in name:  # small ones around it
            continue
        which = passes["backward" in name]
        try:
            told[which] = compiled(name, source, folder)
        except Exception as error:
            told[which] = _line(error)
    return told


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _errors(case: Case) -> dict[str, float]:
    """Of forward and backward, from a process of their own: Triton chooses its interpreter when
    it is imported.
    """
    command = [sys.executable, __file__, "--interpret", json.dumps(vars(case))]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return {}
    found = json.loads(done.stdout.splitlines()[-1])
    forward = found.pop("forward")
    return {"forward": forward, "backward": max(found.values())}


def main() -> None:
    """Print the table; 1 if a kernel does not compile, fit, run, or is wrong."""
    asked = _asked()
    if (reason := unpinned()) is not None:
        sys.exit(reason)
    _load_hooks()
    if asked.interpret:
        case = Case(**json.loads(asked.interpret))
        found = [errors(case, length) for length in SHORT]
        print(json.dumps({name: max(e[name] for e in found) for name in found[0]}))
        return
    faults = 0
    print(f"{'scheme':14}{'dtype':9}{'dim':>4} {'pass':9}", end="")
    print("".join(f"{name:>10}" for name in COLUMNS), f"{'error':>9}")
    for scheme, dtype, dim in itertools.product(asked.schemes, asked.dtypes, asked.dims):
        case = Case(scheme, dtype, dim, asked.length, asked.dynamic, options=asked.options)
        told = _told(case, asked.keep)
        if asked.decoding:
            told |= _told(replace(case, decodes=True), asked.keep)
        run = {} if asked.no_run else _errors(case)
        for which, found in told.items():
            print(f"{scheme:14}{dtype:9}{dim:4} {which:9}", end="")
            fault = None
            if isinstance(found, str):
                fault = f"does not compile: {found}"
            else:
                print("".join(f"{found[name]:10}" for name in COLUMNS), end="")
                if found["shared"] > SHARED:
                    fault = "does not fit"
                elif found["wanted"] > SHARED:
                    fault = f"not pipelined: that takes {found['wanted']} bytes"
            if which in run:
                print(f"{run[which]:10.1e}", end="")
                fault = fault or ("wrong" if not run[which] <= BOUNDS[dtype] else None)
            elif not asked.no_run and which != "decoding":
                fault = fault or "does not run"
            faults += fault is not None
            print("" if fault is None else f"  {fault}", flush=True)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
