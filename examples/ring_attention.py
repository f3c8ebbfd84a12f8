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
from jax.sharding import PartitionSpec

import posenc
import posenc_jax

DATA, CONTEXT = 2, 4
BATCH, LENGTH, HEADS, DIM = 4, 32, 4, 8
SCHEME = posenc.T5Bias(num_heads=HEADS, causal=True)
TOKENS = PartitionSpec("data", "context")  # how (B, L, ...) is sharded


def first_weights(key):
    keys = jax.random.split(key, 3)
    width = HEADS * DIM
    return {
        "qkv": jax.random.normal(keys[0], (width, 3 * width)) / width**0.5,
        "out": jax.random.normal(keys[1], (width, width)) / width**0.5,
        "position": posenc_jax.init(SCHEME, keys[2]),
    }


def layer(weights, x, attend):
    """Attention of a decoder layer, with its residual connection."""
    q, k, v = jnp.split((x @ weights["qkv"]).reshape(*x.shape[:2], -1, DIM), 3, axis=2)
    out = attend(q, k, v, SCHEME, weights["position"], causal=True)
    return x + out.reshape(x.shape) @ weights["out"]


def loss_of_one(weights, x, y):
    return jnp.mean((layer(weights, x, posenc_jax.attention) - y) ** 2)


def loss_of_shards(weights, x, y, pos):
    """Loss on each device, from its shard of x, y and pos; weights are replicated."""
    tokens = posenc.Tokens(pos)
    attend = partial(posenc_jax.ring_attention, axis_name="context", tokens=tokens)
    loss = jnp.mean((layer(weights, x, attend) - y) ** 2)
    return jax.lax.pmean(loss, ("data", "context"))


def step(loss, weights, *batch, rate=0.1):
    value, gradient = jax.value_and_grad(loss)(weights, *batch)
    return value, jax.tree.map(lambda w, g: w - rate * g, weights, gradient)


def work():
    mesh = jax.make_mesh(
        (DATA, CONTEXT), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    keys = jax.random.split(jax.random.key(0), 3)
    weights = first_weights(keys[0])
    x, y = (jax.random.normal(key, (BATCH, LENGTH, HEADS * DIM)) for key in keys[1:])
    expected, weights_of_one = jax.jit(partial(step, loss_of_one))(weights, x, y)

    order = posenc_jax.zigzag(LENGTH, CONTEXT)
    specs = (PartitionSpec(), TOKENS, TOKENS, PartitionSpec("context"))
    loss = jax.shard_map(loss_of_shards, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    batch = x[:, order], y[:, order], jnp.asarray(order)
    sharded, weights_of_shards = jax.jit(partial(step, loss))(weights, *batch)

    print(f"{DATA} x {CONTEXT} devices, tokens of the first: {order[: LENGTH // CONTEXT]}")
    print(f"loss {sharded:.6f}, on one device {expected:.6f}")
    for name in weights:
        equal = jax.tree.map(
            partial(np.allclose, atol=1e-6), weights_of_shards[name], weights_of_one[name]
        )
        print(f"{name} equal to one device after the step: {all(jax.tree.leaves(equal))}")


def main():
    """Run in a process with enough host devices, because JAX counts its devices once."""
    flags = f"--xla_force_host_platform_device_count={DATA * CONTEXT}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, __file__, "work"], env=env, stdout=-1, text=True)
    result.check_returncode()
    print(result.stdout, end="")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
