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
from jax import Array

from harness import exact
from harness.clock import Budget, Sample
from harness.jax_variants import Call, Held, Inputs, Params
from harness.speed import Entry, Settings, Timing, Variant, error_of, free_memory

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

    def _inputs(self, length: int) -> Inputs:
        at = self._settings
        return Inputs(at.heads, length, at.dim, at.dtype)

    def _begin(
        self, entries: Sequence[Entry], inputs: Inputs, end: float, on_first: Callable[[], None]
    ) -> None:
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
                    on_first()

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
            answers, again = (_by_name(kind, compiled(*begun.arguments)) for _ in range(2))
            entry.row[f"{kind} repeats"] = bool(_equal(answers, again))
            del again
            errors = expected.errors(entry.variant.scheme, answers)
            entry.row["errors"] = entry.row.get("errors", {}) | errors
            del answers
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

    def _check_device(self) -> None:
        jax.block_until_ready(jnp.zeros(8) + 1)

    def _free(self) -> float:
        stats = self._stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else free_memory()

    def _stats(self) -> dict[str, int]:
        """Statistics of the device's allocator; empty on a CPU."""
        return (jax.local_devices()[0].memory_stats() if self._gpu else None) or {}


class Expected:
    """Results and gradients of some heads in float64, computed once for each scheme.

    Programs of all schemes are compiled at the same time. They are traced and run in this thread
    only, on JAX arrays: while threads differ in ``enable_x64``, converting a NumPy array sometimes
    gives the wrong width.
    """

    def __init__(self, inputs: Inputs, schemes: Iterable[str], pool: ThreadPoolExecutor) -> None:
        _, length, heads, _ = inputs.d_out.shape
        self._heads = tuple(exact.chosen_heads(heads, length))
        self._dtype = str(inputs.d_out.dtype)
        self._programs: dict[str, tuple[tuple[Any, ...], Future[Any]]] = {}
        self._expected: dict[str, dict[str, Array]] = {}
        for name in schemes:
            given = *inputs.tokens, inputs.d_out, inputs.params(name)
            with jax.enable_x64(True):
                lowered = _exact.lower(inputs.schemes[name], self._heads, *given)
            compiled = pool.submit(lowered.compile, {"xla_gpu_autotune_level": 0})
            self._programs[name] = given, compiled

    def errors(self, scheme: str, answers: dict[str, Array]) -> dict[str, dict[str, float | None]]:
        """Errors of a variant's arrays, and those that are allowed."""
        if scheme not in self._expected:
            given, program = self._programs[scheme]
            with jax.enable_x64(True):
                self._expected[scheme] = program.result()(*given)
        expected = self._expected[scheme]
        errors = _errors(self._heads, answers, {name: expected[name] for name in answers})
        return {name: error_of(name, float(e), self._dtype) for name, e in errors.items()}


@jax.jit
def _equal(first: dict[str, Array], second: dict[str, Array]) -> Array:
    return jnp.all(jnp.asarray([jnp.array_equal(first[name], second[name]) for name in first]))


@partial(jax.jit, static_argnums=0)
def _errors(
    heads: tuple[int, ...], answers: dict[str, Array], expected: dict[str, Array]
) -> dict[str, Array]:
    own = {
        name: _some(a, heads) if a.ndim == 4 else a[jnp.asarray(heads)]
        for name, a in answers.items()
    }
    return {
        name: exact.relative_error(jnp, own[name].astype(jnp.float32), array)
        for name, array in expected.items()
    }


def _some(array: Array, heads: tuple[int, ...]) -> Array:
    """Some heads of the first sequence, ``(h, L, D)``."""
    return jnp.swapaxes(array[0][:, jnp.asarray(heads)], 0, 1)


@partial(jax.jit, static_argnums=(0, 1))
def _exact(
    scheme: Any,
    heads: tuple[int, ...],
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    params: Params,
) -> dict[str, Array]:
    """Results and gradients by ``exact.attend``, as float32."""
    q, k, v, d_out = (_some(a, heads).astype(jnp.float64) for a in (q, k, v, d_out))
    length, chosen = q.shape[1], jnp.asarray(heads)
    at = jnp.arange(length, dtype=jnp.int32)

    def by_distance(params: Params) -> Array:
        bias = exact.bias_by_distance(jnp, scheme, params, at, jnp.float64)
        return jnp.zeros((len(heads), length)) if bias is None else bias[chosen]

    own = {name: a.astype(jnp.float64) for name, a in params.items()}
    bias, pull = jax.vjp(by_distance, own)
    rows = exact.block_length(len(heads), length)

    def block(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        out, d_q, d_k, d_v, d_bias = sums
        first = number * rows
        here = [jax.lax.dynamic_slice_in_dim(a, first, rows, axis=1) for a in (q, d_out)]
        queries = jax.lax.dynamic_slice_in_dim(at, first, rows)
        own = exact.attend(jnp, here[0], k, v, here[1], bias, queries[:, None] - at)
        out, d_q = (
            jax.lax.dynamic_update_slice_in_dim(a, part, first, axis=1)
            for a, part in zip((out, d_q), own[:2], strict=True)
        )
        distance = queries[-1] - jnp.arange(own[4].shape[1], dtype=jnp.int32)
        d_bias = d_bias.at[:, jnp.maximum(distance, 0)].add(own[4])
        return out, d_q, d_k + own[2], d_v + own[3], d_bias

    zeros = jax.tree.map(jnp.zeros_like, (v, q, k, v, bias))
    out, d_q, d_k, d_v, d_bias = jax.lax.fori_loop(0, length // rows, block, zeros)
    d_params = {name: a[chosen] for name, a in pull(d_bias)[0].items()}
    wide = {"out": out, "out of step": out, "q": d_q, "k": d_k, "v": d_v, **d_params}
    return {name: a.astype(jnp.float32) for name, a in wide.items()}


def _by_name(kind: str, answer: Any) -> dict[str, Array]:
    """The result of a forward pass; the result and all gradients of a step."""
    if kind == "forward":
        return {"out": answer}
    out, (d_q, d_k, d_v, *d_params) = answer
    named = {"out of step": out, "q": d_q, "k": d_k, "v": d_v}
    return named | (d_params[0] if d_params else {})


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
