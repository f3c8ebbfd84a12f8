"""The dense bias of a relative scheme, made from a table by distance, is that of its pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import pytest
from frameworks import FRAMEWORKS, ROUTES
from sample import few_of_jax, long
from subjects import HIDDEN_DIM, SUBJECTS, normal, params_of

import posenc
from posenc.apply.bias import bias_tile, depends_on_distance
from posenc.apply.by_distance import Distances
from posenc.apply.shapes import as_column, as_row, prepare_params
from posenc.schemes import FoX, Sum
from posenc.testing import assert_near
from posenc.testing.tolerances import attention_bound, rounding_bound

Q, K = 130, 143  # more pairs than a table needs; neither a multiple of its blocks
RNG = np.random.default_rng(0)
POSITIONS = {
    "consecutive": (np.arange(40, 40 + Q), np.arange(-7, K - 7)),
    "one-sequence": (np.arange(Q)[None], np.arange(K)),
    "every-second": (2 * np.arange(Q), np.arange(K)),
    "unordered": (RNG.permutation(Q), RNG.permutation(K)),
    "two-sequences": (np.arange(Q) + np.asarray([[0], [9]]), np.arange(K)),
    "far-apart": (np.arange(Q), 2**20 * np.arange(K)),
}
BY_DISTANCE = [name for name, scheme in SUBJECTS.items() if depends_on_distance(scheme)]


@pytest.mark.parametrize("name", BY_DISTANCE)
def test_a_table_by_distance_gives_the_bias_of_pairs(name):
    scheme, params = SUBJECTS[name], params_of(SUBJECTS[name])
    for where, (q_pos, k_pos) in POSITIONS.items():
        own, work = prepare_params(scheme, params, like=q_pos, dtype=None, xp=xp)
        pairs = bias_tile(scheme, as_column(q_pos), as_row(k_pos), own, dtype=work, xp=xp)
        bias = posenc.bias(scheme, q_pos, k_pos, params)
        pairs = np.broadcast_to(pairs, (len(as_column(q_pos)), *bias.shape[-3:]))
        pairs = pairs if 2 in (q_pos.ndim, k_pos.ndim) else pairs[0]
        # The same operations on the same differences: the same bits.
        np.testing.assert_array_equal(bias, pairs, err_msg=where)
        assert bias.dtype == pairs.dtype


def read_table(found):
    """A function of frameworks that reads the table of ``found`` at all pairs."""

    def read(xp, arrays):
        return found.at_pairs(arrays["table"], arrays["q"], arrays["k"], xp=xp)

    return read


# JAX compiles each case for a second.
LENGTHS = [(1, 9), (9, 1), (37, 20), (16, 40)]
READS = [
    pytest.param(framework, lengths, marks=[long] * (name == "jax" and lengths != (37, 20)))
    for name, framework in FRAMEWORKS.items()
    for lengths in LENGTHS
]


@pytest.mark.parametrize(("framework", "lengths"), READS, ids=str)
def test_a_table_is_read_at_all_pairs_with_its_gradient(framework, lengths):
    rows, columns = lengths
    q, k = np.arange(5, 5 + rows, dtype=np.int32), np.arange(columns, dtype=np.int32)
    size = rows + columns - 1
    index = k - q[:, None] - (k[0] - q[-1])
    for consecutive in (True, False):
        read = read_table(Distances(int(k[0] - q[-1]), size, consecutive))
        for at in ((q[None, :, None], k[None, None, :]), (as_column(q), as_row(k))):
            arrays = {"table": normal((3, size), 1, "float32"), "q": at[0], "k": at[1]}
            expected = arrays["table"][:, index].reshape((*at[0].shape[:-3], 3, rows, columns))
            np.testing.assert_array_equal(framework.evaluate(read, arrays).values, expected)
            if not framework.differentiable:
                continue
            d_out, d_table = normal(expected.shape, 2, "float32"), np.zeros((3, size))
            np.add.at(d_table, (slice(None), index), d_out.reshape(3, rows, columns))
            _, found = framework.gradients(read, arrays, d_out)
            bound = rounding_bound(rows, np.abs(d_out).max() * rows)
            assert_near(found["table"], d_table, bound)


def test_the_bias_is_an_array_of_its_own():
    scheme = posenc.ALiBi(2, slopes=[1.0, 2.0])
    for q_pos, k_pos in POSITIONS.values():
        bias = posenc.bias(scheme, q_pos, k_pos)
        before = bias.copy()
        bias[..., 3, 5] = 7
        assert np.sum(bias != before) == np.prod(bias.shape[:-2])


@dataclass(frozen=True, eq=False)
class Counted(posenc.PositionScheme, relative=True):
    """``-|q - k|``, which notes how many numbers each call computes; equal to itself alone."""

    sizes: list[int] = field(default_factory=list)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def param_specs(self) -> Mapping[str, Any]:
        return {}

    def bias(self, q, k, *, params, xp):
        distance = xp.abs(q - k)
        self.sizes.append(int(np.prod(distance.shape)))
        return -xp.astype(distance, params.dtype)


DENSE = [r for r in ROUTES if r.id.endswith(("reference", "sdpa", "xla"))]


@pytest.mark.parametrize("route", few_of_jax(DENSE))
def test_attention_computes_as_many_numbers_as_there_are_distances(route):
    scheme = Counted()
    tensors = {name: normal((1, 2, Q, 4), n, "float64") for n, name in enumerate("qkv")}
    expected = posenc.attention(**tensors, scheme=scheme)
    bound = attention_bound("float32", channels=4, keys=Q, score=Q)
    assert_near(route.attend(scheme, tensors, {}), expected, bound)
    assert max(scheme.sizes) == 2 * Q - 1


# Tiles of torch's chunked, and all pairs at once; JAX's chunked has a test of its own tables.
TILES = few_of_jax([*DENSE, *(r for r in ROUTES if r.id == "torch-chunked")])


@pytest.mark.parametrize("route", TILES)
def test_terms_of_a_sum_compute_as_many_numbers_as_there_are_distances(route):
    gates, counted = FoX(2, HIDDEN_DIM), Counted()
    tensors = {name: normal((1, 2, Q, 4), n, "float64") for n, name in enumerate("qkv")}
    tokens = posenc.Tokens(x=normal((1, Q, HIDDEN_DIM), 3, "float64"))
    at = np.arange(Q)
    by_pair = -np.abs(at - at[:, None]).astype(float)[None, None]
    params, options = posenc.init_params(gates), {"tokens": tokens, "causal": True}
    expected = posenc.attention(**tensors, scheme=gates, params=params, bias=by_pair, **options)
    params = {f"1_{name}": array for name, array in params.items()}
    bound = attention_bound("float32", channels=4, keys=Q, score=2 * Q)
    assert_near(route.attend(Sum(counted, gates), tensors, params, **options), expected, bound)
    assert max(counted.sizes) == 2 * Q - 1
