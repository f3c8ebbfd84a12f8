"""``RoPE.from_hf`` and ``to_hf``: dialects of configurations, and errors that name a key."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest

from posenc import hf
from posenc.hf import families
from posenc.schemes import (
    NTK,
    PI,
    ClipHann,
    DynamicNTK,
    LearnedRoPE,
    Llama3,
    LongRoPE,
    MRoPE,
    NoPE,
    NTKMixed,
    Proportional,
    RoPE,
    YaRN,
)

MODEL = {"model_type": "mistral", "hidden_size": 512, "num_attention_heads": 8}
PLAIN = RoPE(64, 5e5)
SCALINGS = [
    (PI(4.0), {"rope_type": "linear", "factor": 4.0}),
    (
        DynamicNTK(2.0, 2048),
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048},
    ),
    (
        YaRN(8.0, 4096),
        {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1,
        },
    ),
    (
        YaRN(8.0, 4096, 16, 2, 1.2, 0.7, 1.0, truncate=False),
        {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
            "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.2, "mscale": 0.7,
            "mscale_all_dim": 1.0, "truncate": False,
        },
    ),
    (
        LongRoPE((1.0,) * 32, (2.0,) * 32, 4096, 32.0),
        {
            "rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
            "original_max_position_embeddings": 4096, "factor": 32.0,
        },
    ),
    (
        Llama3(8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (Proportional(0.25), {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
    (
        Proportional(0.25, 8.0),
        {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 8.0},
    ),
    (None, {"rope_type": "default"}),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "parameters"), SCALINGS)
def test_every_type_of_transformers_there_and_back(scaling, parameters):
    rope, given = RoPE(64, 5e5, scaling=scaling), {"rope_theta": 5e5, **parameters}
    assert RoPE.from_hf(given, head_dim=64) == rope
    assert rope.to_hf() == given


def test_scalings_without_values_for_every_option_come_back():
    for scaling in (LongRoPE((1.0,) * 32, (2.0,) * 32, 64), YaRN(2, 64, mscale=0.5)):
        rope = RoPE(64, 5e5, scaling=scaling)
        assert RoPE.from_hf(rope.to_hf(), head_dim=64) == rope


@pytest.mark.parametrize(
    ("dim", "head_dim"), [(32, 80), (2, 6), (30, 44), (58, 98), (14, 200), (64, 64)]
)
def test_a_part_of_the_channels_comes_back_exactly(dim, head_dim):
    rope = RoPE(head_dim, rotary_dim=dim if dim < head_dim else None)
    given = rope.to_hf()
    assert int(head_dim * given.get("partial_rotary_factor", 1.0)) == dim
    assert RoPE.from_hf(given, head_dim=head_dim) == rope


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        (NTKMixed(4), r"NTKMixed\(factor=4\)"),
        (ClipHann(4096), "ClipHann"),
        (YaRN(4, 64, ramp="turns"), "YaRN with ramp='turns'"),
        (YaRN(4, 64, apply_to="scale"), "YaRN with apply_to='scale'"),
    ],
)
def test_what_transformers_does_not_know_is_an_error(scaling, said):
    with pytest.raises(ValueError, match=f"transformers has no rope_type for {said}"):
        RoPE(64, scaling=scaling).to_hf()


def test_learned_frequencies_are_not_written():
    with pytest.raises(ValueError, match="no rope_type for learned frequencies"):
        LearnedRoPE(64).to_hf()


def test_ntk_is_plain_rope_of_the_base_that_the_error_says():
    rope = RoPE(64, scaling=NTK(4.0))
    with pytest.raises(ValueError, match="plain RoPE with base=") as error:
        rope.to_hf()
    base = float(str(error.value).split("base=")[1])
    assert RoPE(64, base).frequencies() == pytest.approx(rope.frequencies(), rel=1e-13)


# Dialects.

YARN = YaRN(4.0, 1024)
SAME = {  # one model in every dialect: yarn by 4 from 1024, base 5e5
    "inner, transformers 5": (
        {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
         "original_max_position_embeddings": 1024},
        {"head_dim": 64},
    ),
    "type instead of rope_type": (
        {"type": "yarn", "rope_theta": 5e5, "factor": 4.0,
         "original_max_position_embeddings": 1024},
        {"head_dim": 64},
    ),
    "theta beside rope_scaling": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0,
         "original_max_position_embeddings": 1024}},
        {"head_dim": 64},
    ),
    "the length of the configuration": (
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"head_dim": 64, "max_position_embeddings": 1024},
    ),
    "the factor from the lengths": (
        {**MODEL, "max_position_embeddings": 4096, "rope_theta": 5e5, "rope_scaling":
         {"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}},
        {},
    ),
    "a whole configuration, null beside": (
        {**MODEL, "vocab_size": 9, "max_position_embeddings": 4096, "rope_scaling": None,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
         "original_max_position_embeddings": 1024, "beta_fast": None}},
        {},
    ),
    "inside of a multi-modal one": (
        {"model_type": "some_vl", "vision_config": {"rope_theta": 9.0}, "text_config": {
         **MODEL, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0,
         "original_max_position_embeddings": 1024}}},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dialect", SAME)
def test_one_model_in_every_dialect(dialect):
    given, known = SAME[dialect]
    assert RoPE.from_hf(given, **known) == RoPE(64, 5e5, scaling=YARN)


def test_the_arguments_come_before_the_configuration():
    given = {**MODEL, "max_position_embeddings": 64, "rope_scaling": {"type": "dynamic",
             "factor": 2.0}, "rope_theta": 1e4}  # fmt: skip
    assert RoPE.from_hf(given) == RoPE(64, scaling=DynamicNTK(2.0, 64))
    asked = RoPE.from_hf(given, head_dim=32, max_position_embeddings=128)
    assert asked == RoPE(32, scaling=DynamicNTK(2.0, 128))


def test_none_and_null_do_not_rotate():
    assert RoPE.from_hf(None) == NoPE()
    both = {
        "full_attention": None,
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
    expected = {"full_attention": NoPE(), "sliding_attention": PLAIN}
    assert RoPE.from_hf(both, head_dim=64) == expected
    assert RoPE.from_hf({**MODEL, "rope_parameters": both}) == expected
    none = {"full_attention": None}
    types = {**MODEL, "layer_types": ["full_attention"], "rope_parameters": none}
    assert RoPE.from_hf(types) == {"full_attention": NoPE()}


@pytest.mark.parametrize(
    "switch",
    [
        {"position_embedding_type": "nope"},
        {"model_type": "granitemoehybrid", "position_embedding_type": None},
        {"model_type": "zamba2", "use_mem_rope": False},
        {"model_type": "kimi_linear", "mla_use_nope": True, "rope_theta": 10_000.0},
    ],
)
def test_models_that_do_not_rotate(switch):
    assert RoPE.from_hf({**MODEL, "rope_theta": 5e5, **switch}) == NoPE()


PARTS = {
    "inside": {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    "outside": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "rotary_dim": {"rope_theta": 5e5, "rotary_dim": 32},
    "both": {"rope_theta": 5e5, "rotary_dim": 32, "partial_rotary_factor": 0.5},
    "GPT-NeoX": {"model_type": "gpt_neox", "rotary_emb_base": 5e5, "rotary_pct": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_partial_rotation(name):
    assert RoPE.from_hf({**MODEL, **PARTS[name]}) == RoPE(64, 5e5, rotary_dim=32)


def test_proportional_is_not_partial():
    given = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    rope = RoPE.from_hf(given, head_dim=16)
    # By hand: frequencies 1e6**(-2k/16), of which int(0.25 * 16 / 2) = 2 stay.
    assert rope.frequencies() == pytest.approx([1.0, 10**-0.75, 0, 0, 0, 0, 0, 0], rel=1e-14)
    partial = RoPE.from_hf({**given, "rope_type": "default"}, head_dim=16)
    assert partial.frequencies() == pytest.approx([1.0, 1e-3], rel=1e-14)


# Families whose configurations need knowledge of their own.


def test_gemma3_scales_the_full_layers_only_and_leaves_keys_out():
    text = {"model_type": "gemma3_text", "hidden_size": 2560,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    expected = {
        "full_attention": RoPE(256, 1e6, scaling=PI(8.0)),
        "sliding_attention": RoPE(256, 1e4),
    }
    reading = hf.read({"model_type": "gemma3", "text_config": text})
    assert reading.ropes == expected
    assert reading.part == "text_config"
    assert "rope_theta is missing: 1000000.0, the default of 'gemma3_text'" in reading.notes


def test_olmo3_scales_the_full_layers_only():
    given = {**MODEL, "model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": {"rope_type":
             "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}  # fmt: skip
    expected = {"full_attention": RoPE(64, 5e5, scaling=YARN), "sliding_attention": PLAIN}
    assert RoPE.from_hf(given) == expected


def test_dbrx_has_its_base_in_a_part_of_its_own():
    given = {"model_type": "dbrx", "d_model": 512, "n_heads": 8, "attn_config": {"rope_theta": 5e5}}
    assert RoPE.from_hf(given) == PLAIN


def test_older_multi_modal_configurations_have_the_keys_beside_the_text_model():
    text = {"hidden_size": 512, "num_attention_heads": 8}
    given = {"model_type": "some_vl", "text_config": text, "rope_theta": 5e5}
    assert RoPE.from_hf(given) == PLAIN


def test_a_type_beside_mrope():
    both = {"type": "mrope", "rope_type": "linear", "factor": 4.0, "mrope_section": [8, 12, 12]}
    assert RoPE.from_hf({"rope_theta": 5e5, **both}, head_dim=64) == RoPE(64, 5e5, scaling=PI(4.0))


def test_modernbert_has_a_base_per_type():
    given = {
        **MODEL,
        "model_type": "modernbert",
        "global_rope_theta": 1.6e5,
        "local_rope_theta": 1e4,
    }
    assert RoPE.from_hf(given) == {"full_attention": RoPE(64, 1.6e5), "sliding_attention": RoPE(64)}


def test_layer_rope_theta_of_zero_does_not_rotate():
    given = {**MODEL, "rope_theta": 5e5, "layer_rope_theta": [5e5, 5e5, 0]}
    assert RoPE.from_hf(given) == {"layer_rope_theta=500000": PLAIN, "layer_rope_theta=0": NoPE()}
    assert RoPE.from_hf({**given, "layer_rope_theta": [5e5, 5e5]}) == PLAIN


def test_gemma4_has_wider_heads_in_full_layers():
    given = {
        "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"01": {"head_dim": 32}},
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                               "partial_rotary_factor": 0.25},
        },
    }  # fmt: skip
    full = RoPE(32, 1e6, scaling=Proportional(0.25))
    expected = {"sliding_attention": RoPE(16), "full_attention": full}
    assert RoPE.from_hf(given) == expected
    assert RoPE.from_hf({**given, "per_layer_config": None, "global_head_dim": 32}) == expected


def test_truncate_beside_the_layer_types_serves_those_of_yarn():
    types = {"sliding_attention": inner(), "full_attention": inner(**YARN_KEYS)}
    full = RoPE(64, 5e5, scaling=YaRN(4.0, 1024, truncate=False))
    expected = {"sliding_attention": PLAIN, "full_attention": full}
    beside = {"rope_parameters": {**types, "truncate": False}}
    assert RoPE.from_hf(beside, head_dim=64) == expected
    types["full_attention"]["truncate"] = False
    assert RoPE.from_hf({"rope_parameters": types}, head_dim=64) == expected
    with pytest.raises(ValueError, match=r"rope_parameters\.factor"):
        RoPE.from_hf({"rope_parameters": {**types, "factor": 2.0}}, head_dim=64)


def test_what_is_inside_has_priority():
    given = {"rope_theta": 1e4, "rope_scaling": {"type": "default", "rope_theta": 5e5}}
    assert RoPE.from_hf(given, head_dim=64) == PLAIN


def test_phi35_moe_has_its_attention_factor_by_length():
    lists = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "short_mscale": 1.1,
             "long_mscale": 1.1, "original_max_position_embeddings": 64}  # fmt: skip
    rope = RoPE.from_hf(inner(type="longrope", **lists), head_dim=64)
    scaling = LongRoPE((1.0,) * 32, (2.0,) * 32, 64, attention_factor=1.1)
    assert rope == RoPE(64, 5e5, scaling=scaling)


def test_deepseek_rotates_a_vector_of_its_own_and_scales_the_softmax():
    given = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "max_position_embeddings": 163840,
        "rope_theta": 10000, "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    }  # fmt: skip
    rope = RoPE.from_hf(given)
    assert (rope.head_dim, rope.layout, rope.attention_factor) == (64, "interleaved", 1.0)
    assert rope.scale(64) * 8 == pytest.approx((0.1 * math.log(40) + 1) ** 2, rel=1e-14)
    whole = {**given, "head_dim": 192, "partial_rotary_factor": 64 / 192}  # of the whole head
    assert RoPE.from_hf(whole) == rope
    # Kimi K2 is the same architecture by another name, and its ramp starts where it ends.
    equal = {**given["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0}
    kimi = RoPE.from_hf({**given, "model_type": "kimi_k2", "rope_scaling": equal})
    assert (kimi.layout, kimi.scale(64)) == (rope.layout, rope.scale(64))


def test_a_model_that_rotates_though_its_position_embedding_type_is_absolute():
    given = {**MODEL, "model_type": "modernbert", "position_embedding_type": "absolute",
             "global_rope_theta": 5e5, "local_rope_theta": 1e4}  # fmt: skip
    assert RoPE.from_hf(given) == {"full_attention": PLAIN, "sliding_attention": RoPE(64)}
    assert "'absolute', which modernbert ignores" in hf.read(given).notes[0]


def test_gptj_says_that_it_rotates():
    given = {**MODEL, "model_type": "gptj", "rotary_dim": 64, "rotary": True}
    assert RoPE.from_hf(given) == RoPE(64, layout="interleaved")


def test_hunyuan_calls_a_fixed_ntk_dynamic():
    given = {"type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0,
             "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0}  # fmt: skip
    assert RoPE.from_hf(given, head_dim=128) == RoPE(128, scaling=NTK(1000.0))


def test_phi3_calls_longrope_su_or_yarn_and_keeps_its_first_length_outside():
    lists = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    given = {**MODEL, "model_type": "phi3", "max_position_embeddings": 131072,
             "original_max_position_embeddings": 4096, "rope_theta": 5e5}  # fmt: skip
    expected = RoPE(64, 5e5, scaling=LongRoPE(*lists.values(), 4096, 32.0))
    for name in ("su", "yarn", "longrope"):
        assert RoPE.from_hf({**given, "rope_scaling": {"type": name, **lists}}) == expected
    inside = {"type": "su", "original_max_position_embeddings": 8192, **lists}
    reading = hf.read({**given, "rope_scaling": inside})
    assert reading.ropes == {"": expected}
    assert "4096 in the configuration, which has priority, and 8192 here" in reading.notes[0]
    # By hand: sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5/12).
    assert expected.attention_factor == pytest.approx(math.sqrt(17 / 12), rel=1e-14)


def test_the_layout_belongs_to_the_model():
    assert RoPE.from_hf({**MODEL, "rope_theta": 5e5}).layout == "half"
    for model in ("gptj", "glm", "cohere2", "llama4_text"):
        given = {**MODEL, "model_type": model, "rope_theta": 5e5, "rotary_dim": 64}
        assert RoPE.from_hf(given).layout == "interleaved"
    turned = {**MODEL, "model_type": "deepseek_v3", "rope_interleave": False, "rope_theta": 5e5}
    assert RoPE.from_hf(turned).layout == "half"


# What is kept, and what is refused.


def test_keys_that_do_not_concern_frequencies_are_kept():
    parameters = {"rope_theta": 5e5, "type": "mrope", "mrope_section": [8, 12, 12]}
    given = {**MODEL, "rope_parameters": parameters, "no_rope_layers": [1, 0]}
    reading = hf.read(given)
    assert reading.kept == {"rope_parameters.mrope_section": [8, 12, 12], "no_rope_layers": [1, 0]}
    assert reading.ropes == {"": PLAIN}
    assert reading.unknown == {}


def test_numbers_that_are_not_read_are_noted():
    both = {**MODEL, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}
    (note,) = hf.read(both).notes
    assert (
        note == "rope_theta is 500000.0 in rope_parameters, which has priority, and 10000.0 outside"
    )
    read_together = {**MODEL, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear"},
                     "rope_scaling": {"rope_type": "linear", "factor": 4.0}}  # fmt: skip
    assert hf.read(read_together).ropes == {"": RoPE(64, 5e5, scaling=PI(4.0))}
    assert "transformers reads rope_scaling alone" in hf.read(read_together).notes[0]


def test_parts_that_are_not_read_and_the_other_direction_are_noted():
    text = {**MODEL, "model_type": "nanochat", "rope_theta": None, "rope_parameters": inner()}
    given = {"text_config": text, "vision_config": {"rope_theta": 9.0}, "audio_config": {}}
    notes = hf.read(given).notes
    assert notes[0] == "vision_config has rotary keys of its own, which are not read"
    assert notes[1].startswith("nanochat rotates the other way")
    assert len(notes) == 2


def test_unknown_keys_are_listed_with_the_nearest_known_ones():
    given = {**MODEL, "rope_scalling": None, "rope_parameters": {"rope_theta": 5e5, "rope_tpye": 1}}
    unknown = hf.read(given).unknown
    assert list(unknown) == ["rope_parameters.rope_tpye", "rope_scalling"]
    assert "(did you mean 'rope_type'?)" in unknown["rope_parameters.rope_tpye"]
    with pytest.raises(ValueError, match=r"rope_tpye .*rope_scalling .*'rope_scaling'"):
        RoPE.from_hf(given)


def inner(**keys):
    return {"rope_theta": 5e5, **keys}


YARN_KEYS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
REFUSED = {
    "no base": ({"rope_type": "default"}, "rope_theta is missing"),
    "a base that is no number": ({"rope_theta": "1e4"}, "rope_theta must be a number, got '1e4'"),
    "an unknown type": (inner(rope_type="yarm"), "unknown rope_type 'yarm'.*did you mean 'yarn'"),
    "two types": (inner(rope_type="yarn", type="linear"), "rope_type and type differ"),
    "images": (inner(rope_type="axial"), "rotates by two coordinates"),
    "a key of another type": (inner(low_freq_factor=1.0), "rope_parameters.low_freq_factor"),
    "no factor": (inner(rope_type="linear"), "factor is missing; rope_type 'linear' needs it"),
    "no length": (inner(rope_type="dynamic", factor=2.0), "max_position_embeddings is missing"),
    "no first length": (inner(rope_type="yarn", factor=2.0), "original_max_position_embeddings is"),
    "no list": (inner(rope_type="longrope"), "short_factor is missing"),
    "no low_freq_factor": (inner(rope_type="llama3", factor=8.0), "low_freq_factor is missing"),
    "beta_fast of 0": (inner(**YARN_KEYS, beta_fast=0), "got 0, which transformers reads as 32"),
    "beta_slow of 0": (inner(**YARN_KEYS, beta_slow=0), "got 0, which transformers reads as 1"),
    "betas swapped": (inner(**YARN_KEYS, beta_fast=1, beta_slow=32), "rope_parameters: beta_fast"),
    "an odd width": (inner(partial_rotary_factor=0.55), "0.55 of head_dim=64 is 35 channels"),
    "more than the head": (inner(partial_rotary_factor=4.0), "at most 1, got 4.0"),
    "two widths": (inner(partial_rotary_factor=0.5, rotary_dim=16), "rotary_dim=16 and"),
    "two lengths by type": (
        inner(rope_type="longrope", short_factor=[1.0] * 32, long_factor=[1.0] * 32,
              original_max_position_embeddings=64, short_mscale=1.1, long_mscale=1.2),
        "short_mscale and long_mscale differ",
    ),
    "a list": ([], "must be one of transformers, a dictionary or None, got list"),
    "ALiBi": ({**MODEL, "alibi": True}, "alibi is true"),
    "BERT": ({**MODEL, "position_embedding_type": "absolute"}, "'absolute': the model does not"),
    "no rotary key": ({**MODEL, "rope_scaling": None}, "no rotary key.*layer_rope_theta$"),
    "ChatGLM": ({**MODEL, "rope_ratio": 50}, "no rotary key.*; not understood: rope_ratio$"),
    "an image model": ({"patch_size": 16, "rope_theta": 100.0, **MODEL}, "an image model"),
    "two dictionaries": (
        {**MODEL, "rope_parameters": inner(), "rope_scaling": {"rope_theta": 1.0}},
        "rope_parameters and rope_scaling differ: rope_theta is 500000.0 and 1.0",
    ),
    "a number as a type": (inner(rope_type=3), "rope_type must be a name, got 3"),
    "a length that is no integer": (
        inner(rope_type="yarn", factor=2.0, original_max_position_embeddings=64.0),
        "original_max_position_embeddings must be an integer, got 64.0",
    ),
    "no list of bases": ({**MODEL, "layer_rope_theta": 5.0}, "layer_rope_theta must be a list"),
    "MPT": ({**MODEL, "attn_config": {"alibi": True}}, "alibi is true"),
    "no list of numbers": (
        {**MODEL, "layer_rope_theta": [5.0, None]},
        "layer_rope_theta must be a number, got None",
    ),
    "GPT-J without": ({**MODEL, "rotary_dim": 64, "rotary": False}, "rotary is false"),
    "MPT by a table": ({**MODEL, "attn_config": {"rope": False, "rope_theta": 1e4}}, "no rotary"),
    "ESM-1": ({**MODEL, "model_type": "esm"}, "'absolute': the model does not"),
    "no layout": ({**MODEL, **inner(rope_interleave="yes")}, "rope_interleave must be True or F"),
    "an endless base": (inner(rope_theta=10**400), "rope_theta must be finite, got an integer"),
    "no channel": (inner(partial_rotary_factor=0.01), "0.01 of head_dim=64 is 0 channels"),
    "a list of factors": (
        inner(rope_type="longrope", short_factor=[1.0] * 32, long_factor=[1.0] * 32,
              original_max_position_embeddings=64, short_mscale=[1], long_mscale=[1]),
        "attention_factor must be a number",
    ),
    "a text": ({**MODEL, "rope_scaling": "linear"}, "rope_scaling must be a dictionary or null"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_configurations_are_refused_by_the_name_of_the_key(name):
    given, said = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=said):
        RoPE.from_hf(given, head_dim=64)


def test_two_lengths_of_dynamic_are_refused():
    given = inner(rope_type="dynamic", factor=2.0, original_max_position_embeddings=64)
    with pytest.raises(ValueError, match="max_position_embeddings=128 differ"):
        RoPE.from_hf(given, head_dim=64, max_position_embeddings=128)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": None}, "head_dim is missing"),
        ({"head_dim": "64"}, "head_dim must be an integer, got '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"max_position_embeddings": "4k"}, "max_position_embeddings must be an integer"),
        ({"per_layer_config": [1]}, "per_layer_config must be a dictionary"),
        ({"per_layer_config": {"a": {}}}, "per_layer_config must be a dictionary"),
        ({"per_layer_config": {"0": 5}}, "per_layer_config must be a dictionary"),
        ({"layer_types": 5}, "layer_types must be a list, got 5"),
    ],
)
def test_sizes_of_a_configuration(changed, said):
    with pytest.raises((ValueError, TypeError), match=said):
        RoPE.from_hf({**MODEL, "rope_theta": 5e5, **changed})


def test_an_error_in_a_layer_type_names_it():
    given = {"full_attention": inner(rope_type="linear"), "sliding_attention": inner()}
    with pytest.raises(ValueError, match=r"rope_parameters\['full_attention'\]: factor is missing"):
        RoPE.from_hf(given, head_dim=64)


def test_frequencies_are_exact_to_the_last_bit():
    # Decimal, from the formula: transformers' float32 is off by 1e-7 here.
    rope = RoPE.from_hf({"rope_theta": 1e4}, head_dim=64)
    assert rope.frequencies()[3] == float(Decimal(10000) ** (Decimal(-6) / 64))


def test_a_configuration_of_transformers_is_one_object():
    """As it is, whatever else it prints."""

    class Config:
        def to_dict(self):
            return {**MODEL, "rope_theta": 5e5, "model_max_length": 777}

        def __repr__(self):
            return "everything " * 1000

    assert RoPE.from_hf(Config()) == PLAIN
    assert hf.read(Config()).max_len == 777
    sections = {"mrope_section": [8, 12, 12], "rope_type": "default", "rope_theta": 5e5}
    config = type(
        "Sections", (Config,), {"to_dict": lambda self: {**MODEL, "rope_parameters": sections}}
    )
    assert MRoPE.from_hf(config()) == MRoPE.from_hf(config().to_dict())
    with pytest.raises(TypeError, match=r"dictionary or None, got object$"):
        RoPE.from_hf(object())


@pytest.mark.parametrize("model", sorted(families.TURNED_BY_HALVES))
def test_released_weights_decide(model):
    config = {"model_type": model, "hidden_size": 512, "num_attention_heads": 8, "rope_theta": 1e4}
    assert hf.from_hf(config).layout == "interleaved"


@pytest.mark.parametrize(
    ("model", "head_dim", "rotary_dim"),
    [
        ("qwen3", 128, None), ("minimax_m2", 128, None), ("phi", 64, 32), ("persimmon", 64, 32),
        ("nemotron", 64, 32), ("stablelm", 64, 16), ("glm4_moe", 64, 32), ("llama", 64, None),
    ],
)  # fmt: skip
def test_what_a_file_leaves_out_is_the_default_of_its_class(model, head_dim, rotary_dim):
    config = {"model_type": model, "hidden_size": 512, "num_attention_heads": 8, "rope_theta": 1e4}
    rope = RoPE.from_hf(config)
    assert (rope.head_dim, rope.rotary_dim) == (head_dim, rotary_dim)
    # What a file says has priority; null is the width over the heads.
    assert (
        RoPE.from_hf({**config, "head_dim": None, "partial_rotary_factor": 0.75}).rotary_dim == 48
    )


TURNS = sorted(k for k, family in families.FAMILIES.items() if family.mrope == "interleaved")


@pytest.mark.parametrize("model", TURNS)
def test_models_whose_axes_take_turns(model):
    sections = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [12, 10, 10]}
    config = {
        "model_type": model, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64,
        "partial_rotary_factor": 1.0, "rope_parameters": sections,
    }  # fmt: skip
    assert MRoPE.from_hf(config).layout == "interleaved"


def test_the_talker_of_qwen3_omni_turns_its_axes_as_its_thinker():
    """By transformers, whose class of the talker's angles inherits that of the thinker's."""
    module = pytest.importorskip("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    talker, thinker = (
        getattr(module, f"Qwen3OmniMoe{name}RotaryEmbedding") for name in ("Talker", "ThinkerText")
    )
    assert issubclass(talker, thinker)
    assert {"qwen3_omni_moe_talker_text", "qwen3_omni_moe_text"} <= set(TURNS)
