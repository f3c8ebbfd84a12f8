"""Which implementation serves a call, and why not the others."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import HAS
from subjects import SUBJECTS, normal

import posenc
from posenc.testing.examples import HEAD_DIM, HEADS

BACKENDS = [
    pytest.param(name, marks=[] if here else pytest.mark.skip(reason=f"{name} is not installed"))
    for name, here in HAS.items()
]
FAST = {"torch": "sdpa", "jax": "xla"}  # what serves a short, plain call


def backend_of(name):
    """The backend, and a tensor in its layout: heads and length are both HEADS."""
    q = normal((1, HEADS, HEADS, HEAD_DIM), 0, "float32")
    if name == "torch":
        import torch

        import posenc_torch

        return posenc_torch, torch.tensor(q)
    import jax.numpy as jnp

    import posenc_jax

    return posenc_jax, jnp.asarray(q)


@pytest.mark.parametrize("subject", ["nope", "alibi", "rope", "both", "cooled"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_plain_call_takes_the_fast_implementation(name, subject):
    backend, q = backend_of(name)
    found = backend.explain(q, q, q, SUBJECTS[subject], causal=True)
    assert found["implementation"] == FAST[name]
    assert found["others"].keys() == set(backend.IMPLEMENTATIONS) - {found["implementation"]}
    assert all(found["others"].values())
    assert str(found).startswith(f"implementation: {FAST[name]}\n")
    assert all(f"not {other}: " in str(found) for other in found["others"])


@pytest.mark.parametrize("name", BACKENDS)
def test_every_implementation_serves_under_its_name(name):
    backend, q = backend_of(name)
    for implementation in backend.IMPLEMENTATIONS:
        try:
            found = backend.explain(
                q, q, q, posenc.ALiBi(HEADS), causal=True, implementation=implementation
            )
        except NotImplementedError as reason:
            assert "the device is a cpu" in str(reason)  # noqa: PT017
            continue
        assert found["implementation"] == implementation
    with pytest.raises(ValueError, match="'reference'"):
        backend.attention(q, q, q, posenc.NoPE(), implementation="referense")


@pytest.mark.parametrize("name", BACKENDS)
def test_auto_computes_what_it_names(name):
    backend, q = backend_of(name)
    implementation = backend.explain(q, q, q, posenc.ALiBi(HEADS))["implementation"]
    auto = backend.attention(q, q, q, posenc.ALiBi(HEADS))
    np.testing.assert_array_equal(
        auto, backend.attention(q, q, q, posenc.ALiBi(HEADS), implementation=implementation)
    )


@pytest.mark.skipif(not HAS["jax"], reason="jax is not installed")
def test_an_implementation_that_cannot_says_why():
    backend, q = backend_of("jax")
    v = q[..., : HEAD_DIM // 2]
    with pytest.raises(NotImplementedError, match=r"xla.*head_dim"):
        backend.attention(q, q, v, posenc.ALiBi(HEADS), implementation="xla")
    found = backend.explain(q, q, v, posenc.ALiBi(HEADS))
    assert found["implementation"] == "chunked"
    assert "head_dim" in found["others"]["xla"]


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_a_float64_param_makes_every_implementation_that_serves_it_work_in_float64():
    backend, q = backend_of("torch")
    scheme, wide = posenc.ALiBi(HEADS, learned=True), {"slopes": np.linspace(0.1, 1, HEADS)}
    exact = posenc.attention(*[q.double().numpy()] * 3, scheme, wide, causal=True)
    for implementation in backend.IMPLEMENTATIONS:
        try:
            out = backend.attention(
                q, q, q, scheme, wide, causal=True, implementation=implementation
            )
        except NotImplementedError as reason:
            assert "no float64" in str(reason)  # noqa: PT017
            continue
        assert out.dtype == q.dtype
        np.testing.assert_array_equal(out.numpy(), exact.astype(np.float32))
