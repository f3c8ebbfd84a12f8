"""Exponentials of scores: values, no subnormal numbers, derivatives of all orders and modes."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks_installed import require

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

import posenc
import posenc_torch
from posenc.testing.tolerances import UNIT
from posenc_torch.weights import exp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_weight_is_subnormal(dtype):
    """Nor is it after it is divided by their sum; larger ones are exponentials."""
    info, unit = torch.finfo(dtype), UNIT[str(dtype).removeprefix("torch.")]
    x = torch.cat([torch.linspace(-1200, 0, 24001), torch.linspace(-100, -60, 4001)]).to(dtype)
    found, expected = exp(x).double(), np.exp(x.double().numpy())
    assert not torch.any((found > 0) & (found < 2**26 * info.smallest_normal))
    large = torch.tensor(expected > 2**27 * info.smallest_normal)
    assert torch.all((found / torch.tensor(expected) - 1)[large].abs() <= 4 * unit)
    assert torch.all(found[expected < 2**25 * info.smallest_normal] == 0)
    lost = exp(torch.tensor([-torch.inf, torch.nan, info.min], dtype=dtype))
    assert lost[[0, 2]].tolist() == [0, 0]
    assert torch.isnan(lost[1])


def test_its_derivatives_are_itself():
    x = torch.tensor([-50.0, -3.0, -0.5, 0.0, -2000.0], dtype=torch.float64, requires_grad=True)
    for derivative in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert derivative(exp, (x,))
    (d_x,) = torch.autograd.grad(exp(x).sum(), x, create_graph=True)
    assert torch.equal(d_x, exp(x))
    for transformed in (
        torch.func.vmap(exp)(x),
        torch.func.jvp(exp, (x.detach(),), (torch.ones_like(x),))[1],
        torch.func.grad(lambda x: exp(x).sum())(x.detach()),
    ):
        torch.testing.assert_close(transformed, exp(x), rtol=4 * UNIT["float64"], atol=0)


def test_keys_far_down_a_bias_weigh_nothing_in_the_reference():
    """ALiBi with a slope of 1/2: from 180 keys on a weight is 0 in float32, from 139 on below."""
    eye = torch.eye(200)[None, None]
    weights = posenc_torch.attention(
        torch.zeros(1, 1, 200, 2), torch.zeros(1, 1, 200, 2), eye, posenc.ALiBi(1, slopes=(0.5,)),
        causal=True, implementation="reference",
    )  # fmt: skip
    assert not torch.any((weights > 0) & (weights < torch.finfo(torch.float32).smallest_normal))
    assert weights[0, 0, 199, :50].count_nonzero() == 0
