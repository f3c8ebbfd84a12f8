"""``chunked`` with terms that see the query or the key, against ``chunked`` without positions.

Run ``python benchmarks/token_tables.py``, or with ``--framework jax``. Causal attention,
``B=1 H=8 D=64``, float32, one thread. Processor time of the forward pass and of a training step
with gradients of all arrays, each the best of several interleaved runs, divided by that without
positions.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import posenc
from posenc.apply.feature_needs import reads_hidden
from posenc.contract.protocol import PositionScheme
from posenc.schemes import DeBERTa, Inkling, Shaw, TransformerXL

HEADS, DIM = 8, 64
SCHEMES: dict[str, PositionScheme] = {
    "none": posenc.NoPE(),
    "shaw": Shaw(DIM),
    "transformer_xl": TransformerXL(HEADS, DIM, DIM),
    "deberta": DeBERTa(HEADS, DIM),
    "inkling": Inkling(HEADS, HEADS * DIM),
}
Run = Callable[[], Any]


def torch_runs(length: int) -> dict[tuple[str, str], Run]:
    """A forward pass and a training step of each scheme."""
    import torch

    import posenc_torch

    torch.set_num_threads(1)
    shape = (1, HEADS, length, DIM)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    x, runs = torch.randn(1, length, HEADS * DIM), {}
    for name, scheme in SCHEMES.items():
        params = {n: torch.tensor(a).requires_grad_() for n, a in initial(scheme).items()}
        options = {"causal": True, "implementation": "chunked"} | hidden(scheme, x)

        def attend(scheme: Any = scheme, params: Any = params, options: Any = options) -> Any:
            return posenc_torch.attention(q, k, v, scheme, params, **options)

        def step(attend: Run = attend, params: Any = params) -> None:
            torch.autograd.grad(attend().sum(), [q, k, v, *params.values()])

        runs[name, "forward"] = torch.no_grad()(attend)
        runs[name, "step"] = step
    return runs


def jax_runs(length: int) -> dict[tuple[str, str], Run]:
    """The same in JAX, compiled."""
    import jax

    import posenc_jax

    keys, shape = jax.random.split(jax.random.key(0), 4), (1, length, HEADS, DIM)
    tokens = [jax.random.normal(key, shape) for key in keys[:3]]
    x, runs = jax.random.normal(keys[3], (1, length, HEADS * DIM)), {}
    for name, scheme in SCHEMES.items():
        params = {n: jax.numpy.asarray(a) for n, a in initial(scheme).items()}
        options = {"causal": True, "implementation": "chunked"} | hidden(scheme, x)

        def attend(q: Any, k: Any, v: Any, params: Any, s: Any = scheme, o: Any = options) -> Any:
            return posenc_jax.attention(q, k, v, s, params, **o)

        def total(*arrays: Any, attend: Any = attend) -> Any:
            return attend(*arrays).sum()

        for stage, function in (("forward", attend), ("step", jax.grad(total, (0, 1, 2, 3)))):
            compiled = jax.jit(function).lower(*tokens, params).compile()
            runs[name, stage] = lambda compiled=compiled, params=params: jax.block_until_ready(
                compiled(*tokens, params)
            )
    return runs


def initial(scheme: PositionScheme) -> dict[str, Any]:
    """First values of the learned arrays."""
    return posenc.init_params(scheme)


def hidden(scheme: PositionScheme, x: Any) -> dict[str, Any]:
    """Hidden states as the tokens of a call, if the scheme reads them."""
    return {"tokens": posenc.Tokens(x=x)} if reads_hidden(scheme) else {}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=["torch", "jax"], default="torch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch reads it
    make_runs = {"torch": torch_runs, "jax": jax_runs}[options.framework]
    print(f"{'length':>6} {'stage':8}" + "".join(f"{name:>16}" for name in SCHEMES))
    for length in options.lengths:
        runs = make_runs(length)
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(options.rounds):
            for case, run in runs.items():
                start = time.process_time()
                run()
                best[case] = min(best[case], time.process_time() - start)
        for stage in ("forward", "step"):
            ratios = (best[name, stage] / best["none", stage] for name in SCHEMES)
            print(f"{length:6} {stage:8}" + "".join(f"{ratio:16.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
