"""First values: declared shapes, the same for the same seed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import array_api_compat.numpy as xp
import numpy as np
import pytest
from subjects import SUBJECTS

import posenc
from posenc import ParamSpec, PositionScheme, Tokens
from posenc.contract.tables import HeadTable
from posenc.schemes import FoX
from posenc.testing.examples import HIDDEN_DIM


@pytest.mark.parametrize("subject", SUBJECTS)
def test_first_values_are_what_is_declared(subject):
    scheme = SUBJECTS[subject]
    found, again = posenc.init_params(scheme, 3), posenc.init_params(scheme, 3)
    assert found.keys() == scheme.param_specs().keys()
    for name, spec in scheme.param_specs().items():
        assert type(found[name]) is np.ndarray
        assert found[name].shape == tuple(spec.shape)
        assert found[name].dtype == np.float32
        assert np.all(np.isfinite(found[name]))
        np.testing.assert_array_equal(found[name], again[name])
        found[name][...] = 0  # the caller's own
        np.testing.assert_array_equal(posenc.init_params(scheme, 3)[name], again[name])


@pytest.mark.parametrize("seed", [0, 2**62, [1, 2, 3]])
def test_seeds_decide(seed):
    table = posenc.init_params(posenc.T5Bias(4), seed)["table"]
    np.testing.assert_array_equal(table, posenc.init_params(posenc.T5Bias(4), seed)["table"])
    assert not np.array_equal(table, posenc.init_params(posenc.T5Bias(4), 1)["table"])


def test_the_default_draw_is_normal_and_small():
    table = posenc.init_params(posenc.Learned(max_len=1000, dim=64))["table"]
    assert abs(table.std() / 0.02 - 1) < 0.02  # six standard errors of 64,000 draws
    assert abs(table.mean()) < 6 * 0.02 / 64_000**0.5
    assert posenc.init_params(posenc.NoPE()) == {}


def test_params_after_a_step_of_numpy_are_params():
    """NumPy makes a number of an array without axes."""
    scheme = posenc.make("fire", num_heads=2)
    params = {name: a - 0.1 * a for name, a in posenc.init_params(scheme).items()}
    assert any(isinstance(a, np.floating) for a in params.values())
    q = np.ones((1, 2, 3, 4), np.float32)
    arrays = {name: np.asarray(a) for name, a in params.items()}
    np.testing.assert_array_equal(
        posenc.attention(q, q, q, scheme, params), posenc.attention(q, q, q, scheme, arrays)
    )


def test_a_head_table_answers_for_every_head():
    array = np.arange(24.0).reshape(2, 3, 4)
    table = HeadTable(array, xp)
    i, j = np.asarray([[0], [2]])[None], np.asarray([[3, 1]])[None]
    np.testing.assert_array_equal(table[i, j], array[:, i[0], j[0]])
    np.testing.assert_array_equal(table[1, j], array[:, 1, j[0]])
    np.testing.assert_array_equal(table[1, 2], array[:, 1, 2][:, None, None])
    with pytest.raises(IndexError, match="2 indices"):
        table[i]


TABLE = HeadTable(np.ones((2, 3), np.float32), xp, "w2")
ROW = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda: TABLE @ ROW, "@"),
        (lambda: ROW @ TABLE, "a function of NumPy"),
        (lambda: 2 * TABLE, r"\*"),
        (lambda: TABLE + 1, r"\+"),
        (lambda: -TABLE, "-"),
        (lambda: TABLE > 0, ">"),
        (lambda: TABLE[:], r"an index of slice\(None"),
        (lambda: TABLE[..., 0], "an index of Ellipsis"),
        (lambda: TABLE[None], "an index of None"),
        (lambda: np.sum(TABLE), "a function of NumPy"),
        (lambda: list(HeadTable(np.ones((2, 3, 4)), xp, "w2")), "iteration"),
    ],
)
def test_a_head_table_is_no_array_and_says_what_to_write(use, what):
    words = (
        rf"params\['w2'\] .*read by index, w2\[i.*not an array: {what}.* does not work\. "
        r"Write.*sum\(w2\[i.*per_head=False"
    )
    with pytest.raises(TypeError, match=words):
        use()


def test_a_head_table_has_no_attributes_of_an_array():
    with pytest.raises(AttributeError, match=r"not an array: \.T does not work\. Write"):
        TABLE.T  # noqa: B018
    assert not hasattr(TABLE, "__jax_array__")


@pytest.mark.parametrize("name", ["matmul", "exp", "stack"])
def test_a_head_table_says_so_in_torch_too(name):
    torch = pytest.importorskip("torch")
    rows = {"matmul": (TABLE, torch.ones(3)), "exp": (TABLE,), "stack": ([torch.ones(3), TABLE],)}
    with pytest.raises(TypeError, match=f"'w2'.* not an array: .*{name}"):
        getattr(torch, name)(*rows[name])


def test_a_head_table_of_one_axis_is_gone_through():
    table = HeadTable(np.arange(6.0).reshape(2, 3), xp, "w2")
    assert len(table) == 3
    for index, each in enumerate(table):  # and it ends
        np.testing.assert_array_equal(each, [[[index]], [[3.0 + index]]])


@dataclass(frozen=True)
class Product(PositionScheme):
    """The last layer of an MLP as everyone writes it."""

    def param_specs(self):
        return {"w2": ParamSpec((2, 3))}

    def bias(self, q, k, *, params, xp):
        x = xp.astype(xp.abs(q - k), params["w2"].dtype)[..., None] * xp.ones(3)
        return xp.sum(x * params["w2"], axis=-1)


def test_a_scheme_that_takes_a_table_for_an_array_is_told_in_words():
    pos = np.arange(5)
    with pytest.raises(TypeError, match=r"params\['w2'\] has \(3,\) numbers per head"):
        posenc.bias(Product(), pos, pos, posenc.init_params(Product()))


@dataclass(frozen=True)
class Shaped(PositionScheme):
    """Whatever shape, whatever is asked for."""

    shape: tuple[int, ...] | None
    num_heads: int = 2

    def bias(self, q, k, *, params, xp):
        return 0.5 if self.shape is None else xp.zeros(self.shape)


@pytest.mark.parametrize("shape", [(4,), (4, 5), (3, 4), (3, 3, 5), (1, 1, 2, 3, 5), (2, 1, 3, 5)])
def test_a_bias_of_another_shape_is_told_at_the_scheme(shape):
    words = rf"the bias of Shaped has shape {re.escape(str(shape))} .* \(Q, K\) = \(3, 5\)"
    with pytest.raises(ValueError, match=words):
        posenc.bias(Shaped(shape), np.arange(3), np.arange(5))
    q, k = (np.ones((1, 2, n, 4), np.float32) for n in (3, 5))
    with pytest.raises(ValueError, match=words):
        posenc.attention(q, k, k, Shaped(shape))


@pytest.mark.parametrize("shape", [(), (5,), (3, 1), (3, 5), (2, 1, 1), (1, 2, 3, 5), (1, 5)])
def test_a_bias_may_have_any_shape_that_broadcasts(shape):
    assert posenc.bias(Shaped(shape), np.arange(3), np.arange(5)).shape == (2, 3, 5)


def test_a_bias_is_an_array():
    with pytest.raises(TypeError, match=r"the bias of Shaped must be an array, got 0\.5"):
        posenc.bias(Shaped(None), np.arange(3), np.arange(5))


X, CARRY = np.ones((1, 5, HIDDEN_DIM), np.float32), np.zeros((1, 2), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "FoX has features: give tokens with x, or q and k"),
        ({"pos": np.arange(4)}, r"tokens\.pos .* does not fit tokens"),
        ({"pos": np.zeros((3, 5), int)}, r"tokens\.pos .* does not fit tokens"),
        ({"seg": np.zeros((3, 5), int)}, r"tokens\.seg .* does not fit tokens"),
        ({"exists": np.ones(4, bool)}, r"tokens\.exists must be \(5,\) or \(1, 5\)"),
        ({"carry": {"c": np.zeros((3, 2), np.float32)}}, r"carry\['c'\] must be \(1, 2\)"),
        ({"carry": {}}, "carry lacks 'c', which is summed"),
        ({"carry": {"c": CARRY, "d": CARRY}}, "carry has 'd', which is not summed; accepted: c"),
        ({"carry": {"c": CARRY}, "seg": np.zeros(5, int)}, r"carry is given with tokens\.seg"),
        ({"carry": {"c": CARRY}, "exists": np.ones(5, bool)}, r"leave out tokens\.exists"),
        ({"carry": CARRY}, "carry must map names to arrays"),
        ({"places": np.zeros((5, 2), int)}, r"tokens\.places must have shape .* = \(5, 1\)"),
    ],
)
def test_features_of_what_does_not_fit(changes, message):
    scheme = FoX(2, HIDDEN_DIM)
    carry = {n: changes[n] for n in changes if n == "carry"}
    tokens = Tokens(**{"x": X, **{n: a for n, a in changes.items() if n != "carry"}})
    with pytest.raises((TypeError, ValueError), match=message):
        posenc.features(scheme, posenc.init_params(scheme), tokens, **carry)


def test_a_scheme_without_features_has_none():
    tokens = Tokens(x=X)
    assert posenc.features(posenc.ALiBi(2), tokens=tokens) == (tokens, tokens)
    assert tokens.features is None
