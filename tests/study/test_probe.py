"""Probes of any function from tokens to logits: ``posenc.probe.probe``."""

from __future__ import annotations

import json

import numpy as np
import pytest
from frameworks import HAS

import posenc.study
from posenc.probe import Text, byte_lengths, losses_of, probe
from posenc.probe.measures import edges
from posenc.probe.passkey import Symbols, Words
from posenc.probe.text import of_bytes, read
from posenc.study.key_bytes import key_tokens

V = 11
RNG = np.random.default_rng(0)
BIGRAMS = RNG.normal(size=(V, V))
TOKENS = RNG.integers(0, V, 700)


def numpy_model(tokens):
    """Logits that depend on the token and on how far it is from the start of the window."""
    return BIGRAMS[tokens] * (1 + np.arange(tokens.shape[1])[:, None] / 50)


def torch_model(tokens):
    torch = pytest.importorskip("torch")
    return torch.tensor(numpy_model(tokens), requires_grad=True)


def jax_model(tokens):
    jax = pytest.importorskip("jax")
    return jax.numpy.asarray(numpy_model(tokens).astype(np.float32))


def copying_model(vocabulary):
    """Predicts what followed the longest earlier repeat of the tokens so far."""

    def logits(tokens):
        out = np.zeros((*tokens.shape, vocabulary))
        for row, own in enumerate(tokens):
            run = np.zeros(len(own), int)  # by place: how many tokens before it repeat
            for t in range(1, len(own)):
                same = own[:t] == own[t]
                run[1:t] = np.where(same[1:], run[: t - 1] + 1, 0)
                run[0] = same[0]
                if run[:t].any():
                    out[row, t, own[int(np.argmax(run[:t])) + 1]] = 30.0
        return out

    return logits


def by_hand(first, length):
    """Bits of a window, token by token, in float64."""
    found = []
    for t in range(length):
        x = BIGRAMS[TOKENS[first + t]] * (1 + t / 50)
        p = np.exp(x - x.max())
        found.append(-np.log2(p[TOKENS[first + t + 1]] / p.sum()))
    return np.array(found)


