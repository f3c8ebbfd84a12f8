"""Every path of every backend equals the reference in float64, in values and in gradients."""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES, STEERING, expected, tensors_of
from frameworks import FUSED, HAS, assert_near
from subjects import SUBJECTS, normal, params_of

# Relative to the largest number compared.
TOLERANCES = {
    # Sums of 8 channels and 20 keys, in another order: some tens of roundings of 1e-16.
    "float64": 1e-14,
    # Likewise of 6e-8; rotations and exponentials add 1e-7 each.
    "float32": 3e-6,
    # Scores near 5, rotated queries and keys, and weights are all rounded to 8 bits, 4e-3.
    "bfloat16": 4e-2,
}
# The cases in which bfloat16 and float64 are compared: one of them has all that the others have.
OTHER_DTYPES = [("causal", "bfloat16"), ("everything", "bfloat16"), ("everything", "float64")]
GRID = [(case, "float32") for case in CASES] + OTHER_DTYPES


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Tiles of 8, so that short sequences have several and the last is padded."""
    if HAS["jax"]:
        monkeypatch.setattr("posenc_jax.blocks.BLOCK", 8)


def refused(route, dtype):
    """Float64 is refused by what computes its softmax in float32."""
    return dtype == "float64" and (route.backend, route.path) == ("jax", "xla")


@pytest.mark.parametrize(("case", "dtype"), GRID)
@pytest.mark.parametrize("subject", STEERING)
@pytest.mark.parametrize("route", FUSED)
def test_a_path_equals_the_reference(route, subject, case, dtype):
    if not HAS["torch"]:
        pytest.skip("gradients are compared with torch's autograd, torch is not installed")
    scheme, where = SUBJECTS[subject], CASES[case]
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    values, gradients = expected(subject, case)
    d_out = normal(values.shape, 9)
    try:
        out, found = route.gradients(scheme, tensors, params, d_out, dtype=dtype, **where.options)
    except NotImplementedError as reason:
        assert dtype == "float64", reason
        pytest.skip(f"refused: {reason}")
    assert_near(out, values, TOLERANCES[dtype])
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_near(found[name], gradient, TOLERANCES[dtype], f"gradient of {name}")


def test_the_comparison_can_fail():
    assert_near([1.0, -np.inf], [1.0, -np.inf], 0)
    for wrong in ([1.0], [1.1, 0.0], [np.nan, 0.0], [np.inf, 0.0]):
        with pytest.raises(AssertionError):
            assert_near(wrong, [1.0, 0.0], 1e-2)
