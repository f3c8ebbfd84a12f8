"""Compile each kernel for a device that is not present, and read what the compilers report."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.record import fault

from compile_only.pallas.loops import count_loop

DEVICES = {"h200": "NVIDIA H200", "v5e": "TPU v5e", "v6e": "TPU v6e"}
POSITIONS = "alibi, positions and segments"
FORMS = "none", "alibi", "alibi-learned", "kerple", "t5", "gated", "gated-alibi", POSITIONS
KERNELS = "forward", "d_queries", "d_keys", "d_table"
HEADS, BATCH = 4, 2
LENGTHS = 2048, 8192  # of the training steps whose temporaries are compared

_H200 = """
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a" device_address_bits: 64
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  device_memory_size: 151397597184 l2_cache_size: 52428800 memory_bandwidth: 4800000000000
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 patch: 0 }
"""
# Makes Mosaic GPU print what ``_compile_kernel`` reads; a TPU's compiler asks no cloud.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    **{f"MOSAIC_GPU_DUMP_{part}": "1" for part in ("PTXAS", "RESOURCES", "PTX")},
}


@dataclass(frozen=True)
class Case:
    """All kernels of one call."""

    device: str
    form: str
    dim: int

    @property
    def gpu(self) -> bool:
        """Whether it is for a GPU."""
        return self.device == "h200"


def missing_packages(device: str) -> str | None:
    """The packages that compiling for a device needs, if one of them is missing."""
    names, packages = ("libtpu",), "libtpu"
    if device == "h200":
        names = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13")
        packages = "jax-cuda13-plugin and jax-cuda13-pjrt"
    try:
        installed = all(importlib.util.find_spec(name) for name in names)
    except ModuleNotFoundError:  # of a parent package
        installed = False
    return None if installed else packages


def compile_case(case: Case) -> dict[str, Any]:
    """What compilers report of a case.

    ``kernels`` by name, ``temporaries`` and ``transposes`` of a training step by length, and
    ``errors``.
    """
    result: dict[str, Any] = {"kernels": {}, "temporaries": {}, "transposes": {}, "errors": {}}
    names = [name for name in KERNELS if name != "d_table" or case.form == "t5"]
    for name in names:
        try:
            result["kernels"][name] = _compile_kernel(case, name)
        except Exception as error:
            result["errors"][name] = fault(error)["reason"]
    for length in LENGTHS:
        try:
            program, _ = _compile(case, partial(training_step, case), length)
            result["temporaries"][str(length)] = _temporaries(program.memory_analysis())
            if case.gpu:  # kernels for TPUs read (B, H, L, D)
                result["transposes"][str(length)] = count_transposes(program.as_text())
        except Exception as error:
            result["errors"][f"step of {length}"] = fault(error)["reason"]
    return result


def count_transposes(hlo: str) -> int:
    """How often an optimised program moves an array like q, k or v into another layout."""
    return len(re.findall(r"bf16\[\d+,\d+,\d+,\d+\]\S* (?:transpose|copy)\(", hlo))


def _temporaries(memory: Any) -> int:
    """Bytes. For a TPU only the peak counts those that share memory with others."""
    own = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return int(max(memory.temp_size_in_bytes, memory.peak_memory_in_bytes - own))


def _compile_kernel(case: Case, name: str) -> dict[str, Any]:
    """One kernel compiled on its own, and what ptxas reports."""
    program, printed = _compile(case, partial(one_kernel, case, name), LENGTHS[0])
    memory = program.memory_analysis()
    row: dict[str, Any] = {"bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes}
    if not case.gpu:
        return row
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", printed)]
    if not registers:
        raise AssertionError("it is not a kernel, or ptxas printed nothing")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", printed)
    shared = re.findall(r"smem_scratch_bytes=(\d+)", printed)
    return row | {
        "registers": max(registers),
        "spills": sum(map(int, spills)),
        "shared": max(map(int, shared), default=None),
        # A product that ptxas waits for, because of what the code does while it is in flight.
        "serialized": bool(re.search(r"wgmma.*serialized", printed)),
        **count_loop(printed),
    }


def _compile(case: Case, function: Any, length: int) -> tuple[Any, str]:
    """A function of ``arguments`` compiled for the device of a case, and what was printed."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import (
        AbstractDevice,
        AbstractMesh,
        AxisType,
        SingleDeviceSharding,
        use_abstract_mesh,
    )

    from posenc_jax.fused.target import Target, targeting

    if case.gpu:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=_H200, topology="1x1x1"
        )
        target, platform, kind = Target("gpu", "9.0"), "cuda", "NVIDIA H200"
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{case.device}:2x2")
        target, platform, kind = Target("tpu"), "tpu", topology.devices[0].device_kind
    sharding = SingleDeviceSharding(topology.devices[0])
    given = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        arguments(case, length),
    )
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=target.platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with targeting(target), use_abstract_mesh(mesh), captured_output() as printed:
        lowered = jax.jit(function).trace(given).lower(lowering_platforms=(platform,))
        program = lowered.compile()
    return program, printed[0]


