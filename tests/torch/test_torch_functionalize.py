"""``torch.func.functionalize``: NumPy would read memory that its tensors do not own."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks_installed import require
from subjects import SUBJECTS

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

import posenc
import posenc_torch
from posenc.testing import SchemeCase

POS, SEG = 3 * torch.arange(12), (torch.arange(12) // 5)[None]


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_functional_call_is_the_call(name):
    case = SchemeCase(SUBJECTS[name])
    q, k, v = (torch.randn(1, case.heads, 12, case.head_dim) for _ in range(3))
    params = {name: torch.tensor(np.asarray(value)) for name, value in case.params.items()}
    x, sees = torch.randn(1, 12, case.hidden_dim), torch.rand(1, 1, 12, 12) < 0.8

    def call(q, k, v, pos, seg, sees):
        return posenc_torch.attention(
            q, k, v, case.scheme, params, causal=True, mask=sees,
            tokens=posenc.Tokens(pos=pos, seg=seg, x=x),
        )  # fmt: skip

    given = (q, k, v, POS, SEG, sees)
    torch.testing.assert_close(torch.func.functionalize(call)(*given), call(*given))
