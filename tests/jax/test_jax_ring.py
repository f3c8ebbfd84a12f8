"""Ring attention over host devices equals one device: values and every gradient."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks import HAS
from sample import long

import posenc
from posenc.testing.tolerances import attention_bound, rounding_bound

if not HAS["jax"]:
    pytest.skip("JAX is not installed", allow_module_level=True)

import jax
from ring_by_shards import PARTS

import posenc_jax

# Errors relative to the largest number. Two programs, each forward and backward, over 32 keys. A
# learned number is in all 2 * 32 * 32 scores of a head, a result in 32, and errors of terms of both
# signs grow like the root. In bfloat16 a result is rounded once, and a gradient of keys once for
# each of 4 shards.
TOLERANCE = {
    dtype: 2 * 2 * attention_bound(dtype, keys=32) * math.sqrt(2 * 32)
    for dtype in ("float32", "float64")
} | {"bfloat16": rounding_bound(1 + 4, 1, "bfloat16")}
TIMEOUT = 900  # seconds for all calls; they need about 100


@pytest.mark.parametrize("part", ["quick", pytest.param("rest", marks=long)])
def test_equals_one_device(part):
    """Many calls are one test, so that the process with eight devices starts once."""
    calls, wide = PARTS[part]
    script = Path(__file__).parents[1] / "support" / "ring_by_shards.py"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(script), part],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == len(calls) + len(wide)
    wrong = {}
    for at, error in errors.items():
        dtype = next((dtype for dtype in ("bfloat16", "float64") if dtype in at), "float32")
        if isinstance(error, str) or not error < TOLERANCE[dtype]:
            wrong[at] = error
    assert not wrong, wrong


def test_shards_count_their_keys():
    """All scores are equal: a log-sum-exp in one number has lost how many keys a shard has."""
    shards, score = 4, 2.0**20
    q = jax.numpy.full((shards, 1, 4, 2, 1), score)
    v, d_out = jax.random.normal(jax.random.key(0), (2, shards, 1, 4, 2, 8))

    def ring(q, k, v):
        return posenc_jax.ring_attention(
            q, k, v, posenc.NoPE(), causal=True, scale=1.0, axis_name="shards"
        )

    def both(q, k, v, d_out):
        out, transpose = jax.vjp(ring, q, k, v)
        return out, *transpose(d_out)

    # The axis of a vmap will do: each of its rows is a shard.
    spread = jax.jit(jax.vmap(both, axis_name="shards"))
    out, d_q, _, d_v = spread(q, jax.numpy.ones_like(q), v, d_out)
    rows = [np.asarray(a, np.float64).reshape(shards * 4, 2, -1) for a in (out, d_q, v, d_out, d_v)]
    out, d_q, v, d_out, d_v = rows
    count = np.arange(1, len(v) + 1)[:, None, None]
    tolerance = TOLERANCE["float32"]
    np.testing.assert_allclose(out, np.cumsum(v, axis=0) / count, atol=tolerance)
    np.testing.assert_allclose(d_q, 0, atol=tolerance)  # all keys are alike
    wanted = np.cumsum((d_out / count)[::-1], axis=0)[::-1]
    np.testing.assert_allclose(d_v, wanted, atol=tolerance * np.abs(wanted).max())


def attend(scheme, length=4, k_length=4, axis="context", **options):
    """On a mesh of one device."""
    q, k = (jax.numpy.ones((1, n, 4, 8)) for n in (length, k_length))
    mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))

    def ring(q, k):
        return posenc_jax.ring_attention(q, k, k, scheme, axis_name=axis, **options)

    tokens = jax.sharding.PartitionSpec(None, "context")
    return jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=tokens, out_specs=tokens))(q, k)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis": "ring"}, ValueError, "axis_name='ring'"),
        ({"implementation": "pallas"}, NotImplementedError, "kernels are for"),
        ({"implementation": "xla"}, ValueError, "unknown implementation 'xla'"),
        ({"length": 5}, ValueError, "give pos of tokens and of queries"),
        (
            {"queries": posenc.Tokens(pos=np.arange(4))},
            ValueError,
            r"queries\.pos is given without tokens\.pos",
        ),
        (
            {"length": 2, "tokens": posenc.Tokens(seg=np.zeros(4, int))},
            ValueError,
            "tokens are given without queries, but q and k differ in length",
        ),
    ],
    ids=["axis", "refused", "unknown", "longer", "half", "shorter"],
)
def test_wrong_calls(options, error, message):
    with pytest.raises(error, match=message):
        attend(posenc.ALiBi(4), **options)


def test_whole_rows_are_refused_by_the_ring_not_by_chunked():
    """``chunked`` of ``attention`` serves them; the message must not deny it."""
    scheme = posenc.make("cope", head_dim=8)
    params = posenc.init_params(scheme)
    with pytest.raises(NotImplementedError, match="which 'chunked' of ring_attention does not"):
        attend(scheme, params=params)


def test_hidden_states_of_a_shard_are_not_enough_at_given_positions():
    from subjects import params_of

    from posenc.schemes import FoX
    from posenc.testing.examples import HEADS, HIDDEN_DIM

    pos, scheme = np.arange(4), FoX(HEADS, HIDDEN_DIM)
    x = np.ones((1, 4, HIDDEN_DIM), np.float32)
    with pytest.raises(
        ValueError, match=r"positions without features.*give tokens and queries with features"
    ):
        attend(scheme, params=params_of(scheme), tokens=posenc.Tokens(pos=pos, x=x))


@long
def test_summed_features_of_a_shard_are_those_of_the_call():
    """Padding is refused by name; the caller's scale reaches features of vectors too."""
    from subjects import params_of

    from posenc.schemes import FoX, Shaw, Sum
    from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM

    x, scheme = jax.numpy.ones((1, 4, HIDDEN_DIM)), Sum(FoX(HEADS, HIDDEN_DIM), Shaw(HEAD_DIM))
    given = {"params": params_of(scheme), "causal": True}
    with pytest.raises(ValueError, match="padding without features: those of Sum"):
        attend(scheme, **given, tokens=posenc.Tokens(exists=np.ones((1, 4), bool), x=x))
    given |= {"tokens": posenc.Tokens(x=x), "scale": 2.0}
    q = np.ones((1, 4, 4, 8), np.float32)
    expected = posenc_jax.attention(q, q, q, scheme, **given)
    # An empty record of queries is the same as none.
    for queries in (None, posenc.Tokens()):
        assert np.allclose(attend(scheme, **given, queries=queries), expected, atol=1e-6)


@pytest.mark.parametrize(("length", "shards"), [(8, 2), (6, 1), (48, 8)])
def test_zigzag_is_a_permutation_with_the_same_causal_work_everywhere(length, shards):
    order = posenc_jax.zigzag(length, shards)
    assert sorted(order) == list(range(length))
    assert len({int(np.sum(part + 1)) for part in np.split(order, shards)}) == 1


@pytest.mark.parametrize(
    ("length", "shards", "message"), [(6, 2, "multiple of"), (0, 1, "length"), (4, 0, "shards")]
)
def test_zigzag_of_wrong_numbers(length, shards, message):
    with pytest.raises(ValueError, match=message):
        posenc_jax.zigzag(length, shards)
