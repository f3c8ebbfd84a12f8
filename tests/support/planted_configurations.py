"""Readers of configurations with one fault each, which another project had."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from released_configurations import LLAMA3, RELEASED, sizes, yarn

from posenc.audit.definition import definition
from posenc.audit.released import RELEASED as OF_WEIGHTS


@dataclass
class Fake:
    """A reader that is right, but for what ``change`` makes of a configuration or of facts."""

    change: object = None
    facts: object = None
    name: str = "fake"
    version: str = "1"

    def read(self, config, lengths):
        config = json.loads(json.dumps(config))
        if self.change:
            config = self.change(config) or config
        found = []
        for one, rope in zip(*self._own(config), strict=True):
            if rope is not None:
                at = {n: rope.at_length(n).frequencies() for n in lengths}
                one = replace(one, frequencies=at)
            else:
                one = replace(one, frequencies=dict.fromkeys(lengths, ()))
            found.append(self.facts(one) if self.facts else one)
        return found

    def _own(self, config):
        own = definition(config)
        return own.facts, own.ropes


def layers(config, count=8, **more):
    return {**config, "num_hidden_layers": count, **more}


def without(*names):
    """A change that drops keys, also inside of RoPE's dictionaries and parts."""

    def change(config):
        return {
            key: change(value) if isinstance(value, dict) else value
            for key, value in config.items() if key not in names
        }  # fmt: skip

    return change


def put(**changed):
    """A change of keys, wherever they are."""

    def change(config):
        return {
            key: changed.get(key, change(value) if isinstance(value, dict) else value)
            for key, value in config.items()
        }

    return change


def base_of_ten_thousand(config):
    given = config.pop("rope_parameters")
    return {**config, "rope_theta": 10_000.0} if given else config


VISION = sizes(  # Llama 3.2 Vision, its text
    "llama", 4096, 32, 131072, rope_theta=500000.0, rope_scaling=LLAMA3, num_hidden_layers=40
)
PHI = layers(RELEASED["Phi-2"])
MINIMAX = layers(RELEASED["MiniMax-M2"])
V3 = layers(RELEASED["DeepSeek-V3"])
LAGUNA = sizes("qwen3", 2048, 16, 262144, rope_parameters={
    "rope_theta": 5e5, "rope_type": "yarn", "factor": 64.0, "beta_fast": 64.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096, "attention_factor": 1.0})  # fmt: skip
OF_V5 = sizes("llama", 4096, 32, 131072,
              rope_parameters={**LLAMA3, "rope_theta": 500000.0})  # fmt: skip
QWEN_VL = layers(RELEASED["Qwen2-VL"], use_sliding_window=False)
GEMMA = RELEASED["Gemma 3 4B"]
GPT_OSS = layers(RELEASED["gpt-oss"], sliding_window=128)
HY4 = sizes("hy_v4", 4096, 32, 262144, rope_theta=1e6, qk_rope_head_dim=64, qk_nope_head_dim=128)
QWEN35 = {**next(row.config for row in OF_WEIGHTS if row.model == "qwen3_5_moe_text"),
          "model_type": "qwen3_5_moe_text", "max_position_embeddings": 262144}  # fmt: skip
OLMO = RELEASED["OLMo 3"]


def quarter_twice(facts):
    """8 of 32 channels rotate: 0.4 of 80, and 0.4 of that."""
    return replace(facts, rotary_dim=12, frequencies=_plain(facts, 6, 12))


def first_of_the_whole(facts):
    return replace(facts, frequencies=_plain(facts, 16, 80))


def _plain(facts, count, width):
    own = tuple(10_000.0 ** (-2 * k / width) for k in range(count))
    return dict.fromkeys(facts.frequencies, own)


def doubled(facts):
    twice = {n: tuple(2 * f for f in own) for n, own in facts.frequencies.items()}
    return replace(facts, frequencies=twice)


def first_only(facts):
    return replace(facts, frequencies=dict.fromkeys(facts.frequencies, facts.frequencies[1]))


