"""The fused JAX kernels of posenc, on a machine that has neither a GPU nor a TPU.

``python benchmarks/pallas_without_device.py`` compiles every kernel, forward and backward, for an
H200 and for TPU v5e and v6e, with every form of bias and head dimension, and prints: registers,
spills and shared memory as ptxas tells them, instructions for each score as they lie in the
compiled loop, and how temporaries of a training step grow with its length. The exit code is 1 if
anything does not compile, spills, or grows faster than linearly.

Then it **predicts** times on an H200; nothing is run, and nothing here was timed. The model counts
what was compiled. A tile costs its matrix products at ``ACHIEVABLE``, about what the best published
kernels of attention without a bias reach; its other instructions at one a cycle and scheduler;
arrays are moved once, at the bandwidth of the device. A warpgroup may multiply while another does
the rest: ``best`` takes the larger of the two, ``worst`` their sum. Left out are launches, the
first tiles and the last wave, keys and values that the cache gives up, and the search for blocks
that are needed. How many blocks ALiBi needs is counted from ``posenc_jax.fused.plan.needed`` on
normal queries and keys. ``speed`` is beside a kernel that only multiplies: causal attention without
a bias, no product twice, at ``ACHIEVABLE``.

Needs ``pip install jax[cuda13]`` of a Python from 3.12 on for the H200, ``jax[tpu]`` for TPUs; no
driver. With ``nvidia-cuda-nvdisasm`` instructions are those of the machine, otherwise of PTX, from
which some more are merged. It cannot say how fast a kernel is, nor what only hardware does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

DEVICES = {"h200": "NVIDIA H200", "v5e": "TPU v5e", "v6e": "TPU v6e"}
FORMS = "none", "alibi", "alibi-learned", "kerple", "t5", "gated", "gated-alibi"
PLACED = "alibi, positions and segments"
KERNELS = "forward", "d_queries", "d_keys", "d_table"
HEADS, BATCH = 4, 2
LENGTHS = 2048, 8192  # of the training steps whose temporaries are compared
GROWTH = 1.1  # so much more than linear is none: paddings and bounds of blocks

# An H200. The clock is that of long work, below the boost of 1.98 GHz.
PROCESSORS, CLOCK, BANDWIDTH = 132, 1.755e9, 4.8e12
ACHIEVABLE = 600e12  # of 989 TFLOP/s in bfloat16
ISSUED = 4 * 32  # instructions of threads a cycle and processor
EXPONENTIALS = 16  # of them a cycle and processor
PREDICTED = 8192, 65536, 131072
SHAPE = 1, 16, 128  # batch, heads and head_dim of what is predicted
_PRODUCTS = {"forward": 2, "step": 7}  # of matrices, where none is computed twice

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


def missing(device: str) -> str | None:
    """The packages without which nothing is compiled for a device."""
    names, packages = ("libtpu",), "libtpu"
    if device == "h200":
        names = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13")
        packages = "jax-cuda13-plugin and jax-cuda13-pjrt"
    try:
        found = all(importlib.util.find_spec(name) for name in names)
    except ModuleNotFoundError:  # of what a name is in
        found = False
    return None if found else packages


# In a process of its own, because a compiler that gives up takes its process with it


def compiled(case: Case) -> dict[str, Any]:
    """What is known of a case: ``kernels`` by name, ``temporaries`` by length, or ``errors``."""
    found: dict[str, Any] = {"kernels": {}, "temporaries": {}, "errors": {}}
    names = [name for name in KERNELS if name != "d_table" or case.form == "t5"]
    for name in names:
        try:
            found["kernels"][name] = _kernel(case, name)
        except Exception as error:
            found["errors"][name] = _line(error)
    for length in LENGTHS:
        try:
            program, _ = _compile(case, partial(_step, case), length)
            found["temporaries"][str(length)] = _temporaries(program.memory_analysis())
        except Exception as error:
            found["errors"][f"step of {length}"] = _line(error)
    return found


def _temporaries(memory: Any) -> int:
    """Bytes; for a TPU only the peak holds those that share their place with others."""
    own = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return int(max(memory.temp_size_in_bytes, memory.peak_memory_in_bytes - own))


def _kernel(case: Case, name: str) -> dict[str, Any]:
    """One kernel compiled apart, and what ptxas says of it."""
    program, told = _compile(case, partial(_alone, case, name), LENGTHS[0])
    memory = program.memory_analysis()
    row: dict[str, Any] = {"bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes}
    if not case.gpu:
        return row
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", told)]
    if not registers:
        raise AssertionError("it is no kernel, or ptxas told nothing of it")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", told)
    shared = re.findall(r"smem_scratch_bytes=(\d+)", told)
    return row | {
        "registers": max(registers),
        "spills": sum(map(int, spills)),
        "shared": max(map(int, shared), default=None),
        **_of_loop(told),
    }


def _compile(case: Case, function: Any, length: int) -> tuple[Any, str]:
    """A function of ``_given`` compiled for a device that is not here, and what was printed."""
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
        there = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology="1x1x1")
        target, platform, kind = Target("gpu", "9.0"), "cuda", "NVIDIA H200"
    else:
        there = topologies.get_topology_desc(platform="tpu", topology_name=f"{case.device}:2x2")
        target, platform, kind = Target("tpu"), "tpu", there.devices[0].device_kind
    where = SingleDeviceSharding(there.devices[0])
    given = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), _given(case, length)
    )
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=target.platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with targeting(target), use_abstract_mesh(mesh), _overheard() as told:
        lowered = jax.jit(function).trace(given).lower(lowering_platforms=(platform,))
        program = lowered.compile()
    return program, told[0]


@contextlib.contextmanager
def _overheard() -> Iterator[list[str]]:
    """What this process prints, compilers in C++ among it, in the list once it is over."""
    told: list[str] = []
    library = ctypes.CDLL(None)
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = [os.dup(stream) for stream in (1, 2)]
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            yield told
        finally:
            sys.stdout.flush()
            library.fflush(None)
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
            file.seek(0)
            told.append(file.read().decode(errors="replace"))


def _scheme(form: str) -> Any:
    import posenc
    from posenc.schemes import Sum
    from posenc.testing.examples import Forgetting, Kerple

    return {
        "none": posenc.NoPE(),
        "alibi": posenc.ALiBi(HEADS),
        "alibi-learned": posenc.ALiBi(HEADS, learned=True),
        "kerple": Kerple(HEADS),
        "t5": posenc.T5Bias(HEADS),
        "gated": Forgetting(HEADS),
        "gated-alibi": Sum(Forgetting(HEADS), posenc.ALiBi(HEADS)),
        PLACED: posenc.ALiBi(HEADS),
    }[form]


def _given(case: Case, length: int) -> dict[str, Any]:
    """Shapes and dtypes of a call's arrays, by their names in ``attention``; and of ``d_out``."""
    import jax
    import jax.numpy as jnp

    scheme = _scheme(case.form)
    vectors = jax.ShapeDtypeStruct((BATCH, length, HEADS, case.dim), jnp.bfloat16)
    given: dict[str, Any] = dict.fromkeys(("q", "k", "v", "d_out"), vectors)
    given["params"] = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        for name, spec in scheme.param_specs().items()
    }
    if names := scheme.cumulative:
        sums = {names[0]: jax.ShapeDtypeStruct((BATCH, HEADS, length), jnp.float32)}
        given |= {"q_features": sums, "k_features": sums}
    if case.form == PLACED:
        at = jax.ShapeDtypeStruct((BATCH, length), jnp.int32)
        given |= dict.fromkeys(("q_pos", "k_pos", "q_seg", "k_seg"), at)
    return given