def test_loss_by_length_and_position_is_that_of_a_plain_computation():
    found = probe(numpy_model, TOKENS, [8, 24, 50], windows=3, keys=0)
    starts = np.linspace(0, 700 - 51, 3).astype(int)
    for record in found.records:
        n = record["length"]
        # Windows end with their stretch; of 50 tokens, two of 24 leave out the first two.
        firsts = [[s + 50 - n * k for k in range(50 // n, 0, -1)] for s in starts]
        bits = np.array([[by_hand(first, n) for first in own] for own in firsts])
        np.testing.assert_allclose(record["bits"], bits.sum((1, 2)), rtol=1e-12)
        np.testing.assert_allclose(record["last_bits"], bits[:, -1, -4:].sum(-1), rtol=1e-12)
        parts = np.split(bits.mean((0, 1)), edges(n)[:-1])
        np.testing.assert_allclose(record["by_position"], [p.mean() for p in parts], rtol=1e-12)
        assert found.loss("model")[n] == pytest.approx(bits.mean(), rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_windows_at_once_change_nothing(batch_size):
    one, other = (
        probe(numpy_model, TOKENS, [8, 48], batch_size=size, depths=3)
        for size in (None, batch_size)
    )
    assert one.loss("model") == other.loss("model")
    assert [r.get("right") for r in one.records] == [r.get("right") for r in other.records]


@pytest.mark.parametrize("model", [numpy_model, torch_model, jax_model])
def test_losses_a_few_positions_at_a_time_are_those_of_all(model):
    tokens, labels = TOKENS[None, :60].repeat(2, 0), TOKENS[None, 1:61].repeat(2, 0).copy()
    labels[1, ::3] = -1
    loss, right = losses_of(model(tokens), labels)
    for cells in (1, 17 * 2 * V)[model is jax_model :]:
        parts = losses_of(model(tokens), labels, cells)
        np.testing.assert_allclose(parts[0], loss, rtol=1e-6)
        assert np.array_equal(parts[1], right)
    np.testing.assert_allclose(loss[0] / np.log(2), by_hand(0, 60), rtol=2e-5)
    assert not loss[1, ::3].any()
    assert not right[1, ::3].any()


@pytest.mark.long
def test_models_of_all_frameworks_are_rows_side_by_side():
    models = {"numpy": numpy_model}
    models |= {"torch": torch_model} if HAS["torch"] else {}
    models |= {"jax": jax_model} if HAS["jax"] else {}
    found = posenc.study.probe(models, TOKENS, [16, 64], depths=2, keys=2)
    alone = {name: probe({name: model}, TOKENS, [16, 64], keys=0) for name, model in models.items()}
    for name in models:
        assert found.loss(name) == alone[name].loss(name)
        assert found.loss(name) == pytest.approx(found.loss("numpy"), rel=1e-5)


@pytest.mark.parametrize("in_words", [False, True])
def test_a_model_that_copies_finds_passkeys_and_a_random_one_does_not(in_words):
    lengths = [360, 500] if in_words else [32, 90]
    models = {
        "copies": copying_model(256 if in_words else V),
        "random": lambda tokens: RNG.normal(size=(*tokens.shape, 256)),
    }
    text = of_bytes(bytes(range(200)) * 4) if in_words else TOKENS
    encode = (lambda words: list(words.encode())) if in_words else None
    found = probe(models, text, lengths, depths=3, keys=2, windows=1, encode=encode)
    for record in found.records:
        if record["measure"] == "passkey":
            share = np.mean(record["right"])
            assert np.shape(record["right"]) == (3, 2)
            assert share == (1 if record["scheme"] == "copies" else 0)
    shown = found.text()
    assert "≥ 500" in shown or "≥ 90" in shown
    assert f"< {lengths[0]}" in shown


@pytest.mark.parametrize("source", [Symbols((7, 3, 4, 5)), Words(lambda s: list(s.encode()), 9)])
def test_a_passkey_stands_where_its_depth_says(source):
    length = 400 if isinstance(source, Symbols) else 6000
    for depth in (0, 0.5, 1):
        tokens, labels = source.draw(np.random.default_rng(1), length, depth)
        assert tokens.shape == labels.shape == (length,)
        answer = labels[labels >= 0]
        end = np.flatnonzero(labels >= 0)
        assert list(end) == list(range(length - len(answer), length))
        assert list(tokens[end[1:]]) == list(answer[:-1])  # it reads the key so far
        if isinstance(source, Symbols):
            assert list(np.flatnonzero(tokens == 7)) == [round(depth * (length - 5)), length - 2]
        else:
            key = bytes(answer.tolist()).decode()
            prompt = bytes(tokens[1:].tolist()).decode()
            assert prompt.count(f"key is{key}.") == 1
            share = prompt.index(f"key is{key}.") / len(prompt)
            assert abs(share - depth) < 0.03


def test_a_length_without_room_for_a_prompt_has_no_cell():
    encode = lambda words: list(words.encode())  # noqa: E731
    found = probe(copying_model(256), of_bytes(bytes(900)), [64], encode=encode)
    (record,) = (r for r in found.records if r["measure"] == "passkey")
    assert record["right"] is None
    assert "more than 64" in record["why"]
    assert "Passkeys" not in found.text()
    assert "None of passkeys at 64: a prompt needs" in found.text()


def test_key_tokens_are_those_that_only_a_far_repeat_predicts():
    tokens = RNG.integers(0, 10**6, (2, 200))
    tokens[0, 150:160] = tokens[0, 20:30]  # 130 back
    tokens[1, 60:66] = tokens[1, 50:56]  # 10 back
    found = key_tokens(tokens, 64, 3)
    assert np.flatnonzero(found[0]).tolist() == list(range(152, 159))  # targets are one earlier
    assert not found[1].any()
    assert np.flatnonzero(key_tokens(tokens, 9, 3)[1]).tolist() == [62, 63, 64]


def test_bits_per_byte_count_the_bytes_of_the_scored_tokens():
    lengths = RNG.integers(1, 5, len(TOKENS))
    text = Text(TOKENS, lengths)
    found = probe(numpy_model, text, [25, 50], windows=2, keys=0)
    for record in found.records:
        starts = (0, 700 - 51)
        covered = [int(lengths[s + 1 : s + 51].sum()) for s in starts]
        assert record["bytes"] == covered
        per_byte = found.loss("model", per="bytes")[record["length"]]
        assert per_byte == pytest.approx(sum(record["bits"]) / sum(covered))
    assert "per byte" in found.text()


def test_bytes_of_tokens_add_up_to_those_of_the_text():
    text = "aé漢😀 b"
    # The emoji is three tokens, all of which end behind it, and the space belongs to b.
    ends = np.array([1, 2, 3, 4, 4, 4, 6])
    assert byte_lengths(text, ends).tolist() == [1, 2, 3, 4, 0, 0, 2]


def test_a_first_token_of_every_window_is_read_and_not_scored():
    read_tokens = []

    def model(tokens):
        read_tokens.append(tokens)
        return numpy_model(tokens)

    plain, other = (
        probe(model, Text(TOKENS, start=start), [10], windows=2, keys=0) for start in (None, 3)
    )
    assert (read_tokens[1][:, 0] == 3).all()
    assert np.array_equal(read_tokens[0][:, 1:], read_tokens[1][:, 1:])
    one, two = plain.records[0], other.records[0]
    assert one["tokens"] == two["tokens"]
    assert one["by_position"][1:] == two["by_position"][1:]
    assert one["by_position"][0] != two["by_position"][0]


def test_token_ids_in_files(tmp_path):
    ids = np.array([1, 2, 70000])
    np.save(tmp_path / "a.npy", ids)
    ids.astype("<u4").tofile(tmp_path / "b.bin")
    ids[:2].astype("<u2").tofile(tmp_path / "c.bin")
    assert read([tmp_path / "a.npy"], None, vocabulary=9).tokens.tolist() == ids.tolist()
    assert read([tmp_path / "b.bin"], None, vocabulary=10**5).tokens.tolist() == ids.tolist()
    assert read([tmp_path / "c.bin"], None, vocabulary=9).tokens.tolist() == [1, 2]
    np.save(tmp_path / "floats.npy", [0.5])
    with pytest.raises(ValueError, match=r"text: floats\.npy must be integers \(n,\), got float64"):
        read([tmp_path / "floats.npy"], None, vocabulary=9)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    with pytest.raises(ValueError, match="3 bytes"):
        read([tmp_path / "odd.bin"], None, vocabulary=9)
    with pytest.raises(ValueError, match=r"latin\.txt' needs a tokenizer"):
        read([tmp_path / "latin.txt"], None, vocabulary=9)
    with pytest.raises(ValueError, match="is not UTF-8"):
        read([tmp_path / "latin.txt"], lambda s: (np.array([1]), None), vocabulary=9)
    with pytest.raises(FileNotFoundError, match="absent"):
        read([tmp_path / "absent"], None, vocabulary=9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eval_lens": [8, 800]}, "800 needs a text of 801 tokens, and tokens has 700"),
        ({"eval_lens": []}, "at least one length"),
        ({"eval_lens": [0]}, "eval_lens must be at least 1, got 0"),
        ({"windows": 80}, "windows must be 1 to 77"),
        ({"keys": -1}, "keys must be an integer of at least 0, got -1"),
        ({"tokens": [0.5]}, "tokens must be integers"),
        ({"logits": {}}, "at least one model"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"attention_len": 9, "distances": len}, "attention_len must be 0 to 8"),
    ],
)
def test_bad_input_is_an_error_before_any_work(change, message):
    def never(tokens):
        raise AssertionError

    given = {"logits": never, "tokens": TOKENS, "eval_lens": [8], **change}
    with pytest.raises(ValueError, match=message):
        probe(**given)


def test_a_model_that_fails_is_a_row_without_numbers():
    def wrong(tokens):
        return np.full((*tokens.shape, V), np.nan)

    found = probe({"good": numpy_model, "wrong": wrong, "odd": len}, TOKENS, [8], keys=0)
    assert [record["status"] for record in found.records] == ["ok", "failed", "failed"]
    assert "loss at position 0 of window 0 is nan" in found.text()


@pytest.mark.long
def test_files_have_every_number_and_distances_are_drawn(tmp_path):
    distances = {"b": lambda tokens: np.arange(6).reshape(2, 3) + tokens.shape[1]}
    models = {"a": numpy_model, "b": numpy_model}
    found = probe(models, TOKENS, [16, 64], depths=2, keys=1, distances=distances)
    names = {path.name for path in found.write(tmp_path)}
    drawn = {
        f"{n}.{f}" for n in ("attention", "loss", "passkey", "position") for f in ("png", "svg")
    }
    assert drawn <= names
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert "b,attention,16,layer 1 head 2,21.0,tokens" in rows
    assert "no function was given" in (tmp_path / "table.md").read_text()
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == [r["run"] for r in found.records]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert page.count("<table>") == page.count("</table>") == 5  # there are no key tokens
