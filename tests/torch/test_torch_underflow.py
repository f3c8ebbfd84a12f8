"""Keys whose weight would be a subnormal number: none reaches a product, and no other is lost."""

from __future__ import annotations

import pytest
from frameworks import HAS

if not HAS["torch"]:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch
from subjects import SUBJECTS, normal
from torch.utils._python_dispatch import TorchDispatchMode

import posenc
import posenc_torch
from posenc import Tokens
from posenc.schemes.sum import Sum
from posenc_torch.chunked import parts

HEADS, DIM, LENGTH = 4, 8, 200
STEEP = posenc.ALiBi(HEADS, slopes=[2.0, 1.0, 0.7, 0.5])
PLAIN = posenc.NoPE()
FAR = -0.7 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()[None, None]
SHIFTED = FAR + 3.0 * torch.arange(LENGTH)[:, None]  # the highest of each row is another
SOME = torch.tensor(normal((2, 1, LENGTH, LENGTH), 7)) > -1.0
CASES = {
    "by distance": (STEEP, {}),
    "learned": (posenc.ALiBi(HEADS, learned=True, slopes=STEEP.slopes), {}),
    "by pair": (STEEP, {"tokens": Tokens(pos=torch.arange(LENGTH))}),
    "of segments": (STEEP, {"tokens": Tokens(seg=torch.arange(LENGTH) // 190)}),
    "masked": (STEEP, {"mask": SOME | torch.eye(LENGTH, dtype=torch.bool)}),
    "gated": (SUBJECTS["fox"], {}),
    "of the caller": (PLAIN, {"bias": FAR}),
    "of other rows": (PLAIN, {"bias": SHIFTED}),
    "masked, of other rows": (PLAIN, {"bias": SHIFTED, "mask": SOME}),
    "of far keys alone": (PLAIN, {"bias": FAR, "mask": FAR < -70}),
    "that hides": (PLAIN, {"bias": torch.where(SOME[:1], SHIFTED, -torch.inf)}),
}
CALLS = pytest.mark.parametrize("name", CASES)
BY = pytest.mark.parametrize("implementation", ["chunked", "sdpa"])


class Weights(TorchDispatchMode):
    """Inside, collects the weights of each kernel of SDPA and of each softmax."""

    def __init__(self):
        super().__init__()
        self.all = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "flash_attention_for_cpu" in str(function):
            q, k = args[1:3] if "backward" in str(function) else args[:2]
            scores = kwargs["scale"] * q.double() @ k.double().mT
            self.all.append(torch.softmax(scores + kwargs["attn_mask"].double(), -1))
        elif "softmax" in str(function) and "backward" not in str(function):
            self.all.append(result)
        return result


def call(name, *, factor=1.0):
    """A scheme, its vectors and options; gates close by half at each token."""
    scheme, options = CASES[name]
    q, k, v = (torch.tensor(normal((2, HEADS, LENGTH, DIM), n)).float() for n in range(3))
    params = {n: torch.tensor(a) for n, a in posenc.init_params(scheme).items()}
    if scheme is SUBJECTS["fox"]:
        hidden = torch.tensor(normal((2, LENGTH, scheme.hidden_dim), 3)).float()
        options = {"tokens": Tokens(x=hidden)}
    vectors = {"q": factor * q, "k": k, "v": v}
    leaves = [a.requires_grad_() for a in (*vectors.values(), *params.values())]
    return leaves, {**vectors, "scheme": scheme, "params": params, "causal": True, **options}


def step(leaves, options, implementation):
    """The result, and the gradient of each leaf."""
    with parts.small_blocks(64):
        out = posenc_torch.attention(**options, implementation=implementation)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
    return [out.detach(), *gradients]


@CALLS
@BY
@pytest.mark.parametrize("skip_blocks", [True, False])
def test_no_weight_of_a_product_is_subnormal(name, implementation, skip_blocks):
    """Some processors calculate a hundred times more slowly with subnormal numbers."""
    leaves, options = call(name)
    options["skip_blocks"] = skip_blocks
    with Weights() as weights:
        step(leaves, options, implementation)
    assert weights.all
    for each in weights.all:
        assert not ((each > 0) & (each < torch.finfo(torch.float32).smallest_normal)).any()


@CALLS
@BY
@pytest.mark.parametrize("factor", [1.0, 12.0])
def test_what_has_a_weight_keeps_it(name, implementation, factor):
    """Large scores of vectors outweigh a bias that is far below that of other keys."""
    leaves, options = call(name, factor=factor)
    found = step(leaves, options, implementation)
    expected = step(leaves, options, "reference")
    for one, other in zip(found, expected, strict=True):
        # Sums of LENGTH products of numbers of about this size, in another order.
        bound = LENGTH * torch.finfo(torch.float32).eps * other.abs().max() * factor
        assert (one - other).abs().max() <= bound


def test_a_far_key_that_answers_its_query_is_seen():
    """Its bias is 100 below that of the query's own key, and its score 110 above."""
    q = torch.zeros(1, HEADS, LENGTH, DIM)
    k, v = q.clone(), torch.zeros_like(q)
    q[..., 0], k[:, :, 0, 0], v[:, :, 0] = 10.0, 11.0, 1.0
    bias = -torch.arange(LENGTH)[:, None] * torch.linspace(100 / LENGTH, 0, LENGTH)
    for implementation in ("chunked", "sdpa"):
        with parts.small_blocks(64):
            out = posenc_torch.attention(
                q, k, v, PLAIN, causal=True, bias=bias[None, None], scale=1.0,
                implementation=implementation,
            )  # fmt: skip
        assert (out > 0.99).all()


@pytest.mark.parametrize("name", ["by distance", "by pair"])
def test_layers_of_a_pass_have_keys_of_their_own(name):
    """A mask that layers share leaves out no key that the vectors of one need."""
    scheme, options = CASES[name]
    layers = posenc_torch.Positions(scheme, layers=3)
    bound = layers.bind(causal=True, implementation="sdpa", **options)
    for attend, factor in zip(bound, (1.0, 12.0, 1.0), strict=True):
        _, given = call(name, factor=factor)
        vectors = [given[n] for n in "qkv"]
        alone = posenc_torch.attention(
            *vectors, scheme, causal=True, implementation="sdpa", **options
        )
        assert torch.equal(attend(*vectors), alone)


def test_a_sink_is_no_key_of_the_row():
    """A number that is added to all keys of a row would take its share from the sink."""
    _, options = call("of other rows")
    scheme = Sum(posenc.make("alibi", num_heads=HEADS), posenc.make("sink", num_heads=HEADS))
    params = {n: torch.full(a.shape, 590.0) for n, a in posenc.init_params(scheme).items()}
    options |= {"scheme": scheme, "params": params}
    found, expected = (
        posenc_torch.attention(**options, implementation=name) for name in ("sdpa", "reference")
    )
    assert (found == 0).any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
