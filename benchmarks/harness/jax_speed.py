"""Time, memory and errors of variants in JAX."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import posenc_jax
from harness.clock import Budget, Sample
from harness.correctness import array_errors
from harness.jax_variants import Call, Held, Inputs, Params
from harness.speed import SHOWN, Entry, Settings, Timing, Variant, free_memory
from posenc.testing import Host

_WORKERS = min(8, os.cpu_count() or 1)  # programs compiled at the same time
_SAMPLE, _CALLS = 20.0, 50  # milliseconds per sample, and at most so many calls


@dataclass
class Program:
    """A compiled function with its arguments, called ``calls`` times per sample."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    calls: int = 1

    def sample(self) -> tuple[float, float]:
        """Milliseconds per call, and milliseconds that the host needs to queue one.

        All calls are queued at once. The device waits for the host only if queueing a call takes
        longer than running it.
        """
        begun, result = time.perf_counter(), None
        for _ in range(self.calls):
            result = self.run(*self.arguments)
        queued = time.perf_counter()
        jax.block_until_ready(result)
        ended = time.perf_counter()
        return 1e3 * (ended - begun) / self.calls, 1e3 * (queued - begun) / self.calls


@dataclass
class _Begun:
    """A program that is being compiled."""

    entry: Entry
    kind: str
    arguments: tuple[Any, ...]
    compiling: Future[tuple[Any, float]]


class Speed(Timing):
    """Variants of JAX: each is compiled for each length, several at the same time."""

    def __init__(self, settings: Settings, variants: Sequence[Variant], budget: Budget) -> None:
        super().__init__(settings, variants, budget)
        self._gpu = settings.device == "cuda"

    def _inputs(self, batch: int, length: int) -> Inputs:
        at = self._settings
        return Inputs(batch, at.heads, length, at.dim, at.dtype)

    def _begin(self, entries: Sequence[Entry], inputs: Inputs, end: float) -> None:
        """Compile, make the first calls, and check their results."""
        with ThreadPoolExecutor(_WORKERS) as pool:
            possible = [e.variant.scheme for e in entries if e.row["reason"] is None]
            expected = Expected(inputs, dict.fromkeys(possible), pool)
            for at in range(0, len(entries), _WORKERS):
                begun = []
                for entry in entries[at : at + _WORKERS]:
                    kinds = 1 if entry.variant.learns else 2
                    why = self._refusal(end, compiles=kinds)
                    entry.row["reason"] = why or entry.row["reason"]
                    if entry.row["reason"] is None:
                        begun += self._start_compiling(entry, inputs, pool)
                while begun:  # pop: a program frees its memory before the next one runs
                    self._first(begun.pop(0), expected)

    def _start_compiling(
        self, entry: Entry, inputs: Inputs, pool: ThreadPoolExecutor
    ) -> Iterator[_Begun]:
        variant = entry.variant
        params = inputs.params(variant.scheme)
        try:
            call, held = variant.ready(inputs)
            functions = {"forward": partial(_forward, call), "step": partial(_step, call)}
            for kind in ("step",) if variant.learns else ("forward", "step"):
                given: tuple[Any, ...] = inputs.tokens, params, held
                if kind == "step":
                    given = *given, inputs.d_out, variant.learns
                static = {"static_argnums": (4,)} if kind == "step" else {}
                begun = time.perf_counter()
                lowered = jax.jit(functions[kind], **static).lower(*given)
                entry.row[f"seconds to trace {kind}"] = _seconds(begun)
                self._budget.compiles -= 1
                yield _Begun(entry, kind, given[:4], pool.submit(_compile, lowered))
        except Exception as error:
            self._fault(entry, error)

    def _first(self, begun: _Begun, expected: Expected) -> None:
        entry, kind = begun.entry, begun.kind
        try:
            compiled, entry.row[f"seconds to compile {kind}"] = begun.compiling.result()
            used = entry.row[f"bytes of {kind}"] = _bytes(compiled)
            if used is not None and used > 0.95 * self._free():
                raise NotImplementedError(
                    f"it takes {used / 2**30:.1f} GiB, {self._free() / 2**30:.1f} are free"
                )
            program = Program(compiled, begun.arguments)
            answer = compiled(*begun.arguments)
            name, array = ("out", answer) if kind == "forward" else ("q", answer[1][0])
            errors = expected.errors(entry.variant.scheme, {name: array})
            entry.row["errors"] = entry.row.get("errors", {}) | errors
            del answer, array
            ms, _ = program.sample()
            if self._gpu:  # a CPU would run several at a time
                program.calls = max(1, min(_CALLS, round(_SAMPLE / ms)))
            entry.row[f"calls of {kind}"] = program.calls
            entry.row["peak of the process so far"] = self._stats().get("peak_bytes_in_use")
            entry.first[kind] = {"sample": ms * program.calls}
            entry.work[kind] = program
        except Exception as error:
            self._fault(entry, error)

    def _sample(self, entry: Entry, kind: str) -> Sample:
        ms, host = entry.work[kind].sample()
        return {kind: ms, f"host of {kind}": host}

    def _expects(self, error: Exception) -> bool:
        return isinstance(error, NotImplementedError) or "RESOURCE_EXHAUSTED" in str(error)

    def _free(self) -> float:
        stats = self._stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else free_memory()

    def _stats(self) -> dict[str, int]:
        """Statistics of the device's allocator; empty on a CPU."""
        return (jax.local_devices()[0].memory_stats() if self._gpu else None) or {}


