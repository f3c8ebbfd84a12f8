"""The modules that own the params of a scheme, and of a model."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
from frameworks import HAS, PARTIAL
from sample import Turns, long, some
from subjects import MAX_LEN, SUBJECTS, TELLING, heads, normal, steers_attention

import posenc
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM
from posenc.testing.tolerances import ATTENTION_TOL

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import posenc_torch

FLOAT32 = ATTENTION_TOL["float32"]
# A bfloat16 has 8 bits; the sum of two numbers up to 4 is rounded once.
BFLOAT16 = 2.0**-7

everywhere = Turns(SUBJECTS, TELLING, tests=13, times=4)


def inputs(scheme, length=6, dtype=torch.float32):
    shape = (2, heads(scheme), length, HEAD_DIM)
    q, k, v = (torch.tensor(normal(shape, seed), dtype=dtype) for seed in range(3))
    return q, k, v, torch.tensor(normal((2, length, HIDDEN_DIM), 3), dtype=dtype)


def attend(module, *, causal=True, dtype=torch.float32):
    *tensors, x = inputs(module.scheme, dtype=dtype)
    module.embed(torch.zeros(1, 6, width(module.scheme) or 4))  # else it warns
    return module.attend(*tensors, tokens=posenc.Tokens(x=x), causal=causal)


def sees_all(scheme):
    """Whether causal attention reads every param."""
    return scheme.caution(causal=True) is None


def width(scheme):
    result = posenc.embedding(scheme, np.asarray([0]), posenc.init_params(scheme))
    return None if result is None else result.shape[-1]


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
    result = posenc_torch.attention(
        q, k, v, module.scheme, module.params, causal=True, tokens=posenc.Tokens(x=x)
    )
    assert torch.equal(attend(module), result)


@everywhere
def test_a_gradient_reaches_every_param(subject):
    module = posenc_torch.Position(SUBJECTS[subject])
    tokens = torch.zeros(1, 6, width(module.scheme) or 4)
    out = attend(module, causal=sees_all(module.scheme))
    total = out.square().sum() + (1 + module.embed(tokens)).square().sum()
    if module.params:
        total.backward()
    assert all(torch.any(p.grad != 0) for p in module.params.values())


@everywhere
def test_embedding_is_added(subject):
    module = posenc_torch.Position(SUBJECTS[subject])
    size = width(module.scheme)
    x = torch.tensor(normal((2, 5, size or 4), 0), dtype=torch.float32)
    pos = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 7, 1, MAX_LEN - 1]])
    result = module.embed(x, pos)
    if size is None:
        assert result is x
        return
    term = posenc.embedding(module.scheme, pos, module.params)
    assert torch.equal(result, x + term)
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
    "subject",
    some(["alibi-learned", "both", "fence", "fox", "learned", "t5"], ["t5"], long),
)
def test_it_compiles_whole(subject):
    torch.manual_seed(0)
    module = posenc_torch.Position(SUBJECTS[subject])
    size = width(module.scheme)
    x = torch.zeros(2, 6, size or 4)

    def both(*tensors):
        q, k, v, hidden = tensors
        embedded = module.embed(x)
        tokens = posenc.Tokens(x=hidden)
        return module.attend(q, k, v, tokens=tokens, causal=True, window=4), embedded

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
        result = attend(module).detach()
        x = torch.zeros(1, 6, width(module.scheme) or 4)
        embedded = module.embed(x)
    assert result.dtype == torch.float32
    assert_near(result, expected, ATTENTION_TOL["bfloat16"])
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
@pytest.mark.parametrize(
    "implementation",
    # FlexAttention is compiled here.
    some(
        sorted(set(posenc_torch.IMPLEMENTATIONS) - PARTIAL), ["chunked", "reference", "sdpa"], long
    ),
)
def test_a_scale_that_is_not_positive(implementation, scale):
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    got = posenc_torch.attention(
        q, k, v, posenc.NoPE(), causal=True, scale=scale, implementation=implementation
    )
    scores = (q @ k.mT * scale).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(got, scores.softmax(-1) @ v)


@long
@pytest.mark.parametrize("subject", ["fox", "nope", "rope", "t5"])
def test_one_program_serves_every_length(subject):
    torch._dynamo.reset()
    module = posenc_torch.Position(SUBJECTS[subject])
    counter = CompileCounterWithBackend("aot_eager")

    def gradients(run, length):
        q, k, v, x = (each.requires_grad_() for each in inputs(module.scheme, length))
        out = run(q, k, v, tokens=posenc.Tokens(x=x), causal=True)
        leaves = [q, k, v, *module.params.values()]
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    compiled = torch.compile(module.attend, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for length in (5, 9, 14):
        expected = gradients(module.attend, length)
        for one, other in zip(gradients(compiled, length), expected, strict=True):
            torch.testing.assert_close(one, other)
        counts.append(counter.frame_count)
    # The first call may ask its backend twice: torch begins anew where a number became constant.
    assert len(set(counts)) == 1


def test_float64_keys_are_turned_in_float64():
    q, k = torch.randn(1, 2, 5, 8, dtype=torch.float64), torch.randn(1, 2, 5, 8)
    rope = posenc.RoPE(8)
    expected = posenc.attention(q.numpy(), k.double().numpy(), k.double().numpy(), rope)
    for implementation in posenc_torch.IMPLEMENTATIONS:
        try:
            got = posenc_torch.attention(q, k, k, rope, implementation=implementation)
        except NotImplementedError as reason:
            assert implementation in PARTIAL or "no float64" in str(reason)  # noqa: PT017
            continue
        assert_near(got.numpy(), expected, ATTENTION_TOL["float64"])


LAYERS = 3


class Stack(nn.Module):
    """Residual layers of attention alone, over one container."""

    def __init__(self, scheme, layers=LAYERS, **options):
        super().__init__()
        self.positions = posenc_torch.Positions(scheme, layers, **options)

    def forward(self, x, pos=None, causal=True):
        x = self.positions.embed(x, pos)
        for position in self.positions:
            x = x + mixed(position.attend, position.scheme, x, causal=causal)
        return x


def mixed(attend, scheme, x, **keywords):
    """Attention of hidden states (B, L, heads * HEAD_DIM) to themselves."""
    h = x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
    tokens = posenc.Tokens(x=x[..., :HIDDEN_DIM])
    return attend(h, h, h, tokens=tokens, **keywords).transpose(1, 2).flatten(2)


def hidden(scheme, length=6, seed=0):
    size = width(scheme) or heads(scheme) * HEAD_DIM
    return torch.tensor(normal((2, length, size), seed), dtype=torch.float32)


def by_hand(schemes, state, sources, x):
    """What a stack computes, from the arrays of its state dict and no container."""

    def params(layer):
        own = f"positions.{sources[layer]}."
        return {n.removeprefix(own): p for n, p in state.items() if n.startswith(own)}

    for layer in sorted(set(sources)):
        term = posenc.embedding(schemes[layer], torch.arange(x.shape[1]), params(layer))
        x = x if term is None else x + term
    for layer, scheme in enumerate(schemes):
        x = x + mixed(
            lambda *qkv, layer=layer, scheme=scheme, **k: posenc_torch.attention(
                *qkv, scheme, params(layer), **k
            ),
            scheme,
            x,
            causal=True,
        )
    return x


def sharing(scheme):
    once = scheme.shared or width(scheme) is not None
    return (0,) * LAYERS if once else tuple(range(LAYERS))


@everywhere
def test_a_model_holds_each_learned_array_once(subject):
    scheme = SUBJECTS[subject]
    model = Stack(scheme)
    expected = {
        f"positions.{n}.{name}" for n in set(sharing(scheme)) for name in scheme.param_specs()
    }
    assert model.state_dict().keys() == expected
    assert len(list(model.parameters())) == len(expected)
    assert len(model.positions) == len(list(model.positions)) == LAYERS
    one, *_, last = model.positions
    assert (one is last) == (len(set(sharing(scheme))) == 1)
    assert one is model.positions[0]
    assert last is model.positions[-1]


@everywhere
@torch.no_grad()
def test_a_model_is_its_layers_by_hand(subject):
    scheme = SUBJECTS[subject]
    model, x = Stack(scheme), hidden(scheme)
    # matmul rounds otherwise for a tensor without a gradient, also where none is computed.
    state = model.state_dict(keep_vars=True)
    expected = by_hand((scheme,) * LAYERS, state, sharing(scheme), x)
    assert torch.equal(model(x), expected)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(list(twin.parameters())) == len(list(model.parameters()))
        assert torch.equal(twin(x), expected)
    other = Stack(scheme)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)


@everywhere
def test_a_model_on_meta_is_filled_later(subject):
    scheme = SUBJECTS[subject]
    model = Stack(scheme, device="meta", dtype=torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in model.parameters())
    model = model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.positions.reset_parameters()
    torch.manual_seed(5)
    fresh = Stack(scheme, dtype=torch.float64).state_dict()
    assert all(torch.equal(p, fresh[name]) for name, p in model.state_dict().items())


@torch.no_grad()
def test_a_plan_by_layer():
    schemes = (posenc.T5Bias(HEADS), posenc.RoPE(HEAD_DIM), posenc.T5Bias(HEADS))
    model, x = Stack(schemes[:2]), hidden(schemes[0])
    assert [position.scheme for position in model.positions] == list(schemes)
    assert model.state_dict().keys() == {"positions.0.table"}
    assert torch.equal(model(x), by_hand(schemes, model.state_dict(), (0, 1, 0), x))


WINDOWS = [("t5", [3, None, 1]), ("t5", 2), ("rope", [3, None, 1]), ("learned", [None, 2, 4])]


@torch.no_grad()
@pytest.mark.parametrize(("subject", "windows"), WINDOWS)
def test_each_layer_has_its_window(subject, windows):
    scheme = SUBJECTS[subject]
    model, plain = Stack(scheme, windows=windows), Stack(scheme)
    plain.load_state_dict(model.state_dict())  # its names know nothing of windows
    assert plain.positions.state_dict().keys() == model.positions.state_dict().keys()
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    x, given = hidden(scheme), model.positions.plan.windows

    def by_calls():
        out = model.positions.embed(x)
        for position, window in zip(plain.positions, given, strict=True):
            plain.positions.embed(x)
            out = out + mixed(position.attend, scheme, out, causal=True, window=window)
        return out

    assert torch.equal(model(x), by_calls())
    assert not torch.equal(model(x), plain(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
    model.positions.reset_parameters()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), by_calls())


@torch.no_grad()
def test_a_window_in_the_call_takes_the_place_of_the_layers():
    positions = posenc_torch.Positions(posenc.T5Bias(HEADS), 3, windows=[3, None, 2])
    q, k, v, x = inputs(positions[0].scheme)
    own = posenc_torch.Position(posenc.T5Bias(HEADS), window=3)
    own.load_state_dict({"table": positions.state_dict()["0.table"]})
    for position in (*positions, own):
        for window in (None, 5):
            result = position.attend(q, k, v, causal=True, window=window)
            params = {"table": positions.state_dict()["0.table"]}
            expected = posenc_torch.attention(
                q, k, v, posenc.T5Bias(HEADS), params, causal=True, window=window
            )
            assert torch.equal(result, expected)
    assert torch.equal(own.attend(q, k, v), positions[0].attend(q, k, v))
    assert positions[-1].embed(x) is x
    assert positions[1].params["table"] is positions[0].params["table"]


def test_a_plan_is_taken_as_it_is():
    plan = posenc.layers.LayerPlan.of([posenc.T5Bias(HEADS), posenc.NoPE()], 3, [3, None])
    positions = posenc_torch.Positions(plan)
    assert positions.plan is plan
    assert [position.window for position in positions] == [3, None, 3]
    with pytest.raises(ValueError, match="layers must be 3"):
        posenc_torch.Positions(plan, 4)


def test_windows_are_shown_and_checked():
    positions = posenc_torch.Positions(posenc.RoPE(HEAD_DIM), 2, windows=[512, None])
    assert ", window=512" in repr(positions[0])
    assert "window" not in repr(positions[1])
    assert positions[0] is positions[0]
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        posenc_torch.Position(posenc.NoPE(), window=0)
    with pytest.raises(ValueError, match="windows must be one, or 1 to layers=2"):
        posenc_torch.Positions(posenc.NoPE(), 2, windows=[1, 2, 3])


@long
def test_layers_with_windows_compile_whole():
    torch._dynamo.reset()
    model = Stack(posenc.T5Bias(HEADS), windows=[3, None, 2])
    x = hidden(posenc.NoPE())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("subject", [n for n in SUBJECTS if SUBJECTS[n].param_specs()])
def test_an_array_learns_from_every_layer_it_serves(subject):
    scheme = SUBJECTS[subject]
    model = posenc_torch.Positions(scheme, LAYERS)
    q, k, v, x = (each.requires_grad_() for each in inputs(scheme))
    model.embed(hidden(scheme))

    causal = sees_all(scheme)

    def gradients(layers):
        tokens = posenc.Tokens(x=x)
        total = sum(p.attend(q, k, v, tokens=tokens, causal=causal).square().sum() for p in layers)
        leaves = list(model.parameters())
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    apart = [gradients([position]) for position in model]
    for n, grad in enumerate(gradients(model)):
        assert_near(grad, sum(one[n] for one in apart), FLOAT32)
    if steers_attention(scheme):
        assert [sum(bool(grad.any()) for grad in one) for one in apart] == [
            len(scheme.param_specs())
        ] * LAYERS


@long
def test_one_program_serves_a_model_at_every_length():
    torch._dynamo.reset()
    model = Stack([posenc.Learned(MAX_LEN, HEADS * HEAD_DIM), posenc.T5Bias(HEADS)], layers=2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9):
        x = hidden(posenc.NoPE(), length)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1


EMBEDDED = pytest.mark.parametrize(
    "subject", [name for name, scheme in SUBJECTS.items() if width(scheme) is not None]
)


def count_warnings(run):
    """How often ``run`` says that an embedding is missing."""
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        run()
    return sum("attend was called before embed" in str(one.message) for one in result)


def warned(module, run):
    """How often each of three calls of attention says so."""
    *tensors, x = inputs(module.scheme)
    at = {"tokens": posenc.Tokens(x=x), "causal": True}
    return [count_warnings(lambda: run(*tensors, **at)) for _ in range(3)]


@everywhere
def test_an_embedding_that_is_never_added_is_a_warning(subject):
    scheme = SUBJECTS[subject]
    forgotten, used = posenc_torch.Position(scheme), posenc_torch.Position(scheme)
    # Once: a training loop would warn in every step.
    assert warned(forgotten, forgotten.attend) == [int(width(scheme) is not None), 0, 0]
    used.embed(hidden(scheme))
    for module in (used, copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert warned(module, module.attend) == [0, 0, 0]


@long
@pytest.mark.parametrize("embeds", [False, True])
def test_a_compiled_program_warns_of_it_too(embeds):
    torch._dynamo.reset()
    module = posenc_torch.Position(SUBJECTS["sinusoidal"])

    def run(*tensors, **keywords):
        return (module.embed(tokens) if embeds else tokens), module.attend(*tensors, **keywords)

    tokens, counter = hidden(module.scheme), CompileCounterWithBackend("eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    assert warned(module, compiled) == [int(not embeds), 0, 0]
    # What was never embedded is compiled once more, without the warning.
    assert counter.frame_count == (1 if embeds else 2)


@long
def test_a_compiled_layer_reads_no_length_of_the_embedding():
    torch._dynamo.reset()
    module, counter = (
        posenc_torch.Position(SUBJECTS["sinusoidal"]),
        CompileCounterWithBackend("eager"),
    )
    compiled = torch.compile(module.attend, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9, 14):
        module.embed(hidden(module.scheme, length))
        compiled(*inputs(module.scheme, length)[:3], causal=True)
    assert counter.frame_count == 1


@EMBEDDED
def test_decoding_with_an_embedding_needs_positions(subject):
    module = posenc_torch.Positions(SUBJECTS[subject], LAYERS)
    q, k, v, _ = inputs(module[0].scheme)
    x, last = hidden(module[0].scheme), q[:, :, -1:]
    module.embed(x)
    expected = module[1].attend(q, k, v, causal=True)[:, :, -1:]
    torch.testing.assert_close(module[1].attend(last, k, v, causal=True), expected)
    module.embed(x[:, -1:])
    with pytest.raises(ValueError, match=r"embed put 1 tokens .* 0 .. 0, but k has 6.* pos="):
        module[1].attend(last, k, v, causal=True)
    at = {
        "tokens": posenc.Tokens(pos=torch.arange(6)),
        "queries": posenc.Tokens(pos=torch.tensor([5])),
    }
    torch.testing.assert_close(module[1].attend(last, k, v, causal=True, **at), expected)
    module[1].attend(last, k, v)  # as to an encoder's tokens
    module.embed(x[:, -1:], torch.tensor([5]))
    torch.testing.assert_close(module[1].attend(last, k, v, causal=True), expected)


class Tied(nn.Module):
    """A container, one more use of one of its tables, and weights that are tied."""

    def __init__(self, scheme):
        super().__init__()
        self.tokens = nn.Embedding(16, HEADS * HEAD_DIM)
        self.positions = posenc_torch.Positions(scheme, LAYERS)
        self.first = self.positions[0]
        self.norm = nn.LayerNorm(HEADS * HEAD_DIM)
        self.logits = nn.Linear(HEADS * HEAD_DIM, 16)
        self.logits.weight = self.tokens.weight


@everywhere
def test_groups_of_an_optimizer_hold_each_param_once(subject):
    model = Tied(SUBJECTS[subject])
    groups = posenc_torch.param_groups(model, 0.5, position_lr_scale=4.0, weight_decay=0.25)
    names = {id(p): name for name, p in model.named_parameters()}
    result = [({names.pop(id(p)) for p in g["params"]}, g["lr"], g["weight_decay"]) for g in groups]
    own = {name for name, _ in model.named_parameters() if name.startswith("positions.")}
    assert not names
    assert result == [
        ({"tokens.weight"}, 0.5, 0.25),
        ({"norm.weight", "norm.bias", "logits.bias"}, 0.5, 0.0),
        *([(own, 2.0, 0.0)] if own else []),
    ]
    assert len(torch.optim.AdamW(groups).param_groups) == len(groups)


def test_groups_as_the_study_has_them():
    groups = posenc_torch.param_groups(Tied(posenc.T5Bias(HEADS)), 1e-3)
    assert [group["lr"] for group in groups] == [1e-3, 1e-3, 1e-2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": nn.Linear(2, 2)}, "Linear holds no posenc_torch.Position"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": torch.tensor(-1.0)}, "lr must be at least 0, got tensor"),
        ({"lr": float("inf")}, "lr must be finite, got inf"),
        ({"position_lr_scale": 0.0}, "position_lr_scale must be finite and greater than 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
    ],
)
def test_wrong_groups(change, message):
    given = {"model": Tied(posenc.NoPE()), "lr": 1e-3, **change}
    with pytest.raises(ValueError, match=message):
        posenc_torch.param_groups(given.pop("model"), **given)


def test_wrong_first_calls_say_what_is_right():
    with pytest.raises(TypeError, match="scheme must be an instance of a PositionScheme"):
        posenc_torch.Positions("alibi")
    positions = posenc_torch.Positions(posenc.NoPE(), 2)
    q = torch.zeros(1, 2, 3, 4)
    for call in (positions, positions.attend):
        with pytest.raises(TypeError, match=r"positions\[layer\]\.attend\(q, k, v\)"):
            call(q, q, q)
