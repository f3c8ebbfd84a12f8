"""``posenc rope``: what it prints and draws of a ``config.json``."""

from __future__ import annotations

import json
import math

import pytest
from frameworks_installed import require
from sample import long

from posenc.cli.main import main
from posenc.hf.context import BOUNDS, length_by_base, length_by_cosines
from posenc.schemes import RoPE

MODEL = {
    "model_type": "mistral", "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 9,
    "max_position_embeddings": 4096, "rope_theta": 5e5,
}  # fmt: skip
LISTS = {"short_factor": [1.0] * 32, "long_factor": [float(n) for n in range(1, 33)]}
MIXED = {
    "model_type": "some_vl",
    "text_config": MODEL | {
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "longrope", "rope_theta": 1e6, "factor": 4.0,
                               "original_max_position_embeddings": 1024, **LISTS},
            "sliding_attention": None,
            "other": {"rope_type": "proportional", "rope_theta": 1e4,
                      "partial_rotary_factor": 0.25, "mrope_section": [8, 12, 12], "fator": 2},
        },
    },
}  # fmt: skip


@pytest.fixture
def told(tmp_path, capsys, monkeypatch):
    """The exit status and what is printed for a configuration."""
    monkeypatch.setattr("posenc.cli.rope._FAR", 2**14)

    def tell(config, *options):
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        status = main(["rope", str(path), *options])
        shown = capsys.readouterr()
        return status, shown.err or shown.out

    return tell


def test_plain_rope(told):
    status, text = told(MODEL)
    assert status == 0
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "type plain RoPE" in lines
    assert "base 500000" in lines
    assert "channels 64 of 64 per head rotate, layout 'half'" in lines
    # By hand: 2 pi and 2 pi * 5e5**(31/32) tokens.
    assert any(line.startswith("wavelengths 6.283 to 2.085e+06 tokens") for line in lines)
    assert "NOT UNDERSTOOD" not in text


def test_each_layer_type_kept_and_unknown_keys(told):
    _, text = told(MIXED)
    flat = " ".join(text.split())
    assert "read from text_config" in flat
    assert "full_attention type LongRoPE(short_factor=[1.0, 1.0, … 1.0, 1.0] (32)" in flat
    assert "up to 1024 tokens factor 1.09545 on cosines" in flat  # sqrt(1 + ln 4 / ln 1024)
    assert "with 4096 tokens" in flat
    assert "sliding_attention NoPE: no rotation" in flat
    assert "24 frequencies are 0" in flat
    assert "by these frequencies to 16k and beyond" in flat
    assert "rope_parameters.other.mrope_section = [8, 12, 12]: M-RoPE" in flat
    unknown = flat[flat.index("NOT UNDERSTOOD") :]
    assert unknown.startswith("NOT UNDERSTOOD rope_parameters.other.fator (did you mean 'factor'?)")


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, "order chunked"), ({"mrope_interleaved": True}, "order interleaved")],
)
def test_the_axes_of_channel_pairs(told, more, expected):
    of_axes = {"type": "mrope", "mrope_section": [12, 10, 10], **more}
    status, text = told(MODEL | {"rope_scaling": of_axes})
    assert status == 0
    assert f"several axes {expected} pairs 12 + 10 + 10, by axis" in " ".join(text.split())


def test_sections_that_do_not_add_up_are_an_error(told):
    status, text = told(MODEL | {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 13]}})
    assert status == 2
    assert "sections" in text


@long
@pytest.mark.skipif(not require("matplotlib"), reason="matplotlib is not installed")
def test_frequencies_are_drawn(told, tmp_path):
    out = tmp_path / "rope.svg"
    status, text = told(MIXED, "--out", str(out))
    assert status == 0
    assert text.splitlines()[-1] == str(out)
    assert out.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ("{", (), "config.json is no JSON: "),
        ("[1]", (), "config.json must hold a JSON object, got list"),
        ({"model_type": "bert", "hidden_size": 8}, (), "no rotary key; a model that rotates has"),
        (MODEL | {"position_embedding_type": "nope"}, ("--out", "a.png"), "no layer rotates"),
        (MODEL | {"hidden_size": None}, (), "head_dim is missing: give it as an argument"),
    ],
)
def test_errors(told, config, options, said):
    status, text = told(config, *options)
    assert status == 2
    assert said in text


def test_no_rotation(told):
    assert "NoPE: no rotation" in told(MODEL | {"position_embedding_type": "nope"})[1]


def test_a_missing_file_and_a_folder(told, tmp_path, capsys):
    assert main(["rope", str(tmp_path)]) == 2
    assert f"{str(tmp_path)!r} has no config.json" in capsys.readouterr().err
    _, text = told(MODEL | {"hidden_size": None}, "--head-dim", "32")
    assert "32 of 32 per head" in text
    assert main(["rope", str(tmp_path), "--head-dim", "32"]) == 0


def test_the_length_of_a_base_is_the_papers_table():
    for length, base in BOUNDS:
        assert length_by_base(base) == pytest.approx(length)
    # Between 1k and 4k, by hand: halfway on both logarithmic scales.
    assert length_by_base(math.sqrt(4.3e3 * 2.7e4)) == pytest.approx(2048)
    assert length_by_base(4.2e3) == 0
    assert length_by_base(5.2e8) == math.inf


def test_the_papers_criterion():
    # One frequency: the cosine is negative from a quarter turn on, pi / 0.2 = 15.7.
    assert length_by_cosines([0.1]) == 16
    assert length_by_cosines([0.1, 0.0]) == 2**20  # 1 + cos is never negative
    assert length_by_cosines([0.1], limit=8) == 8
    # The table's own heads of 128 channels: 1k, 4k and 128k within its two digits.
    for length, base in (BOUNDS[0], BOUNDS[1], BOUNDS[3]):
        found = length_by_cosines(RoPE(128, base).frequencies())
        assert found == pytest.approx(length, rel=0.06)
