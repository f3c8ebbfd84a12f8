"""What only JAX has: memory of compiled programs, tracing, keys. Laws compare the values."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from sample import long, some
from subjects import SUBJECTS, fox_alibi, normal, params_of

import posenc
from posenc.apply.feature_needs import reads_hidden
from posenc.attn.prepare import prepare
from posenc.schemes import Sum
from posenc.testing.examples import HIDDEN_DIM
from posenc.testing.tolerances import UNIT, assert_near, attention_bound, rounding_bound

jax = pytest.importorskip("jax")
jnp = jax.numpy
posenc_jax = pytest.importorskip("posenc_jax")
from posenc_jax.chunked.blocks import block_size, make_tiling  # noqa: E402
from posenc_jax.chunked.by_distance import split_bias  # noqa: E402
from posenc_jax.chunked.implementation import chunked  # noqa: E402
from posenc_jax.chunked.ranges import needed_ranges  # noqa: E402

HEADS, DIM = 4, 16


def tensors(length, *, batch=2, kv_heads=HEADS, k_length=None, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(length, HEADS), *[(k_length or length, kv_heads)] * 2]
    return [
        jnp.asarray(rng.standard_normal((batch, size, heads, DIM)), jnp.float32)
        for size, heads in shapes
    ]


def loss(scheme, implementation, q, k, v, params=None, **options):
    out = posenc_jax.attention(
        q, k, v, scheme, params, causal=True, implementation=implementation, **options
    )
    return jnp.sum(out**2)


def assert_alike(result, expected):
    """Compare losses and gradients of two programs in float32, up to 300 queries and 300 keys.

    Each program has a forward and a backward pass. A learned number is in all 2 * 300 * 301 / 2
    scores of a head, a result in 300. Errors of terms of both signs grow like the root.
    """
    bound = 2 * 2 * attention_bound("float32", channels=DIM, keys=300) * math.sqrt(301)
    jax.tree.map(partial(assert_near, tolerance=bound), result, expected)


def temporaries(length, scheme, implementation):
    """Bytes of temporaries of forward and backward, compiled for the CPU."""
    shape = jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        for name, spec in scheme.param_specs().items()
    }
    gradient = jax.grad(partial(loss, scheme, implementation), argnums=(0, 1, 2, 3))
    lowered = jax.jit(gradient).lower(shape, shape, shape, params)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@long
@pytest.mark.parametrize(
    "scheme",
    some([posenc.T5Bias(HEADS), posenc.ALiBi(HEADS, learned=True)], [posenc.T5Bias(HEADS)], long),
    ids=lambda scheme: type(scheme).__name__,
)
def test_memory_grows_linearly(scheme):
    half, whole = (temporaries(length, scheme, "chunked") for length in (8192, 16384))
    assert whole < 2.2 * half
    assert whole < HEADS * 16384**2 * 4 / 30


@long
def test_a_bias_that_costs_more_than_scores_is_computed_once_per_distance():
    """And not for every pair: here it has 16 cosines, or a bucket and a look-up."""
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in tensors(7, k_length=9))
    at = np.arange(9) - np.arange(2, 9)[:, None] + 9 - 1
    for scheme in posenc.schemes.Sandwich(HEADS, dim=32), posenc.T5Bias(HEADS):
        params = posenc_jax.init(scheme, jax.random.key(0))
        call = prepare(q, k, v, scheme, params, xp=jnp)
        table, by_pair = split_bias(call)
        np.testing.assert_array_equal(table[:, at], call.bias()[0])
        assert by_pair == ()
    alibi = posenc.ALiBi(HEADS)
    assert split_bias(prepare(q, k, v, alibi, xp=jnp)) == (None, (("", alibi),))
    # A sum has both.
    both = posenc.schemes.Sum(alibi, posenc.T5Bias(HEADS))
    params = posenc_jax.init(both, jax.random.key(0))
    table, by_pair = split_bias(prepare(q, k, v, both, params, xp=jnp))
    t5 = prepare(q, k, v, both.schemes[1], {"table": params["1_table"]}, xp=jnp)
    np.testing.assert_array_equal(table[:, at], t5.bias()[0])
    assert by_pair == (("0_", alibi),)


@long
def test_dense_implementations_hold_all_scores():
    scores = HEADS * 2048**2 * 4
    assert temporaries(2048, posenc.ALiBi(HEADS), "xla") > scores
    assert temporaries(2048, posenc.ALiBi(HEADS), "chunked") < scores / 4


def test_the_logsumexp_of_chunked_has_a_gradient():
    """Two parts of one softmax are merged by it."""
    scheme, slopes = posenc.ALiBi(HEADS, learned=True), jnp.asarray([0.5, 0.25, 0.1, 0.01])
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in tensors(300, kv_heads=2))

    def call(q, k, slopes):
        return prepare(q, k, v, scheme, {"slopes": slopes}, causal=True, xp=jnp)

    def ours(*leaves):
        return jnp.sum(jnp.sin(chunked(call(*leaves))[1].rounded()))

    def expected(*leaves):
        at = call(*leaves)
        scores = jnp.einsum("bhqd,bhkd->bhqk", at.q, jnp.repeat(at.k, 2, axis=1)) * at.scale
        scores = jnp.where(at.visible(), scores + at.bias(), -jnp.inf)
        return jnp.sum(jnp.sin(jax.nn.logsumexp(scores, axis=-1)))

    assert_alike(
        *(
            jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, slopes)
            for f in (ours, expected)
        ),
    )


def test_auto_leaves_long_sequences_to_tiles():
    def implementation(length, k_length=None):
        q = jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)
        k = jax.ShapeDtypeStruct((1, k_length or length, HEADS, DIM), jnp.float32)
        explanation = {}
        jax.eval_shape(
            lambda q, k: explanation.update(posenc_jax.explain(q, k, k, posenc.ALiBi(HEADS))), q, k
        )
        return explanation["implementation"]

    assert implementation(2048) == "chunked"
    assert implementation(1, 65536) == "xla"


@long
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_jit_equals_eager(implementation):
    scheme = posenc.T5Bias(HEADS, max_distance=64)
    arrays = (*tensors(20, k_length=300, kv_heads=2), posenc_jax.init(scheme, jax.random.key(0)))
    gradient = jax.value_and_grad(partial(loss, scheme, implementation), argnums=(0, 1, 2, 3))
    assert_alike(
        jax.jit(gradient)(*arrays),
        gradient(*arrays),
    )


@pytest.mark.parametrize("implementation", some(["xla", "chunked"], ["chunked"], long))
def test_traced_positions_equal_the_default(implementation):
    scheme, (q, k, v) = posenc.ALiBi(HEADS), tensors(40, k_length=300)
    pos = jnp.arange(260, 300), jnp.arange(300)

    @jax.jit
    def traced(q_pos, k_pos):
        return jax.value_and_grad(partial(loss, scheme, implementation))(
            q, k, v, tokens=posenc.Tokens(pos=k_pos), queries=posenc.Tokens(pos=q_pos)
        )

    assert_alike(
        traced(*pos),
        jax.jit(jax.value_and_grad(partial(loss, scheme, implementation)))(q, k, v),
    )


@long
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_vmap_of_the_whole_call(implementation):
    scheme = posenc.ALiBi(HEADS, learned=True)
    stacked = [jnp.stack(pair) for pair in zip(tensors(30), tensors(30, seed=1), strict=True)]
    slopes = {"slopes": jnp.asarray([[0.5, 0.1, 0.2, 0.3], [1.0, 0.4, 0.0, 0.7]])}
    pos = jnp.asarray([range(30), range(7, 37)])

    def one(q, k, v, params, pos):
        gradient = jax.value_and_grad(partial(loss, scheme, implementation), argnums=(0, 1, 2, 3))
        return gradient(q, k, v, params, tokens=posenc.Tokens(pos=pos))

    arrays = (*stacked, slopes, pos)
    separate = [jax.jit(one)(*jax.tree.map(lambda a, i=i: a[i], arrays)) for i in range(2)]
    assert_alike(
        jax.jit(jax.vmap(one))(*arrays),
        jax.tree.map(lambda *pair: jnp.stack(pair), *separate),
    )


@pytest.mark.parametrize("implementation", some(["xla", "chunked"], ["xla"], long))
def test_fully_masked_rows(implementation):
    scheme, (q, k, v) = posenc.ALiBi(HEADS, learned=True), tensors(300)
    params = posenc_jax.init(scheme, jax.random.key(0))
    where = {
        "tokens": posenc.Tokens(seg=jnp.zeros(300, int)),
        "queries": posenc.Tokens(seg=jnp.where(jnp.arange(300) % 3 == 0, 1, 0)),
    }

    @jax.jit
    def both(*arrays):
        out = posenc_jax.attention(
            *arrays[:3], scheme, arrays[3], causal=True, implementation=implementation, **where
        )
        gradient = jax.grad(partial(loss, scheme, implementation), argnums=(0, 1, 2, 3))
        return out, gradient(*arrays, **where)

    out, gradients = both(q, k, v, params)
    assert not jnp.any(out[:, ::3])
    assert not jnp.any(gradients[0][:, ::3])
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves((out, gradients)))


@pytest.mark.parametrize(
    "implementation", some(["auto", "chunked", "reference"], ["chunked"], long)
)
def test_float64(implementation):
    scheme = posenc.ALiBi(HEADS)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 270, HEADS, DIM)) for _ in range(3))
    expected = posenc.attention(*(a.swapaxes(1, 2) for a in (q, k, v)), scheme, causal=True)
    with jax.enable_x64(True):
        out = posenc_jax.attention(
            *map(jnp.asarray, (q, k, v)), scheme, causal=True, implementation=implementation
        )
        assert out.dtype == jnp.float64
        bound = attention_bound("float64", channels=DIM, keys=270)
        assert_near(out.swapaxes(1, 2), expected, 2 * bound)


def test_xla_refuses_float64():
    with jax.enable_x64(True):
        q = jnp.zeros((1, 3, HEADS, DIM), jnp.float64)
        with pytest.raises(NotImplementedError, match="float32"):
            posenc_jax.attention(q, q, q, posenc.NoPE(), implementation="xla")


def test_xla_refuses_values_of_another_width():
    q = jnp.zeros((1, 3, HEADS, DIM))
    with pytest.raises(NotImplementedError, match="head_dim 16, v has 8"):
        posenc_jax.attention(q, q, q[..., :8], posenc.NoPE(), implementation="xla")
    assert posenc_jax.explain(q, q, q[..., :8], posenc.NoPE())["implementation"] == "chunked"


@long
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64"])
def test_positions_of_any_integer_dtype(dtype):
    q, k, v = tensors(20)
    pos = np.arange(20).astype(dtype)
    out = posenc_jax.attention(q, k, v, posenc.ALiBi(HEADS), tokens=posenc.Tokens(pos=pos))
    np.testing.assert_array_equal(out, posenc_jax.attention(q, k, v, posenc.ALiBi(HEADS)))


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_init_draws_the_same_under_jit(key):
    scheme = posenc.T5Bias(HEADS)
    outside = posenc_jax.init(scheme, key)
    assert outside["table"].dtype == jnp.float32
    inside = jax.jit(partial(posenc_jax.init, scheme))(key)
    np.testing.assert_array_equal(inside["table"], outside["table"])
    abstract = jax.eval_shape(partial(posenc_jax.init, scheme), key)
    assert abstract["table"].shape == outside["table"].shape
    assert posenc_jax.init(posenc.NoPE(), key) == {}


def test_init_takes_one_key():
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match="one key"):
        posenc_jax.init(posenc.T5Bias(HEADS), keys)
    tables = jax.vmap(partial(posenc_jax.init, posenc.T5Bias(HEADS)))(keys)["table"]
    np.testing.assert_array_equal(
        tables[1], posenc_jax.init(posenc.T5Bias(HEADS), keys[1])["table"]
    )


def test_keys_decide():
    tables = [posenc_jax.init(posenc.T5Bias(2), jax.random.key(n))["table"] for n in range(3)]
    assert not np.array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[1], tables[2])


def test_a_row_outside_the_table_is_nan_where_positions_are_traced():
    scheme, table = posenc.Learned(max_len=3, dim=2, offset=1), {"table": jnp.ones((4, 2))}
    embedded = jax.jit(lambda pos: posenc.embedding(scheme, pos, table))(jnp.asarray([0, 3, -1]))
    np.testing.assert_array_equal(np.isnan(embedded).all(axis=-1), [False, True, True])


@pytest.mark.parametrize("size", [1e5, 1e8])
def test_the_highest_of_large_scores_takes_all(size):
    """In one block, which XLA fuses into one operation, and with a scale that rounds."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 20, 2, 12)) * factor for factor in (size, size, 1)]
    narrow = [np.asarray(a, np.float32) for a in arrays]
    out = posenc_jax.attention(*map(jnp.asarray, narrow), posenc.NoPE(), implementation="chunked")
    wide = [np.swapaxes(a, 1, 2).astype(np.float64) for a in narrow]
    expected = posenc.attention(*wide, posenc.NoPE())
    # The highest score is so far above the others that only its key has weight.
    assert_near(np.swapaxes(out, 1, 2), expected, attention_bound("float32", channels=12))


