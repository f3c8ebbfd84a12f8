"""``exact`` in PyTorch: block by block, with the keys that each block sees."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import array_api_compat.torch as xp
import torch
from torch import Tensor

from harness import exact
from harness.run import params_of
from harness.variants import Inputs


def begin(
    inputs: Inputs, scheme: str, heads: Tensor, pool: ThreadPoolExecutor
) -> Callable[[], dict[str, Tensor]]:
    """What computes results and gradients."""
    return partial(_compute, inputs, scheme, heads)


def _compute(inputs: Inputs, scheme: str, chosen: Tensor) -> dict[str, Tensor]:
    wide = torch.float64
    tokens = *inputs.tokens.values(), inputs.d_out
    q, k, v, d_out = (exact.some_heads(xp, None, a, chosen).to(wide) for a in tokens)
    heads, length, _ = q.shape
    params = params_of(inputs.params(scheme))
    own = {name: a.to(wide).requires_grad_() for name, a in params.items()}
    at = torch.arange(length, device=q.device)
    bias = exact.bias_by_distance(xp, inputs.schemes[scheme], own, at, wide)
    bias = q.new_zeros(heads, length) if bias is None else bias[chosen]
    sums = {name: torch.zeros_like(q) for name in ("out", "q", "k", "v")}
    d_bias = torch.zeros_like(bias)
    rows = exact.block_length(heads, length)
    for first in range(0, length, rows):
        upto = first + rows  # keys after the last query are not visible
        block, seen = (slice(None), slice(first, upto)), (slice(None), slice(upto))
        out, d_q, d_k, d_v, diagonals = exact.attend(
            xp, q[block], k[seen], v[seen], d_out[block], bias.detach(),
            at[first:upto, None] - at[:upto],
        )  # fmt: skip
        sums["out"][block], sums["q"][block] = out, d_q
        sums["k"][seen] += d_k
        sums["v"][seen] += d_v
        d_bias[:, :upto] += diagonals[:, :upto].flip(-1)
    if own:
        gradients = torch.autograd.grad(bias, list(own.values()), d_bias)
        sums |= {name: a[chosen] for name, a in zip(own, gradients, strict=True)}
    narrow = {name: a.float() for name, a in sums.items()}
    del sums, q, k, v, d_out
    inputs.runner.release()  # blocks of memory that calls may need
    return narrow | {"out of step": narrow["out"]}
