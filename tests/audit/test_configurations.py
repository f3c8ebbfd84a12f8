"""``audit_config``: readers with a planted fault each, files of every kind, and transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec

import audit_configurations as page  # docs/audit_configurations.py
import pytest
from planted_configurations import GEMMA, GPT_OSS, HY4, PLANTED, V3, VISION, Fake, layers, without
from released_configurations import ODD, RELEASED, sizes, whole
from stand_in_for_mlx import Attention, Turn, reader

from posenc.audit import Record, exit_status
from posenc.audit import configs as audited
from posenc.audit.definition import definition
from posenc.audit.readers import (
    FACTS,
    GROUP,
    Facts,
    Missing,
    NotReadError,
    Reader,
    Unsaid,
    installed_readers,
)
from posenc.audit.released import RELEASED as OF_WEIGHTS
from posenc.hf import FAMILIES

HF = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("torch")), reason="needs transformers and torch"
)


def audit(tmp_path, config, *readers):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    return audited.audit_config(file, readers=readers)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(tmp_path, name):
    config, reader, expected = PLANTED[name]
    records = audit(tmp_path, config, reader)
    found = {record.check: record for record in records if record.status == "differs"}
    assert found.keys() == expected.keys(), [r.message for r in records]
    assert exit_status(records) == 1
    for check, (words, error, position) in expected.items():
        record = found[check]
        assert re.search(words, record.message), record.message
        assert (record.library, record.version, record.subject) == ("fake", "1", "config.json")
        assert record.path == "configuration"
        assert f"posenc audit --config {tmp_path}" in record.reproducer
        assert error is None or record.error == pytest.approx(error, rel=1e-3)
        assert record.where.get("position") == position


@pytest.mark.parametrize("name", PLANTED)
def test_a_right_reader_agrees(tmp_path, name):
    """So that it is the planted fault that was found."""
    config, _, _ = PLANTED[name]
    records = audit(tmp_path, config, Fake())
    assert {record.status for record in records} <= {"agrees", "cannot express"}
    told = {record.check.partition(",")[0] for record in records if record.status == "agrees"}
    assert {"frequencies", "layout", "rotary width"} <= told


def test_cosines_are_those_that_others_measured(tmp_path):
    """mlx-vlm#1710: .959, .757, .619 and .503 at 1000, 8192, 20000 and 60000."""
    from posenc.audit.rotation_difference import Rotation, difference

    own = definition(VISION).facts[0]
    plain = definition(without("rope_scaling")(VISION)).facts[0]
    rotations = [Rotation(facts.frequencies[1]) for facts in (own, plain)]
    found = [difference(*rotations, at).cosine for at in (1000, 8192, 20_000, 60_000)]
    assert found == pytest.approx(
        [0.959, 0.757, 0.619, 0.503], abs=0.04
    )  # they turned random vectors


def test_differences_are_those_of_rotated_vectors():
    """Against the scheme's own rotation, also where widths and layouts differ."""
    import numpy as np

    import posenc
    from posenc.audit.rotation_difference import VISIBLE, Rotation, difference

    ropes = [
        posenc.RoPE(8, 100.0), posenc.RoPE(8, 100.0, "interleaved"), posenc.RoPE(8, 120.0),
        posenc.RoPE(8, 100.0, rotary_dim=4),
    ]  # fmt: skip

    def turned(rope, at):
        units = np.eye(8)[None, :, None]
        return posenc.transform(rope, units, np.asarray([at]), role="query")[0, :, 0].T

    for one in ropes:
        for other in ropes:
            found = difference(
                *(Rotation(rope.frequencies(), rope.layout) for rope in (one, other)), 50
            )
            apart = [np.linalg.norm(turned(one, at) - turned(other, at), 2) for at in range(1, 51)]
            seen = [at for at, most in enumerate(apart, 1) if most > VISIBLE]
            assert found.first == (seen[0] if seen else None)
            assert found.largest == pytest.approx(apart[-1], abs=1e-12)
            even = np.full(8, 8**-0.5)
            if len(one.frequencies()) == len(other.frequencies()):
                cosine = (turned(one, 50) @ even) @ (turned(other, 50) @ even)
                assert found.cosine == pytest.approx(cosine, abs=1e-12)


