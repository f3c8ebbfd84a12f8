"""Around the kernels: their inputs, their gradients combined, and which calls are refused.

Kernels by definition replace real ones, so this needs no recent JAX.
"""

import itertools
from dataclasses import dataclass, replace

import fused_by_definition
import numpy as np
import pytest
from cases import CASES, ONE_OF_EACH, Case, expected, options_of, shuffled, tensors_of
from frameworks import HAS, route
from sample import long, some
from subjects import SUBJECTS, fox_alibi, normal, params_of, sunk

import posenc
from posenc.attn.arguments import Arguments
from posenc.attn.implementations import Implementation, Planned, Refusal
from posenc.attn.prepare import prepare
from posenc.attn.reference import dense
from posenc.schemes import Kerple
from posenc.testing.examples import HIDDEN_DIM, Leaning, Levelled, Wide
from posenc.testing.tolerances import (
    ATTENTION_TOL,
    REDUCTION_FACTOR,
    UNIT,
    assert_near,
    attention_bound,
)

jax = pytest.importorskip("jax")
jnp = jax.numpy
posenc_jax = pytest.importorskip("posenc_jax")

from posenc_jax.fused import implementation, inputs  # noqa: E402
from posenc_jax.fused.plan import Plan, Tokens  # noqa: E402
from posenc_jax.fused.reads import BiasReads, trace_bias_reads  # noqa: E402
from posenc_jax.fused.target import Target, targeting  # noqa: E402

FORMS = ["nope", "alibi-learned", "t5", "t5-few", "fading"]
# JAX compiles each for a second: all cases for one scheme of each form, one for each other class.
BY_DEFINITION = [(s, c) for s in FORMS for c in CASES] + [
    (s, "causal") for s in (*ONE_OF_EACH, "rope+alibi") if s not in FORMS
]
QUICK = [
    ("nope", "window-both-sides"),
    ("alibi-learned", "everything"),
    ("t5-few", "fewer-queries"),
]


@pytest.fixture(autouse=True)
def ranges_are_compiled_whole(monkeypatch):
    """JAX takes longer to compile each operation by itself."""
    needed = inputs.needed_blocks
    monkeypatch.setattr(inputs, "needed_blocks", lambda *given: jax.jit(lambda: needed(*given))())


@pytest.fixture
def defined(monkeypatch):
    """Kernels by definition, in blocks of 8."""
    monkeypatch.setattr(implementation, "device_for", lambda target: fused_by_definition.DEVICE)
    with targeting(Target("gpu", "9.0", interpreted=True)):
        yield


@pytest.fixture
def plans(defined, monkeypatch):
    """What kernels computed from, call by call."""
    calls = []
    inputs_of = implementation.inputs_of

    def recorded(*arguments, **options):
        calls.append(inputs_of(*arguments, **options))
        return calls[-1]

    monkeypatch.setattr(implementation, "inputs_of", recorded)
    return calls


@pytest.fixture
def does_not_lower(defined, monkeypatch):
    """Kernels that compute no scheme's own bias."""
    device = fused_by_definition.Definition
    monkeypatch.setattr(device, "unsupported_bias", lambda *_: "it does not")


@pytest.mark.skipif(not HAS["torch"], reason="gradients are compared with torch's autograd")
@pytest.mark.parametrize(("subject", "case"), some(BY_DEFINITION, QUICK, long))
def test_kernels_by_definition_equal_the_reference(subject, case, defined):
    try:
        assert_as_the_reference(subject, case)
    except NotImplementedError as reason:
        if subject in FORMS and not subject.startswith(
            "t5"
        ):  # scalars and features serve every call
            raise
        pytest.skip(f"refused: {reason}")


def assert_as_the_reference(subject, case):
    assert_near_definition(SUBJECTS[subject], CASES[case], *expected(subject, case))


def assert_near_definition(scheme, where, values, gradients):
    """Values and all gradients of the kernels by definition are as expected."""
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    d_out = normal(values.shape, 9)
    out, d_tensors = route("jax", "pallas").gradients(
        scheme, tensors, params, d_out, **options_of(scheme, where)
    )
    assert_near(out, values, ATTENTION_TOL["float32"])
    for name, gradient in gradients.items():
        summed = name in params or name == "tokens.x"
        tolerance = ATTENTION_TOL["float32"] * (REDUCTION_FACTOR if summed else 1)
        assert_near(d_tensors[name], gradient, tolerance, f"gradient of {name}")