# Negligible blocks, in blocks of 8 tokens

FADED = 72  # tokens: nine blocks, one more than skipping needs
STEEP = posenc.ALiBi(HEADS, learned=True, slopes=[8.0, 4.0, 2.0, 1e-3])


def pulled(scheme, *, implementation="chunked", tokens=None, **options):
    """A compiled function: the result, and the gradients of all arrays."""

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(arrays, d_out):
        def attend(arrays):
            q, k, v = (arrays[name] for name in "qkv")
            own = tokens if "x" not in arrays else posenc.Tokens(x=arrays["x"])
            return posenc_jax.attention(
                q, k, v, scheme, arrays["params"], causal=True,
                implementation=implementation, tokens=own, **options,
            )  # fmt: skip

        with block_size(8):
            out, pull = jax.vjp(attend, arrays)
            return out, pull(d_out)[0]

    return run


def faded(scheme, *, q_length=FADED, dtype="float32", kv_heads=None, **_):
    """Arrays of attention to ``FADED`` keys, and a gradient of its result."""
    rng, heads = np.random.default_rng(0), posenc.contract.params.head_count(scheme)
    sizes = {
        "q": (q_length, heads),
        "k": (FADED, kv_heads or heads),
        "v": (FADED, kv_heads or heads),
    }
    arrays = {n: rng.standard_normal((2, *size, DIM)) for n, size in sizes.items()}
    d_out = rng.standard_normal((2, q_length, heads, DIM))
    arrays, d_out = jax.tree.map(lambda a: jnp.asarray(a, dtype), (arrays, d_out))
    if reads_hidden(scheme):
        arrays["x"] = jnp.asarray(8 * rng.standard_normal((2, FADED, HIDDEN_DIM)), "float32")
    params = {name: jnp.asarray(array) for name, array in params_of(scheme).items()}
    return arrays | {"params": params}, d_out


