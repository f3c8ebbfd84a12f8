"""One forward pass in PyTorch: results, what is made once, what is kept, what is refused."""

import gc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
from sample import long, some

import posenc
from posenc import Tokens
from posenc.apply.feature_needs import reads_hidden
from posenc.schemes import FoX, Inkling, LearnedRoPE, RePo, Sink, Sum

torch = pytest.importorskip("torch")
import posenc_torch  # noqa: E402

HEADS, DIM, LAYERS, LENGTH = 2, 8, 4, 12
EACH = {
    "alibi": posenc.ALiBi(HEADS),
    "t5": posenc.T5Bias(HEADS, causal=True),
    "rope": posenc.RoPE(DIM),
    "learned-rope": LearnedRoPE(DIM),
    "sink": Sink(posenc.RoPE(DIM), HEADS),
    "fox": FoX(HEADS, 16),
    "rope+t5": Sum(posenc.RoPE(DIM), posenc.T5Bias(HEADS, causal=True)),
    "rerope": posenc.schemes.ReRoPE(DIM, window=3),
}


def vectors(count=LAYERS, q_len=LENGTH, k_len=LENGTH, **options):
    """Queries, keys, values and hidden states of each layer."""
    torch.manual_seed(0)
    sizes = [(2, HEADS, q_len, DIM), (2, HEADS, k_len, DIM), (2, HEADS, k_len, DIM), (2, k_len, 16)]
    return [[torch.randn(size, **options) for size in sizes] for _ in range(count)]


def alone(positions, each, **options):
    """The layers one by one."""
    outs = []
    for position, (q, k, v, x) in zip(positions, each, strict=True):
        tokens = Tokens(x=x) if reads_hidden(position.scheme) else None
        outs.append(position.attend(q, k, v, causal=True, tokens=tokens, **options))
    return outs


def together(bound, each):
    return [attend(q, k, v, x=x) for attend, (q, k, v, x) in zip(bound, each, strict=True)]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("context", ["eager", "bfloat16", "autocast", "no_grad", "float64"])
def test_a_pass_gives_the_results_of_calls(name, context):
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(context)
    positions = posenc_torch.Positions(EACH[name], LAYERS)
    each = vectors(dtype=dtype or torch.float32)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=context == "autocast"),
        torch.set_grad_enabled(context != "no_grad"),
    ):
        expected, found = alone(positions, each), together(positions.bind(causal=True), each)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def gradients(outs, positions, each):
    loss = sum((out * (n + 1)).sum() for n, out in enumerate(outs))
    leaves = [*positions.parameters(), *[a for layer in each for a in layer[:3]]]
    loss.backward()
    found = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("name", EACH)
def test_gradients_pass_through_what_is_shared(name, reentrant):
    """Also where a backward pass computes layers again, one after the other."""
    from torch.utils.checkpoint import checkpoint

    positions = posenc_torch.Positions(EACH[name], LAYERS)
    each = vectors(requires_grad=True)
    expected = gradients(alone(positions, each), positions, each)
    bound = positions.bind(causal=True)

    def run(attend, q, k, v, x):
        if reentrant is None:
            return attend(q, k, v, x=x)
        return checkpoint(lambda *a: attend(*a[:3], x=a[3]), q, k, v, x, use_reentrant=reentrant)

    outs = [run(attend, *layer) for attend, layer in zip(bound, each, strict=True)]
    found = gradients(outs, positions, each)
    for one, other in zip(expected, found, strict=True):
        # Sums over layers that share an array, in another order: a few roundings of the terms.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_was_made_without_gradients_serves_no_other_call():
    positions, each = posenc_torch.Positions(EACH["t5"], LAYERS), vectors()
    bound = positions.bind(causal=True)
    with torch.no_grad():
        together(bound, each)
    expected = gradients(together(positions.bind(causal=True), each), positions, each)
    found = gradients(together(bound, each), positions, each)
    torch.testing.assert_close(found[0], expected[0])