def test_one_record_for_each_type_of_layer_reader_and_fact(tmp_path):
    records = audit(tmp_path, GPT_OSS, Fake(), Fake(name="other"))
    checks = [f"{FACTS[fact]}, {kind}" for kind in ("sliding_attention", "full_attention")
              for fact in FACTS]  # fmt: skip
    assert [(r.library, r.check) for r in records] == [
        (name, check) for name in ("fake", "other") for check in checks
    ]
    assert {record.scheme for record in records} == {"rope_yarn"}
    assert len({record.name for record in records}) == len(records)
    assert exit_status(records) == 0


def test_readers_are_held_against_each_other(tmp_path):
    wrong = Fake(without("rope_scaling"), name="wrong")
    records = audit(tmp_path, VISION, wrong, Fake(name="right"))
    (between,) = (record for record in records if record.library == "wrong and right")
    assert (between.check, between.status) == ("frequencies, of each other", "differs")
    assert between.message.startswith("right, held against wrong: ")
    same = audit(tmp_path, VISION, wrong, Fake(without("rope_scaling"), name="as wrong"))
    (between,) = (record for record in same if " and " in record.library)
    assert between.status == "agrees"


def test_layers_of_one_type_that_are_read_in_two_ways(tmp_path):
    class Halved(Fake):
        def read(self, config, lengths):
            (facts,) = super().read(config, lengths)
            wrong = replace(facts, layers=(2, 3), layout="interleaved")
            return [replace(facts, layers=(0, 1)), wrong]

    records = audit(tmp_path, layers(RELEASED["Llama 2"], 4), Halved())
    (record,) = (record for record in records if record.status == "differs")
    assert record.message.startswith("differs from released weights: layers 2, 3 of 4: pairs are")


def test_what_a_reader_does_not_say(tmp_path):
    reader = Fake(facts=lambda facts: Facts(layout=Unsaid("it hides it")))
    records = audit(tmp_path, layers(RELEASED["Llama 2"]), reader)
    assert {record.status for record in records} == {"cannot express"}
    assert {r.check: r.message for r in records}["layout"] == "it hides it"


class Raising(Fake):
    def read(self, config, lengths):
        raise self.change


def test_readers_that_raise(tmp_path):
    config = RELEASED["Llama 2"]
    (record,) = audit(tmp_path, config, Raising(NotReadError("fake 1 has no model_type 'llama'")))
    assert (record.status, record.message) == (
        "cannot express", "fake 1 has no model_type 'llama'",
    )  # fmt: skip
    (record,) = audit(tmp_path, config, Raising(KeyError("rope_theta")))
    assert record.status == "not called"
    assert record.message == "fake raised KeyError: 'rope_theta'"


def test_what_is_missing_is_told(tmp_path):
    missing = Missing("vllm", "", "vllm is not installed", False)
    unread = Missing("keras_hub", "0.3", "no reader is written for keras_hub", True)
    records = audit(tmp_path, RELEASED["Llama 2"], missing, unread)
    assert [(r.library, r.version, r.status, r.message) for r in records] == [
        ("vllm", "", "not installed", "vllm is not installed"),
        ("keras_hub", "0.3", "cannot express", "no reader is written for keras_hub"),
    ]