def assert_as_all_blocks(result, expected, dtype="float32"):
    """Two programs, one of which skips: half a rounding is left out, and sums differ in order.

    The bound is twice, for a forward and a backward pass. A learned number or a hidden state sums
    the gradients of up to ``2 * FADED`` rows of terms, whose errors have both signs.
    """
    bound = 2 * attention_bound("float32", channels=DIM, keys=FADED) + UNIT[dtype]
    if dtype == "bfloat16":  # both round weights, values and results
        bound += 2 * rounding_bound(3, 1, dtype)
    (out, gradients), (out_of_all, gradients_of_all) = result, expected
    assert_near(out, out_of_all, bound)
    for name, gradient in gradients.items():
        size = 1 if name in "qkv" else math.sqrt(2 * FADED)
        jax.tree.map(
            partial(assert_near, tolerance=2 * size * bound), gradient, gradients_of_all[name]
        )


def exact(arrays, d_out):
    """The result by the definition in float64, and the sum of its products with ``d_out``."""
    q, k, v = (np.swapaxes(np.asarray(arrays[name], np.float64), 1, 2) for name in "qkv")
    params = {name: np.asarray(array, np.float64) for name, array in arrays["params"].items()}
    out = np.swapaxes(posenc.attention(q, k, v, STEEP, params, causal=True), 1, 2)
    return out, np.sum(np.asarray(d_out, np.float64) * out)