def _step(case: Case, given: dict[str, Any]) -> Any:
    """Attention and all its gradients, as a user would."""
    import jax

    import posenc_jax

    given = dict(given)
    d_out, scheme = given.pop("d_out"), _scheme(case.form)
    names = ("q", "k", "v", "params", "q_features", "k_features")
    floats = {name: given.pop(name) for name in names if name in given}

    def attend(floats: dict[str, Any]) -> Any:
        return posenc_jax.attention(
            **floats, **given, scheme=scheme, causal=True, implementation="pallas"
        )

    out, pull = jax.vjp(attend, floats)
    return out, pull(d_out)


def _alone(case: Case, name: str, given: dict[str, Any]) -> Any:
    """One of the kernels that the implementation would call, with what it would be given."""
    import jax.numpy as jnp

    from posenc.attn.call import prepare
    from posenc_jax.fused import implementation as fused
    from posenc_jax.fused.gradients import Rows
    from posenc_jax.fused.plan import planned
    from posenc_jax.fused.target import target

    given = dict(given)
    q, k, v, d_out = (jnp.swapaxes(given.pop(n), 1, 2) for n in ("q", "k", "v", "d_out"))
    params = given.pop("params")
    call = prepare(q, k, v, _scheme(case.form), params, True, **given, xp=jnp)
    here = target()
    module = fused._module(here)
    call, form = fused._formed(call, module, here)
    plan, operands, places = planned(call, form, module.block(call, form))
    kernel = getattr(module.kernels(here), name)
    if name == "forward":
        return kernel(plan, operands, places)
    of_rows = jnp.sum(d_out.astype(jnp.float32), axis=-1)
    return kernel(plan, operands, places, Rows(d_out, of_rows, of_rows))