STEEP = posenc.ALiBi(4, slopes=[8.0, 4.0, 2.0, 1.0])


def vectors(length, *, q_len=None, dtype="float32", kv_heads=4):
    """q, k, v in the layout of JAX."""
    sizes = [(q_len or length, 4), *[(length, kv_heads)] * 2]
    return [jnp.asarray(normal((2, size, own, 8), n), dtype) for n, (size, own) in enumerate(sizes)]


# Shuffled, some negative: first tokens are anywhere, and tokens before position 0 are none.
ANYWHERE = {
    "tokens": posenc.Tokens(pos=shuffled(20, 6)),
    "queries": posenc.Tokens(pos=shuffled(20, 5)),
}
NEW = {
    "fox-alibi": (fox_alibi(), Case({"causal": True}, grouped=True)),
    "fox-alibi-anywhere": (fox_alibi(), Case({"causal": True, **ANYWHERE})),
    "feature-of-keys": (Leaning("key"), Case({"window": 9}, q_len=11)),
    "feature-of-queries": (Leaning("query"), Case({"causal": True})),
    "window-of-two-sides": (SUBJECTS["nope"], Case({"window": (6, 2)}, q_len=13)),
    "window-open-behind": (SUBJECTS["alibi-learned"], Case({"window": (None, 3)})),
    "first-tokens": (
        SUBJECTS["alibi"],
        Case({"causal": True, "mask": posenc.window((3, 0), first=2)}),
    ),
    "first-tokens-anywhere": (
        SUBJECTS["nope"],
        Case({"mask": posenc.window((9, 4), first=12), **ANYWHERE}),
    ),
    "first-tokens-and-a-table": (
        SUBJECTS["t5"],
        Case({"causal": True, "mask": posenc.window(4, first=3)}, grouped=True),
    ),
    "regions": (Levelled(), Case({"causal": True})),
    "regions-and-first-tokens": (
        Levelled(),
        Case({"causal": True, "mask": posenc.window(None, first=2)}),
    ),
    "regions-in-a-window": (Levelled(), Case({"causal": True, "window": 9})),
}


@pytest.mark.parametrize(
    "name",
    some(
        NEW,
        ("a-number-of-keys", "first-tokens-anywhere"),
        long,
    ),
)
def test_features_windows_and_regions_equal_the_definition(name, defined):
    scheme, where = NEW[name]
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    given = scheme, tensors, params, normal(tensors["q"].shape, 9)
    options = {"dtype": "float64", **options_of(scheme, where)}
    assert_near_definition(scheme, where, *route("jax", "reference").gradients(*given, **options))


@long
@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(SUBJECTS["alibi-learned"], id="alibi"),
        pytest.param(fox_alibi(), id="fox", marks=long),
        pytest.param(Levelled(), id="regions", marks=long),
    ],
)
def test_a_learned_sink_has_its_gradient(inner, defined):
    """The weight of the sink reaches every gradient through that of the log-sum-exp."""
    scheme = sunk(inner)
    # In some rows only the sink is visible.
    where = Case(
        {
            "causal": True,
            "tokens": posenc.Tokens(seg=np.arange(20) % 2),
            "queries": posenc.Tokens(seg=np.arange(20) % 3),
        }
    )
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    given = scheme, tensors, params, normal(tensors["q"].shape, 9)
    values, gradients = route("jax", "reference").gradients(
        *given, dtype="float64", **options_of(scheme, where)
    )
    assert np.all(np.abs(gradients["sink"]) > 0.01)
    assert_near_definition(scheme, where, values, gradients)


def call_of(scheme, *, length=20, causal=False, tokens=None, **options):
    """A call in the layout of the core."""
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in vectors(length))
    params = {name: jnp.asarray(a) for name, a in params_of(scheme).items()}
    x = jnp.asarray(normal((2, length, HIDDEN_DIM), 3), "float32")
    given = Arguments(tokens=replace(tokens or posenc.Tokens(), x=x), **options)
    return prepare(q, k, v, scheme, params, causal, given, xp=jnp)


