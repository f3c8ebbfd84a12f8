"""The kernels for Hopper GPUs, interpreted against the reference; and which calls are refused."""

import re
import types
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from frameworks import route
from subjects import fox_alibi, normal, params_of, sunk

import posenc
from posenc import Tokens
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc.schemes import FoX, Kerple
from posenc.testing.examples import HIDDEN_DIM, Fence, Levelled
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR, assert_near

jax = pytest.importorskip("jax")
jnp = jax.numpy
posenc_jax = pytest.importorskip("posenc_jax")

from posenc_jax.fused import implementation, mosaic_gpu  # noqa: E402
from posenc_jax.fused.mosaic_gpu import tile  # noqa: E402
from posenc_jax.fused.plan import Plan  # noqa: E402
from posenc_jax.fused.reads import BiasReads, trace_bias_reads  # noqa: E402
from posenc_jax.fused.target import Target, targeting  # noqa: E402

INTERPRETED, HOPPER = Target("gpu", "9.0", interpreted=True), Target("gpu", "9.0")
OLD = jax.__version_info__[:2] < mosaic_gpu.OLDEST
recent = pytest.mark.skipif(OLD, reason="Mosaic GPU kernels need JAX 0.11")
interprets = pytest.mark.skipif(
    jax.__version_info__[:2] < (0, 12),
    reason="before JAX 0.12 the interpreter wants each warpgroup to wait for each barrier",
)
HEADS = 2
NOPE = posenc.make("nope", num_heads=HEADS, head_dim=64, max_len=64)


def positions(length, seed):
    """Shuffled, with gaps, some negative."""
    return np.random.default_rng(seed).permutation(3 * length)[:length] - length


@dataclass(frozen=True)
class Case:
    """One call; ``kv`` heads of keys."""

    scheme: posenc.PositionScheme
    dtype: str = "bfloat16"
    dim: int = 64
    q_len: int = 150
    k_len: int = 150
    kv: int = HEADS
    batch: int = 1
    heads: int = HEADS
    options: dict = field(default_factory=dict)

    def tensors(self):
        """q, k and v."""
        keys = (self.batch, self.kv, self.k_len, self.dim)
        return {
            "q": normal((self.batch, self.heads, self.q_len, self.dim), 0),
            "k": normal(keys, 1),
            "v": normal(keys, 2),
        }

    def given(self):
        """Keywords of attention, with hidden states of the keys' tokens."""
        x = normal((self.batch, self.k_len, HIDDEN_DIM), 3)
        return {**self.options, "tokens": replace(self.options.get("tokens", Tokens()), x=x)}


