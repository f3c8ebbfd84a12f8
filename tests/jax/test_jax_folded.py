"""A bias folded into the head dimension, with XLA's attention in place of cuDNN's."""

from functools import partial

import numpy as np
import pytest
from sample import long, some
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc.testing.examples import HIDDEN_DIM
from posenc.testing.tolerances import assert_near, rounding_bound

jax = pytest.importorskip("jax")
jnp = jax.numpy
posenc_jax = pytest.importorskip("posenc_jax")

from posenc_jax import folded  # noqa: E402
from posenc_jax.fused.target import Target, targeting  # noqa: E402

FOLDABLE = ["alibi", "alibi-learned", "fox"]


@pytest.fixture
def calls(monkeypatch):
    """The calls of ``jax.nn.dot_product_attention``, for a GPU that is not here."""
    calls = []

    def attend(q, k, v, *, implementation, **options):
        assert implementation == "cudnn"
        calls.append({"shapes": [a.shape for a in (q, k, v)], **options})
        wide = (a.astype(jnp.float32) for a in (q, k, v))
        return jax.nn.dot_product_attention(*wide, **options).astype(q.dtype)

    monkeypatch.setattr(folded, "dot_product_attention", attend)
    with targeting(Target("gpu", "9.0")):
        yield calls


def arrays(scheme, length, dtype, *, dim=16, shared=False, q_len=None):
    count = heads(scheme)
    sizes = {"q": (q_len or length, count), **dict.fromkeys("kv", (length, 1 if shared else count))}
    tensors = {
        name: jnp.asarray(normal((2, size, own_heads, dim), n), dtype)
        for n, (name, (size, own_heads)) in enumerate(sizes.items())
    }
    return tensors, jnp.asarray(normal((2, length, HIDDEN_DIM), 5), jnp.float32)


def in_float64(tensors, scheme, params, x=None):
    wide = {name: np.asarray(a, np.float64).swapaxes(1, 2) for name, a in tensors.items()}
    tokens = None if x is None else posenc.Tokens(x=np.asarray(x, np.float64))
    params = {name: a.astype(np.float64) for name, a in params.items()}
    return posenc.attention(**wide, scheme=scheme, params=params, causal=True, tokens=tokens)


# Products of half precision are exact in float32, and three numbers hold the bias. There remain the
# rounding of the result, and float32 sums, whose error is less than that rounding.
ROUNDED = {dtype: rounding_bound(2, 1, dtype) for dtype in ("bfloat16", "float16")}


EVERY = [
    (name, shared, q_len, dtype)
    for name in FOLDABLE
    for shared, q_len in ((False, None), (True, None), (False, 1))
    for dtype in ROUNDED
]


@pytest.mark.parametrize(
    ("name", "shared", "q_len", "dtype"),
    some(EVERY, [("alibi-learned", True, None, "bfloat16")], long),
)
def test_a_folded_bias_is_the_bias(name, shared, q_len, dtype, calls):
    scheme = SUBJECTS[name]
    tensors, x = arrays(scheme, 40, dtype, shared=shared, q_len=q_len)
    params = params_of(scheme)
    out = posenc_jax.attention(
        **tensors, scheme=scheme, params=params, causal=True, implementation="folded",
        tokens=posenc.Tokens(x=x),
    )  # fmt: skip
    expected = in_float64(tensors, scheme, params, x).swapaxes(1, 2)
    assert_near(np.asarray(out, np.float64), expected, ROUNDED[dtype])
    assert calls == [
        {
            "shapes": [(2, q_len or 40, heads(scheme), 24), *[(2, 40, heads(scheme), 24)] * 2],
            "scale": 0.25,
            "is_causal": q_len is None,
        }
    ]


def test_it_stays_exact_far_away(calls):
    """Slope times position is 46 000 here: 8 bits of it are off by 100, 16 bits by 0.3."""
    scheme = posenc.ALiBi(4, slopes=[0.7, 0.3, 0.05, 0.011])
    tensors, _ = arrays(scheme, 2**16, "bfloat16", q_len=1)
    attend = partial(posenc_jax.attention, scheme=scheme, causal=True, implementation="folded")
    out = jax.jit(attend)(**tensors)
    expected = in_float64(tensors, scheme, {}).swapaxes(1, 2)
    assert_near(np.asarray(out, np.float64), expected, ROUNDED["bfloat16"])


