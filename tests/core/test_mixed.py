"""Places of text mixed with images and videos: the models' own, packing, decoding."""

from __future__ import annotations

import importlib
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
from frameworks_installed import require
from hypothesis import given, settings
from hypothesis import strategies as st
from sample import long
from subjects import normal

import posenc
from posenc.positions import (
    Patches,
    hunyuan_mixed,
    left_padded,
    left_padded_mixed,
    mixed,
    packed_mixed,
    text_places,
)
from posenc.schemes import MRoPE

sizes = st.integers(1, 5)
images = st.builds(Patches, sizes, sizes)
videos = st.builds(Patches, sizes, sizes, sizes, st.sampled_from([0.5, 1.0, 2.5]))
DOCUMENTS = st.lists(sizes | images | videos, min_size=1, max_size=5)


def test_two_images_by_hand():
    # Of four axes, the first is the index throughout; then the column, the row, and the image.
    places = hunyuan_mixed([1, Patches(2, 2), Patches(1, 2), 1])
    assert places.T.tolist() == [
        list(range(8)),
        [0, 0, 1, 0, 1, 0, 1, 7],
        [0, 0, 0, 1, 1, 0, 0, 7],
        [0, 0, 0, 0, 0, 1, 1, 7],
    ]
    merged = Patches.of_grid((4, 6, 9), merge=3, merge_frames=2, step=0.5)
    assert merged == Patches(2, 3, frames=2, step=0.5)


def test_a_video_and_text_by_hand():
    places, delta = mixed([Patches(3, 3, frames=2), 2])
    assert places[:9].T.tolist() == [[0] * 9, [0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2] * 3]
    assert places[9:18, 0].tolist() == [1] * 9
    assert places[18:].tolist() == [[3] * 3, [4] * 3]
    assert delta == 5 - 20
    long = mixed([1, Patches(1, 2, frames=4, step=2.5), 1])[0]
    assert long[:, 0].tolist() == [0, 1, 1, 3, 3, 6, 6, 8, 8, 9]  # 2.5, 5 and 7.5 rounded down
    side = mixed([1, Patches(1, 2, frames=4, step=2.5), 1], following="side")
    assert side[0][-1].tolist() == [3] * 3
    assert side[1] == 9 - 10  # and what is decoded goes on after the largest


@given(DOCUMENTS)
def test_each_part_begins_where_the_last_ended(parts):
    places, delta = mixed(parts)
    start = at = 0
    for part in parts:
        size = part if isinstance(part, int) else len(part)
        own = places[at : at + size]
        assert own.min(axis=0).tolist() == [start] * 3
        if isinstance(part, int):
            assert np.array_equal(own, text_places(start + np.arange(size)))
        else:
            assert len(np.unique(own[:, 1:], axis=0)) == part.height * part.width
            assert own.max(axis=0)[1:].tolist() == [start + part.height - 1, start + part.width - 1]
        start, at = int(own.max()) + 1, at + size
    assert at == len(places)
    assert start == at + delta


@given(DOCUMENTS, sizes)
def test_decoding_goes_on_as_more_text_would(parts, more):
    places, delta = mixed(parts)
    whole = mixed([*parts, more])[0]
    later = text_places(np.arange(len(places), len(places) + more), delta)
    assert np.array_equal(whole, np.concatenate([places, later]))


@given(st.lists(DOCUMENTS, min_size=1, max_size=3))
def test_packed_and_padded_documents_are_as_alone(documents):
    alone = [mixed(parts) for parts in documents]
    packed = packed_mixed(documents)
    for n, (own, _) in enumerate(alone):
        assert np.array_equal(packed.places[packed.seg == n], own)
        assert np.array_equal(packed.pos[packed.seg == n], np.arange(len(own)))
    lengths = [len(own) for own, _ in alone]
    total = max(lengths) + 2
    padded, deltas = left_padded_mixed(documents, total)
    text = left_padded(lengths, total)
    assert np.array_equal(padded.pos, text.pos)
    assert np.array_equal(padded.exists, text.exists)
    for n, (own, delta) in enumerate(alone):
        assert np.array_equal(padded.places[n, text.exists[n]], own)
        assert not padded.places[n, ~text.exists[n]].any()
        following = text_places(text.pos[:, -1:] + 1, deltas)[n]
        assert following.tolist() == [[len(own) + delta] * 3]