@contextlib.contextmanager
def captured_output() -> Iterator[list[str]]:
    """What this process prints, compilers in C++ included; in the list after the block."""
    printed: list[str] = []
    library = ctypes.CDLL(None)
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        copies = [os.dup(stream) for stream in (1, 2)]
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            yield printed
        finally:
            sys.stdout.flush()
            library.fflush(None)
            for stream, copy in zip((1, 2), copies, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))


def scheme_of(form: str) -> Any:
    """The scheme of one of ``FORMS``."""
    import posenc
    from posenc.schemes import FoX, Kerple, Sum
    from posenc.testing import examples

    return {
        "none": posenc.NoPE(),
        "alibi": posenc.ALiBi(HEADS),
        "alibi-learned": posenc.ALiBi(HEADS, learned=True),
        "kerple": Kerple(HEADS),
        "t5": posenc.T5Bias(HEADS),
        "gated": FoX(HEADS, examples.HIDDEN_DIM),
        "gated-alibi": Sum(FoX(HEADS, examples.HIDDEN_DIM), posenc.ALiBi(HEADS)),
        POSITIONS: posenc.ALiBi(HEADS),
    }[form]


def arguments(case: Case, length: int) -> dict[str, Any]:
    """Shapes and dtypes of a call's arrays, by their names in ``attention``; and of ``d_out``."""
    import jax
    import jax.numpy as jnp

    import posenc
    from posenc.apply.feature_needs import summed_features

    scheme = scheme_of(case.form)
    vectors = jax.ShapeDtypeStruct((BATCH, length, HEADS, case.dim), jnp.bfloat16)
    given: dict[str, Any] = dict.fromkeys(("q", "k", "v", "d_out"), vectors)
    given["params"] = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        for name, spec in scheme.param_specs().items()
    }
    if names := summed_features(scheme):
        sums = {names[0]: jax.ShapeDtypeStruct((BATCH, HEADS, length), jnp.float32)}
        given |= dict.fromkeys(("queries", "tokens"), posenc.Tokens(features=sums))
    if case.form == POSITIONS:
        integers = jax.ShapeDtypeStruct((BATCH, length), jnp.int32)
        given |= dict.fromkeys(("queries", "tokens"), posenc.Tokens(integers, integers))
    return given


def training_step(case: Case, given: dict[str, Any]) -> Any:
    """Attention and all its gradients, as a user calls it."""
    import jax

    import posenc_jax

    given = dict(given)
    d_out, scheme = given.pop("d_out"), scheme_of(case.form)
    names = ["q", "k", "v", "params"]
    if case.form != POSITIONS:  # the tokens have features
        names += ["queries", "tokens"]
    floats = {name: given.pop(name) for name in names if name in given}

    def attend(floats: dict[str, Any]) -> Any:
        return posenc_jax.attention(
            **floats, **given, scheme=scheme, causal=True, implementation="pallas"
        )

    out, pull = jax.vjp(attend, floats)
    return out, pull(d_out)


def one_kernel(case: Case, name: str, given: dict[str, Any]) -> Any:
    """One of the kernels that the implementation calls, with the same inputs."""
    import jax.numpy as jnp

    from posenc.backend import Arguments, prepare
    from posenc_jax.fused.devices import device_for
    from posenc_jax.fused.gradients import Residuals
    from posenc_jax.fused.implementation import Served, choose_form
    from posenc_jax.fused.inputs import inputs_of
    from posenc_jax.fused.target import target

    given = dict(given)
    q, k, v, d_out = (jnp.swapaxes(given.pop(n), 1, 2) for n in ("q", "k", "v", "d_out"))
    params = given.pop("params")
    call = prepare(q, k, v, scheme_of(case.form), params, True, Arguments(**given), xp=jnp)
    here = target()
    device = device_for(here)
    served = choose_form(call, device)
    assert isinstance(served, Served), served
    inputs = inputs_of(
        served.call(call), served.form, served.reads, device.block(call),
        reads_far=device.reads_far,
    )  # fmt: skip
    kernel = getattr(device.kernels(interpreted=here.interpreted), name)
    if name == "forward":
        return kernel(*inputs)
    per_query = jnp.sum(d_out.astype(jnp.float32), axis=-1)
    return kernel(*inputs, Residuals(d_out, per_query, per_query))
