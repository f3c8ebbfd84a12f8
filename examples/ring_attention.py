"""Ring attention: a training step on a mesh of data x context gives the result of one device.

A device holds some sequences, and some tokens of each. Keys, values and their positions travel
around the devices that share a sequence, so any layout of tokens works. The zig-zag layout gives
every device the same work under a causal mask.
"""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import posenc
import posenc_jax

DATA, CONTEXT = 2, 4
BATCH, LENGTH, HEADS, DIM = 4, 32, 4, 8
WIDTH = HEADS * DIM
SCHEME = posenc.T5Bias(num_heads=HEADS, causal=True)
TOKENS = PartitionSpec("data", "context")  # how (B, L, ...) is sharded


def loss_of_one(weights, x, y, attend=posenc_jax.attention):
    """Loss of a decoder layer's attention, with its residual connection."""
    q, k, v = jnp.split((x @ weights["qkv"]).reshape(*x.shape[:2], -1, DIM), 3, axis=2)
    out = attend(q, k, v, SCHEME, weights["position"], causal=True)
    return jnp.mean((x + out.reshape(x.shape) @ weights["out"] - y) ** 2)


def loss_of_shards(weights, x, y, pos):
    """Loss on each device, from its shard of x, y and pos; weights are replicated."""
    tokens = posenc.Tokens(pos)
    attend = partial(posenc_jax.ring_attention, axis_name="context", tokens=tokens)
    return jax.lax.pmean(loss_of_one(weights, x, y, attend), ("data", "context"))


def step(loss, weights, *batch, rate=0.1):
    value, gradient = jax.value_and_grad(loss)(weights, *batch)
    return value, jax.tree.map(lambda w, g: w - rate * g, weights, gradient)


def work():
    keys = jax.random.split(jax.random.key(0), 5)
    weights = {
        "qkv": jax.random.normal(keys[0], (WIDTH, 3 * WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH**0.5,
        "position": posenc_jax.init(SCHEME, keys[2]),
    }
    x, y = (jax.random.normal(key, (BATCH, LENGTH, WIDTH)) for key in keys[3:])
    expected, of_one = jax.jit(partial(step, loss_of_one))(weights, x, y)

    order = posenc_jax.zigzag(LENGTH, CONTEXT)
    mesh = jax.make_mesh((DATA, CONTEXT), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    specs = (PartitionSpec(), TOKENS, TOKENS, PartitionSpec("context"))
    loss = jax.shard_map(loss_of_shards, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    batch = x[:, order], y[:, order], jnp.asarray(order)
    sharded, of_shards = jax.jit(partial(step, loss))(weights, *batch)

    print(f"{DATA} x {CONTEXT} devices, tokens of the first: {order[: LENGTH // CONTEXT]}")
    print(f"loss {sharded:.6f}, on one device {expected:.6f}")
    equal = jax.tree.map(partial(np.allclose, atol=1e-6), of_shards, of_one)
    print(f"weights equal to one device's after the step: {equal}")


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        work()
    else:  # in a process with enough host devices, because JAX counts its devices once
        flags = f"--xla_force_host_platform_device_count={DATA * CONTEXT}"
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "work"]
        print(subprocess.run(command, env=env, stdout=-1, text=True, check=True).stdout, end="")