def test_the_logsumexp_is_that_of_the_definition(defined):
    seg = {
        "tokens": posenc.Tokens(seg=jnp.arange(20) % 2),
        "queries": posenc.Tokens(seg=jnp.arange(20) % 3),
    }

    @jax.jit  # JAX takes longer to compile each operation by itself
    def both():
        call = call_of(fox_alibi(), causal=True, **seg)
        return [attended(call)[1].rounded() for attended in (implementation.plan(call).run, dense)]

    lse, expected = map(np.asarray, both())
    assert np.all(lse[:, :, 2::3] == -np.inf)  # fully masked rows
    assert np.all(expected[:, :, 2::3] == -np.inf)
    visible = expected > -np.inf
    assert_near(lse[visible], expected[visible], ATTENTION_TOL["float32"])


def test_a_key_bias_has_no_logsumexp(does_not_lower):
    call = call_of(SUBJECTS["fox"], causal=True)
    planned = implementation.plan(call)
    assert jax.eval_shape(lambda: planned.run(call))[1] is None
    assert "replace the bias of FoX by its key bias" in planned.without_lse
    asked = Implementation("pallas", implementation.plan)
    refused = asked.plan_all(call_of(sunk(SUBJECTS["fox"]), causal=True))
    assert "the sink of Sink needs a log-sum-exp, and kernels replace the bias of" in refused.why
    assert isinstance(asked.plan_all(call), Planned)


@dataclass(frozen=True)
class OfKeys(posenc.PositionScheme):
    """A feature of each key, which no query has."""

    large: float = 0.0

    def feature_specs(self):
        return {"w": posenc.FeatureSpec(self.first, of="key", reads="vectors")}

    def first(self, k, pos, *, scale, params, xp):
        return self.large + 3 * k[..., 0]

    def bias(self, q, k, *, params, xp):
        return params.key["w"]

    def key_bias(self, k, *, params, xp):
        return params.key["w"]


# float32 has steps of 1/64 at such numbers; subtracted before scores are added, they cancel.
@long
@pytest.mark.parametrize(("case", "large"), [("everything", 0.0), ("fewer-queries", 2.0**18)])
def test_a_key_bias_of_a_feature_that_queries_lack(case, large, does_not_lower):
    scheme, where = OfKeys(large), CASES[case]
    tensors = tensors_of(scheme, where)
    given = scheme, tensors, {}, normal(tensors["q"].shape, 9)
    options = {"dtype": "float64", **options_of(scheme, where)}
    assert_near_definition(scheme, where, *route("jax", "reference").gradients(*given, **options))


@pytest.mark.parametrize(
    ("scheme", "options", "reason"),
    [
        (STEEP, {"softcap": 30.0}, "do not cap scores, softcap is 30.0"),
        (STEEP, {"bias": jnp.zeros((1, 1, 20, 20))}, "only the scheme's bias, bias is given"),
        (STEEP, {"mask": lambda q, k: q != k}, "windows only, mask is given"),
        (
            STEEP,
            {"tokens": posenc.Tokens(places=jnp.arange(20))},
            "the bias of ALiBi reads the places of tokens",
        ),
        (SUBJECTS["streets"], {}, "reads a table per query, 'places'; kernels take one number"),
        (
            Levelled(),
            {"mask": posenc.window(9, first=2)},
            "a mask of first tokens in a region needs two",
        ),
        (Wide(), {}, "reads a table per key, 't'; kernels take one number"),
        (Wide(table=False), {}, "reads 2 numbers per key, a, b; kernels take one"),
    ],
    ids=["softcap", "bias", "mask", "places", "axes", "first-tokens-of-regions", "table", "two"],
)
def test_arguments_that_kernels_do_not_read_are_refused(scheme, options, reason, defined):
    call = call_of(scheme, **options)
    refused = implementation.plan((call.regions or (call,))[0])
    assert isinstance(refused, Refusal)
    assert reason in refused.why