def with_sections(facts):
    turns = tuple(k % 3 for k in range(64))
    return replace(facts, sections=turns)


def rotating(facts):
    if any(facts.frequencies.values()):
        return facts
    whole = tuple(5e6 ** (-k / 64) for k in range(64))
    return replace(facts, frequencies=dict.fromkeys(facts.frequencies, whole))


def near(change):
    def facts(one):
        return one if one.window is None else replace(one, window=change(one.window))

    return facts


# What went wrong elsewhere -> the configuration, the faulty reader, and for each check what its
# message has, by how much scores differ (None: not told), and the first position.
PLANTED = {
    "hy_v4 by halves (vllm#54160)": (
        HY4, Fake(facts=lambda f: replace(f, layout="half")),
        {"layout": ("differs from released weights: pairs are channels k and k \\+ R/2; they should"
                    " be neighbours.*perplexity 151, and 6.39", None, 1)},
    ),
    "partial factor ignored (transformers#48241)": (
        MINIMAX, Fake(without("rotary_dim")),
        {"frequencies": ("partial factor is ignored: 128 channels rotate, not 64; 64", None, 1),
         "rotary width": ("differs from released weights: 128 channels rotate, not 64", None, 1)},
    ),
    "partial factor ignored under M-RoPE (maxtext#4616)": (
        QWEN35, Fake(facts=lambda f: replace(
            f, rotary_dim=256, frequencies={n: tuple(1e7 ** (-k / 128) for k in range(128))
                                            for n in f.frequencies})),
        {"frequencies": ("the partial factor is ignored: 256 channels rotate, not 64", None, 1),
         "rotary width": ("256 channels rotate, not 64 of 256.*MaxText turned all 256", None, 1)},
    ),
    "partial factor applied twice": (
        PHI, Fake(facts=quarter_twice),
        {"frequencies": ("0.4 is applied twice: 12 channels rotate, not 32", None, 1),
         "rotary width": ("12 channels rotate, not 32 of 80", None, 1)},
    ),
    "partial factor dropped from the frequencies": (
        PHI, Fake(facts=first_of_the_whole),
        {"frequencies": ("to the channels and not to the frequencies, .*first of those of 80",
                         None, 1)},
    ),
    "scaling declared, plain RoPE built (mlx-vlm#1710)": (
        VISION, Fake(without("rope_scaling")),
        {"frequencies": ("Llama3 is declared, and plain RoPE is built; 35 of 64 freq", None, 2)},
    ),
    "rope_parameters unread (vllm#28542)": (
        OF_V5, Fake(base_of_ten_thousand),
        {"frequencies": ("rope_theta is not read: the base is 10000, and Llama3 is not read "
                         "either", None, 1)},
    ),
    "rope_parameters half read": (
        OF_V5, Fake(without("rope_type")),
        {"frequencies": ("Llama3 is declared, and plain RoPE is built", None, 2)},
    ),
    "one of two layer types read": (
        GEMMA, Fake(put(rope_scaling=None)),
        {"frequencies, full_attention": ("PI is declared, and plain RoPE is built", None, 1)},
    ),
    "explicit attention_factor ignored (vllm#46280)": (
        LAGUNA, Fake(without("attention_factor")),
        {"attention factor": ("attention_factor=1 is ignored and derived from factor instead; "
                              "cosines and sines are multiplied by 1.41589, not 1", 1.0047, 1)},
    ),
    "attention factor becomes 1 (exllamav3#259)": (
        layers(RELEASED["Qwen2.5 with YaRN"]),
        Fake(facts=lambda f: replace(f, attention_factor=1.0)),
        {"attention factor": ("the attention factor is ignored: it is 1; cosines and sines are "
                              "multiplied by 1, not 1.13863", 0.2287, 1)},
    ),
    "mscale squared missing from the softmax (mobius#548)": (
        V3, Fake(facts=lambda f: replace(f, softmax_factor=1.0)),
        {"softmax factor": ("the square of mscale, 1.87385, is missing.*0.5337 times", 0.4663, 1)},
    ),
    "mscale not squared": (
        V3, Fake(facts=lambda f: replace(f, softmax_factor=math.sqrt(f.softmax_factor))),
        {"softmax factor": ("mscale multiplies the softmax scale once, not squared", 0.2695, 1)},
    ),
    "mscale for mscale_all_dim (Megatron-LM#1429)": (
        layers({**V3, "rope_scaling": yarn(40, 4096, mscale=1.0, mscale_all_dim=0.707)}),
        Fake(facts=lambda f: replace(f, softmax_factor=(0.1 * math.log(40) + 1) ** 2)),
        {"softmax factor": ("mscale=1 is read for mscale_all_dim=0.707", 0.1788, 1)},
    ),
    "rotated twice (TensorRT-LLM#16378)": (
        VISION, Fake(facts=doubled),
        {"frequencies": ("queries and keys are rotated twice: every frequency is doubled", 2.0, 1)},
    ),
    "LongRoPE keeps its short factors (llama.cpp#24875)": (
        layers(RELEASED["Phi-3.5 mini"], sliding_window=262144), Fake(facts=first_only),
        {"frequencies": ("LongRoPE does not change with the length of the text; texts of 131072 "
                         "tokens: 47 of 48", None, 1)},
    ),
    "dynamic NTK keeps its angles (transformers#25306)": (
        sizes("llama", 4096, 32, 4096, rope_scaling={"type": "dynamic", "factor": 2.0}),
        Fake(facts=first_only),
        {"frequencies": ("plain RoPE is built.*texts of 8192 tokens", None, 1)},
    ),
    "truncate not read": (
        GPT_OSS, Fake(without("truncate")),
        {"frequencies, sliding_attention": ("truncate=False is read as True", 1.9358, 5),
         "frequencies, full_attention": ("truncate=False is read as True", 1.9358, 5)},
    ),
    "original length not read": (
        layers(RELEASED["Llama 3.1"]),
        Fake(without("original_max_position_embeddings")),
        {"frequencies": ("original_max_position_embeddings=8192 is not read: "
                         "max_position_embeddings=131072 instead", None, 2)},
    ),
    "layers with a window scaled too (vllm#43419)": (
        OLMO, Fake(facts=lambda f: replace(f, attention_factor=1.2079441541679836)),
        {"attention factor, sliding_attention": (
            "differs from released weights.*YaRN is for layers of full attention alone", 0.4591, 1)
         },
    ),
    "a window one off (transformers#39408)": (
        GPT_OSS, Fake(facts=near(lambda size: size + 1)),
        {"window, sliding_attention": (
            "a window of 129 keys, not 128, 1 off; masks differ from position 128 on", None, 128)},
    ),
    "a window not read": (
        GPT_OSS, Fake(facts=near(lambda size: None)),
        {"window, sliding_attention": ("the window of 128 keys is not read", None, 128)},
    ),
    "axes take turns instead of blocks (vllm-gaudi#1437)": (
        QWEN_VL, Fake(facts=with_sections),
        {"sections": ("42 of 64 pairs turn by another axis, the first is pair 1: by axis 1, not 0",
                      None, None)},
    ),
    "layers without rotation rotated": (
        layers(RELEASED["SmolLM3"], 36, no_rope_layers=[1, 1, 1, 0] * 9), Fake(facts=rotating),
        {"frequencies, full_attention, no rotation": (
            "these layers do not rotate, and are rotated", 2.0, 1)},
    ),
    "nanochat turned forwards": (
        {"model_type": "nanochat", "hidden_size": 512, "num_attention_heads": 4,
         "rope_theta": 1e4, "max_position_embeddings": 2048},
        Fake(facts=lambda f: replace(f, layout="half")),
        {"layout": ("pairs are channels k and k \\+ R/2; they should be .*, the other way", None,
                    1)},
    ),
}  # fmt: skip
