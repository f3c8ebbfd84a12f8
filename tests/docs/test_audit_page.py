"""Snippets of ``docs/audit.md``, with the functions that a reader has."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from frameworks_installed import require

import posenc
from posenc.testing import check_function

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text("utf-8")
ADAPTERS, IN_A_TEST_SUITE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]


class Table:
    """A table ``(length, dim)`` of which only the rows that are read are computed."""

    def __init__(self, length, dim):
        self.length, self.scheme = length, posenc.Sinusoidal(dim)

    def __getitem__(self, pos):
        assert (pos < self.length).all()
        return posenc.embedding(self.scheme, pos, dtype=np.float32)


def interleaved(x, pos):
    rope = posenc.RoPE(x.shape[-1], layout="interleaved")
    return posenc.transform(rope, x, pos, role="query")


def geometric(num_heads, q_pos, k_pos):
    slopes = 2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)
    return -slopes[:, None, None] * np.abs(q_pos[:, None] - k_pos)


def kernel(x, tables, offsets):
    """A rotation ``(B, L, H, D)`` that counts from an offset for each row."""
    pos = offsets[:, None] + tables
    return interleaved(x.swapaxes(1, 2), pos).swapaxes(1, 2)


def run(code, given):
    names = dict(given)
    exec(compile(code, "audit.md", "exec"), names)
    return names


def test_adapters():
    names = run(ADAPTERS, {"make_table": Table, "kernel": kernel})
    assert check_function(names["embed"], "sinusoidal:dim=512", grid="ci")
    if not require("torch"):
        pytest.skip("not installed: torch")  # its arrays transpose two axes
    import torch

    pos = torch.arange(5) + torch.tensor([[7], [70]])
    x = torch.randn(2, 3, 5, 8)
    turned = run(ADAPTERS, {"kernel": kernel, "tables": torch.arange(5)})["rotate"](x, pos)
    torch.testing.assert_close(turned, interleaved(x, pos))


def test_checks_in_a_test_suite():
    names = run(IN_A_TEST_SUITE, {"my_rotation": interleaved, "my_bias": geometric})
    (mark,) = names["test_functions"].pytestmark
    checks = [value.values[0] for value in mark.args[1]]
    assert len(checks) > 5
    for check in checks:
        with suppress(pytest.skip.Exception):  # NumPy has no gradients
            names["test_functions"](check)