def test_attention_of_a_packed_mix_is_that_of_its_documents():
    documents = [[2, Patches(2, 3), 1], [Patches(2, 2), 3]]
    scheme = MRoPE(8, (2, 1, 1))
    tokens = packed_mixed(documents)
    q, k, v = (normal((1, 2, len(tokens.pos), 8), n) for n in range(3))
    whole = posenc.attention(q, k, v, scheme, causal=True, tokens=tokens)
    for n, parts in enumerate(documents):
        own, at = np.flatnonzero(tokens.seg == n), mixed(parts)[0]
        tensors = (a[:, :, own] for a in (q, k, v))
        alone = posenc.attention(*tensors, scheme, causal=True, tokens=posenc.Tokens(places=at))
        np.testing.assert_allclose(whole[:, :, own], alone, rtol=0, atol=1e-13)


def test_decoding_with_a_cache_of_rotated_keys():
    parts, more = [2, Patches(2, 3), 1], 3
    scheme, (whole, _), (prompt, delta) = MRoPE(8, (2, 1, 1)), mixed([*parts, more]), mixed(parts)
    length = len(whole)
    q, k, v = (normal((1, 2, length, 8), n) for n in range(3))
    expected = posenc.attention(q, k, v, scheme, causal=True, tokens=posenc.Tokens(places=whole))
    places = np.concatenate([prompt, text_places(np.arange(len(prompt), length), delta)])
    rotated = posenc.transform(scheme, k, np.arange(length), role="key", places=places)
    for at in range(len(prompt), length):
        cached, now = slice(at + 1), np.asarray([at])
        tokens = posenc.Tokens(pos=np.arange(at + 1), places=places[cached])
        queries = posenc.Tokens(pos=now, places=text_places(now, delta))
        found = posenc.attention(
            q[:, :, at : at + 1], rotated[:, :, cached], v[:, :, cached], scheme, causal=True,
            k_transformed=True, tokens=tokens, queries=queries,
        )  # fmt: skip
        np.testing.assert_allclose(found[:, :, 0], expected[:, :, at], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint64", "int32"])
def test_places_of_text_are_wide(kind):
    """Narrow integers do not wrap around, and unsigned ones make no floats."""
    pos, delta = np.asarray([100, 127], kind), np.asarray([100], kind)
    found = text_places(pos[None], delta, axes=1)
    assert found.dtype == np.int64
    assert found[0, :, 0].tolist() == [200, 227]
    assert text_places([]).dtype == np.int64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixed([]), "parts is empty"),
        (lambda: mixed(5), "parts must be a list of numbers of text tokens, and Patches, got 5"),
        (lambda: packed_mixed([3]), "parts must be a list of .* got 3"),
        (lambda: text_places([1.5]), r"pos must be integers, got \[1.5\]"),
        (lambda: text_places([1], "2"), "delta must be integers, got '2'"),
        (lambda: left_padded_mixed([], 4), "documents is empty"),
        (lambda: mixed([0]), "parts must be at least 1, got 0"),
        (lambda: mixed([1], following="end"), "following"),
        (lambda: Patches(0, 2), "height must be at least 1, got 0"),
        (lambda: Patches(1, 2, step=0), "step must be finite and greater than 0, got 0"),
        (lambda: Patches.of_grid((1, 3, 4)), r"multiples of \(1, 2, 2\), got \(1, 3, 4\)"),
        (lambda: Patches.of_grid((4, 4)), r"grid must be \(frames, height, width\), got \(4, 4\)"),
        (lambda: Patches.of_grid(7), r"grid must be \(frames, height, width\), got 7"),
        (lambda: Patches.of_grid((1, 4.9, 6)), "grid must be an integer, got 4.9"),
        (lambda: Patches(1, 1, frames=3, step=1e300), r"step 1e\+300 takes 3 frames beyond"),
        (lambda: posenc.positions.packed(5), "lengths must be a list of integers, got 5"),
        (lambda: posenc.positions.left_padded(3, 3), "lengths must be a list of integers, got 3"),
        (lambda: posenc.Tokens(np.arange(3)).concat(5), "others must be posenc.Tokens, got int"),
        (lambda: hunyuan_mixed([Patches(2, 2, frames=2)]), "frames must be 1, got 2"),
        (lambda: hunyuan_mixed([]), "parts is empty"),
        (lambda: packed_mixed([]), "documents is empty"),
        (lambda: left_padded_mixed([[3]], 2), "documents must have 1 .. total=2 tokens"),
    ],
)
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# Model, class, whether videos stay whole, and how far frames are apart.
MODELS = {
    "qwen2_vl": ("Qwen2VLModel", True, 1),
    "qwen2_5_vl": ("Qwen2_5_VLModel", True, 2),
    "qwen3_vl": ("Qwen3VLModel", False, 1),
    "glm4v": ("Glm4vModel", False, 1),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeModel", True, 1),
}
MERGE_FRAMES = {"ernie4_5_vl_moe": 2}