FILES = {
    "broken": ('{"model_type": "llama"', "no JSON: "),
    "binary": (b"\xff\xfe\x00", "no JSON: "),
    "list": ("[1]", "no configuration: must hold a JSON object, got list"),
    "adapter": ('{"peft_type": "LORA", "r": 8}', "no configuration of a model: model_type is "
                "missing; it has peft_type, r"),
    "odd": (json.dumps(sizes("llama", 4096, 32, 2048, rope_theta="much")),
            "the definition refuses it: .*rope_theta must be"),
    "unknown-type": (json.dumps(sizes("llama", 4096, 32, 64, rope_theta=1e4, rope_scaling={
        "type": "yarm", "factor": 2})), "the definition refuses it: .*unknown rope_type 'yarm'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_configuration_are_told_in_words(tmp_path, name):
    content, words = FILES[name]
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (record,) = audited.audit_config(file, readers=[Fake()])
    assert record.status == "not called"
    assert re.match(words, record.message), record.message
    assert exit_status([record]) == 2


def test_a_key_that_is_not_understood_is_told_and_the_rest_compared(tmp_path):
    config = layers(RELEASED["Qwen2.5 with YaRN"], use_sliding_window=False)
    config["rope_scaling"] = {**config["rope_scaling"], "attn_scale": 1.0}
    records = audit(tmp_path, config, Fake())
    told = [record for record in records if record.status == "not called"]
    assert [record.check for record in told] == ["key rope_scaling.attn_scale"]
    assert "rope_scaling.attn_scale is not understood (did you mean 'mscale'?)" in told[0].message
    assert sum(record.status == "agrees" for record in records) == len(FACTS)
    assert exit_status(records) == 2


def test_a_folder_is_searched(tmp_path):
    for place in ("b", "a/deep"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text(json.dumps(RELEASED["Llama 2"]))
    (tmp_path / "a" / "other.json").write_text("{}")
    records = audited.audit_config(str(tmp_path), readers=[Fake()])
    assert list(dict.fromkeys(record.subject for record in records)) == [
        "a/deep/config.json", "b/config.json",
    ]  # fmt: skip
    (tmp_path / "deep" / "none").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no config\.json in .*deep/none"):
        audited.audit_config(tmp_path / "deep" / "none")
    with pytest.raises(FileNotFoundError, match=r"must be a file or a folder, got '.*nowhere'"):
        audited.audit_config(tmp_path / "nowhere")


def test_models_that_do_not_rotate(tmp_path):
    records = audit(tmp_path, {"model_type": "bloom", "n_head": 4, "n_layer": 2}, Fake())
    assert {r.check: r.message for r in records} == {
        "frequencies": "no rotation", "window": "no window",
    }  # fmt: skip


def test_readers_of_installed_libraries(monkeypatch):
    from importlib.metadata import EntryPoint

    own = EntryPoint("mine", f"{__name__}:Fake", GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Fake)
    monkeypatch.setattr("posenc.audit.readers.entry_points", lambda group: [own])
    monkeypatch.setattr("posenc.audit.readers._here", lambda name: name == "litgpt")
    found = list(installed_readers())
    assert [one.name for one in found if isinstance(one, Reader) and one.version == "1"] == ["fake"]
    missing = {one.name: one for one in found if isinstance(one, Missing)}
    assert missing["transformers"].reason == "transformers is not installed"
    assert missing["litgpt"].reason == "no reader is written for litgpt"
    assert missing["litgpt"].installed
    assert [one.name for one in installed_readers(["vllm"])] == ["vllm"]
    with pytest.raises(ValueError, match="reader 'vlm'"):
        list(installed_readers(["vlm"]))


@pytest.mark.parametrize("row", OF_WEIGHTS, ids=lambda row: f"{row.model}-{row.fact}")
def test_the_definition_is_that_of_released_weights(row):
    own = definition({"model_type": row.model, **row.config})
    (facts,) = (facts for facts in own.facts if row.kind in ("", facts.kind))
    assert getattr(facts, row.fact) == row.value
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source) for source in row.sources)
    assert row.model in FAMILIES or row.value in ("half", 1.0)


# transformers, installed.

VERSION = "5.23.0"
"""What it differs in is known of this version; another may have mended it, or broken something."""
KNOWN = {
    ("hy_v4", "layout"),  # released weights pair neighbours
    ("minimax_m3_vl_text", "frequencies"),  # it does not read rotary_dim
    ("minimax_m3_vl_text", "rotary width"),
}


def of_transformers(tmp_path, config):
    (reader,) = installed_readers(["transformers"])
    return audit(tmp_path, config, reader)


def checked(records: list[Record]):
    """Differences, which are those of the version that is known; and how much was compared."""
    import transformers

    if transformers.__version__ != VERSION:
        pytest.skip(f"what differs is known of transformers {VERSION}")
    differing = {record.check for record in records if record.status == "differs"}
    return differing, sum(record.status == "agrees" for record in records)


@HF
@pytest.mark.parametrize(
    ("name", "agreeing"),
    [("DeepSeek-V3", 7), ("Gemma 3 4B", 14), ("gpt-oss", 14), ("Qwen2-VL", 7), ("GLM-4", 7)],
)
def test_transformers_agrees(tmp_path, name, agreeing):
    config = {**GEMMA, "gpt-oss": GPT_OSS}.get(name) or RELEASED[name]
    if name not in ("Gemma 3 4B", "gpt-oss"):
        config = layers(config, 4, use_sliding_window=False)
    assert checked(of_transformers(tmp_path, config)) == (set(), agreeing)


@HF
def test_transformers_turns_hy_v4_by_halves(tmp_path):
    import transformers

    records = of_transformers(tmp_path, layers(HY4, 2))
    if transformers.__version__ == VERSION:
        (record,) = (record for record in records if record.status == "differs")
        assert record.check == "layout"
        assert "differs from released weights" in record.message
        assert "WestWaters/pollard-weights#70" in record.message


@HF
def test_a_model_that_transformers_does_not_know(tmp_path):
    kimi = {**V3, "model_type": "kimi_k2"}
    (record,) = of_transformers(tmp_path, kimi)
    assert record.status == "cannot express"
    assert re.fullmatch(r"transformers [\d.]+\w* has no model_type 'kimi_k2'", record.message)


@HF
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("rotary", "holds no inv_freq"),
        ("angles", "the angles at position 1 are not the frequencies that the module holds"),
        ("still", "unit vectors do not turn"),
        ("crossed", "channel 0 turns with channel 3, and others are no layout known here"),
        ("more", "apply needs sections too"),
    ],
)
def test_what_is_measured_is_no_guess(module, words):
    """Modules that turn otherwise than they say are not read by what they say."""
    import torch

    from posenc_torch.audit.attention_code import Unclear
    from posenc_torch.audit.turns import Turns

    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            if module != "rotary":
                self.register_buffer("inv_freq", torch.tensor([1.0, 0.1]))

        def forward(self, x, position_ids):
            times = {"angles": 2.0, "still": 0.0}.get(module, 1.0)
            angles = times * position_ids[..., None].float() * self.inv_freq
            if module == "crossed":
                angles = torch.cat([angles, angles.flip(-1)], -1)
            else:
                angles = torch.cat([angles, angles], -1)
            return angles.cos(), angles.sin()

    def apply(q, k, cos, sin):
        first, second = q.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        if module == "crossed":
            turned = torch.cat([-second.flip(-1), first.flip(-1)], -1)
        return q * cos + turned * sin, k

    def needing(q, k, cos, sin, sections):
        raise AssertionError

    needing.__name__ = "apply"
    with pytest.raises(Unclear, match=words):
        Turns.measure(Rotary(), needing if module == "more" else apply, "", [1])