class Expected:
    """Some rows of the result and of the gradient of q, by the reference in float64.

    Programs of all schemes are compiled at the same time. They are traced and run in this thread
    only, on JAX arrays: while threads differ in ``enable_x64``, converting a NumPy array sometimes
    gives the wrong width.
    """

    def __init__(self, inputs: Inputs, schemes: Iterable[str], pool: ThreadPoolExecutor) -> None:
        length = inputs.tokens[0].shape[1]
        some = np.random.default_rng().permutation(length)[: SHOWN - 1]
        self._rows = jnp.asarray(np.append(some, length - 1), jnp.int32)
        self._programs: dict[str, tuple[tuple[Any, ...], Future[Any]]] = {}
        self._expected: dict[str, dict[str, Host]] = {}
        for name in schemes:
            given = *inputs.tokens, inputs.d_out, inputs.params(name), self._rows
            with jax.enable_x64(True):
                lowered = _reference.lower(inputs.schemes[name], *given)
            self._programs[name] = given, pool.submit(lowered.compile)

    def errors(self, scheme: str, answers: dict[str, Array]) -> dict[str, dict[str, float | None]]:
        """Errors of a variant's arrays."""
        if scheme not in self._expected:
            given, program = self._programs[scheme]
            with jax.enable_x64(True):
                rows = program.result()(*given)
                self._expected[scheme] = {name: np.asarray(a) for name, a in rows.items()}
        return {
            name: array_errors(_wide(array, self._rows), self._expected[scheme][name])
            for name, array in answers.items()
        }


@partial(jax.jit, static_argnums=0)
def _reference(
    scheme: Any, q: Array, k: Array, v: Array, d_out: Array, params: Params, rows: Array
) -> dict[str, Array]:
    k_pos = jnp.arange(k.shape[1])
    q, k, v, d_out = (a[:1].astype(jnp.float64) for a in (q, k, v, d_out))
    own = {name: a.astype(jnp.float64) for name, a in params.items()}

    def some(q: Array) -> Array:
        return posenc_jax.attention(
            q, k, v, scheme, own, True, q_pos=rows, k_pos=k_pos, implementation="reference"
        )

    out, pull = jax.vjp(some, q[:, rows])
    return {"out": out, "q": pull(d_out[:, rows])[0]}


def _wide(array: Array, rows: Array) -> Host:
    return np.asarray(array[:1, rows].astype(jnp.float32)).astype(np.float64)


def _forward(call: Call, tokens: Sequence[Array], params: Params, held: Held) -> Array:
    return call(*tokens, params, held)


def _step(
    call: Call,
    tokens: Sequence[Array],
    params: Params,
    held: Held,
    d_out: Array,
    learns: bool,
) -> tuple[Array, Any]:
    """The result, gradients of tokens, and gradients of params if they learn."""
    if learns:
        out, pull = jax.vjp(lambda t, p: call(*t, p, held), tokens, params)
        d_tokens, d_params = pull(d_out)
        return out, (*d_tokens, d_params)
    out, pull = jax.vjp(lambda t: call(*t, params, held), tokens)
    return out, tuple(pull(d_out)[0])


def _compile(lowered: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    return lowered.compile(), _seconds(begun)


def _seconds(begun: float) -> float:
    return round(time.perf_counter() - begun, 3)


def _bytes(compiled: Any) -> int | None:
    """Bytes of temporaries and results as the compiler reports them; None if it does not."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