def test_each_head_skips_its_own_negligible_blocks():
    """NaN in the first values reaches no late query of a steep head, nor its gradient."""
    run, (arrays, d_out) = pulled(STEEP), faded(STEEP, kv_heads=2)
    bound = attention_bound("float32", channels=DIM, keys=FADED)
    out, gradients = run(arrays, d_out)
    assert_near(out, exact(arrays, d_out)[0], bound + UNIT["float32"] / 2)
    for n, name in enumerate(arrays):
        gradient, own = gradients[name], arrays[name]
        if name == "params":
            gradient, own = gradient["slopes"], own["slopes"]
        along = np.random.default_rng(n).standard_normal(own.shape)
        values = []
        for step in (1e-5, -1e-5):
            moved = np.asarray(own, np.float64) + step * along
            moved = {"slopes": moved} if name == "params" else moved
            values.append(exact(arrays | {name: moved}, d_out)[1])
        size = max(1, np.linalg.norm(gradient) * np.linalg.norm(along))
        derivative = (values[0] - values[1]) / 2e-5
        assert_near(np.vdot(gradient, along) / size, derivative / size, 2 * bound, name)
    out, gradients = run(arrays | {"v": arrays["v"].at[:, :8].set(jnp.nan)}, d_out)
    for array in (out, gradients["q"]):
        late = np.asarray(array[:, 48:])
        assert np.all(np.isfinite(late[:, :, :3]))
        assert np.all(np.isnan(late[:, :, 3]))  # the flat head needs all keys


