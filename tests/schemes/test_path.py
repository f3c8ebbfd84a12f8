"""PaTH against the product of its reflections, one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import FUSED, HAS, ROUTES
from frameworks import route as named
from sample import long
from subjects import normal

import posenc
from posenc.schemes import FoX, PaTH, Sum
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR, assert_near

HEADS, DIM, WIDTH, LENGTH = 2, 4, 3, 9
SCHEME, CONVOLVED = PaTH(HEADS, DIM, WIDTH), PaTH(HEADS, DIM, WIDTH, conv=3)
FLOAT64 = 16 * ATTENTION_TOL["float64"]  # a product of matrices for each pair
Q, K, V = (normal((2, HEADS, LENGTH, DIM), seed) for seed in range(3))
X, NO_BIAS = normal((2, LENGTH, WIDTH), 4), np.zeros((2, HEADS, LENGTH, LENGTH))
TOKENS = posenc.Tokens(x=X)
SLOW = {"jax-chunked-in order", "jax-chunked-interleaved", "jax-reference-interleaved"}
AT, ONE = np.arange(LENGTH), np.zeros(LENGTH, int)


def drawn(scheme):
    shapes = {name: spec.shape for name, spec in scheme.param_specs().items()}
    return {name: normal(shape, n) for n, (name, shape) in enumerate(shapes.items())}


def by_loop(params, pos=AT, seg=ONE, k=K, v=V, bias=NO_BIAS):
    """The formula, from the query's token backwards: ``q <- H_t q`` before each earlier key."""
    out = np.zeros_like(Q)
    for b, h, i in np.ndindex(Q.shape[:3]):
        g = h // (HEADS // k.shape[1])
        path = [t for t in np.argsort(pos) if pos[t] <= pos[i] and seg[t] == seg[i]]
        q, s = Q[b, h, i], {}
        for n, t in reversed(list(enumerate(path))):
            s[t] = q @ k[b, g, t] / np.sqrt(DIM)
            if "taps" in params:
                near = path[max(0, n - 2) : n + 1]
                w = sum(params["taps"][h, :, tap - len(near)] * (params["w"][h] @ X[b, near[tap]])
                        for tap in range(len(near)))  # fmt: skip
                w = w / (1 + np.exp(-w))
            else:
                w = params["w"][h] @ X[b, t]
            w = w / np.sqrt(w @ w + 1e-6)
            beta = 2 / (1 + np.exp(-(params["beta"][h] @ X[b, t] + params["b"][h])))
            q = q - beta * w * (w @ q)
        each = np.array([s[t] for t in path]) + bias[b, h, i, path]
        weights = np.exp(each)
        out[b, h, i] = weights / weights.sum() @ v[b, g, path]
    return out


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("case", ["in order", "shuffled", "packed", "grouped", "convolved"])
def test_it_is_the_formula(case, block, monkeypatch):
    monkeypatch.setattr("posenc.schemes.reflections._BLOCK", block)
    scheme, k, v, pos, seg = SCHEME, K, V, AT, ONE
    if case == "shuffled":
        pos = np.random.default_rng(0).permutation(40)[:LENGTH] - 20
    if case == "grouped":
        k, v = k[:, :1], v[:, :1]
    if case in ("packed", "convolved"):  # the documents interleaved
        pos, seg = np.array([0, 0, 1, 1, 2, 2, 3, 4, 3]), np.array([0, 7, 7, 0, 0, 7, 7, 7, 0])
        scheme = CONVOLVED if case == "convolved" else scheme
    params = drawn(scheme)
    where = {} if case in ("in order", "grouped") else {"pos": pos, "seg": seg}
    tokens = posenc.Tokens(x=X, **where)
    found = posenc.attention(Q, k, v, scheme, params, causal=True, tokens=tokens)
    assert_near(found, by_loop(params, pos, seg, k, v), FLOAT64, case)