# Each is compiled and interpreted for seconds, so what can be combined is.
CASES = {
    "no-bias-window": Case(NOPE, q_len=150, k_len=260, kv=1, options={"window": (90, 30)}),
    "no-bias-negative-scale": Case(NOPE, q_len=70, k_len=100, options={"scale": -0.2}),
    "alibi-fewer-queries": Case(
        posenc.ALiBi(HEADS, learned=True),
        "float16",
        128,
        q_len=70,
        k_len=200,
        options={"causal": True},
    ),
    "alibi-learned-anywhere": Case(
        posenc.ALiBi(HEADS, learned=True),
        q_len=140,
        k_len=60,
        kv=1,
        options={
            "causal": True,
            "scale": -0.1,
            "tokens": Tokens(pos=positions(60, 2), seg=np.arange(60) % 3),
            # Segment 3 has no key: fully masked rows.
            "queries": Tokens(pos=positions(140, 1), seg=np.arange(140) % 4),
        },
    ),
    "alibi-asymmetric": Case(
        posenc.ALiBi(HEADS, noncausal="asymmetric", learned=True), "float16", q_len=100, k_len=140
    ),
    "kerple-segments": Case(
        Kerple(HEADS),
        "float16",
        options={
            "causal": True,
            # The last block of queries sees no key, and no query sees the last block of keys.
            "tokens": Tokens(seg=np.where(np.arange(150) < 120, np.arange(150) // 40, 9)),
            "queries": Tokens(seg=np.arange(150) // 40),
        },
    ),
    "table": Case(posenc.T5Bias(HEADS), q_len=150, k_len=200, options={"causal": True}),
    "table-far": Case(
        posenc.T5Bias(HEADS, max_distance=40), q_len=310, k_len=390, kv=1, options={"causal": True}
    ),
    "table-far-both-sides": Case(
        posenc.T5Bias(HEADS, max_distance=40), "float16", q_len=300, k_len=420
    ),
    "table-both-sides": Case(
        posenc.T5Bias(HEADS, num_buckets=8),
        "float16",
        128,
        100,
        100,
        kv=1,
        batch=2,
        options={"window": 50},
    ),
    "fox": Case(FoX(HEADS, HIDDEN_DIM), kv=1, options={"causal": True}),
    "fox-alibi-first-tokens": Case(
        fox_alibi(HEADS),
        kv=1,
        options={"causal": True, "mask": posenc.window((70, None), first=5)},
    ),
    "regions-and-a-sink": Case(sunk(Levelled(HEADS, 30)), options={"causal": True}),
    "nothing-far": Case(Fence(reach=20), "float16", q_len=40, k_len=40, heads=4, kv=4),
}


@interprets
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_equal_the_reference(name):
    case = CASES[name]
    tensors, params, options = case.tensors(), params_of(case.scheme), case.given()
    d_out = normal(tensors["q"].shape, 4)
    at = case.scheme, tensors, params, d_out
    values, gradients = route("jax", "reference").gradients(*at, dtype="float64", **options)
    with targeting(INTERPRETED):
        out, d_tensors = route("jax", "pallas").gradients(*at, dtype=case.dtype, **options)
    tolerance = ATTENTION_TOL[case.dtype]
    assert_near(out, values, tolerance)
    for which, gradient in gradients.items():
        summed = which in params or which == "tokens.x"
        wide = tolerance * (REDUCTION_FACTOR if summed else 1)
        assert_near(d_tensors[which], gradient, wide, f"gradient of {which}")


@pytest.mark.parametrize("form", ["none", "elementwise"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.3])
def test_the_factor_of_scores_is_positive(form, scale):
    """The maximum of a row is taken before scores are multiplied."""
    plan = replace(Plan.of_one_block(NOPE, BiasReads(), 128), form=form, scale=scale)
    assert tile.score_factor(plan) > 0


@interprets
def test_masked_values_do_not_matter():
    """Fully masked rows are 0, however large the masked values are."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 1, 20, 64)), jnp.bfloat16) for _ in range(3))
    seg = jnp.asarray([0] * 10 + [1] * 10)
    v = v.at[:, :, 10:].set(1e30)
    given = Arguments(tokens=Tokens(seg=seg), queries=Tokens(seg=seg.at[:5].set(2)))
    call = prepare(q, k, v, NOPE, given=given, xp=jnp)
    with targeting(INTERPRETED):
        out, lse = implementation.plan(call).run(call)
    assert np.all(np.asarray(out[:, :, :5], np.float32) == 0)
    assert np.all(np.asarray(lse.rounded()[:, :, :5]) == -np.inf)
    assert np.all(np.isfinite(np.asarray(out[:, :, :10], np.float32)))


@recent
@pytest.mark.parametrize("name", CASES)
def test_kernels_lower_for_a_gpu_that_is_not_here(name):
    """Forward and all gradients. The interpreter does not check layouts in registers, this does."""
    case = replace(CASES[name], dim=128)  # needs most resources
    tensors = {n: jnp.asarray(a, case.dtype) for n, a in case.tensors().items()}
    params = {n: jnp.asarray(a) for n, a in params_of(case.scheme).items()}
    options = case.given()
    tensors["x"] = jnp.asarray(options["tokens"].x, case.dtype)

    def loss(tensors, params):
        q, k, v = (jnp.swapaxes(tensors[name], 1, 2) for name in "qkv")
        given = {**options, "tokens": replace(options["tokens"], x=tensors["x"])}
        out = posenc_jax.attention(q, k, v, case.scheme, params, implementation="pallas", **given)
        return jnp.sum(out.astype(jnp.float32))

    with targeting(HOPPER):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(tensors, params)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = 4 if isinstance(case.scheme, posenc.T5Bias) else 3
    kernels *= max(1, len(case.scheme.regions()))
    calls = re.findall(r"custom_call @mosaic_gpu.*", text)
    assert len(calls) == kernels
    # (B, L, H, D), as callers have it: nothing is transposed.
    shapes = [re.findall(r"tensor<(\d+)x(\d+)x(\d+)x128xb?f16>", call) for call in calls]
    assert all(len(shape) >= 4 for shape in shapes)
    assert all(int(n) % mosaic_gpu.BLOCK == 0 for shape in shapes for _, n, _ in shape)


def call_of(scheme=NOPE, dtype="bfloat16", **shapes):
    """A call that kernels serve, but for the given arguments."""
    given = {"q": (1, HEADS, 20, 64), "k": (1, HEADS, 20, 64), "v": (1, HEADS, 20, 64)} | shapes
    q, k, v = (jnp.zeros(given[name], dtype) for name in "qkv")
    params = {n: jnp.asarray(a) for n, a in params_of(scheme).items()}
    return prepare(q, k, v, scheme, params, xp=jnp)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"dtype": "float32"}, "are float32; .* take bfloat16 and float16"),
        (
            {"q": (1, 2, 20, 96), "k": (1, 2, 20, 96)},
            "q and k have head_dim 96; .* take 64 and 128",
        ),
        ({"v": (1, 2, 20, 32)}, "v has head_dim 32"),
        ({"v": (1, 2, 20, 128)}, "q has head_dim 64, v has 128; .* equal"),
    ],
)
def test_shapes_and_dtypes_are_refused_with_the_value(call, reason):
    assert re.search(reason, mosaic_gpu.DEVICE.unsupported_call(call_of(**call)))
    assert mosaic_gpu.DEVICE.unsupported_call(call_of()) is None


def test_other_gpus_are_refused():
    why = mosaic_gpu.DEVICE.unsupported(Target("gpu", "8.0"))
    assert "JAX 0.11" in why if OLD else "Hopper" in why and "8.0" in why
    if OLD:
        assert jax.__version__ in mosaic_gpu.DEVICE.unsupported(HOPPER)
    else:
        assert mosaic_gpu.DEVICE.unsupported(HOPPER) is None


@pytest.mark.parametrize("reported", [12060, 12080, 12090, 13000, None])
def test_a_cuda_that_miscompiles_masks_is_refused(monkeypatch, reported):
    """Except by the interpreter. A version that JAX does not report is not refused."""
    versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: reported)
    monkeypatch.setattr("jax._src.lib.cuda_versions", reported and versions)
    monkeypatch.setattr(mosaic_gpu, "OLDEST", (0, 0))  # whichever JAX this is
    assert mosaic_gpu.DEVICE.unsupported(INTERPRETED) is None
    why = mosaic_gpu.DEVICE.unsupported(HOPPER)
    if reported in (12080, 12090):
        assert f"this is CUDA 12.{reported % 1000 // 10};" in why
        assert "need CUDA 13" in why
    else:
        assert why is None


@dataclass(frozen=True)
class Wave(posenc.PositionScheme):
    """A bias that calls a function which kernels do not have."""

    def bias(self, q, k, *, params, xp):
        return xp.sin(xp.astype(q - k, xp.float32))


def unlowered(call):
    return mosaic_gpu.DEVICE.unsupported_bias(call.scheme, trace_bias_reads(call))


@dataclass(frozen=True)
class WavyKeys(posenc.ALiBi):
    """A key bias that calls a function which kernels do not have; the bias itself does not."""

    def key_bias(self, k, *, params, xp):
        w = super().key_bias(k, params=params, xp=xp)
        return w + 0 * xp.sin(w)


@recent
@pytest.mark.parametrize("scheme", [Wave(), WavyKeys(HEADS)])
def test_a_bias_that_no_kernel_computes_is_named(scheme):
    why = unlowered(replace(call_of(scheme), mask=posenc.causal))
    assert type(scheme).__name__ in why
    assert "sin" in why


@recent
def test_a_bias_that_kernels_compute_is_not_refused():
    assert unlowered(call_of(Kerple(HEADS))) is None