@HF
@pytest.mark.long
@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations(tmp_path, name):
    config = RELEASED[name]
    differing, agreeing = checked(of_transformers(tmp_path, config))
    assert not differing
    assert agreeing >= 5 or name == "ESM-2"


@HF
@pytest.mark.long
@pytest.mark.parametrize("name", ODD)
def test_odd_configurations(tmp_path, name):
    differing, agreeing = checked(of_transformers(tmp_path, whole(ODD[name])))
    assert not differing
    assert agreeing >= 5 or name == "Kimi Linear"


LLAMA = whole(sizes("llama", 64, 4, 256, num_hidden_layers=2))


def of_mlx_lm(tmp_path, monkeypatch, config, *attentions):
    """Findings by check, of a reader of mlx-lm whose model has these attention modules."""
    asked = reader(monkeypatch, lambda given: attentions)
    return {one.check: one for one in audit(tmp_path, config, asked)}


def test_the_reader_of_mlx_lm_measures_a_rotation(tmp_path, monkeypatch):
    found = of_mlx_lm(tmp_path, monkeypatch, LLAMA, Attention(Turn(16)), Attention(Turn(16)))
    assert {one.status for one in found.values()} == {"agrees", "cannot express"}
    assert {name for name, one in found.items() if one.status == "agrees"} == {
        "frequencies", "rotary width", "layout", "attention factor", "softmax factor", "sections",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "check", "words"),
    [
        (Turn(16, base=1000), "frequencies", "7 of 8 frequencies differ"),
        (Turn(8), "rotary width", "8 channels rotate, not 16"),
        (Turn(16, pairs="interleaved"), "layout", "pairs are neighbours"),
        (Turn(16, pairs="interleaved", back=True), "layout", "the other way"),
        (Turn(16, factor=2.0), "attention factor", "multiplied by 2, not 1"),
        (None, "frequencies", "these layers rotate, and are left unrotated"),
        (Turn(0), "frequencies", "these layers rotate, and are left unrotated"),
    ],
)
def test_what_the_reader_of_mlx_lm_tells(tmp_path, monkeypatch, turn, check, words):
    found = of_mlx_lm(tmp_path, monkeypatch, LLAMA, Attention(turn), Attention(turn))
    assert found[check].status == "differs"
    assert words in found[check].message


