"""Measures docs/costs.json, what each scheme costs in attention: ``python docs/costs.py``.

A forward pass and a training step of each implementation that serves a scheme on a CPU, divided by
the framework's own attention without positions. Calls take turns, each figure is a ratio of medians
of processor time on one core, so other work beside it matters little. All takes some minutes. With
names, or with ``--missing``, other records stay. Pages of schemes show it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import posenc
import posenc_jax
import posenc_torch
from posenc.study.origin import processor

DATA = Path(__file__).parent / "costs.json"
LENGTH, HEADS, DIM, TURNS = 1024, 4, 64, 5
SIZES = {
    "num_heads": HEADS, "head_dim": DIM, "dim": HEADS * DIM, "hidden_dim": HEADS * DIM,
    "max_len": LENGTH, "train_len": LENGTH // 4,
}  # fmt: skip
STAGES = ("forward", "step")
# Not measured, though they serve: each call of flex would be compiled for a CPU first.
LEFT_OUT = {"flex": "not measured: it compiles each call, and has no backward pass on a CPU"}
Call = Callable[[], Any]


def main() -> None:
    """Measure and write the file, after each scheme."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="schemes (default: all of the catalogue)")
    parser.add_argument("--missing", action="store_true", help="those without a record")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # JAX then starts one thread
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", posenc.SchemeWarning)  # embeddings add nothing to attention
    found: dict[str, Any] = {}
    if (options.name or options.missing) and DATA.exists():
        found = json.loads(DATA.read_text(encoding="utf-8"))
    for name in options.name or [n for n in posenc.catalogue() if n not in found]:
        found[name] = {"torch": costs(Torch(name)), "jax": costs(Jax(name)), "measured": about()}
        print(name, json.dumps(found[name]), flush=True)
        DATA.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", "utf-8")