def test_calls_of_a_vmap_share_their_ranges():
    k, q = np.random.default_rng(0).standard_normal((2, 1, HEADS, FADED, DIM)).astype("float32")
    q = jnp.stack([0.1 * q, 3 * q])  # larger scores hide fewer keys
    params = {"slopes": jnp.asarray([8.0, 4.0, 2.0, 1.0])}

    @jax.jit
    def ranges(q):
        call = prepare(q, k, k, STEEP, params, causal=True, xp=jnp)
        return needed_ranges(make_tiling(call), q, k, k, call.query, call.key, params)

    with block_size(8):
        of_both = jax.vmap(ranges, out_axes=None)(q)  # raises if they differ by call
        low, high = map(ranges, q)
    assert np.any(low.keys != high.keys)
    for both, *own in zip(of_both, low, high, strict=True):
        first, end = (np.stack([a[n] for a in own]) for n in (0, 1))
        np.testing.assert_array_equal(both[0], first.min(axis=0))
        np.testing.assert_array_equal(both[1], end.max(axis=0))


@long
def test_calls_of_a_vmap_that_skip_are_as_each_alone():
    run, (arrays, d_out) = pulled(STEEP), faded(STEEP, kv_heads=2)
    calls = [arrays | {"q": size * arrays["q"]} for size in (0.1, 2.0)]
    stacked = jax.tree.map(lambda *both: jnp.stack(both), *calls)
    together = jax.vmap(run, in_axes=(0, None))(stacked, d_out)
    for n, call in enumerate(calls):
        of_one = jax.tree.map(lambda a, n=n: a[n], together)
        assert_as_all_blocks(of_one, run(call, d_out))