@dataclass(frozen=True)
class Counted(posenc.ALiBi):
    """ALiBi that counts how often its bias is computed."""

    calls = 0

    def bias(self, q_pos, k_pos, *, params, xp):
        type(self).calls += 1
        return super().bias(q_pos, k_pos, params=params, xp=xp)


@dataclass(frozen=True)
class Turning(posenc.RoPE):
    """RoPE that counts how often its angles are computed."""

    calls = 0

    def rotary(self, pos, *, dtype, params, xp):
        type(self).calls += 1
        return super().rotary(pos, dtype=dtype, params=params, xp=xp)


@pytest.mark.parametrize("scheme", [Counted(HEADS), Turning(DIM)], ids=["bias", "angles"])
def test_what_positions_decide_is_made_once(scheme):
    positions, each = posenc_torch.Positions(scheme, LAYERS), vectors()
    kind = type(scheme)
    kind.calls = 0
    alone(positions, each)
    by_calls, kind.calls = kind.calls, 0
    bound = positions.bind(causal=True)
    assert kind.calls == 0  # nothing before a layer needs it
    together(bound, each)
    assert (kind.calls, by_calls) == (by_calls // LAYERS, by_calls)


@pytest.mark.parametrize("scheme", [posenc.NoPE(), posenc.RoPE(DIM)], ids=["nope", "rope"])
def test_layers_may_have_other_numbers_of_heads(scheme):
    """A scheme that declares none serves any; parts of a call are of all its heads."""
    positions = posenc_torch.Positions(scheme, 3)
    bound = positions.bind(causal=True, window=3, implementation="chunked")
    draw = torch.Generator().manual_seed(0)
    for attend, (heads, shared) in zip(bound, [(2, 2), (6, 3), (6, 6)], strict=True):
        q, k = (torch.randn(2, n, 300, DIM, generator=draw) for n in (heads, shared))
        options = {"causal": True, "window": 3, "implementation": "reference"}
        expected = posenc_torch.attention(q, k, k, scheme, **options)
        torch.testing.assert_close(attend(q, k, k), expected)


def test_layers_may_be_learned_one_after_the_other():
    """In parts each has the graph of its learned arrays to itself."""
    positions = posenc_torch.Positions(EACH["t5"], LAYERS)
    for attend, (q, k, v, _) in zip(
        positions.bind(causal=True, implementation="chunked"), vectors(), strict=True
    ):
        attend(q, k, v).sum().backward()
    assert next(positions.parameters()).grad is not None


def test_layers_of_other_windows_share_angles_alone():
    positions = posenc_torch.Positions(Turning(DIM), LAYERS, windows=[3, None])
    each = vectors()
    expected = alone(positions, each)
    Turning.calls = 0
    found = together(positions.bind(causal=True), each)
    assert Turning.calls == 1
    assert all(map(torch.equal, expected, found))
    assert not torch.equal(*[a(*each[0][:3]) for a in list(positions.bind(causal=True))[:2]])


def test_padding_and_packed_documents():
    positions = posenc_torch.Positions([EACH["rope"], EACH["t5"]], LAYERS)
    for tokens in (posenc.positions.packed([5, 7]), posenc.positions.left_padded([12, 7], LENGTH)):
        each = vectors()
        expected = [
            p.attend(*a[:3], causal=True, tokens=tokens)
            for p, a in zip(positions, each, strict=True)
        ]
        found = together(positions.bind(tokens, causal=True), each)
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", ["alibi", "t5", "rope"])
def test_decoding_with_keys_that_a_cache_holds_transformed(name):
    positions = posenc_torch.Positions(EACH[name], LAYERS)
    each = vectors()
    whole = together(positions.bind(causal=True), each)
    cached = []
    for end in (7, 8, LENGTH):
        start = cached[0].shape[2] if cached else 0
        now = Tokens(torch.arange(start, end))
        bound = positions.bind(Tokens(torch.arange(end)), now, causal=True)
        for layer, (attend, (q, k, v, _)) in enumerate(zip(bound, each, strict=True)):
            new = attend.transform_keys(k[:, :, start:end])
            if start == 0:
                cached.append(new)
            else:
                cached[layer] = torch.cat([cached[layer], new], dim=2)
            out = attend(q[:, :, start:end], cached[layer], v[:, :, :end], k_transformed=True)
            torch.testing.assert_close(out, whole[layer][:, :, start:end])


def test_keys_of_a_cache_may_have_several_lengths():
    bound = posenc_torch.Positions(EACH["rope"], 1).bind(Tokens(torch.arange(9)), causal=True)
    keys = torch.randn(1, 1, 4, DIM)
    last = bound[0].transform_keys(keys[:, :, -1:])
    assert torch.equal(bound[0].transform_keys(keys)[:, :, -1:], last)


def test_keys_that_turn_by_features_are_refused():
    bound = posenc_torch.Positions(RePo(HEADS, DIM, 16), 1).bind(Tokens(torch.arange(4)))
    with pytest.raises(ValueError, match="RePo transforms keys by features of their tokens"):
        bound[0].transform_keys(torch.randn(1, HEADS, 4, DIM))


@pytest.mark.parametrize(
    ("scheme", "anywhere"),
    [(Inkling(HEADS, 16), False), (FoX(HEADS, 16), True)], ids=["own", "sums"],
)  # fmt: skip
def test_hidden_states_of_queries_are_those_of_the_last_tokens(scheme, anywhere):
    """Or of none that is known, where a scheme reads more than sums over keys."""
    positions = posenc_torch.Positions(scheme, 1)
    torch.nn.init.normal_(next(positions.parameters()))
    (layer,), keys = vectors(1), Tokens(torch.arange(LENGTH))
    (whole,), (q, k, v, x) = alone(positions, [layer]), layer

    def at(pos):
        bound = positions.bind(keys, Tokens(torch.tensor(pos)), causal=True)
        return bound[0](q[:, :, pos], k, v, x=x)

    for pos in ([LENGTH - 2, LENGTH - 1], [2], [LENGTH - 1, LENGTH - 2]):
        if anywhere or pos == [LENGTH - 2, LENGTH - 1]:
            torch.testing.assert_close(at(pos), whole[:, :, pos])
            continue
        with pytest.raises(ValueError, match=r"queries\.pos are not the last of tokens\.pos"):
            at(pos)
    three = Tokens(torch.arange(LENGTH).expand(3, -1))
    with pytest.raises(ValueError, match=r"tokens\.pos has batch 3, k has 2"):
        positions.bind(three, Tokens(three.pos[:2]))[0](q, k, v, x=x)


def test_embeddings_are_added_at_the_positions_of_the_queries():
    positions = posenc_torch.Positions(posenc.Sinusoidal(16), 1)
    x, tokens = torch.zeros(1, 3, 16), Tokens(torch.arange(9))
    expected = positions.embed(x, torch.tensor([6, 7, 8]))
    assert torch.equal(positions.bind(tokens, causal=True).embed(x), expected)
    assert torch.equal(positions.bind(tokens, Tokens(torch.tensor([6, 7, 8]))).embed(x), expected)
    assert torch.equal(positions.bind().embed(x), positions.embed(x))


@pytest.mark.parametrize("name", some(EACH, ["t5", "sink", "fox"], long))
def test_nothing_is_kept_when_a_pass_ends(name):
    positions = posenc_torch.Positions(EACH[name], LAYERS)
    bound = positions.bind(causal=True)
    outs = together(bound, vectors())
    kept = bound.state.shared(0).made._kept
    assert kept
    made = [weakref.ref(bound), weakref.ref(bound.state), weakref.ref(bound.state.shared(0))]
    made += [weakref.ref(value) for _, value in kept.values() if isinstance(value, torch.Tensor)]
    del kept
    del bound, outs
    gc.collect()
    assert [ref() for ref in made] == [None] * len(made)


@long
def test_nothing_grows_over_many_passes():
    """Tensors that are alive after 1 000 passes of 50 lengths: those after the first 50."""
    positions = posenc_torch.Positions([EACH["t5"], EACH["rope"]], 2)
    by_length = {n: vectors(2, n, n) for n in range(1, 51)}

    def run(passes):
        with torch.no_grad():
            for n in range(passes):
                together(positions.bind(causal=True), by_length[1 + n % 50])
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    before = run(100)
    assert run(1000) <= before


@pytest.mark.parametrize("what", ["params", "positions", "mask"])
@pytest.mark.parametrize("name", ["learned-rope", "rope+t5", "rerope"])
def test_a_pass_that_is_kept_begins_again_when_tensors_change(name, what):
    """Params after a step of an optimiser, positions of a decoding loop, a mask."""
    positions, each = posenc_torch.Positions(EACH[name], LAYERS), vectors()
    pos, mask = torch.arange(LENGTH), torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    tokens = Tokens(pos=pos)
    bound = positions.bind(tokens, causal=True, mask=mask)
    before = together(bound, each)
    with torch.no_grad():
        if what == "positions":
            pos[5:] += 3
        elif what == "mask":
            mask[..., 2] = False
        for param in positions.parameters() if what == "params" else ():
            param += 1
    found = together(bound, each)
    expected = together(positions.bind(tokens, causal=True, mask=mask), each)
    for one, other, old in zip(expected, found, before, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, old) == (what == "params" and name == "rerope")  # it learns nothing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q, k, v: (q[:, :, 1:], k[:, :, 1:], v[:, :, 1:]),
            "had batch 2, queries 12, .*queries 11",
        ),
        (
            lambda q, k, v: (q.double(), k.double(), v.double()),
            "dtype torch.float32.* dtype torch.float64",
        ),
        (lambda *a: [x[:1] for x in a], "batch 2.*batch 1"),
        (lambda *a: [x.to("meta") for x in a], "device cpu.*device meta"),
    ],
)
def test_a_pass_is_of_one_shape(change, message):
    bound = posenc_torch.Positions(EACH["alibi"], LAYERS).bind(causal=True)
    (q, k, v, _), *_ = vectors()
    bound[0](q, k, v)
    with pytest.raises(ValueError, match=message + ".*bind again"):
        bound[1](*change(q, k, v))


