"""A kernel for Hopper GPUs: two warpgroups that compute, and copies that run ahead of them.

No warpgroup is there for copies alone. JAX 0.12 compiles kernels in a way in which ``setmaxnreg``
is ignored, so that a third warpgroup would leave 168 registers a thread to each, where a backward
pass holds 192 in its sums and scores; two have 255. A copy is one instruction of one thread.
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
STAGES = 2  # places in a ring
_LAST = WARPGROUPS - 1  # starts a step after the others, and so does not wait when it copies


class Stream(NamedTuple):
    """Blocks of several arrays that arrive together, in a ring of shared memory.

    Attributes
    ----------
    sources
        By name, a function of a step: the block in global memory.
    steps
        How many there are.
    buffers
        By name, shared memory for as many blocks as the ring has places.
    ready, free
        Barriers, one a place: all blocks are there, all readers have done with them.
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
        """The blocks of a step, once they are there."""
        slot = _slot(step)
        plgpu.barrier_wait(self.ready.at[slot])
        return {name: buffer.at[slot] for name, buffer in self.buffers.items()}

    def release(self, step: Any) -> None:
        """Give the place of a step back."""
        plgpu.barrier_arrive(self.free.at[_slot(step)])

    def advance(self, step: Any) -> None:
        """At the beginning of a step: copy what a later one needs, once its place is free."""
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


def ring(buffers: Mapping[str, Any], readers: int = WARPGROUPS) -> tuple[Any, ...]:
    """Scratch of a stream of such blocks: its buffers and barriers."""
    return (
        {name: buffer.times(STAGES) for name, buffer in buffers.items()},
        plgpu.Barrier(num_arrivals=len(buffers), num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=readers, num_barriers=STAGES),
    )


class Turns(NamedTuple):
    """Two warpgroups half a step apart: one has the tensor cores while the other has exponents.

    After Shah et al. 2024, "FlashAttention-3", arXiv 2407.08608, section 3.1. Each passes twice a
    step, the last one once more at the beginning, and the first at the end.
    """

    barrier: Any
    warpgroup: Any

    def begin(self) -> None:
        """Before the first step."""
        pl.when(self.warpgroup == _LAST)(self.change)

    def change(self) -> None:
        """Go on when the other gets here."""
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Let the other go on."""
        plgpu.barrier_arrive(self.barrier)

    def wait(self) -> None:
        """Go on when the other has arrived."""
        plgpu.barrier_wait(self.barrier)

    def end(self) -> None:
        """After the last step."""
        pl.when(self.warpgroup != _LAST)(self.change)


def run(
    warpgroup: Any,
    streams: tuple[Stream, ...],
    step: Callable[[Any, Any], Any],
    carry: Any,
    turns: Turns | None = None,
) -> Any:
    """``carry = step(i, carry)`` for every step of streams that all warpgroups read."""

    @pl.when(warpgroup == _LAST)
    def _() -> None:
        for stream in streams:
            stream.begin()

    if turns is not None:  # not before the copies: the other waits for these first
        turns.begin()

    def body(i: Any, carry: Any) -> Any:
        @pl.when(warpgroup == _LAST)
        def _() -> None:
            for stream in streams:
                stream.advance(i)

        return step(i, carry)

    carry = lax.fori_loop(jnp.int32(0), streams[0].steps, body, carry)
    if turns is not None:
        turns.end()
    return carry


def fetch(copies: list[tuple[Any, Any]], barrier: Any) -> None:
    """Copy to shared memory, and wait for it."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def launch(
    kernel: Callable[[Any, Mapping[str, Any], Any], None],
    arrays: Mapping[str, Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    grid: Mapping[str, int],
    *,
    interpreted: bool,
) -> dict[str, Array]:
    """Run a kernel: a function of the number of its warpgroup, arrays by name, and scratch."""
    names = [*arrays, *results]

    def body(*refs_and_scratch: Any) -> None:
        refs = dict(zip(names, refs_and_scratch, strict=False))
        (own,) = refs_and_scratch[len(names) :]
        kernel(lax.axis_index("warpgroup"), refs, own)

    found = plgpu.kernel(
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
    return dict(zip(results, found, strict=True))