# What a loop over tiles consists of


def _of_loop(told: str) -> dict[str, Any]:
    """Instructions, exponentials and products for each score, of the loop over tiles.

    Nothing where no such loop is found.
    """
    found = re.search(r"^\.version.*?^}", told, re.M | re.S)
    machine = None if found is None else _disassembled(found[0])
    loop = [] if found is None else _loop(machine or found[0])
    weights = sum(op.startswith(("ex2", "MUFU.EX2")) for op in loop)
    scores = weights // 32 * 32  # the rest of them is one or two a row
    if not scores:
        return {}
    sizes = [re.search(r"[m.]64[nx](\d+)[kx](\d+)", op) for op in loop if _multiplies(op)]
    flops = sum(2 * 64 * int(size[1]) * int(size[2]) for size in sizes if size is not None)
    return {
        "instructions": round(len(loop) / scores, 2),
        "exponentials": round(weights / scores, 3),
        "flops": flops // (scores * 128),  # the 128 threads of a warpgroup multiply together
        "counted in": "PTX" if machine is None else "SASS",
    }


def _multiplies(op: str) -> bool:
    return op.startswith(("wgmma.mma_async", "HGMMA"))


def _loop(text: str) -> list[str]:
    """Operations of the shortest way from a product back to it, of the longest such way.

    The shortest: where nothing of a tile is hidden.
    """
    ops, labels = _operations(text)
    following: list[list[int]] = []
    for at, (_, goal, surely) in enumerate(ops):
        there = [] if goal is None else [labels[goal]]
        following.append(there + [at + 1] * (not surely and at + 1 < len(ops)))
    products = [at for at, (op, _, _) in enumerate(ops) if _multiplies(op)]
    ways = [_round_trip(following, at) for at in products]
    return [ops[at][0] for at in max(ways, key=len, default=[])]


def _round_trip(following: Sequence[Sequence[int]], start: int) -> list[int]:
    """The shortest way from a place back to it; empty if there is none."""
    before: dict[int, int] = {}
    now = [start]
    while now and start not in before:
        later = []
        for at in now:
            for after in following[at]:
                if after not in before:
                    before[after] = at
                    later.append(after)
        now = later
    if start not in before:
        return []
    way = [start]
    while (at := before[way[-1]]) != start:
        way.append(at)
    return way


def _operations(text: str) -> tuple[list[tuple[str, str | None, bool]], dict[str, int]]:
    """Name of each instruction, where it may jump to, and whether it surely does; and labels.

    Moves between registers are left out: most of PTX's are only names.
    """
    ops: list[tuple[str, str | None, bool]] = []
    labels: dict[str, int] = {}
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text)
    text = re.sub(r"\{[^{}]*\}", _scoped, text)
    for line in re.split(r"[;\n]", text):
        statement = line.strip(" \t{}")
        if label := re.match(r"([$.\w]+):", statement):
            labels[label[1]] = len(ops)
            continue
        found = re.match(r"(@!?[%\w]+\s+)?([A-Za-z][\w.:]*)(.*)", statement)
        if found is None or re.match(r"mov|MOV|NOP|WARPSYNC", found[2]):
            continue
        goal = None
        if re.match(r"bra\b|BRA\b", found[2]):
            goal = re.findall(r"[$.\w]+", found[3])[-1]
        ends = found[2] in ("ret", "EXIT") or goal is not None
        ops.append((found[2], goal, ends and found[1] is None))
    return ops, labels


def _scoped(match: re.Match[str]) -> str:
    """What is in a bracket, its labels unlike those of other brackets."""
    found = match[0]
    for label in re.findall(r"^\s*(\w+):\s", found, re.M):
        found = re.sub(rf"\b{label}\b", f"{label}.{match.start()}", found)
    return found


