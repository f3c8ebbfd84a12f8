"""A small decoder in JAX that takes any scheme, or a list of schemes by layer.

``Positions`` is a pytree among the params. It adds an embedding once and holds one T5 table for all
layers that have T5. ``positions.bind`` makes what positions alone decide, such as the angles of
RoPE or the bias of T5, once for all layers.
``param_labels`` says which params are position params, so they can have their own learning rate.
With Optax it is the second argument of ``multi_transform``.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import posenc
import posenc_jax

LAYERS, HEADS, DIM, LENGTH, STEPS = 2, 4, 64, 64, 20
TEXT = np.frombuffer(Path(__file__).read_bytes(), dtype=np.uint8).astype(np.int32)
RATES = {"decay": 0.1, "no_decay": 0.1, "position": 1.0}  # of plain gradient descent
SHAPES = {"qkv": (DIM, 3 * DIM), "out": (DIM, DIM), "up": (DIM, 4 * DIM), "down": (4 * DIM, DIM)}


def first_params(scheme, key):
    def draw(shape):
        return np.float32(rng.standard_normal(shape) / shape[0] ** 0.5)

    rng = np.random.default_rng(0)
    blocks = [{name: draw(shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
    positions = posenc_jax.Positions.init(scheme, LAYERS, key)
    return {"tokens": draw((256, DIM)), "blocks": blocks, "positions": positions}


def block(w, x, attend):
    qkv = (jax.nn.standardize(x) @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1)
    qkv = jnp.split(qkv, 3, axis=2)
    out = attend(*qkv)
    x = x + out.reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ w["up"]) @ w["down"]


def loss_of(params, tokens):
    bound = params["positions"].bind(causal=True)  # one forward pass
    x = bound.embed(params["tokens"][tokens[:, :-1]])
    for w, attend in zip(params["blocks"], bound, strict=True):
        x = block(w, x, attend)
    logp = jax.nn.log_softmax(jax.nn.standardize(x) @ params["tokens"].T)
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


@jax.jit
def step(params, tokens):
    loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
    rates = jax.tree.map(RATES.get, posenc_jax.param_labels(params))
    return jax.tree.map(lambda p, g, rate: p - rate * g, params, gradient, rates), loss


def main():
    t5 = posenc.T5Bias(HEADS, causal=True, max_distance=LENGTH)  # training uses every bucket
    params, rng = (
        first_params([t5, posenc.RoPE(DIM // HEADS)], jax.random.key(0)),
        np.random.default_rng(1),
    )
    for n in range(STEPS):
        starts = rng.integers(0, len(TEXT) - LENGTH, (8, 1))
        params, loss = step(params, TEXT[starts + np.arange(LENGTH + 1)])
        if n % 10 in (0, 9):
            print(f"step {n + 1}: loss {loss:.2f}")
    print("learned positions:", jax.tree.map(jnp.shape, params["positions"].params))


if __name__ == "__main__":
    main()
