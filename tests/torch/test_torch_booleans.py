"""Masks as bytes and bits, against PyTorch's own operations on booleans."""

from __future__ import annotations

import pytest
from frameworks import HAS

if not HAS["torch"]:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch

from posenc_torch.booleans import all_of, any_of, hiding

MASKS = {
    "mixed": torch.tensor([[True, False, True], [False, False, False], [True, True, True]]),
    "shown": torch.ones(3, 5, dtype=torch.bool),
    "hidden": torch.zeros(3, 5, dtype=torch.bool),
    "repeated": torch.tensor([[True], [False]]).expand(2, 4),
    "turned": torch.tensor([[True, False], [False, False]]).T.flip(0),
    "empty": torch.zeros(0, 4, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_any_and_all(mask):
    assert torch.equal(all_of(mask), mask.all())
    for dim in (0, -1, (0, 1)):
        for keepdim in (False, True):
            found, expected = any_of(mask, dim, keepdim=keepdim), torch.any(mask, dim, keepdim)
            assert torch.equal(found, expected)
            assert found.dtype == torch.bool


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_added_to_scores(mask, dtype):
    found = hiding(mask, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, torch.where(mask, 0.0, -torch.inf).to(dtype))
    assert not torch.signbit(found[mask]).any()


def test_under_a_transform():
    mask = MASKS["mixed"]
    assert torch.equal(torch.func.vmap(lambda m: any_of(m, 0))(mask), mask.any(1))
    assert torch.equal(
        torch.func.vmap(lambda m: hiding(m, torch.float32))(mask), hiding(mask, torch.float32)
    )
