"""A network of one number, as products and as a broken line."""

from __future__ import annotations

import pytest
from frameworks_installed import require
from hypothesis import example, given
from hypothesis import strategies as st

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from posenc_torch.network import network

# Ends of pieces are where a number is 0, equal, or so small that a quotient overflows.
NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40]), st.floats(-100, 100, width=32))


@pytest.mark.parametrize("learns", [False, True])
@given(
    st.integers(1, 20).flatmap(
        lambda n: st.tuples(*[st.lists(NUMBERS, min_size=n, max_size=n)] * 4)
    ),
    st.lists(NUMBERS, min_size=1, max_size=8),
)
@example(([0.0, 1.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [1.0] * 4), [0.0])
def test_a_network_is_the_sum_of_its_units(learns, units, numbers):
    w1, b1, *w2 = (torch.tensor(a).requires_grad_(learns) for a in units)
    x = torch.tensor(numbers)
    found = network(x.reshape(1, 1, 1, -1), w1, b1, torch.stack(w2))
    at, first, offset, last = (a.detach().double() for a in (x, w1, b1, torch.stack(w2)))
    each = torch.relu(first[:, None] * at + offset[:, None])
    most = first.abs()[:, None] * at.abs() + offset.abs()[:, None]
    # A product, a sum and the sum of the units are rounded; subnormal products may be lost.
    bound = (len(w1) + 4) * 2.0**-23 * (last.abs() @ most) + 1e-36
    error = (found.detach().double().reshape(2, -1) - last @ each).abs()
    assert torch.all(error <= bound)
    assert found.requires_grad == learns