def about() -> dict[str, Any]:
    """How, where and when a scheme is measured."""
    packages = ("posenc", "numpy", "torch", "jax")
    return {
        "call": f"B=1 H={HEADS} D={DIM}, {LENGTH} tokens, causal, float32",
        "turns": TURNS,
        "processor": processor(),
        "versions": ", ".join(f"{package} {version(package)}" for package in packages),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


class Torch:
    """Calls of PyTorch, eager, queries ``(B, H, L, D)``."""

    def __init__(self, name: str) -> None:
        self.scheme, params, qkv, out, x = drawn(name)
        self.params = {n: torch.tensor(a, requires_grad=True) for n, a in params.items()}
        self.qkv = [torch.tensor(a, requires_grad=True) for a in qkv]
        self.out, self.tokens = torch.tensor(out), posenc.Tokens(x=torch.tensor(x))
        self.implementations = posenc_torch.IMPLEMENTATIONS

    def given(self, implementation: str) -> dict[str, Any]:
        """Keywords of a call."""
        return {"causal": True, "tokens": self.tokens, "implementation": implementation}

    def explain(self, implementation: str) -> Any:
        """What would be called."""
        return posenc_torch.explain(
            *self.qkv, self.scheme, self.params, **self.given(implementation)
        )

    def calls(self, implementation: str | None) -> dict[str, Call]:
        """By stage; of SDPA without positions for None."""
        attend, arrays = torch.nn.functional.scaled_dot_product_attention, self.qkv
        attend = partial(attend, *self.qkv, is_causal=True)
        if implementation is not None:
            arrays = [*self.qkv, *self.params.values()]
            attend = partial(
                posenc_torch.attention, *self.qkv, self.scheme, self.params,
                **self.given(implementation),
            )  # fmt: skip

        def step() -> None:
            # Arrays of other parts of a model, as those of an embedding, get no gradient.
            torch.autograd.grad(attend(), arrays, self.out, allow_unused=True)

        return {"forward": torch.no_grad()(attend), "step": step}

    def memory(self, call: Call) -> None:
        """Not known on a CPU."""


class Jax:
    """Calls of JAX, each one program of ``jax.jit``, queries ``(B, L, H, D)``."""

    def __init__(self, name: str) -> None:
        self.scheme, params, qkv, out, x = drawn(name)
        self.params = {n: jnp.asarray(a) for n, a in params.items()}
        self.qkv = [jnp.asarray(np.swapaxes(a, 1, 2)) for a in qkv]
        self.out, self.x = jnp.asarray(np.swapaxes(out, 1, 2)), jnp.asarray(x)
        self.implementations = posenc_jax.IMPLEMENTATIONS

    def explain(self, implementation: str) -> Any:
        """What would be called."""
        return posenc_jax.explain(
            *self.qkv, self.scheme, self.params, causal=True,
            tokens=posenc.Tokens(x=self.x), implementation=implementation,
        )  # fmt: skip

    def calls(self, implementation: str | None) -> dict[str, Call]:
        """By stage; of ``jax.nn`` without positions for None."""

        def attend(qkv: Any, params: Any, x: Any) -> Any:
            if implementation is None:
                return jax.nn.dot_product_attention(*qkv, is_causal=True)
            return posenc_jax.attention(
                *qkv, self.scheme, params, causal=True,
                tokens=posenc.Tokens(x=x), implementation=implementation,
            )  # fmt: skip

        def step(qkv: Any, params: Any, x: Any, out: Any) -> Any:
            return jax.vjp(lambda *inputs: attend(*inputs, x), qkv, params)[1](out)

        arrays = (self.qkv, self.params, self.x)
        given = {"forward": (attend, arrays), "step": (step, (*arrays, self.out))}
        return {stage: Program(function, args) for stage, (function, args) in given.items()}

    def memory(self, call: Call) -> float:
        """MiB of temporary arrays, as the compiler reports them."""
        used = call.program.memory_analysis().temp_size_in_bytes  # type: ignore[attr-defined]
        return float(f"{used / 2**20:.3g}")


class Program:
    """A compiled call, waited for."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.program = jax.jit(function).lower(*arguments).compile()
        self.arguments = arguments

    def __call__(self) -> None:
        jax.block_until_ready(self.program(*self.arguments))


def drawn(name: str) -> tuple[posenc.PositionScheme, Any, Any, Any, Any]:
    """A scheme, its params, normal queries, keys, values, a gradient, and hidden states."""
    scheme, rng = posenc.make(name, **SIZES), np.random.default_rng(0)
    params = {n: np.asarray(a, np.float32) for n, a in posenc.init_params(scheme).items()}
    *qkv, out = rng.standard_normal((4, 1, HEADS, LENGTH, DIM), dtype=np.float32)
    return scheme, params, qkv, out, rng.standard_normal((1, LENGTH, HEADS * DIM), np.float32)


def costs(side: Torch | Jax) -> dict[str, dict[str, Any]]:
    """By implementation: ratios of both stages and memory, or why there is none."""
    chosen = side.explain("auto")["implementation"]
    found: dict[str, dict[str, Any]] = {}
    for one in side.implementations:
        try:
            side.explain(one)
        except NotImplementedError:
            continue  # the page says why, from explain
        if one in LEFT_OUT and one != chosen:
            found[one] = {"why": LEFT_OUT[one]}
        elif one != "reference" or one == chosen:  # it is the definition, never fast
            found[one] = {"auto": True} if one == chosen else {}
    measured = [one for one in found if "why" not in found[one]]
    plain, calls = baseline(type(side)), {one: side.calls(one) for one in measured}
    for stage in STAGES:
        able = {}
        for one in measured:
            try:
                calls[one][stage]()
            except (NotImplementedError, RuntimeError, ValueError) as refused:
                found[one][stage] = f"not measured: {str(refused).splitlines()[0]}"
            else:
                able[one] = calls[one][stage]
        for one, ratio in zip(able, ratios(plain[stage], able.values()), strict=True):
            found[one][stage] = ratio
            if (memory := side.memory(able[one])) is not None:
                found[one][f"memory of {stage}"] = [memory, side.memory(plain[stage])]
    return found


@cache
def baseline(framework: type[Torch] | type[Jax]) -> dict[str, Call]:
    """Calls without positions, which are the same for each scheme."""
    return framework("nope").calls(None)


def ratios(plain: Call, calls: Iterable[Call]) -> list[float]:
    """The median of each call's processor times, divided by that of the plain one."""
    turns = [plain, *calls]
    times: list[list[float]] = [[] for _ in turns]
    for turn in range(TURNS + 1):  # the first warms up
        for call, own in zip(turns, times, strict=True):
            begun = time.process_time()
            call()
            if turn:
                own.append(time.process_time() - begun)
    first, *others = (statistics.median(own) for own in times)
    return [float(f"{other / first:.3g}") for other in others]


if __name__ == "__main__":
    main()
