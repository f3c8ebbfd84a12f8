"""Kernels for TPUs: interpreted against the reference, and lowered for the device at real sizes.

Interpreted tiles are of 8 tokens, so that short sequences have several, some of them padded.
"""

from dataclasses import replace
from functools import partial

import fused_by_definition
import numpy as np
import pytest
from cases import BATCH, CASES, LENGTH, Case, shuffled
from frameworks import route
from sample import long, some
from subjects import SUBJECTS as COMMON
from subjects import fox_alibi, normal, params_of, sunk

import posenc
from posenc import Tokens
from posenc.attn.arguments import Arguments
from posenc.attn.prepare import prepare
from posenc.schemes import LogScale, PoPE, Sum
from posenc.testing.examples import HEADS, HIDDEN_DIM, Levelled
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR, assert_near, attention_bound

jax = pytest.importorskip("jax")
jnp = jax.numpy
posenc_jax = pytest.importorskip("posenc_jax")

from posenc_jax.fused import implementation, tpu  # noqa: E402
from posenc_jax.fused.gradients import Residuals  # noqa: E402
from posenc_jax.fused.inputs import _ranges, inputs_of  # noqa: E402
from posenc_jax.fused.plan import Integers, Plan  # noqa: E402
from posenc_jax.fused.reads import BiasReads, trace_bias_reads  # noqa: E402
from posenc_jax.fused.target import Target, targeting  # noqa: E402
from posenc_jax.fused.tpu import tile as tpu_tile  # noqa: E402
from posenc_jax.fused.tpu.grid import Diagonal, KeyMajor, QueryMajor, Step  # noqa: E402

