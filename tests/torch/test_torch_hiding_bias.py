"""A caller's bias of 0 and -inf is read as a mask."""

from __future__ import annotations

import pytest
from frameworks import HAS
from subjects import SUBJECTS

import posenc
from posenc.backend import reads_hidden
from posenc.testing import SchemeCase

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

import posenc_torch
from posenc_torch.api import _IMPLEMENTATIONS

NAMES = [name for name, s in SUBJECTS.items() if not reads_hidden(s)]


def vectors(scheme, length=9, dtype=torch.float32):
    case, draw = SchemeCase(scheme), torch.Generator().manual_seed(0)
    shape = 2, case.heads, length, case.head_dim
    params = {name: torch.tensor(value) for name, value in case.params.items()}
    return [torch.randn(shape, generator=draw, dtype=dtype) for _ in range(3)], params


def hidden(heads=1, length=9):
    """Of two texts; one query sees no key, and one key is seen by no query."""
    draw = torch.Generator().manual_seed(1)
    shown = torch.rand((2, heads, length, length), generator=draw) < 0.7
    shown[0, :, 3], shown[1, :, :, 2] = False, False
    return shown


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [True, False])
def test_it_gives_the_bits_of_the_mask(name, causal):
    scheme = SUBJECTS[name]
    (q, k, v), params = vectors(scheme)
    q[0, :, 3] = float("nan")  # a query that sees no key
    shown = hidden()
    bias = torch.where(shown, 0.0, -torch.inf)
    found, expected = (
        posenc_torch.attention(q, k, v, scheme, params, causal, **given)
        for given in ({"bias": bias}, {"mask": shown})
    )
    assert torch.equal(found, expected)
    assert not found.isnan().any()


@pytest.fixture
def seen(monkeypatch):
    """The biases that implementations get."""
    biases = []
    reference = _IMPLEMENTATIONS[-1]

    def plan(call):
        biases.append(call.extra_bias)
        return reference.plan(call)

    spied = (*_IMPLEMENTATIONS[:-1], type(reference)("reference", plan, whole_rows=True))
    monkeypatch.setattr(posenc_torch.api, "_IMPLEMENTATIONS", spied)
    return biases


@pytest.mark.parametrize(
    ("change", "is_mask"),
    [
        (None, True),
        ((0, 0, 0, 0, -0.0), True),
        ((0, 0, -1, 0, 1.0), False),
        ((1, 0, 2, 1, -1e-45), False),
        ((1, 0, 2, 1, torch.finfo(torch.float32).min), False),
        ((1, 0, 2, 1, float("nan")), False),
    ],
    ids=str,
)
def test_any_other_number_makes_it_a_bias(change, is_mask, seen):
    (q, k, v), _ = vectors(posenc.ALiBi(4))
    bias = torch.where(hidden(), 0.0, -torch.inf)
    if change is not None:
        bias[change[:-1]] = change[-1]
    posenc_torch.attention(q, k, v, posenc.ALiBi(4), bias=bias, implementation="reference")
    assert [each is None for each in seen] == [is_mask]


def test_one_that_learns_stays_a_bias(seen):
    (q, k, v), _ = vectors(posenc.ALiBi(4))
    bias = torch.where(hidden(), 0.0, -torch.inf).requires_grad_()
    out = posenc_torch.attention(q, k, v, posenc.ALiBi(4), bias=bias, implementation="reference")
    out.sum().backward()
    assert bias.grad is not None
    assert seen[0] is not None


@pytest.mark.parametrize("name", ["alibi", "nope", "rope"])
def test_other_layers_of_a_pass_do_not_have_it(name):
    scheme = SUBJECTS[name]
    (q, k, v), _ = vectors(scheme)
    bias = torch.where(hidden(), 0.0, -torch.inf)
    given = [bias, None, bias.flip(2), None, bias]
    positions = posenc_torch.Positions(scheme, len(given))
    bound = positions.bind(causal=True)
    for attend, position, own in zip(bound, positions, given, strict=True):
        expected = position.attend(q, k, v, causal=True, bias=own)
        assert torch.equal(attend(q, k, v, bias=own), expected)


def test_a_bias_that_changes_later_changes_no_gradient():
    (q, k, v), _ = vectors(posenc.ALiBi(4))
    q.requires_grad_()
    bias = torch.where(hidden(), 0.0, -torch.inf)
    posenc_torch.attention(q, k, v, posenc.ALiBi(4), causal=True, bias=bias).sum().backward()
    expected, q.grad = q.grad, None
    out = posenc_torch.attention(q, k, v, posenc.ALiBi(4), causal=True, bias=bias)
    bias.zero_()
    out.sum().backward()
    assert torch.equal(q.grad, expected)
