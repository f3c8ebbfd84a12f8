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

WARPGROUPS = 2
STAGES = 2  # slots of a ring buffer
# The last warpgroup makes the copies. In the forward kernel it runs half a step behind the other,
# so it need not wait for a free slot.
_LAST = WARPGROUPS - 1


class Stream(NamedTuple):
    """Blocks of several arrays that arrive together, in a ring buffer in shared memory.

    Attributes
    ----------
    sources
        By name, a function from a step to its block in global memory.
    steps
        The number of steps.
    buffers
        By name, shared memory for one block per slot.
    ready, free
        One barrier per slot. ``ready``: all blocks have arrived; ``free``: all readers are done.
    """

    sources: Mapping[str, Callable[[Any], Any]]
    steps: Any
    buffers: Mapping[str, Any]
    ready: Any
    free: Any

    def begin(self) -> None:
        """Copy what the first step needs."""
        for step in range(STAGES - 1):
            self._copy(jnp.int32(step))

    def wait(self, step: Any) -> dict[str, Any]:
        """The blocks of a step, once they have arrived."""
        slot = _slot(step)
        plgpu.barrier_wait(self.ready.at[slot])
        return {name: buffer.at[slot] for name, buffer in self.buffers.items()}

    def release(self, step: Any) -> None:
        """Free the slot of a step."""
        plgpu.barrier_arrive(self.free.at[_slot(step)])

    def advance(self, step: Any) -> None:
        """At the start of a step: copy what a later one needs, once its slot is free."""
        self._copy(step + (STAGES - 1))

    def _copy(self, step: Any) -> None:
        slot = _slot(step)

        @pl.when(step < self.steps)
        def _() -> None:
            @pl.when(step >= STAGES)
            def _() -> None:
                plgpu.barrier_wait(self.free.at[slot])

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
    """Two warpgroups half a step apart: one uses the tensor cores while the other exponentiates.

    After Shah et al. 2024, "FlashAttention-3", arXiv 2407.08608, section 3.1. Each warpgroup passes
    the barrier twice per step. The last one passes it once more before the first step, and the
    first one once more after the last step.
    """

    barrier: Any
    warpgroup: Any

    def begin(self) -> None:
        """Before the first step."""
        pl.when(self.warpgroup == _LAST)(self.switch)

    def switch(self) -> None:
        """Wait until both warpgroups are here."""
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Let the other warpgroup continue."""
        plgpu.barrier_arrive(self.barrier)

    def wait(self) -> None:
        """Continue when the other warpgroup has arrived."""
        plgpu.barrier_wait(self.barrier)

    def end(self) -> None:
        """After the last step."""
        pl.when(self.warpgroup != _LAST)(self.switch)


def run_steps(
    warpgroup: Any,
    streams: tuple[Stream, ...],
    step: Callable[[Any, Any], Any],
    carry: Any,
    ping_pong: PingPong | None = None,
) -> Any:
    """``carry = step(i, carry)`` for every step of streams that all warpgroups read."""

    @pl.when(warpgroup == _LAST)
    def _() -> None:
        for stream in streams:
            stream.begin()

    if ping_pong is not None:  # after the first copies, which the other warpgroup waits for
        ping_pong.begin()

    def body(i: Any, carry: Any) -> Any:
        @pl.when(warpgroup == _LAST)
        def _() -> None:
            for stream in streams:
                stream.advance(i)

        return step(i, carry)

    carry = lax.fori_loop(jnp.int32(0), streams[0].steps, body, carry)
    if ping_pong is not None:
        ping_pong.end()
    return carry


def fetch(copies: list[tuple[Any, Any]], barrier: Any) -> None:
    """Copy each source to its target in shared memory, and wait for all."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, barrier)
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
        interpret=plgpu.InterpretGPUParams() if interpreted else False,
    )(*arrays.values())
    return dict(zip(results, outputs, strict=True))
