"""Numbers that callers give, of whatever type, become Python's own before anything computes."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
from frameworks import HAS, ROUTES
from sample import few_of_jax
from subjects import normal

import posenc
from posenc.positions import left_padded, packed
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

INTEGERS = ("uint8", "int16", "uint64")
SIZES = {"num_heads": 2, "head_dim": 8, "max_len": 40, "train_len": 20, "dim": 16}


@dataclass(frozen=True)
class Strangers(posenc.PositionScheme):
    """A scheme whose author never thought of NumPy's integers."""

    num_heads: int
    wide: int
    flag: bool = False
    rate: float = 0.5

    def __post_init__(self):
        object.__setattr__(self, "table", self.wide**3)


SCHEMES = [
    *(maker(**SIZES) for maker in posenc.catalogue().values()),
    Strangers(2, 100),
    posenc.T5Bias(2, num_buckets=32, max_distance=120),
    posenc.Learned(max_len=100, dim=4, offset=100),
]


def plain(scheme):
    """What a scheme holds that equals its like, and of which type."""
    kinds = (int, float, str, tuple)
    return {n: (type(v), v) for n, v in vars(scheme).items() if isinstance(v, kinds)}


@pytest.mark.parametrize("integer", INTEGERS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_fields_of_any_integer_make_the_same_scheme(scheme, integer):
    own = {f.name: getattr(scheme, f.name) for f in fields(scheme) if f.init}
    given = {
        name: np.dtype(integer).type(value) if type(value) is int else value
        for name, value in own.items()
    }
    again = type(scheme)(**given)
    assert plain(again) == plain(scheme)
    assert repr(again) == repr(scheme)
    assert {n: s.shape for n, s in again.param_specs().items()} == {
        n: s.shape for n, s in scheme.param_specs().items()
    }


def test_flags_and_floats_of_numpy_become_pythons():
    scheme = Strangers(np.uint8(2), np.uint8(100), np.bool_(True), np.float32(0.25))
    assert scheme == Strangers(2, 100, True, 0.25)
    assert [type(v) for v in vars(scheme).values()] == [int, int, bool, float, int]
    assert posenc.RoPE(8, base=np.float32(500_000)).base == 500_000.0


def test_a_shape_of_numpy_integers_is_one_of_pythons():
    assert [type(n) for n in posenc.ParamSpec((np.uint8(3), 2)).shape] == [int, int]


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_an_integer_of_torch_is_an_integer():
    import torch

    assert posenc.ALiBi(torch.tensor(4)) == posenc.ALiBi(4)
    with pytest.raises(TypeError, match="num_heads"):
        posenc.ALiBi(torch.tensor([4, 4]))


@pytest.mark.parametrize("integer", ["uint8", "uint64"])
@pytest.mark.parametrize("route", few_of_jax(ROUTES))
def test_a_window_and_a_scale_of_any_number(route, integer):
    tensors = {n: normal((1, 2, 20, 8), i, "float32") for i, n in enumerate("qkv")}
    options = {"scheme": posenc.ALiBi(2), "causal": True}
    expected = posenc.attention(**tensors, **options, window=3, scale=0.5)
    arrays = {name: route.framework.array(a, "float32") for name, a in tensors.items()}
    # NumPy's first: a compiled function that was kept under an equal key would answer the second.
    for window, scale in ((np.dtype(integer).type(3), np.float32(0.5)), (3, 0.5)):
        given = options | {"window": window, "scale": scale}
        with route.framework.precision_scope(["float32"]):
            found = route.framework.attend(route.implementation, arrays, **given)
        assert_near(np.asarray(found), expected, ATTENTION_TOL["float32"])


def test_positions_of_documents_of_any_integer():
    lengths = [np.uint8(200), np.uint8(100)]
    tokens = packed(lengths)
    assert tokens.pos.size == tokens.seg.size == 300
    padded = left_padded(lengths, np.uint8(250))
    assert padded.pos.max() == 199
    assert padded.exists.sum() == 300


@pytest.mark.parametrize("integer", ["int8", "uint8", "uint16", "uint64"])
@pytest.mark.parametrize("route", few_of_jax(ROUTES))
def test_positions_of_any_integer(route, integer):
    tensors = {n: normal((1, 2, 20, 8), i, "float32") for i, n in enumerate("qkv")}
    pos = np.random.default_rng(0).permutation(20)
    options = {"scheme": posenc.ALiBi(2), "causal": True}
    expected = posenc.attention(**tensors, **options, tokens=posenc.Tokens(pos=pos))
    arrays = {name: route.framework.array(a, "float32") for name, a in tensors.items()}
    narrow = route.framework.array(pos.astype(integer), integer)
    with route.framework.precision_scope(["float32"]):
        found = route.framework.attend(
            route.implementation, arrays, **options, tokens=posenc.Tokens(pos=narrow)
        )
    assert_near(np.asarray(found), expected, ATTENTION_TOL["float32"])


def test_a_study_of_numpy_integers_is_the_same_study():
    from posenc.study.study import Study

    own = {"train_len": 16, "steps": 4, "eval_lens": (16, 32), "seeds": 1}
    given = {
        n: tuple(map(np.int64, v)) if n == "eval_lens" else np.uint8(v) for n, v in own.items()
    }
    assert repr(Study(**given)) == repr(Study(**own))
