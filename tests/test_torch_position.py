"""The module that owns a scheme's params."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from frameworks import HAS, PARTIAL
from subjects import DIM, HEADS, MAX_LEN, SUBJECTS, WIDTH, heads, normal

import posenc
from posenc.testing import assert_near
from posenc.testing.tolerances import PATHS

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import posenc_torch

FLOAT32 = PATHS["float32"]
# A bfloat16 has 8 bits; the sum of two numbers up to 4 is rounded once.
BFLOAT16 = 2.0**-7

everywhere = pytest.mark.parametrize("subject", SUBJECTS)


def inputs(scheme, length=6, dtype=torch.float32):
    shape = (2, heads(scheme), length, DIM)
    q, k, v = (torch.tensor(normal(shape, seed), dtype=dtype) for seed in range(3))
    return q, k, v, torch.tensor(normal((2, length, WIDTH), 3), dtype=dtype)


def attend(module, *, causal=True, dtype=torch.float32):
    *tensors, x = inputs(module.scheme, dtype=dtype)
    return module.attend(*tensors, x=x, causal=causal)


def width(scheme):
    found = posenc.embedding(scheme, np.asarray([0]), posenc.init_params(scheme))
    return None if found is None else found.shape[-1]


@everywhere
def test_it_holds_learned_params_and_nothing_else(subject):
    scheme = SUBJECTS[subject]
    module = posenc_torch.Position(scheme)
    specs = scheme.param_specs()
    assert module.state_dict().keys() == specs.keys()
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {
        name: tuple(spec.shape) for name, spec in specs.items()
    }
    assert not list(module.buffers())
    assert repr(scheme) in repr(module)
    assert module.params.keys() == specs.keys()


@everywhere
def test_the_seed_of_torch_decides(subject):
    def state(seed):
        torch.manual_seed(seed)
        return posenc_torch.Position(SUBJECTS[subject]).state_dict()

    first, again, other = state(1), state(1), state(2)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert value.dtype == torch.float32
    constant = same_draws(SUBJECTS[subject])
    assert constant or any(not torch.equal(first[name], other[name]) for name in first)


def same_draws(scheme):
    one, two = posenc.init_params(scheme, 1), posenc.init_params(scheme, 2)
    return all(np.array_equal(one[name], two[name]) for name in one)


@everywhere
def test_a_module_on_meta_is_filled_later(subject):
    scheme = SUBJECTS[subject]
    module = posenc_torch.Position(scheme, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module = module.to_empty(device="cpu")
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    fresh = posenc_torch.Position(scheme)
    for name, value in fresh.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert torch.equal(attend(module), attend(fresh))


@everywhere
def test_copies_answer_alike(subject):
    module = posenc_torch.Position(SUBJECTS[subject])
    expected = attend(module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(attend(twin), expected)
    other = posenc_torch.Position(SUBJECTS[subject])
    other.load_state_dict(module.state_dict())
    assert torch.equal(attend(other), expected)


@everywhere
def test_attending_is_attention_with_its_params(subject):
    module = posenc_torch.Position(SUBJECTS[subject])
    q, k, v, x = inputs(module.scheme)
    found = posenc_torch.attention(q, k, v, module.scheme, module.params, causal=True, x=x)
    assert torch.equal(attend(module), found)


@everywhere
def test_a_gradient_reaches_every_param(subject):
    module = posenc_torch.Position(SUBJECTS[subject])
    tokens = torch.zeros(1, 6, width(module.scheme) or 4)
    total = attend(module).square().sum() + (1 + module.embed(tokens)).square().sum()
    if module.params:
        total.backward()
    assert all(torch.any(p.grad != 0) for p in module.params.values())


@everywhere
def test_embedding_is_added(subject):
    module = posenc_torch.Position(SUBJECTS[subject])
    size = width(module.scheme)
    x = torch.tensor(normal((2, 5, size or 4), 0), dtype=torch.float32)
    pos = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 7, 1, MAX_LEN - 1]])
    found = module.embed(x, pos)
    if size is None:
        assert found is x
        return
    term = posenc.embedding(module.scheme, pos, module.params)
    assert torch.equal(found, x + term)
    assert torch.equal(module.embed(x), x + term[:1])
    # Added in float32, rounded once.
    half = x.bfloat16()
    assert torch.equal(module.embed(half, pos), (half.float() + term).bfloat16())


@pytest.mark.parametrize("subject", ["sinusoidal", "rope", "alibi", "both"])
def test_a_cast_to_half_precision_rounds_no_angle(subject):
    scheme = SUBJECTS[subject]
    module, half = posenc_torch.Position(scheme), posenc_torch.Position(scheme).to(torch.bfloat16)
    if (size := width(scheme)) is not None:
        x, pos = torch.zeros(1, 4, size), torch.tensor([255, 257, 100_003, 2**20 + 1])
        assert torch.equal(half.embed(x, pos), module.embed(x, pos))
        narrow = half.embed(x.bfloat16(), pos).float()
        assert_near(narrow, module.embed(x, pos), BFLOAT16)
    assert torch.equal(attend(half), attend(module))


@pytest.mark.parametrize(
    "subject", ["alibi-learned", "both", "fence", "forgetting", "learned", "t5"]
)
def test_it_compiles_whole(subject):
    torch.manual_seed(0)
    module = posenc_torch.Position(SUBJECTS[subject])
    size = width(module.scheme)
    x = torch.zeros(2, 6, size or 4)

    def both(*tensors):
        q, k, v, hidden = tensors
        return module.attend(q, k, v, x=hidden, causal=True, window=4), module.embed(x)

    expected = both(*inputs(module.scheme))
    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*inputs(module.scheme)), expected, strict=True):
        assert_near(one.detach(), other.detach(), FLOAT32)


@everywhere
def test_autocast_keeps_positions_precise(subject):
    module = posenc_torch.Position(SUBJECTS[subject])
    expected = attend(module).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(module).detach()
        x = torch.zeros(1, 6, width(module.scheme) or 4)
        embedded = module.embed(x)
    assert found.dtype == torch.float32
    assert_near(found, expected, PATHS["bfloat16"])
    assert torch.equal(embedded, module.embed(x))


def test_device_and_dtype_are_those_asked_for():
    module = posenc_torch.Position(posenc.T5Bias(HEADS), dtype=torch.float64)
    assert module.params["table"].dtype == torch.float64


@pytest.mark.parametrize("shape", [(2, 1, 8), (2, 5, 1), (2, 5, 4)])
def test_an_embedding_of_another_shape_is_not_broadcast(shape):
    position = posenc_torch.Position(posenc.Sinusoidal(8))
    with pytest.raises(ValueError, match="x must be floating and end in"):
        position.embed(torch.zeros(shape), torch.arange(5))


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("path", [p for p in posenc_torch.PATHS if p not in PARTIAL])
def test_a_scale_that_is_not_positive(path, scale):
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    got = posenc_torch.attention(q, k, v, posenc.NoPE(), causal=True, scale=scale, path=path)
    scores = (q @ k.mT * scale).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(got, scores.softmax(-1) @ v)


@pytest.mark.parametrize("subject", ["forgetting", "nope", "rope", "t5"])
def test_one_program_serves_every_length(subject):
    torch._dynamo.reset()
    module = posenc_torch.Position(SUBJECTS[subject])
    counter = CompileCounterWithBackend("aot_eager")

    def gradients(run, length):
        q, k, v, x = (each.requires_grad_() for each in inputs(module.scheme, length))
        out = run(q, k, v, x=x, causal=True)
        leaves = [q, k, v, *module.params.values()]
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    compiled = torch.compile(module.attend, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9, 14):
        expected = gradients(module.attend, length)
        for one, other in zip(gradients(compiled, length), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


def test_float64_keys_are_turned_in_float64():
    q, k = torch.randn(1, 2, 5, 8, dtype=torch.float64), torch.randn(1, 2, 5, 8)
    rope = posenc.RoPE(8)
    expected = posenc.attention(q.numpy(), k.double().numpy(), k.double().numpy(), rope)
    for path in posenc_torch.PATHS:
        try:
            got = posenc_torch.attention(q, k, k, rope, path=path)
        except NotImplementedError as reason:
            assert path in PARTIAL or "no float64" in str(reason)  # noqa: PT017
            continue
        assert_near(got.numpy(), expected, PATHS["float64"])