def _disassembled(ptx: str) -> str | None:
    """As the machine's instructions; None without the tools."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    for tools in (Path(root, "cu13", "bin") for root in roots):
        if not (tools / "ptxas").exists() or not (tools / "nvdisasm").exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(ptx)
            command = [tools / "ptxas", "-arch=sm_90a", source, "-o", binary]
            subprocess.run(command, check=True, capture_output=True)
            command = [tools / "nvdisasm", "-c", binary]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0][:300]}"


# The report


def told(case: Case) -> dict[str, Any]:
    """``compiled`` from another process."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        **{f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTXAS", "RESOURCES", "PTX")},
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--out", str(out)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
    last = (done.stderr.strip() or "no reason").splitlines()[-1][:300]
    return {"kernels": {}, "temporaries": {}, "errors": {"process": f"{done.returncode}: {last}"}}


def faults(found: dict[str, Any]) -> list[str]:
    """What is wrong with a case."""
    wrong = [f"{name}: {error}" for name, error in found["errors"].items()]
    wrong += [
        f"{name} spills {row['spills']} bytes"
        for name, row in found["kernels"].items()
        if row.get("spills")
    ]
    growth = grown(found["temporaries"])
    if growth is not None and growth > GROWTH:
        wrong.append(f"temporaries grow {growth:.2f} times as fast as the length")
    return wrong


def grown(temporaries: dict[str, int]) -> float | None:
    """How much faster than the length temporaries grow: 1 is linear."""
    if len(temporaries) < 2:
        return None
    (short, few), (long, many) = ((int(n), size) for n, size in temporaries.items())
    return many * short / (max(few, 1) * long)


def needed_share(form: str, length: int, block: int) -> dict[str, float]:
    """Scores that are computed, of all pairs, by forward (and d_queries) and by d_keys.

    For normal queries and keys, rounded to bfloat16, the same for all heads: slopes differ.
    """
    import jax
    import jax.numpy as jnp

    import posenc
    from posenc.attn.call import prepare
    from posenc_jax.fused.plan import needed

    _, heads, dim = SHAPE
    scheme = posenc.ALiBi(heads) if form == "alibi" else posenc.NoPE()

    @jax.jit
    def computed(q: Any, k: Any) -> Any:
        q = jnp.broadcast_to(q, (1, heads, length, dim))
        call = prepare(q, k, k, scheme, causal=True, xp=jnp)
        return [jnp.mean(ends - firsts) for firsts, ends in needed(call, block)]

    q, k = (
        jax.random.normal(key, (1, 1, length, dim), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0), 2)
    )
    of_queries, of_keys = (float(count) * block / length for count in computed(q, k))
    return {"queries": of_queries, "keys": of_keys}


def predicted(form: str, kernels: dict[str, Any], block: int) -> list[dict[str, Any]]:
    """Milliseconds of each kernel at each length, and of all of them: a training step."""
    batch, heads, dim = SHAPE
    rows = []
    for length in PREDICTED:
        share = needed_share(form, length, block)
        times = {
            name: times_of(
                kernel,
                share["keys" if name == "d_keys" else "queries"] * batch * heads * length**2,
                length,
                batch * heads,
            )
            for name, kernel in kernels.items()
        }
        times["step"] = {
            what: sum(time[what] for time in times.values()) for what in times["forward"]
        }
        pairs = batch * heads * length * (length + 1) / 2
        for name, time in times.items():
            row = {"form": form, "length": length, "kernel": name, "computed": share["queries"]}
            row |= {f"{what}, ms": ms for what, ms in time.items()}
            if name in _PRODUCTS:
                least = 1e3 * _PRODUCTS[name] * 2 * dim * pairs / ACHIEVABLE
                row |= {f"speed at {what}": least / time[what] for what in ("worst", "best")}
            rows.append({n: _rounded(value) for n, value in row.items()})
    return rows


