"""Sinks against gpt-oss's attention in ``transformers``, and as a part of the catalogue."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from frameworks import FUSED
from sample import long
from subjects import HIDDEN_DIM, normal

import posenc
from posenc.schemes import DynamicNTK, NoPE, RoPE, Sink, Sum, YaRN
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR, assert_near

HEADS, DIM, LENGTH = 4, 8, 20
SINKS = np.asarray([-2.0, 0.5, 3.0, 0.0])


def vectors():
    shapes = {"q": HEADS, "k": 2, "v": 2}
    return {n: normal((2, h, LENGTH, DIM), seed) for seed, (n, h) in enumerate(shapes.items())}


def test_a_sink_takes_weight():
    """``exp(s) / (exp(sink) + exp(s))`` with one key."""
    q, k, v = (np.full((1, 2, 1, 1), x) for x in (2.0, 1.5, 8.0))
    out = posenc.attention(q, k, v, Sink(NoPE(), 2), {"sink": np.asarray([3.0, -1.0])})
    np.testing.assert_allclose(out[0, :, 0, 0], [4.0, 8 / (1 + np.exp(-4.0))], rtol=1e-14)


def test_the_catalogue_has_a_sink_alone():
    assert posenc.make("sink", num_heads=4, head_dim=8) == Sink(NoPE(), 4)
    assert posenc.make("sink", num_heads=4, learned=False) == Sink(NoPE(), 4, learned=False)
    per_query = posenc.make("sink", num_heads=2, dim=6, per_query=True)
    assert per_query == Sink(NoPE(), 2, per_query=True, hidden_dim=6)
    q, k, v = vectors().values()
    one, other = Sum(RoPE(DIM), Sink(NoPE(), HEADS)), Sink(RoPE(DIM), HEADS)
    np.testing.assert_array_equal(
        posenc.attention(q, k, v, one, {"1_sink": SINKS}, True),
        posenc.attention(q, k, v, other, {"sink": SINKS}, True),
    )


def test_a_sink_starts_from_its_value_and_keeps_what_the_scheme_says():
    for scheme in (Sink(NoPE(), 3, value=2.0), Sink(NoPE(), 3)):
        first = posenc.init_params(scheme)["sink"]
        np.testing.assert_array_equal(first, np.full(3, scheme.value, np.float32))
    scheme = Sink(RoPE(DIM, scaling=YaRN(16, 64, apply_to="scale")), HEADS)
    assert scheme.scale(DIM) == scheme.scheme.scale(DIM) != NoPE().scale(DIM)
    dynamic = Sink(RoPE(DIM, scaling=DynamicNTK(2, 64)), HEADS, value=0.5)
    longer = dynamic.at_length(128)
    assert longer == Sink(dynamic.scheme.at_length(128), HEADS, value=0.5) != dynamic
    assert longer.at_length(128) is longer
    t5 = posenc.T5Bias(HEADS, causal=True)
    assert Sink(t5).constant_beyond() == t5.constant_beyond() != (None, None)


# window, sink_tokens -> which keys a query sees besides the causal mask
MASKS = {"causal": (None, 0), "window": (5, 0), "window-and-first-tokens": (5, 2)}


def released(torch, tensors, sinks, window, sink_tokens, d_out):
    """Result and gradients of gpt-oss's own eager attention."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    leaves = {
        n: torch.tensor(a, requires_grad=True) for n, a in (*tensors.items(), ("sink", sinks))
    }
    module = SimpleNamespace(sinks=leaves["sink"], num_key_value_groups=2, training=False)
    pos = torch.arange(LENGTH)
    ahead = pos[:, None] - pos
    seen = ahead >= 0
    if window is not None:
        seen &= (ahead < window) | (pos < sink_tokens)
    mask = torch.where(seen, 0.0, -torch.inf).to(torch.float64)
    q, k, v = (leaves[n] for n in "qkv")
    out, _ = eager_attention_forward(module, q, k, v, mask, DIM**-0.5)
    out = out.transpose(1, 2)
    out.backward(torch.tensor(d_out))
    return out.detach().numpy(), {n: leaf.grad.numpy() for n, leaf in leaves.items()}


@long
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("route", [p for p in FUSED if p.id != "torch-flex"])
def test_a_learned_sink_is_that_of_gpt_oss(route, mask):
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    window, sink_tokens = MASKS[mask]
    tensors, d_out = vectors(), normal((2, HEADS, LENGTH, DIM), 7)
    expected, slopes = released(torch, tensors, SINKS, window, sink_tokens, d_out)
    out, gradients = route.gradients(
        Sink(NoPE(), HEADS), tensors, {"sink": SINKS}, d_out,
        causal=True, mask=posenc.window(window, first=sink_tokens),
    )  # fmt: skip
    assert_near(out, expected, ATTENTION_TOL["float32"])
    for name, slope in slopes.items():
        factor = REDUCTION_FACTOR if name == "sink" else 1
        assert_near(gradients[name], slope, factor * ATTENTION_TOL["float32"], name)


@long
@pytest.mark.parametrize("mask", MASKS)
def test_constant_and_per_query_sinks_are_its_formula_too(mask):
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    window, sink_tokens = MASKS[mask]
    tensors, d_out = vectors(), normal((2, HEADS, LENGTH, DIM), 7)
    options = {"causal": True, "mask": posenc.window(window, first=sink_tokens)}
    constant = Sink(NoPE(), learned=False, value=0.75)
    sinks = np.full(HEADS, 0.75)
    expected, _ = released(torch, tensors, sinks, window, sink_tokens, d_out)
    out = posenc.attention(**tensors, scheme=constant, **options)
    assert_near(out, expected, ATTENTION_TOL["float64"])
    # With the same hidden state in every token, the sink of each query is the same number.
    x = np.broadcast_to(normal((1, 1, HIDDEN_DIM), 8), (2, LENGTH, HIDDEN_DIM))
    w = normal((HEADS, HIDDEN_DIM), 9)
    expected, _ = released(torch, tensors, w @ x[0, 0], window, sink_tokens, d_out)
    per_query = Sink(NoPE(), HEADS, per_query=True, hidden_dim=HIDDEN_DIM)
    out = posenc.attention(
        **tensors, scheme=per_query, params={"sink_w": w}, tokens=posenc.Tokens(x=x), **options
    )
    assert_near(out, expected, ATTENTION_TOL["float64"])


@long
def test_the_log_sum_exp_learns_where_it_equals_the_sink():
    """``log(exp(s) + exp(sink))``: half of the gradient each. JAX's ``abs`` has a slope at 0."""
    jax = pytest.importorskip("jax")
    posenc_jax = pytest.importorskip("posenc_jax")
    zeros = jax.numpy.zeros((1, 1, 1, 8))

    def lse(sink):
        call = zeros, zeros, zeros, Sink(NoPE(), 1), {"sink": sink}
        return posenc_jax.attention(*call, return_lse=True)[1][0, 0, 0]

    value, slope = jax.value_and_grad(lse)(jax.numpy.zeros(1))
    np.testing.assert_allclose([value, slope[0]], [np.log(2), 0.5], rtol=1e-6)
