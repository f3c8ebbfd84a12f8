"""Around the kernels: what they compute from, their gradients put together, who is refused.

Kernels by definition stand for real ones, so that this needs no recent JAX.
"""

import fused_by_definition
import pytest
from cases import CASES, STEERING, expected, tensors_of
from frameworks import HAS, route
from subjects import SUBJECTS, normal, params_of

from posenc.testing.tolerances import PATHS, SUMMED, assert_near

jax = pytest.importorskip("jax")
jnp = jax.numpy
posenc_jax = pytest.importorskip("posenc_jax")

from posenc_jax.fused import path  # noqa: E402
from posenc_jax.fused.target import Target, targeting  # noqa: E402

FORMS = ["nope", "alibi-learned", "t5", "forgetting", "fading"]


@pytest.fixture
def defined(monkeypatch):
    """Kernels by definition, in blocks of 8."""
    monkeypatch.setattr(path, "_module", lambda here: fused_by_definition)
    with targeting(Target("gpu", "9.0", interpreted=True)):
        yield


@pytest.mark.skipif(not HAS["torch"], reason="gradients are compared with torch's autograd")
@pytest.mark.parametrize(
    ("subject", "case"),
    # JAX compiles each for a second: all cases for what has a form of its own, two for the others.
    [(s, c) for s in STEERING for c in CASES if s in FORMS or c in ("causal", "everything")],
)
def test_kernels_by_definition_equal_the_reference(subject, case, defined):
    scheme, where = SUBJECTS[subject], CASES[case]
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    values, gradients = expected(subject, case)
    d_out = normal(values.shape, 9)
    try:
        out, found = route("jax", "pallas").gradients(
            scheme, tensors, params, d_out, **where.options
        )
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    assert_near(out, values, PATHS["float32"])
    for name, gradient in gradients.items():
        summed = name in params or name == "x"
        tolerance = PATHS["float32"] * (SUMMED if summed else 1)
        assert_near(found[name], gradient, tolerance, f"gradient of {name}")
