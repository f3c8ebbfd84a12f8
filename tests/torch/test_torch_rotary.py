"""``posenc.rotary`` in PyTorch: gradients, compiled programs, and rotation in place."""

import pytest
import torch
from sample import long

import posenc
import posenc_torch
from posenc.schemes import LearnedRoPE, MixedRoPE
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

LAYOUTS = ("half", "interleaved")
AT = torch.arange(6)


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def turn(scheme, x, rotary=None, params=None):
    return posenc.transform(scheme, x, AT, role="query", params=params, rotary=rotary)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_has_every_derivative(layout):
    rope, x = posenc.RoPE(8, layout=layout, rotary_dim=6), torch.randn(2, 2, 6, 8).double()
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: turn(rope, x), x)
    assert torch.autograd.gradgradcheck(lambda x: turn(rope, x), x)
    tangent = torch.randn_like(x)
    _, forward = torch.func.jvp(lambda x: turn(rope, x), (x.detach(),), (tangent,))
    torch.testing.assert_close(forward, turn(rope, tangent))
    each = torch.func.vmap(lambda x: turn(rope, x))(x.detach())
    torch.testing.assert_close(each, turn(rope, x.detach()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_of_strided_vectors(layout):
    rope, whole = posenc.RoPE(8, layout=layout), torch.randn(2, 6, 3, 2, 9)
    for q in (whole[..., 1:].movedim(3, 1)[:, :, :, 0], whole[..., :8].transpose(1, 3)[:, :, 0]):
        torch.testing.assert_close(turn(rope, q), turn(rope, q.contiguous()))
    rows = torch.randn(2, 8, 6, 2).movedim(1, 3).transpose(1, 2)  # channels are not neighbours
    torch.testing.assert_close(turn(rope, rows), turn(rope, rows.contiguous()))


@pytest.mark.parametrize("scheme", [LearnedRoPE(8), MixedRoPE(2, 8, axes=1)])
def test_learned_frequencies_get_gradients_through_a_rotary(scheme):
    x = torch.randn(2, 2, 6, 8)
    params = {n: torch.tensor(a) for n, a in posenc.init_params(scheme).items()}
    grads = []
    for before in (True, False):
        own = {n: p.clone().requires_grad_() for n, p in params.items()}
        rotary = posenc.rotary(scheme, AT, own) if before else None
        (turn(scheme, x, rotary, own) ** 2 * x).sum().backward()
        grads.append(next(iter(own.values())).grad)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(*grads)


class Model(torch.nn.Module):
    def __init__(self, schemes):
        super().__init__()
        self.positions = posenc_torch.Positions(schemes, 4)

    def forward(self, q, shared=True):
        rotaries = self.positions.rotary(AT) if shared else [None] * 4
        for position, rotary in zip(self.positions, rotaries, strict=True):
            q = q + position.attend(q, q, q, causal=True, tokens=posenc.Tokens(rotary=rotary))
        return q


def test_a_model_shares_its_rotaries():
    model = Model([posenc.RoPE(8), posenc.NoPE(), LearnedRoPE(8)])
    first, none, learned, again = model.positions.rotary(AT)
    assert none is None
    assert first is again
    assert learned is not first
    q = torch.randn(2, 2, 6, 8)
    torch.testing.assert_close(model(q), model(q, shared=False), rtol=0, atol=0)


@long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_model_shares_its_rotaries(layout):
    model, q = Model([posenc.RoPE(8, layout=layout), posenc.NoPE()]), torch.randn(2, 2, 6, 8)
    found, expected = torch.compile(model, fullgraph=True)(q), model(q)
    layers = len(model.positions)
    assert_near(found.detach(), expected.detach(), layers * ATTENTION_TOL["float32"])


def test_rotation_of_nothing_and_of_many_gradients_at_once():
    empty = posenc.transform(
        posenc.RoPE(8, layout="interleaved"), torch.ones(0, 2, 5, 8), torch.arange(5), role="query"
    )
    assert empty.shape == (0, 2, 5, 8)
    x, d_outs = torch.randn(2, 4, 8, requires_grad=True), torch.randn(3, 2, 4, 8)
    out = posenc.transform(posenc.RoPE(8), x, torch.arange(4), role="query")

    def gradient(d_out):
        return torch.autograd.grad(out, x, d_out, retain_graph=True)[0]

    together = torch.func.vmap(gradient)(d_outs)
    torch.testing.assert_close(together, torch.stack([gradient(d_out) for d_out in d_outs]))
