"""Around the kernels: what they compute from, their gradients put together, who is refused.

Kernels by definition stand for real ones, so that this needs no recent JAX.
"""

import fused_by_definition
import numpy as np
import pytest
from cases import CASES, STEERING, expected, tensors_of
from frameworks import HAS, route
from subjects import SUBJECTS, normal, params_of

import posenc
from posenc.call import prepare
from posenc.testing.tolerances import PATHS, SUMMED, UNIT, assert_near, attention_bound

jax = pytest.importorskip("jax")
jnp = jax.numpy
posenc_jax = pytest.importorskip("posenc_jax")

from posenc_jax.fused import path  # noqa: E402
from posenc_jax.fused.target import Target, targeting  # noqa: E402

FORMS = ["nope", "alibi-learned", "t5", "fading"]


@pytest.fixture
def defined(monkeypatch):
    """Kernels by definition, in blocks of 8."""
    monkeypatch.setattr(path, "_module", lambda here: fused_by_definition)
    with targeting(Target("gpu", "9.0", interpreted=True)):
        yield


@pytest.mark.skipif(not HAS["torch"], reason="gradients are compared with torch's autograd")
@pytest.mark.parametrize(
    ("subject", "case"),
    # JAX compiles each for a second: all cases for one of each form, one for the others.
    [(s, c) for s in STEERING for c in CASES if s in FORMS or c == "causal"],
)
def test_kernels_by_definition_equal_the_reference(subject, case, defined):
    try:
        assert_as_the_reference(subject, case)
    except NotImplementedError as reason:
        if subject in FORMS and subject != "t5":  # numbers and coordinates serve every call
            raise
        pytest.skip(f"refused: {reason}")


def assert_as_the_reference(subject, case):
    scheme, where = SUBJECTS[subject], CASES[case]
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    values, gradients = expected(subject, case)
    d_out = normal(values.shape, 9)
    out, found = route("jax", "pallas").gradients(scheme, tensors, params, d_out, **where.options)
    assert_near(out, values, PATHS["float32"])
    for name, gradient in gradients.items():
        summed = name in params or name == "x"
        tolerance = PATHS["float32"] * (SUMMED if summed else 1)
        assert_near(found[name], gradient, tolerance, f"gradient of {name}")


STEEP = posenc.ALiBi(4, slopes=[8.0, 4.0, 2.0, 1.0])


def tokens(length, *, q_len=None, dtype="float32", kv_heads=4):
    """q, k, v in the layout of JAX."""
    sizes = [(q_len or length, 4), *[(length, kv_heads)] * 2]
    return [jnp.asarray(normal((2, size, own, 8), n), dtype) for n, (size, own) in enumerate(sizes)]


def test_blocks_that_round_to_nothing_are_left_out(defined, monkeypatch):
    seen = []
    plain = path.planned
    monkeypatch.setattr(path, "planned", lambda *a: seen.append(plain(*a)) or seen[-1])
    out = [
        posenc_jax.attention(*tokens(80), STEEP, causal=True, path="pallas", skip_blocks=skip)
        for skip in (True, False)
    ]
    some, every = (jnp.sum(jnp.diff(at.keys, axis=0)) for _, _, at in seen)
    assert every == 2 * 4 * 10 * 11 / 2
    assert some < 0.6 * every
    # What is left out weighs less than half a rounding; the rest is summed in another order.
    assert_near(out[0], out[1], UNIT["float32"] + 2 * attention_bound("float32", keys=80))


def test_bounds_of_keys_and_of_queries_hold_the_same_pairs(defined, monkeypatch):
    seen = []
    plain = path.planned
    monkeypatch.setattr(path, "planned", lambda *a: seen.append(plain(*a)) or seen[-1])
    posenc_jax.attention(*tokens(80), STEEP, causal=True, window=20, path="pallas")
    ((plan, _, places),) = seen
    index = np.arange(plan.q_blocks)
    by_query = (places.keys[0][..., None] <= index) & (index < places.keys[1][..., None])
    by_key = (places.queries[0][..., None] <= index) & (index < places.queries[1][..., None])
    np.testing.assert_array_equal(by_query, jnp.swapaxes(by_key, -1, -2))


def test_the_logsumexp_has_a_gradient(defined):
    """As two parts of one softmax need it to be put together."""
    scheme, length = posenc.ALiBi(4, learned=True), 19
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in tokens(length))
    params = {"slopes": jnp.asarray([0.5, 0.25, 0.1, 0.01])}

    def call(q, k, params):
        return prepare(q, k, v, scheme, params, causal=True, xp=jnp)

    def ours(*leaves):
        return jnp.sum(jnp.sin(path.fused_with_logsumexp(call(*leaves))[1]))

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
        assert_near(one, other, SUMMED * PATHS["float32"])


@pytest.mark.parametrize("subject", ["alibi-learned", "forgetting"])
def test_a_key_bias_stands_for_a_bias_that_does_not_lower(subject, defined, monkeypatch):
    monkeypatch.setattr(fused_by_definition, "why_not_lowered", lambda call, here: "it does not")
    # At explicit positions there is no table either.
    assert_as_the_reference(subject, "everything")


@pytest.mark.parametrize(
    ("scheme", "options", "reason"),
    [
        (SUBJECTS["t5"], {"q_pos": np.arange(20), "k_pos": np.arange(20)}, "the default positions"),
        (SUBJECTS["checkered"], {}, "is not relative, .*; a key bias needs a causal mask"),
    ],
    ids=["t5-shuffled", "checkered"],
)
def test_a_bias_without_a_form_is_refused(scheme, options, reason, defined):
    tensors = tokens(20)
    arguments = *tensors, scheme, params_of(scheme)
    with pytest.raises(NotImplementedError, match=reason):
        posenc_jax.attention(*arguments, path="pallas", **options)
    found = posenc_jax.explain(*arguments, **options)
    assert found["path"] == "chunked"


def test_segments_of_64_bits_are_refused(defined):
    with jax.enable_x64(True):
        where = dict.fromkeys(("q_seg", "k_seg"), jnp.arange(20, dtype="int64"))
        with pytest.raises(NotImplementedError, match="q_seg has 64"):
            posenc_jax.attention(*tokens(20), STEEP, path="pallas", **where)


def test_a_cpu_has_no_kernels():
    with pytest.raises(NotImplementedError, match="for gpu and tpu, the device is a cpu"):
        posenc_jax.attention(*tokens(20), STEEP, path="pallas")


def test_auto_passes_kernels_by_and_says_why(defined):
    at_all = posenc_jax.explain(*tokens(300), STEEP, causal=True)
    assert at_all["path"] != "pallas"
    assert "no device has run them yet" in at_all["others"]["pallas"]
    few = posenc_jax.explain(*tokens(300, q_len=3), STEEP, causal=True)
    assert "3 queries are few" in few["others"]["pallas"]