@long
def test_places_without_a_bias_are_served(defined):
    places = posenc.Tokens(places=jnp.arange(20) // 2)
    assert isinstance(implementation.plan(call_of(posenc.RoPE(8), tokens=places)), Planned)


def test_negligible_blocks_are_skipped(plans):
    out = [
        posenc_jax.attention(
            *vectors(80), STEEP, causal=True, implementation="pallas", skip_blocks=skip
        )
        for skip in (True, False)
    ]
    skipped, all_blocks = (jnp.sum(jnp.diff(at.key_ranges, axis=0)) for _, _, at in plans)
    assert all_blocks == 2 * 4 * 10 * 11 / 2
    assert skipped < 0.6 * all_blocks
    # Skipped weights are below half a rounding; the rest is summed in another order.
    assert_near(out[0], out[1], UNIT["float32"] + 2 * attention_bound("float32", keys=80))


def test_ranges_of_keys_and_of_queries_hold_the_same_pairs(plans):
    posenc_jax.attention(*vectors(80), STEEP, causal=True, window=20, implementation="pallas")
    ((plan, _, integers),) = plans
    index = np.arange(plan.q_blocks)
    by_query = (integers.key_ranges[0][..., None] <= index) & (
        index < integers.key_ranges[1][..., None]
    )
    by_key = (integers.query_ranges[0][..., None] <= index) & (
        index < integers.query_ranges[1][..., None]
    )
    np.testing.assert_array_equal(by_query, jnp.swapaxes(by_key, -1, -2))


def test_the_logsumexp_has_a_gradient(defined):
    """Combining two parts of one softmax needs it."""
    scheme, length = posenc.ALiBi(4, learned=True), 19
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in vectors(length))
    params = {"slopes": jnp.asarray([0.5, 0.25, 0.1, 0.01])}

    def call(q, k, params):
        return prepare(q, k, v, scheme, params, causal=True, xp=jnp)

    def ours(*leaves):
        asked = call(*leaves)
        return jnp.sum(jnp.sin(implementation.plan(asked).run(asked)[1].rounded()))

    def expected(*leaves):
        at = call(*leaves)
        scores = jnp.einsum("bhqd,bhkd->bhqk", at.q, at.k) * at.scale + at.bias()
        scores = jnp.where(at.visible(), scores, -jnp.inf)
        return jnp.sum(jnp.sin(jax.nn.logsumexp(scores, axis=-1)))

    arguments = q, k, params
    for one, other in zip(
        *(
            jax.tree.leaves(jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*arguments))
            for f in (ours, expected)
        ),
        strict=True,
    ):
        assert_near(one, other, REDUCTION_FACTOR * ATTENTION_TOL["float32"])


@pytest.mark.parametrize("subject", some(["alibi-learned", "fox"], ["alibi-learned"], long))
def test_a_key_bias_replaces_a_bias_that_does_not_lower(subject, does_not_lower):
    # At explicit positions there is no table either.
    assert_as_the_reference(subject, "everything")


@pytest.mark.parametrize(
    ("scheme", "options", "reason"),
    [
        (SUBJECTS["t5"], {"tokens": posenc.Tokens(pos=np.arange(20))}, "the default positions"),
        (SUBJECTS["checkered"], {}, "is not relative, .*; a key bias needs a causal mask"),
    ],
    ids=["t5-shuffled", "checkered"],
)
def test_a_bias_without_a_form_is_refused(scheme, options, reason, defined):
    tensors = vectors(20)
    arguments = *tensors, scheme, params_of(scheme)
    with pytest.raises(NotImplementedError, match=reason):
        posenc_jax.attention(*arguments, implementation="pallas", **options)
    choice = posenc_jax.explain(*arguments, **options)
    assert choice["implementation"] == "chunked"


def test_segments_of_64_bits_are_refused(defined):
    with jax.enable_x64(True):
        where = posenc.Tokens(seg=jnp.arange(20, dtype="int64"))
        with pytest.raises(NotImplementedError, match=r"tokens\.seg has 64"):
            posenc_jax.attention(*vectors(20), STEEP, implementation="pallas", tokens=where)


