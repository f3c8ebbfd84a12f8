"""Every rotary module of the installed transformers, built from its family's own defaults.

A module is rotary if its source speaks of ``inv_freq``. It is built from the default configuration
of its family, and compared with what ``posenc.hf.read`` makes of that configuration's JSON. What is
not compared is listed below by its reason; a module in neither list fails the test.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import warnings
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from float32_frequencies import relative_error
from rotary_modules import built, compare, modules

from posenc.hf import families
from posenc.schemes import RoPE
from posenc.testing.tolerances import UNIT

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (find_spec("transformers") and find_spec("torch")), reason="needs transformers, torch"
    ),
    # Files of transformers have invalid escapes in docstrings, and deprecate their own names.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

PAGE = (Path(__file__).parents[2] / "docs" / "rope.md").read_text(encoding="utf-8")

IMAGES = "images: places on several axes"
ODD = "an odd number of rotated channels"
NOT_ROTARY = "no rotation: inv_freq is of another encoding"
NOT_ALONE = "cannot be built from a configuration of its family"

REFUSED = {
    "an image model": IMAGES,
    "rotates by two coordinates": IMAGES,
    "rotation acts on pairs": ODD,
    "no rotary key": NOT_ROTARY,
    "the model does not rotate": NOT_ROTARY,
    "partial_rotary_factor must be at most 1": IMAGES,
}
"""The reason for each refusal, by words of its error."""

NOT_BUILT = {
    "BrosPositionalEmbedding1D", "ClvpRotaryPositionalEmbedding",
    "Kimi_K25VisionPositionEmbeddings", "SeamlessM4TConformerRotaryPositionalEmbedding",
    "VoxtralRealtimeTimeEmbedding", "Wav2Vec2BertRotaryPositionalEmbedding",
    "Wav2Vec2ConformerRotaryPositionalEmbedding",
}  # fmt: skip
"""Modules that take no configuration, or that fail with their family's own default."""

_PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
OPTIONS = {
    "CohereCompassRotaryEmbedding": {
        "head_dim": 64, "rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN},
    },
    "EsmRotaryEmbedding": {"position_embedding_type": "rotary"},
    "Glm4MoeRotaryEmbedding": {"head_dim": 64},
    "Glm4vMoeTextRotaryEmbedding": {"head_dim": 64},
    "GraniteMoeHybridRotaryEmbedding": {"position_embedding_type": "rope"},
    "Qwen3OmniMoeThinkerTextRotaryEmbedding": {"head_dim": 64},
    "Qwen3OmniMoeRotaryEmbedding": {"head_dim": 64},
    "Zamba2RotaryEmbedding": {"use_mem_rope": True},
}  # fmt: skip
"""Options for families whose default fails, does not rotate, or rotates an odd width."""

DIFFERENT = {
    "MiniMaxM3VLRotaryEmbedding": "transformers does not read rotary_dim there",
    "MusicFlamingoRotaryEmbedding": "it rotates by time; the text model is a part of its own",
    "Ernie4_5_VLMoeTextRotaryEmbedding": "it holds frequencies by axis, and forward sorts them",
}
"""Modules that hold something else than the RoPE of their configuration."""


@cache
def outcome():
    """``{reason: names}`` for every rotary module; the reason ``equal`` for those compared."""
    found = defaultdict(list)
    for module, kind in modules():
        name = kind.__name__
        made = built(module, kind, OPTIONS.get(name, {}))
        if made is None:
            found[NOT_ALONE].append(name)
        elif name in DIFFERENT:
            found[DIFFERENT[name]].append(name)
        else:
            try:
                compare(name, *made)
            except ValueError as error:
                reasons = [reason for words, reason in REFUSED.items() if words in str(error)]
                found[reasons[0] if reasons else f"unexpected: {error}"].append(name)
            else:
                found["equal"].append(name)
    return dict(found)


def test_every_rotary_module_is_equal_or_listed_by_its_reason(record_property):
    import transformers

    found = outcome()
    counts = {reason: len(names) for reason, names in found.items()}
    record_property("rotary modules", json.dumps(counts))
    named = {module.__name__ for module, kind in modules() if kind.__name__ in found["equal"]}
    print(json.dumps(found, indent=1), counts, f"{len(named)} families equal", sep="\n")
    assert not [reason for reason in found if reason.startswith("unexpected")]
    assert set(found[NOT_ALONE]) <= NOT_BUILT
    assert counts["equal"] > 2 * (sum(counts.values()) - counts["equal"])
    if transformers.__version__ == "5.23.0":  # that of the page
        for said in (
            f"the rotary modules of {len(named)} families",
            f"{counts['equal']} modules equal",
            f"{counts[IMAGES]} rotate by places in images",
            f"{counts[NOT_ROTARY]} have an `inv_freq` of another encoding",
            f"{counts[NOT_ALONE]} cannot be built from a configuration alone",
            f"{len(DIFFERENT)} hold something else",
        ):
            assert said in PAGE, said


