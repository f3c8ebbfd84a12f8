"""One thread a process, the same examples every time, and no backend missing in silence."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

# Torch on two threads is ten times slower beside other load; read when a framework is imported.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Threads of XLA on a CPU, otherwise one per core. An interpreted GPU kernel blocks one for itself
# and one per warpgroup; with two threads it hangs now and then.
os.environ.setdefault("NPROC", "8")
# JAX's tests spend most of their time compiling: LLVM optimises nothing, XLA fuses as it did before
# its emitters (a third of their time), one thread compiles each program, and all processes of a run
# share them. Exactness and instruction sets are tried with programs as users have them.
_QUICKLY_COMPILED = ["--xla_backend_optimization_level=0"]
if find_spec("jaxlib") and tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    # Later versions end the process at a flag that they do not know.
    _QUICKLY_COMPILED += [
        "--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"
    ]  # fmt: skip
os.environ.setdefault("XLA_FLAGS", " ".join(_QUICKLY_COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Frameworks and tests are millions of objects that stay. To look through them takes a second, each
# time that a test or JAX collects garbage.
gc.disable()

settings.register_profile(
    "posenc",
    deadline=None,  # the machine is shared
    derandomize=True,
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow],
)
# Drawn anew each time, for hours:
# ``pytest tests/core/test_fuzz.py -m "" --hypothesis-profile=long``.
settings.register_profile(
    "long",
    settings.get_profile("posenc"),
    derandomize=False,
    database=None,
    max_examples=2000,
    print_blob=True,
)
settings.load_profile("posenc")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """For the whole suite or a folder two workers, up to four with eight cores: each holds 1.1 GB.

    Files that are named run in this process.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return 0 if any(".py" in name for name in config.args) else min(4, max(2, _cores() // 2))


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--share 5/3``: every third test, others for each number before the slash."""
    parser.addoption(
        "--share", metavar="K/N", type=_share, default=(0, 1),
        help="an N-th of the tests: runs that count K up try all in turn",
    )  # fmt: skip


def _share(text: str) -> tuple[int, int]:
    """``"5/3"`` as (2, 3)."""
    k, n = map(int, text.split("/"))
    return k % n, n


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``-m long`` leaves out what is exhaustive, though its test as a whole is marked long."""
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "long"]
    k, n = config.getoption("share")
    # By name, so that a test stays in its share when others come and go. All but the last parameter
    # count, because those often share what is slow.
    names = (item.nodeid.rpartition("-")[0] or item.nodeid for item in items)
    own = [crc32(name.encode()) % n == k for name in names]
    others = [item for item, is_own in zip(items, own, strict=True) if not is_own]
    if others:
        items[:] = [item for item, is_own in zip(items, own, strict=True) if is_own]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Garbage is collected from now on, of what tests make."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """``POSENC_REQUIRE_BACKENDS=torch,jax``: a missing one ends the run, where it else skips."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers and other processes inherit it
        folder = tempfile.mkdtemp(prefix="posenc-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    for name in filter(None, os.environ.get("POSENC_REQUIRE_BACKENDS", "").split(",")):
        for module in (name.strip(), f"posenc_{name.strip()}"):
            try:
                importlib.import_module(module)
            except ImportError as error:
                message = f"POSENC_REQUIRE_BACKENDS names {name!r}: cannot import {error}"
                raise pytest.UsageError(message) from error