PACKED = np.sort(np.random.default_rng(1).integers(0, 3, (2, FADED)), axis=1)
ROLLED = np.roll(np.arange(FADED), 32)
SKIPPING = {
    "8-heads": (posenc.ALiBi(8, slopes=8 * 2.0 ** -np.arange(8)), {}),
    "16-heads": (posenc.ALiBi(16, slopes=8 * 2.0 ** (-np.arange(16) / 2)), {"kv_heads": 4}),
    "learned": (STEEP, {}),
    "one-head-of-keys": (STEEP, {"kv_heads": 1}),
    "gates": (SUBJECTS["fox"], {}),
    "gates-and-slopes": (fox_alibi(), {"kv_heads": 2}),
    "gates-and-table": (Sum(SUBJECTS["fox"], posenc.T5Bias(HEADS)), {"kv_heads": 2}),
    "window": (STEEP, {"window": 30}),
    "segments": (STEEP, {"tokens": posenc.Tokens(seg=PACKED)}),
    "positions": (STEEP, {"tokens": posenc.Tokens(pos=ROLLED)}),
    "few-queries": (STEEP, {"q_length": 5}),
    "fewer-queries": (STEEP, {"q_length": 37, "kv_heads": 2}),
    "bfloat16": (STEEP, {"dtype": "bfloat16", "kv_heads": 2}),
}


@long
@pytest.mark.parametrize("name", SKIPPING)
def test_skipping_blocks_changes_at_most_a_rounding(name):
    scheme, case = SKIPPING[name]
    arrays, d_out = faded(scheme, **case)
    sizes = ("kv_heads", "q_length", "dtype")
    options = {option: value for option, value in case.items() if option not in sizes}
    assert_as_all_blocks(
        pulled(scheme, **options)(arrays, d_out),
        pulled(scheme, skip_blocks=False, **options)(arrays, d_out),
        case.get("dtype", "float32"),
    )


def step(scheme, params, heads, *, batch=1, **options):
    """Gradients of q and params, of a call whose blocks are skipped."""
    q = jax.random.normal(jax.random.key(0), (batch, 9 * 256, heads, 8))

    def total(q, params):
        out = posenc_jax.attention(
            q, q, q, scheme, params, True, implementation="chunked", **options
        )
        return (out * q).sum()

    return jax.jit(jax.grad(total, (0, 1)))(q, params)


@long
def test_padding_has_no_gradient_however_large_a_bias_is():
    """The exponential of 95 is infinite."""
    scheme = posenc.T5Bias(2, causal=True)
    for gradient in jax.tree.leaves(step(scheme, {"table": jnp.full((2, 32), 95.0)}, 2)):
        assert np.all(np.isfinite(gradient))


@long
def test_as_many_shared_numbers_as_heads_are_not_one_for_each_head():
    scheme, params = SUBJECTS["parabola"], {"c": jnp.array([0.2, 0.3])}
    skipping, whole = (step(scheme, params, 2, skip_blocks=skip)[1]["c"] for skip in (True, False))
    np.testing.assert_allclose(skipping, whole, rtol=1e-4)  # 2.6 million scores of both signs


@long
def test_one_lane_serves_programs_with_long_integers():
    with jax.enable_x64(True):
        gradient, _ = step(posenc.ALiBi(2), {}, 2, batch=5)
    assert np.all(np.isfinite(gradient))


@long
def test_a_mask_function_reads_the_variables_of_its_call():
    """Not those that a loop has left when the backward pass calls it, or when it was compiled."""
    q = jnp.asarray(normal((1, 40, 2, 8), 0, "float32"))

    def loss(q, masks):
        with block_size(16):
            return sum(
                jnp.sum(posenc_jax.attention(q, q, q, posenc.ALiBi(2), mask=mask) ** 2)
                for mask in masks
            )

    def late(q):
        return loss(q, (lambda i, j: (j <= i) | (j < prefix) for prefix in (5, 30)))  # noqa: B023

    def bound(q):
        return loss(q, [lambda i, j, n=prefix: (j <= i) | (j < n) for prefix in (5, 30)])

    late, bound = (jax.jit(jax.grad(function))(q) for function in (late, bound))
    np.testing.assert_array_equal(late, bound)
    prefix = 5

    def sees(i, j):
        return (j <= i) | (j < prefix)

    def attend(q):
        return posenc_jax.attention(q, q, q, posenc.NoPE(), mask=sees)

    before = jax.jit(lambda q: attend(q))(q)
    prefix = 30
    after = jax.jit(lambda q: attend(q))(q)
    assert jnp.max(jnp.abs(after - before)) > 0.01