def test_modules_that_hold_something_else_do():
    """The day one of them is equal, its line above goes."""
    for module, kind in modules():
        if kind.__name__ in DIFFERENT:
            with pytest.raises((AssertionError, ValueError)):
                compare(kind.__name__, *built(module, kind, {}))


# What a configuration says by its model_type alone.

# Any function about rotation that tells even channels from odd ones, whatever its name.
ABOUT_ROTATION = re.compile("rot|freqs|interleave")
NEIGHBOURS = re.compile(r"::2|view_as_complex|1, 2\)|2, 2\)|unbind\(-1\)|unbind\(dim=-1\)")


def rotations():
    """``(family, result)`` of the functions that rotate 0, 1, ... 7 by a quarter turn."""
    import torch

    for module in {module: None for module, _ in modules()}:
        source, family = Path(module.__file__).read_text("utf-8"), module.__name__.split(".")[2]
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef):
                continue
            turns = function.name.startswith(("rotate_half", "rotate_every_two"))
            if turns and hasattr(module, function.name):
                turned = getattr(module, function.name)(torch.arange(8.0)[None, None, None])
                yield family, turned.flatten().tolist()
            elif ABOUT_ROTATION.search(function.name) and NEIGHBOURS.search(ast.unparse(function)):
                yield family, QUARTERS["neighbours"]


def folder_of(model):
    """The folder of a model type among those of transformers: the longest that it begins with."""
    import transformers.models

    folders = [path.name for path in Path(transformers.models.__path__[0]).iterdir()]
    return max((f for f in folders if model.startswith(f)), key=len)


def listed_as(fact):
    return {model for model, family in families.FAMILIES.items() if getattr(family, fact)}


def test_each_model_type_has_one_entry():
    names = [name for names, _ in families._PLANNED + families._READ for name in names.split()]
    assert sorted(names) == sorted(families.FAMILIES)


QUARTERS = {
    "halves": [-4, -5, -6, -7, 0, 1, 2, 3],
    "neighbours": [-1, 0, -3, 2, -5, 4, -7, 6],
    "halves, the other way": [4, 5, 6, 7, 0, -1, -2, -3],
}


def test_the_models_whose_pairs_are_neighbours():
    elsewhere = {  # they rotate by places in images, or in time
        "edgetam_video", "efficientloftr", "inkling2", "lightglue", "musicflamingo", "roformer",
        "sam2_video", "sam3", "sam3_tracker_video", "vjepa2",
    }  # fmt: skip
    found = list(rotations())
    assert all(turned in QUARTERS.values() for _, turned in found)
    ours = listed_as("interleaved") - families.TURNED_BY_HALVES - families.AS_DEEPSEEK_V3
    listed = {folder_of(model) for model in ours} - {"gptj", "codegen"}  # without inv_freq
    neighbours = {family for family, turned in found if turned == QUARTERS["neighbours"]}
    assert neighbours - elsewhere == listed
    # Wrong for their released weights, and so no evidence for them.
    assert not neighbours & {folder_of(model) for model in families.TURNED_BY_HALVES}
    other_way = {family for family, turned in found if turned == QUARTERS["halves, the other way"]}
    assert other_way == listed_as("turns_back")


@pytest.mark.parametrize("model", ["gptj", "codegen"])
def test_models_that_make_sines_themselves(model):
    import torch

    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    sines = module.create_sinusoidal_positions(2, 64)[1, :32].double().numpy()
    rope = RoPE.from_hf({"model_type": model, "n_embd": 4096, "n_head": 16, "rotary_dim": 64})
    assert rope.rotary_dim == 64
    expected = np.sin(rope.frequencies())
    # The sine of an angle is off by no more than the angle, and by its own two roundings.
    bound = (relative_error(rope.base) + 2 * UNIT["float32"]) * np.asarray(rope.frequencies())
    assert np.all(np.abs(sines - expected) < bound)
    turned = module.rotate_every_two(torch.arange(8.0)[None, None, None])
    assert turned.flatten().tolist() == QUARTERS["neighbours"]


def test_defaults_are_those_of_transformers():
    from transformers import CONFIG_MAPPING

    inside = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    for model, family in families.FAMILIES.items():
        if not family.defaults:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = CONFIG_MAPPING[model]().to_dict()
        parameters = config.get("rope_parameters") or {}
        full = parameters.get("full_attention", parameters)
        for key, value in family.defaults.items():
            if key == "rope_local_base_freq":
                assert parameters["sliding_attention"]["rope_theta"] == value
            elif key == "rope_theta" and not full and key not in config:
                assert model in ("gptj", "codegen")  # 10000 is written in their code
            else:
                key = inside.get(key, key)
                assert {**config, **full}[key] == value, (model, key)


def test_models_that_scale_the_softmax_by_yarn():
    import transformers

    root = Path(transformers.__file__).parent / "models"
    found = {
        file.parent.name
        for file in root.glob("*/modeling_*.py")
        if "self.scaling = yarn_apply_mscale(" in file.read_text(encoding="utf-8")
    }
    listed = listed_as("scaled_softmax") - families.AS_DEEPSEEK_V3
    assert found == {model.removesuffix("_text") for model in listed}
