"""torch.export with "sdpa": one program for every length, the same when saved and loaded."""

from __future__ import annotations

import io

import pytest
from cases import ONE_OF_EACH
from frameworks import HAS
from sample import long, some
from subjects import SUBJECTS

import posenc
from posenc.schemes import Sink
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM
from posenc.testing.tolerances import ATTENTION_TOL

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch.export import Dim, export
from torch_layers import Layer, tensors

import posenc_torch

# A program computes what eager code does; another kernel for another stride may round anew.
FLOAT32 = ATTENTION_TOL["float32"]
BATCH, QUERIES, KEYS = Dim("batch"), Dim("queries"), Dim("keys")


def documents(q_len, k_len):
    """Positions and segments of documents of five tokens; queries are the last, back to front."""
    pos, seg = torch.arange(k_len) % 5 + 7, torch.arange(k_len) // 5
    last = slice(k_len - q_len, None)
    return {"pos": pos, "seg": seg, "q_pos": pos[last].flip(0), "q_seg": seg[last].flip(0)}


def arguments(form, scheme, q_len, k_len, batch):
    result = tensors(scheme, q_len, k_len, batch)
    if form == "packed":
        return result | {"seg": torch.arange(k_len) // 5}
    return result | documents(q_len, k_len) if form == "documents" else result


# What is exported, lengths of queries and of keys it must serve, and the axes that vary.
FORMS = {
    "whole": ((6, 6), [(1, 1), (2, 2), (5, 5), (21, 21)], (KEYS, KEYS)),
    "decoding": ((1, 6), [(1, 2), (1, 21)], (None, KEYS)),
    "documents": ((4, 6), [(4, 6), (3, 3), (7, 21)], (QUERIES, KEYS)),
    "packed": ((6, 6), [(2, 2), (5, 5), (21, 21)], (KEYS, KEYS)),
}


def axes(form):
    queries, keys = FORMS[form][2]
    at_queries = {} if queries is None else {2: queries}
    result = {"q": {0: BATCH} | at_queries, "k": {0: BATCH, 2: KEYS}, "v": {0: BATCH, 2: KEYS}}
    result |= {"x": {0: BATCH, 1: KEYS}}
    if form == "packed":
        result |= {"seg": {0: keys}}
    if form == "documents":
        result |= {"pos": {0: keys}, "seg": {0: keys}}
        result |= {"q_pos": {0: queries}, "q_seg": {0: queries}}
    return result


def reloaded(program):
    """A program as another process would find it."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


CATALOGUE = list(posenc.catalogue())
KINDS = ("learned", "nope", "rope", "sinusoidal", "t5")
# Strict: numbers that are kept for a bias, and those kept for angles, must be in the program.
QUICK = [
    ("t5", "decoding", False),
]
MORE = [
    ("rope", "whole", True),
    *[(name, "whole", False) for name in KINDS],
    ("fox", "documents", False),
    ("both", "documents", False),
    ("transformer_xl", "packed", False),
    ("alibi", "whole", True),
]
EVERY = [
    (name, form, strict)
    for name in dict.fromkeys(CATALOGUE + ONE_OF_EACH)
    for form in FORMS
    for strict in (False, True)
]


@pytest.mark.parametrize(
    ("subject", "form", "strict"),
    some(QUICK + MORE, QUICK, long) + some([at for at in EVERY if at not in QUICK + MORE], []),
)
def test_an_exported_program_serves_every_length(subject, form, strict):
    scheme = SUBJECTS[subject]
    torch.manual_seed(0)
    layer = Layer(scheme, implementation="sdpa", window=8)
    example, lengths, _ = FORMS[form]
    given = arguments(form, scheme, *example, batch=2)
    try:
        layer(**given)
    except NotImplementedError as reason:
        pytest.skip(f"refused: {reason}")
    program = export(layer, (), given, dynamic_shapes=axes(form), strict=strict)
    learned = {f"position.{name}" for name in scheme.param_specs()}
    assert {name for name, _ in program.named_parameters()} == learned
    run, loaded = program.module(), reloaded(program).module()
    # Where features are computed from tokens, PyTorch writes a program of its own for one.
    fewest = (2, 2) if form == "whole" and scheme.feature_specs() else (1, 1)
    for q_len, k_len in (at for at in lengths if at >= fewest):
        tokens = arguments(form, scheme, q_len, k_len, batch=3)
        expected = layer(**tokens)
        for result, again, right in zip(run(**tokens), loaded(**tokens), expected, strict=True):
            assert_near(result.detach(), right.detach(), FLOAT32)
            assert torch.equal(again, result)


@long
@pytest.mark.parametrize(
    "subject", ["cope", "dape", "grape_ap", "path", "tra", "wall", "rerope", "dual_chunk"]
)
def test_what_the_reference_alone_exports_serves_every_length(subject):
    scheme, length = SUBJECTS[subject], Dim("length", min=3, max=4096)
    torch.manual_seed(0)
    layer = Layer(scheme, implementation="reference")
    sizes = {"q": {2: length}, "k": {2: length}, "v": {2: length}, "x": {1: length}}
    given = arguments("packed", scheme, 6, 6, batch=2)
    run = export(layer, (), given, dynamic_shapes=sizes | {"seg": {0: length}}).module()
    for size in (3, 21):
        tokens = arguments("packed", scheme, size, size, batch=2)
        for result, right in zip(run(**tokens), layer(**tokens), strict=True):
            assert_near(result.detach(), right.detach(), FLOAT32)


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
def test_a_sink_over_shared_keys_serves_every_length(strict):
    """As in gpt-oss: the sink is one more key, and SDPA repeats keys that heads share."""
    length = Dim("length", min=2, max=4096)

    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.position = posenc_torch.Position(Sink(posenc.RoPE(8), 4))

        def forward(self, q, k):
            return self.position.attend(q, k, k, causal=True)

    layer = Attend()
    q, k = (torch.randn(1, heads, 7, 8) for heads in (4, 2))
    shapes = {"q": {2: length}, "k": {2: length}}
    run = export(layer, (q, k), dynamic_shapes=shapes, strict=strict).module()
    for now in (slice(7), slice(3)):
        shorter = q[:, :, now], k[:, :, now]
        assert_near(run(*shorter).detach(), layer(*shorter).detach(), FLOAT32)


@long
def test_a_pass_over_layers_serves_every_length():
    """An embedding, a table that layers share, and positions as input; far ones too."""
    schemes = [posenc.Sinusoidal(HEAD_DIM), posenc.T5Bias(2, causal=True), posenc.RoPE(HEAD_DIM)]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = posenc_torch.Positions(schemes, layers=4)

        def forward(self, x, pos):
            bound = self.positions.bind(posenc.Tokens(pos=pos), causal=True)
            x = bound.embed(x)
            q = x[:, None].expand(-1, 2, -1, -1)
            for attend in bound:
                q = attend(q, q, q)
            return q

    def given(length, first):
        return torch.randn(2, length, HEAD_DIM), torch.arange(length) + first

    torch.manual_seed(0)
    model, length = Model(), Dim("length", min=2, max=4096)
    run = export(model, given(6, 0), dynamic_shapes=({1: length}, {0: length})).module()
    for size, first in ((3, 0), (21, 1_000_000)):
        arguments = given(size, first)
        result, right = run(*arguments).detach(), model(*arguments).detach()
        assert_near(result, right, 4 * FLOAT32)  # of four layers


def test_what_reads_values_says_so():
    layer, given = (
        Layer(SUBJECTS["alibi"], implementation="chunked"),
        arguments("whole", SUBJECTS["alibi"], 6, 6, 2),
    )
    with pytest.raises(NotImplementedError, match=r"tensor values.*'sdpa' can be exported"):
        export(layer, (), given)