@pytest.mark.parametrize(
    ("route", "where"),
    [
        pytest.param(*found.values, where, id=id, marks=[*found.marks, *[long] * (id in SLOW)])
        for found in FUSED
        if found.id.endswith(("chunked", "reference"))
        for where in ("in order", "interleaved")
        for id in [f"{found.id}-{where}"]
    ],
)
def test_blocks_of_tokens_are_the_system_of_all(route, where, monkeypatch):
    """Two blocks, the second of 6 tokens, in blocks of queries too, with gradients."""
    if not HAS["torch"]:
        pytest.skip("gradients are compared with torch's autograd, torch is not installed")
    length, params = 70, drawn(SCHEME)
    own = np.arange(length)
    tokens = {} if where == "in order" else {"pos": own, "seg": own % 3}
    d_out, *vectors = (normal((2, HEADS, length, DIM), seed) for seed in range(4))
    tensors = dict(zip("qkv", vectors, strict=True)) | {"tokens.x": normal((2, length, WIDTH), 4)}

    def found(route, dtype):
        at = posenc.Tokens(**tokens)
        return route.gradients(
            SCHEME, tensors, params, d_out, dtype=dtype, causal=True, tokens=at
        )  # fmt: skip

    out, gradients = found(route, "float64")
    monkeypatch.setattr("posenc.schemes.reflections.is_compiling", lambda xp: True)
    expected, of_system = found(named("torch", "reference"), "float64")
    assert_near(out, expected, FLOAT64)
    for name, gradient in of_system.items():
        assert_near(gradients[name], gradient, REDUCTION_FACTOR * FLOAT64, name)


def test_without_reflections_it_is_nope():
    params = drawn(SCHEME) | {"beta": np.zeros((HEADS, WIDTH)), "b": np.full(HEADS, -800.0)}
    np.testing.assert_array_equal(
        posenc.attention(Q, K, V, SCHEME, params, causal=True, tokens=TOKENS),
        posenc.attention(Q, K, V, posenc.NoPE(), causal=True),
    )


def test_a_scale_of_the_caller():
    params = drawn(SCHEME)
    found = posenc.attention(
        Q, K, V, SCHEME, params, causal=True, tokens=TOKENS, scale=3 / np.sqrt(DIM)
    )
    expected = posenc.attention(3 * Q, K, V, SCHEME, params, causal=True, tokens=TOKENS)
    assert_near(found, expected, 4 * FLOAT64)


def test_a_forget_gate_beside_it():
    fox, path = FoX(HEADS, WIDTH), drawn(SCHEME)
    gates = drawn(fox)
    params = {f"0_{n}": a for n, a in path.items()} | {f"1_{n}": a for n, a in gates.items()}
    c = posenc.features(fox, gates, TOKENS)[0].features["c"]
    bias = c[..., :, None] - c[..., None, :]
    tokens = posenc.Tokens(seg=ONE, x=X)
    found = posenc.attention(
        Q, K, V, Sum(SCHEME, fox), params, causal=True, tokens=tokens, queries=tokens
    )
    assert_near(found, by_loop(path, bias=bias), FLOAT64)


def test_several_hundred_tokens_stay_exact():
    """The system is well conditioned: entries of its inverse are products of reflections."""
    length = 300
    q, k, v = (normal((1, 1, length, 8), seed) for seed in range(3))
    scheme, x = PaTH(1, 8, WIDTH), normal((1, length, WIDTH), 4)
    params = drawn(scheme)
    wide = posenc.attention(q, k, v, scheme, params, causal=True, tokens=posenc.Tokens(x=x))
    q, k, v, x = (a.astype(np.float32) for a in (q, k, v, x))
    narrow = {n: a.astype(np.float32) for n, a in params.items()}
    found = posenc.attention(q, k, v, scheme, narrow, causal=True, tokens=posenc.Tokens(x=x))
    assert_near(found, wide, 4 * ATTENTION_TOL["float32"])


@pytest.mark.parametrize("by", ["exists", "segments"])
def test_padding_may_be_nan(by):
    params, valid = drawn(SCHEME), AT > 2
    junk = {n: np.where(valid[:, None], a, np.nan) for n, a in {"q": Q, "k": K, "v": V}.items()}
    where = {"tokens": posenc.Tokens(pos=AT, exists=valid, x=X)}
    if by == "segments":
        where = {
            "tokens": posenc.Tokens(pos=AT, seg=np.where(valid, 0, -2), x=X),
            "queries": posenc.Tokens(pos=AT, seg=np.where(valid, 0, -1), x=X),
        }
    found = posenc.attention(**junk, scheme=SCHEME, params=params, causal=True, **where)
    alone = (a[:, :, 3:] for a in (Q, K, V))
    expected = posenc.attention(*alone, SCHEME, params, causal=True, tokens=TOKENS[3:])
    assert not np.any(found[:, :, :3])
    assert_near(found[:, :, 3:], expected, FLOAT64)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.id in ("torch-sdpa", "jax-xla")])
