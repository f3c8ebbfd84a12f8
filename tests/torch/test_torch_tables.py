"""Tables of tokens, read by distance where positions are consecutive and else by pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from frameworks_installed import require
from subjects import normal

from posenc.contract.protocol import Array, FeatureSpec, Namespace, PositionScheme
from posenc.schemes import DeBERTa, Shaw, Sum
from posenc.testing.examples import HEAD_DIM, HEADS

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch_operations import Operations

import posenc
import posenc_torch
from posenc_torch.chunked import parts
from posenc_torch.tables import gather_pairs, read_by_distance, take_along_axis

INDICES = {
    "clipped": lambda at: at.clip(-4, 4) + 4,
    "from the end": lambda at: (-at).clip(0, 20),
    "one number": lambda at: 0 * at + 3,
    "buckets": lambda at: (abs(at) / 2.7).astype(int) + 10 * (at > 0),
    "every third": lambda at: (3 * at).clip(-9, 11) % 21,
    "any": lambda at: np.random.default_rng(0).integers(0, 21, 100)[at],
    "negative": lambda at: at.clip(-5, -1),
}


@pytest.mark.parametrize("shape", [(9, 9), (5, 19), (30, 9), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_columns_by_distance_are_the_pairs(index, shape):
    """Also where there are more rows than columns: the tables of keys."""
    rows, columns = shape
    at = np.arange(columns)[None, :] - np.arange(rows)[:, None] + 2
    pairs = torch.tensor(index(at))[None, None]
    table = torch.tensor(normal((2, 3, rows, 21), 1), dtype=torch.float64, requires_grad=True)
    d_values = torch.tensor(normal((2, 3, rows, columns), 2), dtype=torch.float64)
    results = []
    for read in (gather_pairs, read_by_distance):
        values = read(table, pairs, by_distance=True)
        results += [(values, *torch.autograd.grad(values, table, d_values))]
    for by_pair, by_distance in zip(*results, strict=True):
        assert torch.allclose(by_pair, by_distance, rtol=0, atol=1e-13)


@pytest.mark.parametrize("read", [gather_pairs, take_along_axis])
def test_some_numbers_of_an_index_may_count_from_the_end(read):
    table, index = torch.arange(12.0).reshape(1, 1, 2, 6), torch.tensor([[1, 0, -1], [2, -6, 5]])
    named = {"by_distance": False} if read is gather_pairs else {"axis": -1}
    assert read(table, index[None, None], **named).tolist() == [[[[1, 0, 5], [8, 6, 11]]]]
    assert read(table, index[None, None, :, :0], **named).shape == (1, 1, 2, 0)


def tokens(length, batch=2, heads=HEADS):
    q, k, v = (torch.tensor(normal((batch, heads, length, HEAD_DIM), n)) for n in range(3))
    return q.requires_grad_(), k.requires_grad_(), v


def gathers(scheme, length=40, **options):
    """How many operations of a training step gather or scatter."""
    own = {name: torch.tensor(a).requires_grad_() for name, a in posenc.init_params(scheme).items()}
    with Operations() as operations, parts.small_blocks(8):
        posenc_torch.attention(
            *tokens(length), scheme, own, implementation="chunked", **options
        ).sum().backward()
    return sum(operations.count(word) for word in ("gather", "scatter", "take_along", "index_put"))


def test_chunked_gathers_no_pairs():
    scheme = Sum(Shaw(HEAD_DIM, 5), Shaw(HEAD_DIM, 3))
    assert gathers(scheme, causal=True) == 0
    assert gathers(scheme, window=9, softcap=5.0) == 0
    assert gathers(scheme, tokens=posenc.Tokens(pos=torch.arange(40))) > 0


def largest(scheme, length):
    """The number of elements of the largest array of a training step."""

    class Sizes(Operations):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(function, types, args, kwargs)
            for array in result if isinstance(result, tuple | list) else [result]:
                if isinstance(array, torch.Tensor) and array.device.type != "meta":
                    self.most = max(self.most, array.numel())
            return result

    own = {name: torch.tensor(a).requires_grad_() for name, a in posenc.init_params(scheme).items()}
    with Sizes() as sizes, parts.small_blocks(8):
        posenc_torch.attention(
            *tokens(length), scheme, own, implementation="chunked", causal=True
        ).sum().backward()
    return sizes.most


@pytest.mark.parametrize(
    "scheme", [Shaw(HEAD_DIM, 5), DeBERTa(HEADS, HEAD_DIM, buckets=4, max_distance=6)], ids=str
)
def test_no_array_grows_with_the_square_of_the_length(scheme):
    assert largest(scheme, 192) < 2.2 * largest(scheme, 96)


@dataclass(frozen=True)
class Chosen(PositionScheme, relative=True):
    """A bias whose index depends on a number of the key, and on the distance."""

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        return {
            "r": FeatureSpec(self.query, of="query", reads="vectors"),
            "at": FeatureSpec(self.first, of="key", reads="vectors"),
        }

    def query(self, q: Array, pos: Array, **_: Any) -> Array:
        return q

    def first(self, k: Array, pos: Array, **_: Any) -> Array:
        return k[..., 0]

    def bias(self, q: Array, k: Array, *, params: Any, xp: Namespace) -> Array:
        at = xp.astype(xp.abs(3 * params.key["at"]), xp.int32)
        return params.query["r"][xp.clip(at + xp.abs(q - k), 0, HEAD_DIM - 1)]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_an_index_that_depends_on_a_feature(batch, heads):
    """Also of one head of one sequence, where the shape of the index does not show it."""
    q, k, v = tokens(20, batch, heads)
    expected, result = (
        posenc_torch.attention(q, k, v, Chosen(), implementation=name)
        for name in ("reference", "chunked")
    )
    assert torch.allclose(expected, result, atol=1e-5)