@dataclass(frozen=True)
class Within(posenc.Mask):
    limit: Any = None

    def pairs(self, q, k, xp):
        return q.pos - k.pos < self.limit


def with_default(limit):
    def near(i, j, *, limit=limit):
        return i - j < limit

    return near


READING = {
    "closure": lambda limit: lambda i, j: i - j < limit,
    "default": with_default,
    "partial": lambda limit: partial(lambda limit, i, j: i - j < limit, limit),
    "field": lambda limit: Within(limit=limit),
    "one of two": lambda limit: posenc.window((90, None)) & (lambda i, j: i - j < limit),
}


@pytest.mark.parametrize("way", READING)
def test_a_mask_may_read_a_traced_value_where_programs_are_not_kept_by_it(way):
    """Some implementation serves it, with its gradient; chunked says why it does not."""
    arrays, mask, scheme = tensors(24), READING[way], posenc.ALiBi(HEADS)
    expected = jax.grad(partial(loss, scheme, "auto", window=(4, None)))(*arrays)

    @partial(jax.jit, static_argnums=1)
    def gradient(limit, name, q, k, v):
        return jax.grad(partial(loss, scheme, name, mask=mask(limit)))(q, k, v)

    assert_alike(gradient(5, "auto", *arrays), expected)
    with pytest.raises(NotImplementedError, match="the mask reads a traced value"):
        gradient(5, "chunked", *arrays)
    loss(scheme, "chunked", *arrays, mask=mask(5))


@dataclass(frozen=True)
class Groups(posenc.Mask):
    table: Any = None

    def pairs(self, q, k, xp):
        table = xp.asarray(self.table)
        return table[q.pos] == table[k.pos]


def test_a_scheme_that_equality_does_not_tell_from_others_is_refused():
    """The first one's program would serve the second."""

    @dataclass(frozen=True, eq=False)
    class Steeper(posenc.ALiBi):
        factor: float = 1.0

    x = jnp.ones((1, 4, HEADS, DIM))
    with pytest.raises(TypeError, match="scheme: two Steeper that differ in 'factor' alone"):
        posenc_jax.attention(x, x, x, Steeper(HEADS, factor=2.0), causal=True)


def test_a_mask_that_holds_an_array_is_not_for_chunked():
    (q, k, v), groups = tensors(24), np.arange(24) // 5
    out = posenc_jax.attention(q, k, v, posenc.NoPE(), mask=Groups(table=groups))
    tokens = posenc.Tokens(seg=jnp.asarray(groups))
    expected = posenc_jax.attention(q, k, v, posenc.NoPE(), tokens=tokens)
    assert_near(out, expected, 2 * attention_bound("float32", channels=DIM, keys=24))
    with pytest.raises(NotImplementedError, match="Groups is not hashable"):
        loss(posenc.NoPE(), "chunked", q, k, v, mask=Groups(table=groups))


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
def test_gradients_do_not_go_through_the_highest_score(options):
    """JAX would look for it again. XLA computes a score twice, with other roundings, so that none
    may be equal to it, and the gradient is 0 / 0.
    """
    gradient = jax.grad(partial(loss, posenc.ALiBi(HEADS), "reference", **options))
    program = jax.make_jaxpr(gradient)(*tensors(24)).jaxpr
    compared = [each.invars[0].aval for each in primitives(program, "eq")]
    scores = [
        a for a in compared if a.shape[-2:] == (24, 24) and jnp.issubdtype(a.dtype, jnp.floating)
    ]
    assert not scores


def primitives(program, name):
    """The operations of that name, also in functions that are called."""
    for each in program.eqns:
        if each.primitive.name == name:
            yield each
        for value in each.params.values():
            if hasattr(value, "jaxpr"):
                yield from primitives(value.jaxpr, name)