def times_of(kernel: dict[str, Any], scores: float, length: int, heads: int) -> dict[str, float]:
    """Milliseconds of a kernel that computes so many scores of so many heads in all."""
    products = scores * kernel["flops"] / ACHIEVABLE
    cycles = max(kernel["instructions"] / ISSUED, kernel["exponentials"] / EXPONENTIALS)
    others = scores * cycles / (PROCESSORS * CLOCK)
    # Counted at another size; every array grows with it.
    moved = kernel["bytes"] / (BATCH * HEADS * LENGTHS[0]) * heads * length / BANDWIDTH
    return {
        "products": 1e3 * products,
        "others": 1e3 * others,
        "moved": 1e3 * moved,
        "best": 1e3 * max(products, others, moved),
        "worst": 1e3 * max(products + others, moved),
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a kernel does not compile, spills, or a step holds more than it should."""
    asked = _asked(arguments)
    if asked.case:
        asked.out.write_text(json.dumps(compiled(Case(**json.loads(asked.case)))))
        return 0
    from harness import record

    result: dict[str, Any] = {
        "what": "posenc pallas_without_device",
        "date": record.now(),
        "versions": record.versions(),
        "sizes": {"batch": BATCH, "heads": HEADS, "length": LENGTHS[0], "dtype": "bfloat16"},
        "kernels": [],
        "steps": [],
        "predicted": [],
        "absent": {name: why for name in asked.devices if (why := missing(name)) is not None},
    }
    out = asked.out or HERE / "results" / "pallas-without-device.json"
    wrong, counted = [], {}
    for device, dim, form in itertools.product(asked.devices, asked.dims, asked.forms):
        if device in result["absent"]:
            continue
        case = Case(device, form, dim)
        found = told(case)
        if device == "h200" and dim == SHAPE[2]:
            counted[form] = found["kernels"]
        what = {"device": device, "form": form, "dim": dim}
        result["kernels"] += [what | {"kernel": n} | row for n, row in found["kernels"].items()]
        result["steps"].append(what | {"temporaries": found["temporaries"], "wrong": faults(found)})
        for fault in faults(found):
            wrong.append(f"{device} {form} {dim}: {fault}")
            print(f"wrong    {wrong[-1]}", flush=True)
        record.write(out, result)  # a run that is stopped leaves its parts
    for form in ("none", "alibi"):
        if asked.predict and all("flops" in k for k in counted.get(form, {"": {}}).values()):
            result["predicted"] += predicted(form, counted[form], _block())
    print(_report(result))
    for name, why in result["absent"].items():
        print(f"\nnothing was compiled for {DEVICES[name]}: it needs {why}")
    record.write(out, result)
    print(f"\n{len(wrong)} wrong; {out}")
    return int(bool(wrong or result["absent"]))


def _block() -> int:
    """Of the kernels for a GPU."""
    import jax.numpy as jnp

    import posenc
    from posenc.attn.call import prepare
    from posenc_jax.fused import implementation as fused
    from posenc_jax.fused.target import Target

    token = jnp.zeros((1, 1, 256, SHAPE[2]), jnp.bfloat16)
    call = prepare(token, token, token, posenc.NoPE(), causal=True, xp=jnp)
    return fused._module(Target("gpu", "9.0")).block(call, "none")


def _report(result: dict[str, Any]) -> str:
    from harness import record

    columns = "registers", "spills", "shared", "instructions", "exponentials", "flops"
    head = ["device", "dim", "form", "kernel", *columns]
    rows = [
        [row["device"], row["dim"], row["form"], row["kernel"], *[row.get(c) for c in columns]]
        for row in result["kernels"]
    ]
    parts = [record.table(head, rows)]
    lengths = [f"temporaries at {n}" for n in LENGTHS]
    rows = [
        [row["device"], row["dim"], row["form"], *row["temporaries"].values(),
         grown(row["temporaries"])]
        for row in result["steps"] if len(row["temporaries"]) == len(LENGTHS)
    ]  # fmt: skip
    parts.append(record.table(["device", "dim", "form", *lengths, "growth"], rows))
    if result["predicted"]:
        head = list(result["predicted"][0])
        rows = [[row.get(name) for name in head] for row in result["predicted"]]
        batch, heads, dim = SHAPE
        where = f"an H200, bfloat16, causal, B={batch} H={heads} D={dim}"
        parts.append(f"predicted, nothing was run: {where}\n" + record.table(head, rows))
    return "\n\n".join(parts)


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    every = (*FORMS, PLACED)
    add("--devices", nargs="+", default=list(DEVICES), choices=list(DEVICES))
    add("--forms", nargs="+", default=list(every), choices=every)
    add("--dims", nargs="+", type=int, default=[64, 128], help="head dimensions")
    add("--no-predict", dest="predict", action="store_false", help="compile only")
    add("--out", type=Path, help="default: benchmarks/results/pallas-without-device.json")
    add("--case", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