BLOCK, DIM = 8, 64
SUBJECTS = COMMON | {
    "fox-alibi": fox_alibi(),
    "sunk-regions": sunk(Levelled()),
    "t5-near": posenc.T5Bias(HEADS, num_buckets=8, max_distance=5),
    "pope-of-shared-keys": PoPE(HEADS // 2, DIM),  # vectors of 2 * DIM beside values of DIM
    "scaled-bias": Sum(posenc.ALiBi(HEADS), LogScale("inkling", train_len=4)),
}
INTERPRETED = Target("tpu", interpreted=True)
OWN_CASES = {
    # Lengths that no block divides, a third of the queries in a segment that no key has, a negative
    # scale, and the default positions, which tables need.
    "aligned": Case(
        {
            "causal": True,
            "scale": -0.25,
            "tokens": Tokens(seg=np.arange(LENGTH) % 2),
            "queries": Tokens(seg=np.arange(13) % 3),
        },
        q_len=13,
        grouped=True,
    ),
    # First tokens are anywhere; tokens before position 0 are none.
    "first-tokens": Case(
        {
            "causal": True,
            "mask": posenc.window((9, None), first=12),
            "tokens": Tokens(pos=shuffled(LENGTH, 6)),
            "queries": Tokens(pos=shuffled(LENGTH, 5)),
        },
        grouped=True,
    ),
    # Far tiles on both sides, some of them padded.
    "many-keys-in-order": Case({}, q_len=30, k_len=37),
    "many-keys": Case(
        {"tokens": Tokens(pos=shuffled(37, 2)), "queries": Tokens(pos=np.arange(5) * 7)},
        q_len=5,
        k_len=37,
    ),
}
FORMS = {
    "nope": "none",
    "alibi": "elementwise",
    "alibi-learned": "elementwise",
    "kerple_log": "elementwise",
    "t5": "by distance",
    "parabola": "by distance",
    "fox": "elementwise",
    "fading": "elementwise",
    "fox-alibi": "elementwise",
    "fence": "elementwise",
    "tide": "elementwise",
    "scaled-bias": "elementwise",
}
pytestmark = pytest.mark.skipif(
    tpu.DEVICE.unsupported(INTERPRETED) is not None,
    reason=str(tpu.DEVICE.unsupported(INTERPRETED)),
)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels in blocks of 8, on the CPU."""
    monkeypatch.setattr(tpu, "BLOCKS", (BLOCK,))
    with targeting(INTERPRETED):
        yield


def tensors_of(case, *, dim=DIM, batch=BATCH, heads=HEADS):
    """As in ``cases``, with vectors as long as kernels take."""
    kv = heads // 2 if case.grouped else heads
    return {
        "q": normal((batch, case.q_len, heads, dim), 0),
        "k": normal((batch, case.k_len, kv, dim), 1),
        "v": normal((batch, case.k_len, kv, dim), 2),
        "x": normal((batch, case.k_len, HIDDEN_DIM), 3),
    }


def pulled(scheme, options, arrays, params, d_out):
    """The result of the kernels and the gradients of ``sum(result * d_out)``."""

    def attend(arrays, params):
        vectors = {name: arrays[name] for name in "qkv"}
        tokens = replace(options.get("tokens", Tokens()), x=arrays["x"])
        given = {**options, **vectors, "tokens": tokens}
        return posenc_jax.attention(scheme=scheme, params=params, implementation="pallas", **given)

    out, pull = jax.vjp(attend, arrays, params)
    return out, *pull(d_out.astype(out.dtype))


def assert_as_the_reference(scheme, case, tensors, dtype):
    """Values and all gradients of the kernels are those of the definition in float64."""
    params, options = params_of(scheme), case.options
    d_out = normal(tensors["q"].shape, 9)
    swapped = {name: np.swapaxes(tensors[name], 1, 2) for name in "qkv"}
    tokens = replace(options.get("tokens", Tokens()), x=tensors["x"])
    values, expected = route("jax", "reference").gradients(
        scheme, swapped, params, np.swapaxes(d_out, 1, 2), dtype="float64",
        **{**options, "tokens": tokens},
    )  # fmt: skip
    expected["x"] = expected.pop("tokens.x")
    arrays = {name: jnp.asarray(a, dtype) for name, a in tensors.items()}
    learned = {name: jnp.asarray(a) for name, a in params.items()}
    # Quick to compile: most of the time goes there.
    quick = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(partial(pulled, scheme, options), compiler_options=quick)
    out, d_arrays, d_params = compiled(arrays, learned, jnp.asarray(d_out))
    assert_near(_host(out), values, ATTENTION_TOL[dtype])
    for name, gradient in {**d_arrays, **d_params}.items():
        summed = name in params or name == "x"
        tolerance = ATTENTION_TOL[dtype] * (REDUCTION_FACTOR if summed else 1)
        assert_near(_host(gradient), expected[name], tolerance, f"gradient of {name}")


def _host(array):
    array = np.asarray(array, np.float32)
    return np.swapaxes(array, 1, 2) if array.ndim == 4 else array


QUICK = [("kerple_log", "shuffled", "float32")]
MORE = [
    ("t5-near", "aligned", "float32"),
    ("fox-alibi", "first-tokens", "bfloat16"),
    ("nope", "window-both-sides", "float32"),
    ("nope", "segments", "bfloat16"),
    ("alibi", "many-keys", "float32"),
    ("alibi-learned", "everything", "float32"),
    ("t5", "window", "float32"),
    ("t5-near", "many-keys-in-order", "float32"),
    ("kerple_log", "many-keys-in-order", "float32"),
    ("fox", "everything", "float32"),
    ("fading", "grouped", "bfloat16"),
    ("fence", "plain", "float32"),
    ("sunk-regions", "causal", "float32"),
    ("pope-of-shared-keys", "aligned", "float32"),
    ("scaled-bias", "window", "float32"),
    ("alibi-asymmetric", "plain", "float32"),
    ("alibi-asymmetric", "causal", "float32"),
    ("alibi-two-sided", "plain", "float32"),
    ("alibi-offset", "segments", "float32"),
    ("kerple_power", "aligned", "float32"),
    ("sandwich", "window-both-sides", "float32"),
    ("relative-table-two-sided", "many-keys-in-order", "float32"),
]


@pytest.mark.parametrize(("subject", "case", "dtype"), some(QUICK + MORE, QUICK, long))
def test_interpreted_kernels_equal_the_reference(subject, case, dtype, interpreted):
    where = (CASES | OWN_CASES)[case]
    assert_as_the_reference(SUBJECTS[subject], where, tensors_of(where), dtype)


@long
def test_blocks_of_the_size_that_the_device_has():
    scheme, case = posenc.T5Bias(2, causal=True), Case({"causal": True}, q_len=150, k_len=300)
    with targeting(INTERPRETED):
        tensors = tensors_of(case, dim=128, batch=1, heads=2)
        assert_as_the_reference(scheme, case, tensors, "float32")


def ranges_by_head(batch, heads, q_blocks, k_blocks, rng):
    """Integers whose heads look up to none, one, two ... blocks back, and these tiles, by index."""
    most = np.arange(heads)[:, None]
    lengths = rng.integers(0, most + 1, (batch, heads, q_blocks))  # some are empty
    end = np.where(lengths == 0, 0, np.arange(q_blocks) + 1)
    first = np.maximum(end - lengths, 0)
    block = np.arange(k_blocks)
    needed = (first[..., None] <= block) & (block < end[..., None])
    key_ranges = jnp.asarray([first, end], jnp.int32)
    query_ranges = _ranges(jnp.swapaxes(needed, 2, 3), (batch, heads, k_blocks))
    return Integers(None, None, None, None, key_ranges, query_ranges), needed


@pytest.mark.parametrize("order_of", some([QueryMajor, KeyMajor, Diagonal], [Diagonal], long))
def test_a_grid_visits_needed_tiles_once_and_few_others(order_of):
    one_block = Plan.of_one_block(SUBJECTS["nope"], BiasReads(), BLOCK)
    plan = replace(one_block, q_len=4 * BLOCK, k_len=4 * BLOCK, near=(-1, 4))
    integers, needed = ranges_by_head(3, HEADS, 4, 4, np.random.default_rng(0))
    order = order_of(plan, integers)
    shape = tuple(map(int, order.grid))
    ids = np.indices(shape).reshape(len(shape), -1)
    step = Step(*map(np.asarray, order.step(order.prefetched, *ids)))
    tiles = list(zip(*step[:4], strict=True))
    visited = [tile for tile, here in zip(tiles, step.needed, strict=True) if here]
    if order_of is Diagonal:
        assert shape == (HEADS, 2, 3, 4)  # the causal diagonals of those that are near
        assert order.visited().tolist() == [True, True, False, False, False]
        needed = np.triu(needed, -1)
    assert sorted(visited) == list(zip(*needed.nonzero(), strict=True))
    if order_of is Diagonal:
        return
    # All steps of a result follow each other, from one that is first to one that is last.
    by_key = order_of is KeyMajor
    results = [(b, h, k if by_key else q) for b, h, q, k in tiles]
    assert len(set(results)) == needed[..., 0].size
    for result in set(results):
        at = [n for n, other in enumerate(results) if other == result]
        assert at == list(range(at[0], at[-1] + 1))
        assert np.flatnonzero(step.is_first[at[0] : at[-1] + 1]).tolist() == [0]
        (last,) = np.flatnonzero(step.is_last[at[0] : at[-1] + 1])
        assert not np.any(step.needed[at[0] + last + 1 : at[-1] + 1])
    lengths = np.stack(
        [np.diff(r, axis=0)[0] for r in (integers.key_ranges, integers.query_ranges)]
    )
    assert len(tiles) == 3 * 4 * lengths[int(by_key)].max(axis=(0, 2), initial=1).sum()


@long
def test_only_blocks_in_range_are_computed(monkeypatch):
    monkeypatch.setattr(tpu, "BLOCKS", (BLOCK,))
    call = call_of(SUBJECTS["t5-near"], length=27)
    plan, operands, integers = inputs_of(call, "by distance", BiasReads(), BLOCK, reads_far=True)
    assert plan.has_far
    rng = np.random.default_rng(0)
    operands = jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape), jnp.float32), operands
    )
    integers, _ = ranges_by_head(1, HEADS, 4, 4, rng)

    def results(kernels):
        def run(operands, integers):
            given = plan, operands, integers
            out, logsumexp = kernels.forward(*given)
            residuals = Residuals(jnp.cos(out), logsumexp, jnp.sum(out * jnp.cos(out), axis=-1))
            backward = kernels.d_queries, kernels.d_keys, kernels.d_table
            return out, logsumexp, [kernel(*given, residuals) for kernel in backward]

        return jax.tree.leaves(jax.jit(run)(operands, integers))

    expected = results(fused_by_definition.KERNELS)
    interpreted = results(tpu.DEVICE.kernels(interpreted=True))
    for result, wanted in zip(interpreted, expected, strict=True):
        # Two results, of 64 channels and 32 keys; gradients go through the scores once more.
        bound = 2 * 2 * attention_bound("float32", channels=64, keys=32)
        assert_near(result, wanted, bound)


@pytest.mark.parametrize("size", [8, 128])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_table_gives_a_tile_and_diagonals_of_a_tile_give_its_gradient(size, shift):
    line = np.arange(2 * size, dtype=np.float32)
    toeplitz = jax.jit(partial(tpu_tile.toeplitz, shift=shift))
    tile = toeplitz(line[None, :size], line[None, size:])
    i, j = np.arange(size)[:, None], np.arange(size)[None, :]
    np.testing.assert_array_equal(tile, line[size - shift + j - i])
    d_tile = np.random.default_rng(0).integers(-8, 8, (size, size)).astype(np.float32)
    expected = np.zeros(2 * size, np.float32)
    np.add.at(expected, size - 1 + j - i, d_tile)
    np.testing.assert_array_equal(jax.jit(tpu_tile.diagonal_sums)(d_tile)[0], expected)


def lowered(scheme, tensors, **options):
    """Forward and backward pass of the kernels, as the compiler of a TPU receives them."""
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        for name, spec in scheme.param_specs().items()
    }
    d_out = tensors["q"].update(shape=(*tensors["q"].shape[:3], tensors["v"].shape[3]))

    def both(arrays, places, params, d_out):
        return pulled(scheme, {**options, **places}, arrays, params, d_out)

    places = {name: a for name, a in tensors.items() if isinstance(a, Tokens)}
    arrays = {name: a for name, a in tensors.items() if name not in places}
    with targeting(Target("tpu")), tpu.abstract_tpu():
        traced = jax.jit(both).trace(arrays, places, params, d_out)
        return traced.lower(lowering_platforms=("tpu",)).as_text()


def shapes(dtype, dims, *, heads=HEADS, q_len=1000, k_len=1500, positions=False, segments=True):
    def integers(length):
        return jax.ShapeDtypeStruct((2, length), jnp.int32)

    def vectors(length, heads, dim):
        return jax.ShapeDtypeStruct((2, length, heads, dim), dtype)

    arrays = {
        "q": vectors(q_len, heads, dims[0]),
        "k": vectors(k_len, heads // 2, dims[0]),
        "v": vectors(k_len, heads // 2, dims[1]),
        "x": jax.ShapeDtypeStruct((2, k_len, HIDDEN_DIM), dtype),
    }
    given = {"pos": positions, "seg": segments}
    sides = {
        side: Tokens(**{name: integers(length) for name, here in given.items() if here})
        for side, length in (("tokens", k_len), ("queries", q_len))
    }
    return arrays | sides


@long
@pytest.mark.parametrize(
    ("subject", "dtype", "dims"),
    some(
        [(s, "bfloat16", (128, 128)) for s in FORMS]
        + [(s, "float32", (64, 256)) for s in ("t5", "fading")],
        [(s, "bfloat16", (128, 128)) for s in ("nope", "kerple_log", "t5", "fading")],
        long,
    ),
)
def test_every_kernel_lowers_for_the_device_at_real_sizes(subject, dtype, dims):
    positions = dtype == "float32" and FORMS[subject] != "by distance"
    options = {"causal": dtype == "float32", "window": 600}
    text = lowered(SUBJECTS[subject], shapes(dtype, dims, positions=positions), **options)
    assert text.count("tpu_custom_call") == (4 if FORMS[subject] == "by distance" else 3)


@long
def test_kernels_lower_where_integers_have_64_bits():
    with jax.enable_x64(True):
        lowered(SUBJECTS["t5"], shapes("float32", (64, 64)), causal=True)


def call_of(scheme, dtype="float32", dim=DIM, v_dim=DIM, batch=1, length=LENGTH, **options):
    """A call as an implementation receives it."""
    size = (batch, HEADS, length)
    q, v = jnp.zeros((*size, dim), dtype), jnp.zeros((*size, v_dim), dtype)
    params = {name: jnp.asarray(a) for name, a in params_of(scheme).items()}
    x = jnp.zeros((batch, length, HIDDEN_DIM), dtype)
    given = Arguments(tokens=Tokens(x=x))
    return prepare(q, q, v, scheme, params, given=given, **options, xp=jnp)


# One of each form, and what is hidden by a bias.
@pytest.mark.parametrize(
    "subject", some(FORMS, ["nope", "alibi", "t5", "fox", "fading", "fence"], long)
)
def test_which_form_a_bias_has(subject):
    # Also under a causal mask, where a key bias would serve: the bias itself comes first.
    call = call_of(SUBJECTS[subject], causal=True)
    served = implementation.choose_form(call, tpu.DEVICE)
    assert (served.form, served.key_bias) == (FORMS[subject], None)


def unlowered(call):
    return tpu.DEVICE.unsupported_bias(call.scheme, trace_bias_reads(call))


def test_a_bias_that_does_not_lower_says_why():
    class Sorting(type(SUBJECTS["tide"])):
        def bias(self, q, k, *, params, xp):
            return super().bias(q, k, params=params, xp=xp) + xp.sort(q - k, axis=-1)

    reason = unlowered(call_of(Sorting()))
    assert reason is not None
    assert "the bias of Sorting does not lower for a TPU: " in reason
    # Also while a program is traced.
    traced = []
    jax.eval_shape(lambda: traced.append(unlowered(call_of(Sorting()))))
    assert traced == [reason]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, "bfloat16 or float32, q is float16"),
        ({"dim": 96, "v_dim": 64}, "head_dim 64, 128, 256; q has 96"),
        ({"v_dim": 80}, "head_dim 64, 128, 256; v has 80"),
    ],
)
def test_what_no_kernel_takes(options, reason):
    assert reason in tpu.DEVICE.unsupported_call(call_of(SUBJECTS["nope"], **options))


def test_prefetched_integers_have_little_room():
    def refused(batch):
        long = jax.ShapeDtypeStruct((batch, 32, 8192, DIM), jnp.bfloat16)
        return tpu.DEVICE.unsupported_call(
            replace(call_of(SUBJECTS["nope"]), q=long, k=long, v=long)
        )

    assert refused(63) is None
    assert "batch 64, 32 heads and 16 + 16 blocks need 132096 integers" in refused(64)


def test_what_kernels_take():
    call = call_of(SUBJECTS["nope"], "bfloat16", 128, 256)
    assert tpu.DEVICE.unsupported_call(call) is None
    mixed = replace(call, v=call.v.astype(jnp.float32))
    assert "differ in dtype" in tpu.DEVICE.unsupported_call(mixed)


def test_blocks_are_no_longer_than_the_queries():
    def of(length):
        q = jax.ShapeDtypeStruct((1, 1, length, DIM), jnp.float32)
        return tpu.DEVICE.block(replace(call_of(SUBJECTS["nope"]), q=q))

    sizes = {1: 128, 128: 128, 300: 256, 511: 256, 512: 512, 4000: 512}
    assert {length: of(length) for length in sizes} == sizes
