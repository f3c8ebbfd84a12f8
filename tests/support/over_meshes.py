"""Attention of arrays that are spread over four host devices; prints the errors as JSON.

``test_meshes`` runs it as a separate process, because JAX counts its devices once, and forgets axes
of one device.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

if __name__ == "__main__":
    # Most of the time goes to compiling, and the code need not be fast.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sample import in_turn
from subjects import SUBJECTS, normal, params_of

import posenc
import posenc_jax
from posenc.layers import LayerPlan
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM

LENGTH, BATCH, LAYERS = 20, 2, 2
SPREAD = {"q": P("data", None, "heads"), "x": P("data"), "sees": P("data"), "seg": P("data")}
ARRAYS = {
    "q": normal((BATCH, LENGTH, HEADS, HEAD_DIM), 0, "float32"),
    "x": normal((BATCH, LENGTH, HIDDEN_DIM), 1, "float32"),
    "sees": np.random.default_rng(2).random((BATCH, 1, LENGTH, LENGTH)) < 0.8,
    "seg": np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) // 7,
}


def attend(scheme, params, given):
    """With a mask and documents, by one call; and the log-sum-exp."""
    tokens = posenc.Tokens(x=given["x"], seg=given["seg"])
    q, mask = given["q"], posenc.causal & given["sees"]
    return posenc_jax.attention(q, q, q, scheme, params, mask=mask, tokens=tokens, return_lse=True)


def attend_in_layers(scheme, params, given):
    """By the layers of a pass, which all have the same arrays."""
    own = {str(layer): params for layer in range(LAYERS)} if params else {}
    positions, out = posenc_jax.Positions(LayerPlan.of(scheme, LAYERS), own), given["q"]
    bound = positions.bind(tokens=posenc.Tokens(seg=given["seg"]), causal=True)
    for layer in bound:
        out = layer(out, out, out, x=given["x"])
    return out, out[..., 0]


CALLS = {"attend": attend, "attend in layers": attend_in_layers}


def errors(name, call, kinds):
    """The largest differences of values and gradients, compiled; and of values, eager."""
    scheme = SUBJECTS[name]
    params = {n: jnp.asarray(a) for n, a in params_of(scheme).items()}

    def loss(floats, params, others):
        out, lse = call(scheme, params, {**floats, **others})
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(out**2) + jnp.sum(seen), (out, seen)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def parted(arrays):
        of_floats = {n: a for n, a in arrays.items() if a.dtype == np.float32}
        return of_floats, {n: a for n, a in arrays.items() if n not in of_floats}

    plain, others = parted({n: jnp.asarray(a) for n, a in ARRAYS.items()})
    expected = step(plain, params, others)
    found = {}
    for kind in kinds:
        axes, _, eager = kind.partition(" ")
        mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType[axes],) * 2)
        given, others = parted(
            {n: jax.device_put(a, NamedSharding(mesh, SPREAD[n])) for n, a in ARRAYS.items()}
        )
        everywhere = jax.device_put(params, NamedSharding(mesh, P()))
        tokens, q = posenc.Tokens(x=given["x"], seg=others["seg"]), given["q"]
        assert posenc_jax.explain(q, q, q, scheme, everywhere, tokens=tokens)["implementation"]
        if eager:
            results = loss(given, everywhere, others)[1]
            found[kind] = difference(results, expected[0][1])
            continue
        results = step(given, everywhere, others)
        found[kind] = difference(results, expected)
        out = results[0][1][0]
        if axes == "Explicit":  # lies as the queries do
            assert jax.typeof(out).sharding.spec == P("data", None, "heads", None)
    return found


def difference(results, expected):
    """The largest one, relative to the largest number of each array."""
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / max(1.0, np.max(np.abs(b))))
        for a, b in pairs
    )


ALL = ("Explicit", "Auto", "Explicit eager", "Auto eager")
# Vectors of tokens. Each program compiles for seconds.
QUICK = [("attend in layers", "deberta", ALL[:1])]
WHOLLY = ("fox", "cope")
REST = [(call, name, ALL) for call in CALLS for name in WHOLLY]
REST += [("attend", "t5", ALL[:1])]  # a bias that is gathered
REST += [("attend", n, ALL[:1]) for n in in_turn(SUBJECTS, 0, 4) if n not in WHOLLY]
PARTS = {"quick": QUICK, "rest": REST}


def main(part):
    found = {}
    for call, name, kinds in PARTS[part]:
        try:
            own = errors(name, CALLS[call], kinds)
        except Exception:
            own = dict.fromkeys(kinds, traceback.format_exc())
        found |= {f"{name}, {call}, {kind}": error for kind, error in own.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
