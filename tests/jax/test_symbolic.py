"""Sizes and arrays that are not there: symbols of ``jax.export``, and shapes alone."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import HAS
from sample import long, some
from subjects import SUBJECTS, heads, normal, params_of

import posenc
from posenc.apply.feature_needs import reads_hidden
from posenc.testing.examples import HEAD_DIM, HIDDEN_DIM
from posenc.testing.tolerances import attention_bound

if not HAS["jax"]:
    pytest.skip("JAX is not installed", allow_module_level=True)

import jax

import posenc_jax

# A rotation, sums in order of positions, decay in blocks, regions, and whole rows.
FEW = ("rope", "fox", "wall", "rerope", "cope")
ON_ONE_AXIS = [name for name, scheme in SUBJECTS.items() if scheme.axes == 1]
LENGTH = 23


def attend_with(name):
    """Packed attention at positions of one's own."""
    scheme = SUBJECTS[name]
    params = params_of(scheme)

    def attend(q, k, v, pos, seg, x):
        tokens = posenc.Tokens(pos, seg=seg, x=x if reads_hidden(scheme) else None)
        return posenc_jax.attention(q, k, v, scheme, params, causal=True, tokens=tokens)

    return jax.jit(attend)


def shapes_of(batch, length, count):
    vectors = jax.ShapeDtypeStruct((batch, length, count, HEAD_DIM), np.float32)
    pos, seg = (jax.ShapeDtypeStruct(s, np.int32) for s in ((length,), (batch, length)))
    x = jax.ShapeDtypeStruct((batch, length, HIDDEN_DIM), np.float32)
    return vectors, vectors, vectors, pos, seg, x


def values_of(batch, length, count):
    q, k, v = normal((3, batch, length, count, HEAD_DIM), 0, "float32")
    pos = np.arange(length, dtype=np.int32) * 3 + 100
    seg = np.sort(np.arange(batch * length, dtype=np.int32).reshape(batch, length) % 3)
    return q, k, v, pos, seg, normal((batch, length, HIDDEN_DIM), 1, "float32")


@pytest.mark.filterwarnings("ignore::posenc.SchemeWarning")
@pytest.mark.parametrize("name", some(ON_ONE_AXIS, FEW, long))
def test_a_program_serves_every_batch_and_length(name):
    attend, count = attend_with(name), heads(SUBJECTS[name])
    sizes = jax.export.symbolic_shape("b, n")
    program = jax.export.export(attend)(*shapes_of(*sizes, count))
    for batch, length in ((1, 1), (3, LENGTH)):
        given = values_of(batch, length, count)
        # Sums of gates are in another order than those of a length in numbers.
        bound = 2 * attention_bound("float32", keys=LENGTH) * np.max(np.abs(given[2]))
        np.testing.assert_allclose(program.call(*given), attend(*given), atol=bound)


def test_a_mask_of_ones_own_is_tried_with_a_symbolic_batch():
    def attend(q, k, v, exists):
        tokens = posenc.Tokens(exists=exists)
        return posenc_jax.attention(q, k, v, posenc.RoPE(HEAD_DIM), mask=sees, tokens=tokens)

    def sees(q_pos, k_pos):
        return (k_pos <= q_pos) | (k_pos < 2)

    sizes = jax.export.symbolic_shape("b, n")
    given = *shapes_of(*sizes, 2)[:3], jax.ShapeDtypeStruct(sizes, bool)
    program = jax.export.export(jax.jit(attend))(*given)
    values = *values_of(3, LENGTH, 2)[:3], np.arange(3 * LENGTH).reshape(3, LENGTH) % 5 > 0
    bound = 2 * attention_bound("float32", keys=LENGTH) * np.max(np.abs(values[2]))
    np.testing.assert_allclose(program.call(*values), attend(*values), atol=bound)


@pytest.mark.parametrize("symbols", ["b, 6", "2, n"])
def test_what_cuts_blocks_refuses_symbols_by_name(symbols):
    batch, length = jax.export.symbolic_shape(symbols)

    def attend(q, k, v):
        return posenc_jax.attention(q, k, v, posenc.RoPE(HEAD_DIM), implementation="chunked")

    with pytest.raises(NotImplementedError, match="a length or the batch is symbolic"):
        jax.export.export(jax.jit(attend))(*shapes_of(batch, length, 2)[:3])


def test_explain_needs_shapes_alone():
    """Of a call that no machine could hold; positions, hidden states and params are shapes too."""
    scheme, length = SUBJECTS["fox"], 2**24
    own = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in params_of(scheme).items()}
    q, _, _, pos, _, x = shapes_of(64, length, heads(scheme))
    tokens = posenc.Tokens(pos, x=x)
    told = posenc_jax.explain(q, q, q, scheme, own, causal=True, tokens=tokens, return_lse=True)
    assert told["implementation"] == "chunked"
    with pytest.raises(TypeError, match=r"q must be an array, got a ShapeDtypeStruct.*explain"):
        posenc_jax.attention(q, q, q, scheme, own, causal=True, tokens=tokens)


@pytest.mark.parametrize(
    ("q", "error", "said"),
    [
        (np.ones((2, 0, 4, 8)), ValueError, r"q has an axis of length 0: \(2, 0, 4, 8\)"),
        (
            jax.numpy.ones((2, 6, 4, 8), jax.numpy.float8_e4m3fn),
            TypeError,
            "q must have 16 bits or more, got float8_e4m3fn",
        ),
    ],
    ids=["empty", "float8"],
)
def test_wrong_arrays_are_named_as_they_were_given(q, error, said):
    with pytest.raises(error, match=said):
        posenc_jax.attention(q, q, q, posenc.ALiBi(4))