def theirs(model, documents, seconds):
    """``get_rope_index`` of a model of transformers, on left-padded documents."""
    import torch

    name, _, step = MODELS[model]
    kind = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    vision = {"spatial_merge_size": 2, "tokens_per_second": step, "temporal_merge_size": 2}
    stub = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(**vision)))
    stub.get_vision_position_ids = MethodType(kind.get_vision_position_ids, stub)
    lengths = [sum(p if isinstance(p, int) else len(p[1]) for p in d) for d in documents]
    total = max(lengths)
    types = np.zeros((len(documents), total), int)
    grids = {1: [], 2: []}
    for row, parts, length in zip(types, documents, lengths, strict=True):
        at = total - length
        for part in parts:
            size = part if isinstance(part, int) else len(part[1])
            if not isinstance(part, int):
                row[at : at + size] = part[2]
                grids[part[2]].append(part[0])
            at += size
    mask = np.arange(total) >= total - np.asarray(lengths)[:, None]
    given = {
        "image_grid_thw": torch.tensor(grids[1]) if grids[1] else None,
        "video_grid_thw": torch.tensor(grids[2]) if grids[2] else None,
        "attention_mask": torch.tensor(mask.astype(int)),
    }
    if model == "qwen2_5_vl":
        given["second_per_grid_ts"] = [seconds] * len(grids[2])
    places, deltas = kind.get_rope_index(
        stub, torch.zeros(types.shape, dtype=torch.long), torch.tensor(types), **given
    )
    return places.permute(1, 2, 0).numpy(), deltas[:, 0].numpy()


@long  # importing models takes seconds
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=30)
@given(data=st.data())
def test_places_are_those_of_transformers(model, data):
    if not (require("torch") and require("transformers")):
        pytest.skip("not installed: torch or transformers")
    _, whole_videos, step = MODELS[model]
    seconds = data.draw(st.sampled_from([1.0, 0.5, 1.5])) if model == "qwen2_5_vl" else 1.0

    def visual(draw):
        merged, is_video = MERGE_FRAMES.get(model, 1), draw(st.booleans())
        frames = merged * draw(sizes) if is_video and whole_videos else 1
        grid = (frames, 2 * draw(sizes), 2 * draw(sizes))
        own = {"merge_frames": merged, "step": step * seconds} if is_video else {}
        return grid, Patches.of_grid(grid, **own), 1 + is_video

    # Texts between, because neighbours of a kind are one to the models.
    documents = [
        [part for _ in range(data.draw(sizes)) for part in (data.draw(sizes), visual(data.draw))]
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    found, found_deltas = theirs(model, documents, seconds)
    ours = [[p if isinstance(p, int) else p[1] for p in parts] for parts in documents]
    tokens, deltas = left_padded_mixed(ours, found.shape[1], following="side")
    np.testing.assert_array_equal(tokens.places, found)
    np.testing.assert_array_equal(deltas, found_deltas)
    if all(isinstance(p, int) or p.frames == 1 for parts in ours for p in parts):
        np.testing.assert_array_equal(left_padded_mixed(ours, found.shape[1])[0].places, found)


@long
@settings(max_examples=30)
@given(st.lists(st.tuples(sizes, images), max_size=3), sizes, st.integers(3, 5))
def test_hunyuan_places_are_those_of_transformers(pairs, last, axes):
    if not (require("torch") and require("transformers")):
        pytest.skip("not installed: torch or transformers")
    import torch
    from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLModel

    parts, types, grids = [], [], []
    for text, image in pairs:
        # A token before the image, one after each row, and one after the image.
        parts += [text, 1, Patches(image.height, image.width + 1), 1]
        types += [0] * text + [1] * (2 + len(parts[-2]))
        grids.append([1, 2 * image.height, 2 * image.width])
    parts, types = [*parts, last], [*types, *[0] * last]
    config = SimpleNamespace(
        text_config=SimpleNamespace(rope_parameters={"mrope_section": [1] * axes}),
        vision_config=SimpleNamespace(spatial_merge_size=2),
    )
    stub = SimpleNamespace(config=config)
    stub.get_vision_position_ids = MethodType(HunYuanVLModel.get_vision_position_ids, stub)
    found, deltas = HunYuanVLModel.get_rope_index(
        stub, torch.zeros(1, len(types), dtype=torch.long), torch.tensor([types]),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )  # fmt: skip
    np.testing.assert_array_equal(hunyuan_mixed(parts, axes=axes), found[:, 0].T.numpy())
    assert deltas.tolist() == [[0]]