@pytest.mark.parametrize("dtype", ROUNDED)
def test_it_rounds_by_an_operation_that_compilers_keep(dtype):
    """XLA leaves out a conversion to a narrower dtype and back on a GPU, and the rest is then 0."""
    values = normal((1000,), 3).astype(np.float32)
    program = jax.jit(partial(folded._rounded, dtype=jnp.dtype(dtype))).lower(values).compile()
    assert np.array_equal(program(values), values.astype(dtype).astype(np.float32))
    assert "reduce-precision" in program.as_text()


def test_gradients_of_queries_keys_and_values(calls):
    scheme = SUBJECTS["alibi"]
    tensors, _ = arrays(scheme, 40, "bfloat16")

    def loss(implementation, q, k, v):
        out = posenc_jax.attention(q, k, v, scheme, causal=True, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def gradients_of(implementation, tensors):
        gradient = jax.grad(partial(loss, implementation), argnums=(0, 1, 2))
        return jax.jit(gradient)(*tensors.values())

    gradients = gradients_of("folded", tensors)
    wide = {name: a.astype(jnp.float32) for name, a in tensors.items()}
    expected = gradients_of("reference", wide)
    # Each result is rounded once. Its gradient is twice the result, and is rounded once too.
    for name, one, other in zip("qkv", gradients, expected, strict=True):
        assert_near(np.asarray(one, np.float64), other, 2 * ROUNDED["bfloat16"], name)


def test_a_bias_that_learns_is_not_differentiated(calls):
    scheme = SUBJECTS["alibi-learned"]
    tensors, _ = arrays(scheme, 20, "bfloat16")

    def loss(params, q):
        out = posenc_jax.attention(
            **{**tensors, "q": q},
            scheme=scheme,
            params=params,
            causal=True,
            implementation="folded",
        )
        return jnp.sum(out.astype(jnp.float32))

    params = jax.tree.map(jnp.asarray, params_of(scheme))
    gradient = jax.jit(jax.grad(loss, argnums=1))(params, tensors["q"])
    assert np.all(np.isfinite(gradient))
    with pytest.raises(NotImplementedError, match="cannot differentiate a bias that learns"):
        jax.grad(loss)(params, tensors["q"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheme": SUBJECTS["nope"]}, "has no bias"),
        ({"causal": False}, "only under a causal mask"),
        ({"scheme": SUBJECTS["t5"]}, "declares no key_bias"),
        ({"window": 5}, "without a window"),
        ({"scale": -1.0}, "a scale above 0, got -1.0"),
        ({"q_len": 7}, "as many queries as keys or one, got 7 and 20"),
        ({"dtype": "float32"}, "one of bfloat16 and float16, got float32"),
        ({"dim": 256}, "head_dim up to 256, the bias makes 264 of it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refusals_name_the_reason(change, reason, calls):
    options = {"scheme": SUBJECTS["alibi"], "causal": True, **change}
    sizes = {name: options.pop(name) for name in ("q_len", "dim") if name in options}
    tensors, _ = arrays(options["scheme"], 20, options.pop("dtype", "bfloat16"), **sizes)
    params = params_of(options["scheme"])
    with pytest.raises(NotImplementedError, match=reason):
        posenc_jax.attention(**tensors, params=params, implementation="folded", **options)
    explained = posenc_jax.explain(**tensors, params=params, **options)
    assert explained["implementation"] != "folded"
    assert reason in explained["others"]["folded"]


def test_it_needs_a_gpu():
    tensors, _ = arrays(SUBJECTS["alibi"], 4, "bfloat16")
    with pytest.raises(NotImplementedError, match="the device is a cpu"):
        posenc_jax.attention(
            **tensors, scheme=SUBJECTS["alibi"], causal=True, implementation="folded"
        )
