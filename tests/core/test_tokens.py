"""``Tokens``: slices, joins, and what it refuses."""

import numpy as np
import pytest

import posenc
from posenc import Tokens

RNG = np.random.default_rng(0)


def tokens(batch, length, heads=3, axes=2):
    """A record with every field."""
    return Tokens(
        pos=np.arange(length), seg=np.zeros((batch, length), int),
        places=RNG.integers(0, 9, (batch, length, axes)), exists=np.ones((batch, length), bool),
        x=RNG.standard_normal((batch, length, 5)),
        features={"c": RNG.standard_normal((batch, heads, length))},
        rotary=posenc.rotary(posenc.RoPE(8), np.arange(length)),
    )  # fmt: skip


def leaves(record):
    yield from ((n, a) for n, a in vars(record).items() if isinstance(a, np.ndarray))
    yield from record.features.items()
    yield from record.rotary.tables.items()


def test_slices_and_concatenates():
    whole = tokens(2, 7)
    parts = whole[:3], whole[3:6], whole[6:]
    assert [part.pos.shape[-1] for part in parts] == [3, 3, 1]
    assert whole[-2:].features["c"].shape == (2, 3, 2)
    again = parts[0].concat(*parts[1:])
    for (name, one), (_, other) in zip(leaves(whole), leaves(again), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_a_slice_is_attended_to_like_the_whole():
    """Decoding with slices of one record gives the rows of one call."""
    scheme = posenc.schemes.FoX(2, 5)
    params = posenc.init_params(scheme)
    q, k, v = (RNG.standard_normal((2, 2, 7, 8)) for _ in range(3))
    record = Tokens(np.arange(7) * 2, x=RNG.standard_normal((2, 7, 5)))
    queries, keys = posenc.features(scheme, params, record)
    whole = posenc.attention(q, k, v, scheme, params, causal=True, tokens=record)
    for start, end in ((0, 4), (4, 5), (5, 7)):
        part = posenc.attention(
            q[:, :, start:end], k[:, :, :end], v[:, :, :end], scheme, params, causal=True,
            tokens=keys[:end], queries=queries[start:end],
        )  # fmt: skip
        np.testing.assert_allclose(part, whole[:, :, start:end], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("places", [np.arange(6), np.zeros((2, 6), int), np.zeros((6, 2), int)])
def test_places_have_their_axis_by_the_length(places):
    cut = Tokens(np.arange(6), places=places)[4:]
    assert 2 in cut.places.shape
    assert cut.places.shape == tuple(2 if n == 6 else n for n in places.shape)


def test_what_may_be_two_things_is_refused():
    with pytest.raises(ValueError, match=r"places \(3, 4\) may be \(B, L\) or \(L, axes\)"):
        Tokens(places=np.zeros((3, 4), int))[1:]
    with pytest.raises(ValueError, match="seg is given for some of the tokens only"):
        Tokens(np.arange(3), np.arange(3)).concat(Tokens(np.arange(2)))
    with pytest.raises(TypeError, match="indexed by a slice, got 0"):
        Tokens(np.arange(3))[0]
    with pytest.raises(ValueError, match="rotary was made for"):
        Tokens(rotary=posenc.rotary(posenc.RoPE(8), np.arange(3))).concat(
            Tokens(rotary=posenc.rotary(posenc.RoPE(4), np.arange(3)))
        )


OLD = ["q_pos", "k_pos", "q_seg", "k_seg", "q_axes", "k_axes", "k_valid", "x", "q_x"]
OLD += ["q_features", "k_features", "q_rotary", "k_rotary", "sink_tokens"]


@pytest.mark.parametrize("name", OLD)
def test_old_keywords_say_the_new_spelling(name):
    x = np.ones((1, 2, 4, 8))
    new = "first=" if name == "sink_tokens" else r"posenc\.Tokens\("
    with pytest.raises(TypeError, match=rf"no keyword '{name}': say .*{new}"):
        posenc.attention(x, x, x, posenc.NoPE(), **{name: None})


def test_the_last_tokens_are_the_queries():
    scheme, q = posenc.ALiBi(2), RNG.standard_normal((1, 2, 6, 8))
    record = posenc.positions.packed([2, 4])
    whole = posenc.attention(q, q, q, scheme, causal=True, tokens=record)
    last = posenc.attention(q[:, :, -3:], q, q, scheme, causal=True, tokens=record)
    np.testing.assert_array_equal(last, whole[:, :, -3:])
    with pytest.raises(ValueError, match="q has length 6, k only 3: give queries"):
        posenc.attention(q, q[:, :, :3], q[:, :, :3], scheme, tokens=record[:3])


def test_padding_sees_nothing_and_nobody_sees_it():
    q = RNG.standard_normal((2, 2, 5, 8))
    exists = np.array([[False, False, True, True, True], [True] * 5])
    spoilt = np.where(exists[:, None, :, None], q, np.nan)
    out, lse = posenc.attention(
        spoilt, spoilt, spoilt, posenc.NoPE(), tokens=Tokens(exists=exists), return_lse=True
    )
    expected = posenc.attention(*[q[:1, :, 2:]] * 3, posenc.NoPE())
    np.testing.assert_allclose(out[:1, :, 2:], expected, rtol=1e-12)
    assert not np.any(out[0, :, :2])
    assert np.all(lse[0, :, :2] == -np.inf)


def test_attention_has_few_parameters():
    import inspect

    for name in ("posenc", "posenc_torch", "posenc_jax"):
        module = pytest.importorskip(name)
        parameters = inspect.signature(module.attention).parameters
        assert len(parameters) <= 18
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
