"""Plans by name, from the papers and the released configurations, layer by layer."""

from __future__ import annotations

import inspect
import re

import pytest

import posenc
from posenc import presets
from posenc.cli import show
from posenc.cli.list import page
from posenc.schemes import Chunk, LogScale, Sink, Sum, YaRN
from posenc.study.recipe import Recipe
from posenc.study.specs import fitted_settings

LAYERS = {  # eight layers, by hand; R rotates, N does not; small letters have a window
    "rnope": "rrrNrrrN",
    "swan": "NrrrNrrr",
    "irope": "RRRNRRRN",  # in chunks, which are no windows
    "llama4": "RRRNRRRN",
    "cohere2": "rrrNrrrN",
    "smollm3": "RRRNRRRN",
    "exaone4": "rrrNrrrN",
    "kolibri1": "rrrrNrrr",
    "olmo3": "rrrRrrrR",
    "gpt_oss": "rRrRrRrR",
    "gemma2": "rRrRrRrR",
    "gemma3": "rrrrrRrr",
    "gemma4": "rrrrrRrR",
    "mistral_large4": "RRRNRRRN",
}


def rope(scheme):
    """The RoPE of a layer, or None."""
    inner = scheme.scheme if isinstance(scheme, Sink) else scheme
    parts = inner.schemes if isinstance(inner, Sum) else [inner]
    return next((part for part in parts if isinstance(part, posenc.RoPE)), None)


def letters(plan):
    """The plan in the letters of ``LAYERS``."""
    kinds = ["R" if rope(scheme) else "N" for scheme in plan.schemes]
    return "".join(
        kind if window is None else kind.lower()
        for kind, window in zip(kinds, plan.windows, strict=True)
    )


@pytest.mark.parametrize("name", presets.PLANS)
def test_layers_in_order(name):
    plan = presets.PLANS[name](layers=8, head_dim=16)
    assert letters(plan) == LAYERS[name]
    assert len(presets.PLANS[name]()) > 8
    assert all(own.head_dim == 16 for own in map(rope, plan.schemes) if own)


@pytest.mark.parametrize("name", presets.PLANS)
def test_a_plan_takes_every_size_of_a_model_and_is_fitted_to_a_small_one(name):
    sizes = {"num_heads": 4, "head_dim": 16, "dim": 64, "max_len": 512, "train_len": 64}
    plan = presets.PLANS[name](layers=2, **sizes)
    assert len(plan) == 2
    assert {window for window in plan.windows if window} <= {32}
    assert len(set(zip(plan.schemes, plan.windows, strict=True))) == 2  # one layer of each kind
    if "window" in inspect.signature(presets.PLANS[name]).parameters:
        given = presets.PLANS[name](layers=8, window=100, every=3, **sizes)
        assert {window for window in given.windows if window} == {100}
        assert given.schemes[:3] == given.schemes[3:6]
        longer = presets.PLANS[name](layers=8, **{**sizes, "train_len": 2**20})
        assert longer.windows == presets.PLANS[name](layers=8).windows


def test_a_study_says_what_was_fitted():
    sizes = Recipe(train_len=64, layers=2)
    told = fitted_settings(["rnope", "irope:every=1", "smollm3", "rope"], sizes)
    assert told["rnope"] == "window=32, every=2"
    assert told["irope:every=1"] == "chunk=32"
    assert told["smollm3"] == "every=2"
    assert "rope" not in told


@pytest.mark.parametrize("name", presets.PLANS)
def test_posenc_list_has_a_page_of_each(name):
    text = page(name, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    for option in inspect.signature(presets.PLANS[name]).parameters:
        assert f"\n  {option}  " in text
    plan = presets.PLANS[name]()
    assert re.search(rf"\b{len(plan) - 1}$", text, re.MULTILINE)  # the last layer ends a line


def test_a_plan_is_no_scheme():
    with pytest.raises(ValueError, match=r"'rnope' is a plan .* posenc.presets.rnope"):
        posenc.make("rnope", head_dim=8)
    with pytest.raises(ValueError, match=r"did you mean 'smollm3'"):
        posenc.make("smolm3", head_dim=8)
    with pytest.raises(ValueError, match="unknown scheme"):
        posenc.make(["rnope"])


def test_show_says_where_a_plan_is_shown():
    with pytest.raises(ValueError, match="'rnope:every=2' is a plan of layers: use posenc list"):
        show.run({"scheme": "rnope:every=2", "length": 8, "heads": 2, "head_dim": 4})


def test_bases_and_layouts():
    near, full = presets.gemma3(layers=6, head_dim=8).schemes[-2:]
    assert (near.base, full.base) == (10_000, 1_000_000)
    assert presets.cohere2(layers=1, head_dim=8).schemes[0].layout == "interleaved"
    assert presets.smollm3(layers=1, head_dim=8).schemes[0].base == 2_000_000
    sink = presets.gpt_oss(layers=1).schemes[0]
    assert sink == Sink(posenc.RoPE(64, 150_000, scaling=YaRN(32, 4096, truncate=False)), 64)


def test_scaled_queries():
    near, full = presets.irope(layers=4, head_dim=8).schemes[-2:]
    assert near == Sum(posenc.RoPE(8, 500_000, "interleaved"), Chunk(8192))
    assert full == LogScale("llama4", train_len=8192, beta=0.1)
    assert presets.irope(layers=4, head_dim=8, chunk=None).schemes[0] == near.schemes[0]
    fitted = presets.irope(layers=2, head_dim=8, train_len=64).schemes
    assert [fitted[0].schemes[1], fitted[1].train_len] == [Chunk(32), 64]
    assert letters(presets.irope(train_len=16384)) == letters(presets.irope()) == "RRRN" * 12
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        presets.irope(chunk=0)
    learned, scale = presets.mistral_large4(layers=4, head_dim=8, num_heads=2).schemes[-2:]
    assert learned.schemes[1] == scale == LogScale("mistral_large4", num_heads=2)
    assert presets.mistral_large4(layers=8).sources == tuple(range(8))  # nothing is learned once
    assert (learned.schemes[0].rotary_dim, learned.schemes[0].attention_factor) == (4, 1)


def test_heads_of_gemma4_are_wider_on_full_layers():
    released, equal = presets.gemma4().schemes[-2:], presets.gemma4(head_dim=8).schemes[-2:]
    assert [scheme.head_dim for scheme in (*released, *equal)] == [256, 512, 8, 8]
    assert presets.gemma4(head_dim=8, global_head_dim=16).schemes[-1].head_dim == 16
    turning = [f > 0 for f in released[1].frequencies()]
    assert turning == [True] * 64 + [False] * 192


def test_without_a_window():
    assert letters(presets.rnope(layers=8, window=None)) == "RRRNRRRN"
    assert letters(presets.cohere2(layers=8, window=None)) == "NNNNNNNN"
    assert letters(presets.exaone4(layers=8, window=None)) == "RRRRRRRR"
    assert letters(presets.smollm3(layers=8, window=5)) == "RRRnRRRn"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"windw": 3}, ValueError, "rnope has no option 'windw' .did you mean 'window'.*base"),
        ({"every": 2.0}, TypeError, "every must be an integer, got 2.0"),
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"layers": 0}, ValueError, "layers must be at least 1, got 0"),
        ({"window": 0}, ValueError, "windows must be at least 1, got 0"),
        ({"train_len": 2.5}, TypeError, "train_len must be an integer, got 2.5"),
        ({"head_dim": 7}, ValueError, "head_dim must be even, got 7"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        presets.rnope(**options)
