"""How a kernel for Hopper GPUs runs: two warpgroups compute while copies run ahead of them.

There is no producer warpgroup, which would only copy. JAX 0.12 compiles kernels in a way that
ignores ``setmaxnreg``. A third warpgroup would leave 168 registers per thread, and the sums and
scores of a backward pass alone take 192. With two warpgroups a thread has 255. A copy is one
instruction of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from posenc_jax.fused.mosaic_gpu.jax_version import plgpu
from posenc_jax.fused.mosaic_gpu.tile import keep_apart

WARPGROUPS = 2
STAGES = 2  # slots of a ring buffer
# Makes the copies. In the forward kernel it runs half a step behind the other warpgroup, so it need
# not wait for a free slot.
_LAST = WARPGROUPS - 1


class Stream(NamedTuple):
    """Blocks of several arrays that arrive together, in a ring buffer in shared memory.

    The last warpgroup makes the copies: of the first ``STAGES`` steps at the beginning, and then of
    step ``i + STAGES`` as soon as all warpgroups have released step ``i``.

    A slot is in turn filled and freed, so both of its barriers complete one phase per use. Each
    reader waits for every phase of ``ready``. The last warpgroup waits for every phase of ``free``
    but the last one of each slot, after which nothing is copied. So no barrier is ever a whole
    phase ahead of one who waits for it; hardware tells only odd phases from even ones.

    Attributes
    ----------
    sources
        By name, a function from a step to its block in global memory.
    first, end
        Its steps are ``first`` to ``end - 1``, which may be none; ``first`` is a multiple of
        ``STAGES``, so that a step has the same slot in all streams.
    warpgroup
        Which warpgroup this is.
    loads
        Whether any block is loaded into registers, and not only multiplied.
    buffers
        By name, shared memory for one block per slot.
    ready, free
        One barrier per slot. ``ready``: all blocks have arrived; ``free``: all readers are done.
    """

    sources: Mapping[str, Callable[[Any], Any]]
    first: Any
    end: Any
    warpgroup: Any
    loads: bool
    buffers: Mapping[str, Any]
    ready: Any
    free: Any

    def begin(self) -> None:
        """Fill all slots."""
        for slot in range(STAGES):
            self._copy(self.first + slot, slot)

    def wait(self, step: Any) -> dict[str, Any]:
        """The blocks of a step, once they have arrived."""
        slot = _slot(step)
        plgpu.barrier_wait(self.ready.at[slot])
        return {name: buffer.at[slot] for name, buffer in self.buffers.items()}

    def release(self, step: Any) -> None:
        """End this warpgroup's reads of a step. When all have ended, its slot is filled again."""
        if self.loads:
            plgpu.commit_smem()  # ordinary loads, before a copy writes there
        plgpu.barrier_arrive(self.free.at[_slot(step)])
        step = keep_apart(step)  # so that addresses of the copy take no registers earlier
        slot = _slot(step)
        self._copy(step + STAGES, slot, lambda: plgpu.barrier_wait(self.free.at[slot]))

    def _copy(self, step: Any, slot: Any, before: Callable[[], None] = lambda: None) -> None:
        @pl.when((self.warpgroup == _LAST) & (step < self.end))
        def _() -> None:
            before()
            for name, source in self.sources.items():
                buffer = self.buffers[name].at[slot]
                plgpu.copy_gmem_to_smem(source(step), buffer, self.ready.at[slot])


def _slot(step: Any) -> Any:
    return lax.rem(step, jnp.int32(STAGES))


def ring_buffer(buffers: Mapping[str, Any], readers: int = WARPGROUPS) -> tuple[Any, ...]:
    """Scratch of a stream: buffers of all slots, and the barriers ``ready`` and ``free``."""
    return (
        {name: buffer.scratch(STAGES) for name, buffer in buffers.items()},
        plgpu.Barrier(num_arrivals=len(buffers), num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=readers, num_barriers=STAGES),
    )


class PingPong(NamedTuple):
    """Warpgroups issue products in turn: one uses the tensor cores while the other exponentiates.

    A warpgroup waits for its turn, issues products, and passes the turn on before they are done.
    The first turn is that of warpgroup 0.

    Attributes
    ----------
    barriers
        One per warpgroup: it has the turn. Every completed phase but the last is waited for.
    warpgroup
        Which warpgroup this is.
    """

    barriers: Any
    warpgroup: Any

    def begin(self) -> None:
        """Wait for the first turn."""
        pl.when(self.warpgroup != 0)(self.wait)

    def wait(self) -> None:
        """Wait for a later turn."""
        plgpu.barrier_wait(self.barriers.at[self.warpgroup])

    def pass_on(self) -> None:
        """Give the turn to the other warpgroup."""
        plgpu.barrier_arrive(self.barriers.at[WARPGROUPS - 1 - self.warpgroup])


def fetch(
    copies: list[tuple[Any, Any]], barrier: Any, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Copy each source to its target in shared memory, run ``meanwhile``, and wait for all."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    meanwhile()
    plgpu.barrier_wait(barrier)


def launch(
    kernel: Callable[[Any, Mapping[str, Any], Any], None],
    arrays: Mapping[str, Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Any,
    grid: Mapping[str, int],
    *,
    interpreted: bool,
) -> dict[str, Array]:
    """Run a kernel: a function of the index of its warpgroup, arrays by name, and scratch."""
    names = [*arrays, *results]

    def body(*refs_and_scratch: Any) -> None:
        refs = dict(zip(names, refs_and_scratch, strict=False))
        (own_scratch,) = refs_and_scratch[len(names) :]
        kernel(lax.axis_index("warpgroup"), refs, own_scratch)

    outputs = plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        scratch_types=(scratch,),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpreted else False,
    )(*arrays.values())
    return dict(zip(results, outputs, strict=True))