def test_tokens_must_be_a_record():
    with pytest.raises(TypeError, match=r"tokens must be posenc\.Tokens, got Tensor"):
        posenc_torch.Positions(EACH["alibi"], 1).bind(torch.arange(3))
    with pytest.raises(TypeError, match="no keyword 'is_causal': say causal="):
        posenc_torch.Positions(EACH["alibi"], 1).bind(is_causal=True)


@long
def test_compiled_and_transformed_programs_make_their_own():
    positions, each = posenc_torch.Positions(EACH["t5"], LAYERS), vectors()
    expected = alone(positions, each)

    def run(*flat):
        layers = [flat[n : n + 4] for n in range(0, len(flat), 4)]
        return together(positions.bind(causal=True), layers)

    flat = [a for layer in each for a in layer]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*flat)
    mapped = torch.func.vmap(run)(*[a[None] for a in flat])
    for one, two, three in zip(expected, compiled, mapped, strict=True):
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(one, three[0])


def test_numbers_of_a_call_are_its_own():
    """A scale, a cap or a bias of one layer reaches no other."""
    positions, each = posenc_torch.Positions(EACH["t5"], LAYERS), vectors()
    bias = torch.tensor(np.random.default_rng(0).standard_normal((1, 1, LENGTH, LENGTH))).float()
    options = [{}, {"scale": 0.5}, {"softcap": 2.0}, {"bias": bias}]
    bound = positions.bind(causal=True)
    for attend, position, (q, k, v, _), own in zip(bound, positions, each, options, strict=True):
        assert torch.equal(attend(q, k, v, **own), position.attend(q, k, v, causal=True, **own))
    both = bound[0](*each[0][:3], return_lse=True)
    expected = positions[0].attend(*each[0][:3], causal=True, return_lse=True)
    assert all(map(torch.equal, both, expected))
