"""Ring attention on eight host devices against attention on one; prints the errors as JSON.

``test_jax_ring`` runs it as a separate process, because JAX counts its devices once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import partial

if __name__ == "__main__":
    # Most of the time goes to compiling, and the code need not be fast.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from subjects import SUBJECTS, normal, params_of

import posenc
import posenc_jax
from posenc.positions import packed
from posenc.schemes import Sum
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM

SHARDS, BATCH, LENGTH = 4, 2, 32
POS, SEG = packed([5, 14, 13])  # documents cross shards
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 6},
    "window-both-sides": {"window": 6},
    "segments": {"causal": True, "q_pos": POS, "k_pos": POS, "q_seg": SEG, "k_seg": SEG},
    # Document 7 has no key anywhere, so its rows are fully masked.
    "fully-masked": {"q_seg": np.where(SEG == 1, 7, SEG), "k_seg": SEG},
    "grouped": {"causal": True},
    "bfloat16": {"causal": True},
    "unsorted": {"causal": True},
    "uneven": {"causal": True},
    "short": {"causal": True},  # one token per shard
    "alone": {"causal": True},  # one shard
    "two-axes": {"causal": True},  # data and context
    "unchecked": {"causal": True},  # check_vma=False
    "jointly": {"causal": True},  # tokens over both axes of a mesh
    "default": {"causal": True},
    "default-x": {"causal": True},
    "default-x-scaled": {"causal": True, "scale": 1.5},
}
# Cumulative features of hidden states, and tables of queries, which read the scale and positions.
OWN = {"sums-and-shaw": Sum(SUBJECTS["fox"], SUBJECTS["shaw"])}
# A call takes seconds to compile, so one scheme runs every case, and the others the richest ones.
_OF_OTHERS = "default-x", "default-x-scaled", "window-both-sides", "plain", "causal"
EVERY = [("alibi-learned", case, "contiguous") for case in CASES if case not in _OF_OTHERS]
EVERY += [(name, "segments", "zigzag") for name in ("nope", "t5", "rope", "fading")]
EVERY += [("sums-and-shaw", "default-x-scaled", "contiguous")]
EVERY += [("selective", "default-x", "contiguous")]
EVERY += [("fading", "default-x", "contiguous"), ("fence", "causal", "zigzag")]
EVERY += [("parabola", "plain", "zigzag"), ("rope+key-side", "causal", "zigzag")]
EVERY += [("sink", "window", "contiguous"), ("shaw", "segments", "zigzag")]
EVERY += [("rerope-leaky", "fully-masked", "zigzag")]
WIDE = [("fading", "segments", "zigzag")]
# Rows without a key, packed documents, gates, and a sink, which needs the log-sum-exp's gradient.
QUICK = [
    ("alibi-learned", "fully-masked", "contiguous"),
    ("t5", "segments", "zigzag"),
    ("fading", "default-x", "contiguous"),
    ("sink", "window", "contiguous"),
]
PARTS = {"quick": (QUICK, []), "rest": ([at for at in EVERY if at not in QUICK], WIDE)}


def arguments(subject, case, layout, dtype):
    """Scheme, shards, arrays with gradients, params, keywords and order of a whole sequence."""
    scheme = (SUBJECTS | OWN)[subject]
    shards = {"alone": 1, "two-axes": 2, "jointly": 4}.get(case, SHARDS)
    k_len = shards if case == "short" else LENGTH
    q_len = k_len // 2 if case == "uneven" else k_len
    kv = 2 if case == "grouped" else HEADS
    options = dict(CASES[case])
    options.setdefault("k_pos", np.arange(k_len))
    options.setdefault("q_pos", np.arange(k_len - q_len, k_len))
    order = np.arange(k_len) if layout == "contiguous" else posenc_jax.zigzag(k_len, shards)
    if case == "unsorted":
        order = np.random.default_rng(0).permutation(k_len)
    arrays = {
        "q": normal((BATCH, q_len, HEADS, HEAD_DIM), 0),
        "k": normal((BATCH, k_len, kv, HEAD_DIM), 1),
        "v": normal((BATCH, k_len, kv, 12), 2),
    }
    x = normal((BATCH, k_len, HIDDEN_DIM), 3)
    if case.startswith("default-x"):
        arrays |= {"x": x}
    elif scheme.cumulative:
        where = {"pos": options["k_pos"], "seg": options.get("k_seg")}
        (sums,) = posenc.features(scheme, params_of(scheme), x=x, **where)[1].values()
        sums = np.asarray(sums)
        arrays |= {"q_features": sums, "k_features": sums}
    arrays = {n: jnp.asarray(a, "float32" if "features" in n else dtype) for n, a in arrays.items()}
    params = {n: jnp.asarray(a) for n, a in params_of(scheme).items()}
    return scheme, shards, arrays, params, options, order


def errors(subject, case, layout, dtype="float32"):
    """Largest error of the output and of each gradient, relative to its largest number."""
    dtype = "bfloat16" if case == "bfloat16" else dtype
    scheme, shards, arrays, params, options, order = arguments(subject, case, layout, dtype)
    token_axis = {name: 2 if "features" in name else 1 for name, a in arrays.items()}
    q_order = order if len(order) == arrays["q"].shape[1] else np.arange(arrays["q"].shape[1])
    orders = {name: q_order if name[0] == "q" else order for name in arrays}
    where = {n: options.pop(n) for n in list(options) if n[:2] in ("q_", "k_")}

    def by_name(arrays):
        names = scheme.cumulative
        return {
            name: dict.fromkeys(names, a) if "features" in name else a for name, a in arrays.items()
        }

    def on_one_device(arrays, params):
        tokens = {name: a.astype("float32") if a.dtype == "bfloat16" else a for name, a in
                  arrays.items()}  # fmt: skip
        tokens = by_name(tokens)
        return posenc_jax.attention(
            **tokens, scheme=scheme, params=params, implementation="reference", **where, **options
        )

    axes = {"two-axes": ("data", "context"), "jointly": ("data", "context")}.get(case, ("context",))
    sizes = (2, 2) if case == "jointly" else (2, shards) if len(axes) == 2 else (shards,)
    mesh = jax.make_mesh(sizes, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    axis_name = axes if case == "jointly" else "context"
    data = "data" if case == "two-axes" else None
    specs = {
        name: P(
            data, *[axis_name if axis == token_axis[name] else None for axis in range(1, a.ndim)]
        )
        for name, a in arrays.items()
    }
    local_positions = {} if "default" in case else {
        n: jnp.asarray(a)[q_order if n[0] == "q" else order] for n, a in where.items()
    }  # fmt: skip

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P(), P(axis_name)),
        out_specs=P(data, axis_name),
        check_vma=case != "unchecked",
    )
    def ring(arrays, params, where):
        return posenc_jax.ring_attention(
            **by_name(arrays), scheme=scheme, params=params, axis_name=axis_name, **where, **options
        )

    def on_shards(arrays, params):
        in_order = {n: jnp.take(a, orders[n], axis=token_axis[n]) for n, a in arrays.items()}
        return jnp.take(ring(in_order, params, local_positions), np.argsort(q_order), axis=1)

    d_out = jnp.asarray(normal((*arrays["q"].shape[:3], 12), 4), "float32")

    def both(function):
        out, transpose = jax.vjp(function, arrays, params)
        return out, transpose(d_out.astype(out.dtype))

    result, expected = (
        jax.jit(partial(both, function))() for function in (on_shards, on_one_device)
    )
    if case == "fully-masked":
        masked = np.asarray(SEG == 1)
        assert not np.any(np.asarray(result[0])[:, masked])
        assert not np.any(np.asarray(result[1][0]["q"])[:, masked])

    def error(a, b):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.all(np.isfinite(a))
        return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-3))

    return max(jax.tree.leaves(jax.tree.map(error, result, expected)))


def attempt(*at, dtype="float32"):
    try:
        return errors(*at, dtype=dtype)
    except Exception:
        return traceback.format_exc()


def main():
    calls, wide = PARTS[sys.argv[1]]
    results = {"-".join(at): attempt(*at) for at in calls}
    with jax.enable_x64(True):
        results |= {"-".join((*at, "float64")): attempt(*at, dtype="float64") for at in wide}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
