"""An H200 that torch believes in, on a machine without one.

It patches internals of torch and Triton, hence the pinned versions.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

PINNED = {"torch": "2.13", "triton": "3.7"}
CAPABILITY = 9, 0  # of an H200, like the properties below
SHARED = 227 * 2**10  # bytes of shared memory per block; a kernel that needs more does not start

# Torch without CUDA has no such device, but slices and autograd ask fake tensors for one.
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


def version_mismatch() -> str | None:
    """Why the installed versions do not serve; None if they do."""
    for name, pinned in PINNED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"it needs {name} {pinned}"
        if not version.startswith(f"{pinned}."):
            return f"it reads internals of {name} {pinned}, this is {version}"
    return None


def load_hooks() -> None:
    """Compile and load CUDA hooks. Call it before torch is imported: torch asks for them once."""
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


@contextlib.contextmanager
def fake_cuda(compile_kernel: Callable[[str, str], Any]) -> Iterator[None]:
    """Inside, torch believes in an H200; ``compile_kernel(name, source)`` compiles its kernels."""
    # Only here, because load_hooks comes before torch.
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
    patches = [(torch.cuda, name, value) for name, value in cuda.items()]
    patches += [(torch._C, name, value) for name, value in core.items()]
    patches += [
        (guards, "_empty_strided_cuda", guards._empty_strided_cpu),
        (AsyncCompile, "triton", lambda _, name, source, **__: compile_kernel(name, source)),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (patterns, "_sfdp_init", lambda *_: None),  # it would compute constants on the device
    ]
    only_cpu = torch._C._only_lift_cpu_tensors()
    with contextlib.ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(module, name, value, create=True))
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
            torch._C._set_only_lift_cpu_tensors(only_cpu)
