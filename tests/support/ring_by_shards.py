"""Ring attention on eight host devices against attention on one; prints the errors as JSON.

``test_jax_ring`` runs it as a separate process, because JAX counts its devices once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import replace
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
from posenc import Tokens
from posenc.apply.feature_needs import summed_features
from posenc.positions import packed
from posenc.schemes import Sink, Sum
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM

SHARDS, BATCH, LENGTH = 4, 2, 32
PACKED = packed([5, 14, 13])  # documents cross shards
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 6},
    "window-both-sides": {"window": 6},
    "segments": {"causal": True, "tokens": PACKED},
    # Document 7 has no key anywhere, so its rows are fully masked.
    "fully-masked": {
        "tokens": Tokens(seg=PACKED.seg),
        "queries": Tokens(seg=np.where(PACKED.seg == 1, 7, PACKED.seg)),
    },
    "padding": {"causal": True, "tokens": Tokens(exists=np.arange(LENGTH) % 13 > 4)},
    "grouped": {"causal": True},
    "bfloat16": {"causal": True},
    "unsorted": {"causal": True},
    "uneven": {"causal": True},
    # Queries of a shard are in documents that its own keys lack, and keys likewise.
    "uneven-segments": {"causal": True, "tokens": PACKED},
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
# Learned arrays that vectors meet, which are 0 in padding.
OWN |= {"sink-and-angles": Sink(SUBJECTS["learned_rope"], HEADS)}
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
EVERY += [("sink", "segments", "zigzag")]
# Packed documents, and a sink, which needs the log-sum-exp's gradient.
QUICK = [("sink-and-angles", "uneven-segments", "contiguous")]
PARTS = {"quick": (QUICK, []), "rest": ([at for at in EVERY if at not in QUICK], WIDE)}


def arguments(subject, case, layout, dtype):
    """Scheme, shards, arrays with gradients, params, and order of a whole sequence.

    Also the integers of its tokens, and the other keywords.
    """
    scheme = (SUBJECTS | OWN)[subject]
    shards = {"alone": 1, "two-axes": 2, "jointly": 4}.get(case, SHARDS)
    k_len = shards if case == "short" else LENGTH
    q_len = k_len // 2 if case.startswith("uneven") else k_len
    kv = 2 if case == "grouped" else HEADS
    options = dict(CASES[case])
    where = {n: options.pop(n) for n in ("tokens", "queries") if n in options}
    keys = where.get("tokens", Tokens())
    where["tokens"] = keys = replace(keys, pos=np.arange(k_len)) if keys.pos is None else keys
    sums = summed_features(scheme) and not case.startswith("default-x")
    if "queries" in where or q_len != k_len or sums:  # otherwise they are the same tokens
        queries = where.get("queries", keys[k_len - q_len :])
        where["queries"] = replace(queries, pos=keys.pos[k_len - q_len :])
    order = np.arange(k_len) if layout == "contiguous" else posenc_jax.zigzag(k_len, shards)
    if case == "unsorted":
        order = np.random.default_rng(0).permutation(k_len)
    arrays = {
        "q": normal((BATCH, q_len, HEADS, HEAD_DIM), 0),
        "k": normal((BATCH, k_len, kv, HEAD_DIM), 1),
        "v": normal((BATCH, k_len, kv, 12), 2),
    }
    arrays = {n: jnp.asarray(a, dtype) for n, a in arrays.items()} | {n: Tokens() for n in where}
    x = normal((BATCH, k_len, HIDDEN_DIM), 3)
    if case.startswith("default-x"):
        arrays["tokens"] = Tokens(x=jnp.asarray(x, dtype))
    elif sums:
        both = posenc.features(scheme, params_of(scheme), replace(keys, x=x))
        for name, side in zip(("queries", "tokens"), both, strict=True):
            features = {n: jnp.asarray(a, "float32") for n, a in side.features.items()}
            arrays[name] = Tokens(features=features)
    params = {n: jnp.asarray(a) for n, a in params_of(scheme).items()}
    return scheme, shards, arrays, params, where, options, order


def in_order(value, order):
    """An array ``(B, L, ...)``, or every array of tokens, with its tokens in another order."""
    if not isinstance(value, Tokens):
        return jnp.take(value, order, axis=1)
    axes = {"x": 1, "features": 2}
    return Tokens(
        **{
            name: jax.tree.map(partial(jnp.take, indices=order, axis=axes.get(name, 0)), own)
            for name, own in vars(value).items()
        }
    )


def whole(arrays, where):
    """Arrays with gradients and integers of tokens as arguments of attention."""
    sides = {
        n: replace(side, x=arrays[n].x, features=arrays[n].features) for n, side in where.items()
    }
    return {n: a for n, a in arrays.items() if not isinstance(a, Tokens)} | sides


def errors(subject, case, layout, dtype="float32"):
    """Largest error of the output and of each gradient, relative to its largest number."""
    dtype = "bfloat16" if case == "bfloat16" else dtype
    scheme, shards, arrays, params, where, options, order = arguments(subject, case, layout, dtype)
    q_order = order if len(order) == arrays["q"].shape[1] else np.arange(arrays["q"].shape[1])
    orders = {name: q_order if name in ("q", "queries") else order for name in arrays}

    def on_one_device(arrays, params):
        wide = jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, "float32")), arrays)
        return posenc_jax.attention(
            **whole(wide, where), scheme=scheme, params=params, implementation="reference",
            **options,
        )  # fmt: skip

    axes = {"two-axes": ("data", "context"), "jointly": ("data", "context")}.get(case, ("context",))
    sizes = (2, 2) if case == "jointly" else (2, shards) if len(axes) == 2 else (shards,)
    mesh = jax.make_mesh(sizes, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    axis_name = axes if case == "jointly" else "context"
    data = "data" if case == "two-axes" else None
    of_tokens = Tokens(x=P(data, axis_name), features=P(data, None, axis_name))
    specs = {
        name: of_tokens if isinstance(a, Tokens) else P(data, axis_name)
        for name, a in arrays.items()
    }
    local = {n: Tokens() if "default" in case else in_order(where[n], orders[n]) for n in where}

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P(), P(axis_name)),
        out_specs=P(data, axis_name),
        check_vma=case != "unchecked",
    )
    def ring(arrays, params, where):
        return posenc_jax.ring_attention(
            **whole(arrays, where), scheme=scheme, params=params, axis_name=axis_name, **options
        )

    def on_shards(arrays, params):
        own = {n: in_order(a, orders[n]) for n, a in arrays.items()}
        return jnp.take(ring(own, params, local), np.argsort(q_order), axis=1)

    d_out = jnp.asarray(normal((*arrays["q"].shape[:3], 12), 4), "float32")

    def both(function):
        out, transpose = jax.vjp(function, arrays, params)
        return out, transpose(d_out.astype(out.dtype))

    result, expected = (
        jax.jit(partial(both, function))() for function in (on_shards, on_one_device)
    )
    if case in ("fully-masked", "padding"):
        masked = PACKED.seg == 1 if case == "fully-masked" else ~where["tokens"].exists
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