def test_the_reader_of_mlx_lm_asks_each_layer_and_each_length(tmp_path, monkeypatch):
    config = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    grows = Turn(16, grows=256)
    assert of_mlx_lm(tmp_path, monkeypatch, config, Attention(grows))["frequencies"].status == (
        "agrees"
    )
    found = of_mlx_lm(tmp_path, monkeypatch, config, Attention(Turn(16)), Attention(grows))
    assert "layers 0 of 2: DynamicNTK is declared" in found["frequencies"].message
    unread = Attention(Turn(16), refuses=True)
    found = of_mlx_lm(tmp_path, monkeypatch, config, unread)
    assert "could not be called with a prompt" in found["frequencies"].message


def test_the_reader_of_mlx_lm_asks_whether_the_module_is_called(tmp_path, monkeypatch):
    unused = Attention(Turn(16), calls=False)
    found = of_mlx_lm(tmp_path, monkeypatch, LLAMA, unused)
    assert "left unrotated" in found["frequencies"].message


def test_what_mlx_lm_does_not_know_is_a_record(tmp_path, monkeypatch):
    def refuse(error):
        def refusing(given):
            raise error

        return refusing

    said = "Model type llama not supported."
    (record,) = audit(tmp_path, LLAMA, reader(monkeypatch, None, refuse(ValueError(said))))
    assert (record.status, said in record.message) == ("cannot express", True)
    error = TypeError("__init__() missing 1 required positional argument: 'rope_theta'")
    (record,) = audit(tmp_path, LLAMA, reader(monkeypatch, refuse(error)))
    assert record.status == "cannot express"
    assert record.message.endswith("needs keys that are missing: rope_theta")


@HF
@pytest.mark.long
def test_every_family_with_a_plan_by_the_defaults_of_its_class(tmp_path):
    from transformers import CONFIG_MAPPING

    compared, different = 0, set()
    models = [kind for kind, family in FAMILIES.items() if family.planned] + ["hy_v4"]
    for kind in (kind for kind in models if kind in CONFIG_MAPPING):
        config = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
        differing, agreeing = checked(of_transformers(tmp_path, config))
        different |= {(kind, check) for check in differing}
        compared += agreeing > 0
    assert different <= KNOWN
    assert compared > 70


@pytest.mark.parametrize("part", [page.weights, page.planted])
def test_the_page_is_what_its_command_writes(part):
    assert f"\n{part()}\n" in page.PAGE.read_text(encoding="utf-8")