def test_others_say_why_they_cannot(route):
    tensors = {n: a.astype(np.float32) for n, a in {"q": Q, "k": K, "v": V}.items()}
    with pytest.raises(NotImplementedError, match="all tokens between its query and its key"):
        route.attend(SCHEME, tensors, posenc.init_params(SCHEME), tokens=TOKENS)


@pytest.mark.parametrize("name", ["num_heads", "head_dim", "hidden_dim", "conv"])
def test_wrong_options(name):
    with pytest.raises(ValueError, match=name):
        PaTH(**{"num_heads": 2, "head_dim": 4, "hidden_dim": 3, name: 0})


def test_vectors_of_another_width():
    q, k, v = (a[..., :2] for a in (Q, K, V))
    with pytest.raises(ValueError, match="q has 2 channels, the scheme head_dim=4"):
        posenc.attention(q, k, v, SCHEME, posenc.init_params(SCHEME), causal=True, tokens=TOKENS)


def of_torch():
    """A function of torch's tensors, two blocks long, and those tensors."""
    import torch

    import posenc_torch

    params = {n: torch.tensor(a, dtype=torch.float32) for n, a in drawn(SCHEME).items()}
    vectors = [torch.tensor(normal((2, HEADS, 70, DIM), s), dtype=torch.float32) for s in range(3)]
    x = torch.tensor(normal((2, 70, WIDTH), 4), dtype=torch.float32)
    pos = torch.stack(
        [torch.randperm(70, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    )

    def attend(q, k, v, x, pos):
        tokens = posenc.Tokens(x=x, pos=pos)
        return posenc_torch.attention(q, k, v, SCHEME, params, causal=True, tokens=tokens)

    return attend, (*vectors, x, pos)


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_each_sequence_alone_by_vmap():
    import torch

    attend, tensors = of_torch()
    one = torch.func.vmap(lambda *own: attend(*(a[None] for a in own))[0])
    assert_near(one(*tensors).numpy(), attend(*tensors).numpy(), ATTENTION_TOL["float32"])


@long
@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_an_exported_program_has_any_length():
    import torch

    attend, tensors = of_torch()

    class Module(torch.nn.Module):
        def forward(self, q, k, v, x, pos):
            return attend(q, k, v, x, pos)

    n = torch.export.Dim("n", min=2, max=4096)
    shapes = ({2: n}, {2: n}, {2: n}, {1: n}, {1: n})
    program = torch.export.export(Module(), tensors, dynamic_shapes=shapes).module()
    short = (*(a[:, :, :33] for a in tensors[:3]), *(a[:, :33] for a in tensors[3:]))
    assert_near(program(*short).numpy(), attend(*short).numpy(), ATTENTION_TOL["float32"])


@long
@pytest.mark.skipif(not HAS["jax"], reason="JAX is not installed")
def test_jax_without_jit_compiles_once():
    import jax

    import posenc_jax

    params = {n: a.astype(np.float32) for n, a in drawn(SCHEME).items()}
    q = normal((1, 70, HEADS, DIM), 0, "float32")
    tokens, compiled = posenc.Tokens(x=normal((1, 70, WIDTH), 4, "float32")), []

    def heard(event, *_, **__):
        compiled.append("backend_compile" in event)

    for n in range(2):
        if n == 1:
            jax.monitoring.register_event_duration_secs_listener(heard)
        posenc_jax.attention(q, q, q, SCHEME, params, causal=True, tokens=tokens)
    assert not any(compiled)


@pytest.mark.skipif(not HAS["jax"], reason="JAX is not installed")
def test_jax_queries_that_all_shards_share():
    """A loop keeps the types of what it carries, and keys vary over the mesh."""
    import jax

    import posenc_jax

    params = {n: a.astype(np.float32) for n, a in drawn(SCHEME).items()}
    q = normal((1, 70, HEADS, DIM), 0, "float32")
    x = normal((1, 70, WIDTH), 4, "float32")

    def attend(k, x):
        return posenc_jax.attention(q, k, k, SCHEME, params, tokens=posenc.Tokens(x=x))

    mesh = jax.sharding.Mesh(jax.devices()[:1], ("rows",))
    spec = jax.sharding.PartitionSpec("rows")
    shared = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    assert_near(shared(q, x), jax.jit(attend)(q, x), ATTENTION_TOL["float32"])
