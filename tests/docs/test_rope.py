"""``docs/rope.md``: its command, its code, and every figure of its table of differences."""

from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from sample import long

from posenc.cli.main import main
from posenc.schemes import DynamicNTK, RoPE, YaRN

PAGE = (Path(__file__).parents[2] / "docs" / "rope.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
HF = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("torch")), reason="needs transformers and torch"
)
GPT_OSS = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0,
           "original_max_position_embeddings": 4096, "truncate": False}  # fmt: skip


def blocks(kind):
    return [text for name, text in BLOCKS if name == kind]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(blocks("json")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_what_the_page_shows(folder, capsys):
    (command,), (shown,) = blocks("sh"), blocks("")
    assert command == "posenc rope config.json --out rope.png\n"
    assert main(["rope", "config.json"]) == 0  # test_cli_rope.py draws
    assert capsys.readouterr().out + "rope.png\n" == shown


def test_the_code_runs(folder, capsys):
    for code in blocks("python"):
        code = code.replace("40 * 128, 5120", "40 * 128, 2")
        exec(
            compile(
                code.replace('open("config.json")', 'open("config.json", "rb")'), "page", "exec"
            )
        )


def row(words):
    """The difference in the one row of the table with these words."""
    (found,) = (line for line in PAGE.splitlines() if line.startswith("|") and words in line)
    return found.rpartition(" | ")[2]


def ratio(a, b):
    """The largest ratio of two frequencies, either way."""
    a, b = (np.asarray(rope.frequencies() if isinstance(rope, RoPE) else rope) for rope in (a, b))
    return max((a / b).max(), (b / a).max())


def rope(head_dim, base, *arguments, **options):
    return RoPE(head_dim, base, scaling=YaRN(*arguments, **options))


def of_transformers(config, kind, **options):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind](config, None, **options)[0].double().numpy()


def test_the_ramps():
    found = ratio(rope(128, 1e4, 16, 4096), rope(128, 1e4, 16, 4096, ramp="turns"))
    assert f"{found:.2f} times" in row("linear in turns")


def test_whole_indices():
    options = (64, 150_000.0, 32, 4096)
    found = ratio(rope(*options), rope(*options, truncate=False))
    assert f"{found:.2f} times" in row("starts and ends at whole indices")


def test_the_end_of_the_ramp():
    # The released formula by hand, with either limit.
    dim, base, length, s, k = 128, 1e4, 131072, 4, np.arange(64)

    def frequencies(limit):
        low, high = (
            dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (32, 1)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), limit)
        ramp = np.clip((k - low) / (high - low), 0, 1)
        return base ** (-k / 64) * (ramp / s + 1 - ramp)

    assert ratio(frequencies(127), rope(dim, base, s, length)) < 1 + 1e-12
    found = ratio(frequencies(127), frequencies(63))
    assert f"{found:.2f} times" in row("The ramp's end is limited")


def test_dynamic_with_another_length():
    found = ratio(RoPE(64, 1e6, scaling=DynamicNTK(4, 4096)).at_length(16384), RoPE(64, 1e6))
    assert f"{found:.0f} times" in row("`dynamic` does not read")


# What transformers does, by running it.


@long
@HF
def test_what_transformers_reads():
    from transformers import (
        DbrxConfig,
        LlamaConfig,
        MiniMaxM3VLTextConfig,
        Olmo3Config,
        Phi3Config,
    )

    def llama(**options):
        return LlamaConfig(head_dim=64, max_position_embeddings=16384, **options)

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
            "original_max_position_embeddings": 4096}  # fmt: skip
    zero = of_transformers(llama(rope_parameters=yarn | {"beta_fast": 0, "beta_slow": 0}), "yarn")
    assert ratio(zero, rope(64, 1e6, 4, 4096)) < 1 + 1e-5
    dynamic = llama(rope_parameters=yarn | {"rope_type": "dynamic"})
    assert ratio(of_transformers(dynamic, "dynamic", seq_len=16384), RoPE(64, 1e6)) < 1 + 1e-5
    both = llama(rope_parameters={"rope_theta": 1e6},
                 rope_scaling={"rope_type": "linear", "factor": 4.0})  # fmt: skip
    assert both.rope_parameters["rope_theta"] == 10_000
    assert row("it reads the latter alone") == "base 10000 instead of 1000000 |"
    olmo = Olmo3Config(rope_theta=1e6, rope_scaling=dict(yarn))
    assert olmo.rope_parameters["sliding_attention"]["rope_theta"] == 500_000
    assert row("An older OLMo 3") == "base 500000 instead of 1000000 |"
    lists = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi3 = {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32,
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0, "rope_scaling": {"type": "su", **lists}}  # fmt: skip
    with pytest.raises(KeyError, match="original_max_position_embeddings"):
        Phi3Config.from_dict(json.loads(json.dumps(phi3)))
    assert RoPE.from_hf(phi3).attention_factor == pytest.approx(math.sqrt(17 / 12))
    assert row("first name of LongRoPE") == "no model instead of one |"
    dbrx = DbrxConfig(attn_config={"rope_theta": 500_000.0})
    assert dbrx.rope_parameters["rope_theta"] == 10_000
    assert row("DBRX").startswith("base 10000 instead of 500000")
    assert (
        RoPE.from_hf({"attn_config": {"rope_theta": 5e5}, "d_model": 64, "n_heads": 1}).base == 5e5
    )
    minimax = MiniMaxM3VLTextConfig()
    assert (minimax.rotary_dim, minimax.head_dim) == (64, 128)
    assert RoPE.from_hf(minimax.to_dict()).rotary_dim == 64


@long
@HF
def test_transformers_does_not_read_truncate_of_a_layer_type():
    from transformers import Gemma3TextConfig

    parameters = {"full_attention": GPT_OSS, "sliding_attention": {"rope_type": "default",
                  "rope_theta": 1e4}}  # fmt: skip
    config = Gemma3TextConfig(
        head_dim=64, rope_parameters=json.loads(json.dumps(parameters)), num_hidden_layers=6
    )
    theirs = of_transformers(config, "yarn", layer_type="full_attention")
    ours = RoPE.from_hf(parameters, head_dim=64)["full_attention"]
    assert f"{ratio(theirs, ours):.2f} times" in row("within the dictionary of a layer type")
    assert ratio(theirs, rope(64, 150_000.0, 32, 4096)) < 1 + 1e-5


@long
@HF
def test_angles_in_float32():
    from transformers import LlamaConfig

    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=llama3)
    inverse = of_transformers(config, "llama3").astype(np.float32)
    exact = np.asarray(RoPE.from_hf(config.to_dict()).frequencies())
    positions = np.arange(131072)
    error = max(
        np.abs((positions.astype(np.float32) * f).astype(np.float64) - positions * e).max()
        for f, e in zip(inverse, exact, strict=True)
    )
    assert f"{error:.4f} rad" in row("Frequencies and angles are float32")