def test_a_cpu_has_no_kernels():
    with pytest.raises(NotImplementedError, match="for gpu and tpu, the device is a cpu"):
        posenc_jax.attention(*vectors(20), STEEP, implementation="pallas")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, "in float16"),
        ({"causal": False}, "causal attention at default positions"),
        ({"window": 7}, "without a window"),
        ({"tokens": posenc.Tokens(seg=np.arange(300) // 90)}, "without a window and segments"),
        ({"tokens": posenc.Tokens(pos=np.arange(300) + 1)}, "default positions"),
        ({"capability": "9.1"}, "on such a device"),
        ({"platform": "tpu"}, "on such a device"),
        ({"q_len": 3}, "3 queries are few"),
        ({"device_count": 2}, "with 2 devices"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_auto_takes_kernels_where_a_device_has_run_them(options, reason, defined, monkeypatch):
    def chosen(
        dtype="bfloat16", capability="9.0", platform="gpu", device_count=1, q_len=300, **own
    ):
        monkeypatch.setattr(jax, "device_count", lambda: device_count)
        tensors = (a.astype(dtype) for a in vectors(300, q_len=q_len))
        with targeting(Target(platform, capability, interpreted=True)):
            return posenc_jax.explain(*tensors, STEEP, **{"causal": True, **own})

    assert chosen()["implementation"] == "pallas"
    other = chosen(**options)
    assert other["implementation"] != "pallas"
    assert reason in other["others"]["pallas"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (70, 3), (None, 9), (9, None), (None, -40)])
def test_a_tile_is_masked_where_a_pair_is(window, causal):
    """And only there: a mask costs instructions for every score."""
    plan = replace(
        Plan.of_one_block(posenc.NoPE(), BiasReads(), 128),
        causal=causal, window=window, q_len=300, k_len=333,
    )  # fmt: skip
    for (q_count, k_count), q, k in itertools.product(
        [(64, 64), (64, 128), (128, 64)], range(33, 333, 64), range(0, 333, 32)
    ):
        at_q, at_k = np.arange(q, q + q_count), np.arange(k, k + k_count)
        mask = plan.mask(at_q[:, None], at_k, at_k)
        masked = mask is not None and not np.all(mask)
        assert bool(plan.needs_mask(q, q_count, k, k_count, has_segments=False)) == masked


POSITIONS = {"tokens": posenc.Tokens(pos=np.arange(20))}


@pytest.mark.parametrize(
    ("scheme", "options", "by_key"),
    [
        (posenc.ALiBi(4), {"causal": True}, True),
        (posenc.ALiBi(4, learned=True), {"causal": True, "window": 9}, True),
        (posenc.ALiBi(4), {}, False),  # later keys have another bias
        (posenc.ALiBi(4), {"causal": True, **POSITIONS}, False),  # they may be large
        (fox_alibi(), {"causal": True}, False),  # features are large
        (Kerple(4), {"causal": True}, False),  # there is no key bias
    ],
)
def test_a_bias_by_key_leaves_out_what_softmax_does_not_see(scheme, options, by_key):
    call = call_of(scheme, **options)
    reads = trace_bias_reads(call)
    plan, operands, _ = implementation.inputs_of(call, "elementwise", reads, 8, reads_far=False)
    assert plan.reads.by_key == by_key
    if not by_key:
        return
    scalars, first = list(operands.head_scalars[1]), 11
    i, j = np.arange(first, 20)[:, None], np.arange(20)[None, :]
    bias = plan.bias(scalars, Tokens(i), Tokens(j))
    zero = np.zeros_like(i)
    row = plan.bias(scalars, Tokens(i - first), Tokens(zero)) - plan.key_bias(scalars, zero)
    by_keys = plan.key_bias(scalars, j - first) + row
    assert_near(np.where(j <= i, by_keys, 0), np.where(j <= i, bias, 0), 4 * UNIT["float32"])


def test_segments_and_given_positions_may_be_masked_anywhere():
    plan = Plan.of_one_block(posenc.NoPE(), BiasReads(), 128)
    given = replace(plan, aligned=False)
    assert plan.needs_mask(0, 128, 0, 128, has_segments=True)
    assert replace(given, causal=True).needs_mask(128, 128, 0, 128, has_segments=False)
    assert not given.needs_mask(0, 128, 0, 128, has_segments=False)
