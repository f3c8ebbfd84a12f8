"""Options of a GPU's kernels, where torch's own choice spills registers or does not fit.

``python benchmarks/compile_only/flex`` counts what they save on an H200.
"""

from __future__ import annotations

from typing import Any

import torch

from posenc.backend import Call
from posenc_torch.flex import target
from posenc_torch.flex.block_mask import BLOCK
from posenc_torch.flex.ranges import OPTIONS as CONTIGUOUS
from posenc_torch.flex.ranges import takes_ranges
from posenc_torch.tracing import constant_in_programs

# A gathered tile goes through shared memory. With torch's default options an H200 has too little.
# Torch then compiles a kernel that spills 12 kB per thread.
GATHER_OPTIONS = {"fwd_BLOCK_N": 64, "fwd_num_warps": 8, "bwd_num_stages": 2}
# Two gathered tiles, as DeBERTa's tables of queries and of keys. With the options for one, a thread
# spills 1 kB at a head_dim of 64, and 3 kB at 128, where a tile does not fit; with these nothing.
TABLES_OPTIONS = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 8,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 8,
}  # fmt: skip
# A row of copies stays in registers: at a head_dim of 64, torch's 4 warps spill 1 kB per thread.
COPY_OPTIONS = {"fwd_num_warps": 8}
# A network keeps several numbers of each score. With torch's own tiles and FIRE's 8 units, a thread
# spills 6 kB forward and 12 kB backward; with these none, and 1 kB.
NETWORK_OPTIONS = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_warps": 8,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 8,
}  # fmt: skip
# Float32 products without tensor cores. With torch's own tiles and 4 warps, a thread spills 5 kB at
# a head_dim of 64 and 11 kB at 128, and 72 kB in decoding.
FLOAT32_OPTIONS = {"fwd_num_warps": 8, "bwd_num_warps": 8}


def kernel_options(
    call: Call, *, gathers: bool, copied: bool, split: bool, masked: bool
) -> dict[str, Any]:
    """The options for a call; torch chooses all others.

    Parameters
    ----------
    call
        The call.
    gathers
        Whether different scores may load different values.
    copied
        Whether there are copies of learned arrays.
    split
        Whether each number of a learned array is an array of its own.
    masked
        Whether there is a block mask.
    """
    if target.is_cpu(call.q):
        return {}
    options: dict[str, Any] = {}
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    if call.q.dtype != torch.float32:
        options = GATHER_OPTIONS if gathers else COPY_OPTIONS if copied else {}
        if q_len >= BLOCK and _count_token_tables(call) > 1:
            options = TABLES_OPTIONS
    elif _multiplies_in_float32():
        options = dict(FLOAT32_OPTIONS)
        if q_len >= BLOCK:  # fewer queries have a kernel of their own
            wide = max(call.q.shape[3], call.v.shape[3]) > 128  # then 64 keys do not fit
            options |= {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32 if wide else 64}
    if split and q_len >= BLOCK:
        options = NETWORK_OPTIONS | ({"fwd_BLOCK_M": 32} if call.q.dtype == torch.float32 else {})
    if takes_ranges(call) or (not masked and q_len >= BLOCK):
        options = options | CONTIGUOUS
    # Lengths that vary are symbols, of which torch knows no divisors. Inside a larger graph this
    # would compile the user's program for two kinds of lengths.
    if not torch.compiler.is_compiling() and q_len % BLOCK == 0 and k_len % BLOCK == 0:
        options = options | {"IS_DIVISIBLE": True}
    return options


def _count_token_tables(call: Call) -> int:
    """How many features are tables, which a score reads by index."""
    sides = call.query.features, call.key.features
    return sum(a.ndim == 4 and a.is_floating_point() for side in sides for a in side.values())


@constant_in_programs
def _multiplies_in_float32() -> bool:
    """Whether products of float32 are exact products, without TF32."""
    return torch.get_float32_matmul_precision() == "highest"
