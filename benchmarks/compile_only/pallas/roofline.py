"""Predict the time of kernels on an H200 from what was compiled; nothing is run or timed.

- The matrix products of a tile take their time at ``ACHIEVABLE``: about the speed of the best
  published kernels of attention without a bias.
- The other instructions issue at one per cycle and scheduler.
- Arrays are moved once, at the bandwidth of the device.
- One warpgroup may multiply while another does the rest: ``best`` takes the larger of the two
  times, ``worst`` their sum.
- The needed blocks of ALiBi are counted by ``posenc_jax.fused.inputs.needed_blocks``, on normal
  queries and keys.
- All tiles of T5 count as far, except for the gradient of its table, which near tiles alone have.
- ``speed`` is relative to cuDNN 9.19 without a bias, as published for an H200 (``CUDNN``).

The model leaves out launches, the first tiles, the last wave, and the search for needed blocks. It
also leaves out keys and values that fall out of the cache.
"""

from __future__ import annotations

from typing import Any

from compile_only.pallas.compile import BATCH, HEADS, LENGTHS

# An H200. The clock is that of sustained work, below the boost of 1.98 GHz.
PROCESSORS, CLOCK, BANDWIDTH = 132, 1.755e9, 4.8e12
ACHIEVABLE = 690e12  # of 989 TFLOP/s in bfloat16; cuDNN's forward pass reaches 688
# Length -> FLOP/s of causal attention, bfloat16, D=128, forward and backward, where nothing is
# computed twice; longer sequences as the longest.
CUDNN = {4096: (591e12, 474e12), 8192: (644e12, 541e12), 32768: (688e12, 581e12)}
ISSUED = 4 * 32  # instructions of threads, per cycle and processor
EXPONENTIALS = 16  # per cycle and processor
FORMS = "none", "alibi", "t5"
PREDICTED = 8192, 65536, 131072
SHAPE = 1, 16, 128  # batch, heads and head_dim of a prediction
_SHARES = {"d_keys": "keys", "d_table": "near"}
_PRODUCTS = 2, 5  # matrix products of forward and backward, where none is computed twice


def needed_share(form: str, length: int, block: int) -> dict[str, float]:
    """Computed scores as a share of all pairs: of forward and d_queries, d_keys, and d_table.

    For normal queries and keys in bfloat16, the same for all heads; the slopes of heads differ.
    """
    import jax
    import jax.numpy as jnp

    import posenc
    from posenc.backend import prepare
    from posenc_jax.fused.inputs import needed_blocks

    _, heads, dim = SHAPE
    scheme = posenc.ALiBi(heads) if form == "alibi" else posenc.NoPE()

    @jax.jit
    def computed(q: Any, k: Any) -> Any:
        q = jnp.broadcast_to(q, (1, heads, length, dim))
        call = prepare(q, k, k, scheme, causal=True, xp=jnp)
        return [jnp.mean(ends - firsts) for firsts, ends in needed_blocks(call, block)]

    q, k = (
        jax.random.normal(key, (1, 1, length, dim), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0), 2)
    )
    of_queries, of_keys = (float(count) * block / length for count in computed(q, k))
    left, _ = posenc.T5Bias(heads, causal=True).constant_beyond()
    assert left is not None
    near = 2 + left // block  # blocks of keys for one of queries
    return {"queries": of_queries, "keys": of_keys, "near": near * block / length}


def predict(form: str, kernels: dict[str, Any], block: int) -> list[dict[str, Any]]:
    """Milliseconds of each kernel at each length, and of their sum, a training step."""
    batch, heads, dim = SHAPE
    rows = []
    for length in PREDICTED:
        share = needed_share(form, length, block)
        times = {
            name: predict_times(
                kernel,
                share[_SHARES.get(name, "queries")] * batch * heads * length**2,
                length,
                batch * heads,
            )
            for name, kernel in kernels.items()
        }
        times["step"] = {
            what: sum(time[what] for time in times.values()) for what in times["forward"]
        }
        pairs = batch * heads * length * (length + 1) / 2
        for name, time in times.items():
            row = {"form": form, "length": length, "kernel": name, "computed": share["queries"]}
            row |= {f"{what}, ms": ms for what, ms in time.items()}
            if name in ("forward", "step"):
                cudnn = cudnn_time(name, length, 2 * dim * pairs)
                row |= {f"speed at {what}": cudnn / time[what] for what in ("worst", "best")}
            rows.append({n: _round(value) for n, value in row.items()})
    return rows


def cudnn_time(name: str, length: int, flops: float) -> float:
    """Milliseconds of cuDNN, forward or for a step; one product has ``flops``."""
    speeds = CUDNN[max(known for known in CUDNN if known <= length)]
    passes = list(zip(_PRODUCTS, speeds, strict=True))[: 1 if name == "forward" else 2]
    return sum(1e3 * count * flops / speed for count, speed in passes)


def predict_times(
    kernel: dict[str, Any], scores: float, length: int, heads: int
) -> dict[str, float]:
    """Milliseconds of a kernel that computes so many scores, of all heads together."""
    products = scores * kernel["flops"] / ACHIEVABLE
    cycles = max(kernel["instructions"] / ISSUED, kernel["exponentials"] / EXPONENTIALS)
    others = scores * cycles / (PROCESSORS * CLOCK)
    # Counted at another size; every array is proportional to it.
    moved = kernel["bytes"] / (BATCH * HEADS * LENGTHS[0]) * heads * length / BANDWIDTH
    return {
        "products": 1e3 * products,
        "others": 1e3 * others,
        "moved": 1e3 * moved,
        "best": 1e3 * max(products, others, moved),
        "worst": 1e3 * max(products + others, moved),
    }


def block_size() -> int:
    """The size of a block of the kernels for a GPU."""
    import jax.numpy as jnp

    import posenc
    from posenc.backend import prepare
    from posenc_jax.fused.devices import device_for
    from posenc_jax.fused.target import Target

    tokens = jnp.zeros((1, 1, 256, SHAPE[2]), jnp.bfloat16)
    call = prepare(tokens, tokens, tokens, posenc.NoPE(), causal=True, xp=jnp)
    return device_for(Target("gpu", "9.0")).block(call)


def _round(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
