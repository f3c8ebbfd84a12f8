"""Fine-tuning after a change of scheme, sliding windows, random float positions."""

from __future__ import annotations

import csv
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from frameworks_installed import require
from sample import long, some

import posenc
from posenc.layers import LayerPlan
from posenc.study import Study, extension, run_study, windows
from posenc.study import run as runs
from posenc.study.captions import PROTOCOLS, caption, settings
from posenc.study.corpus import Corpus
from posenc.study.decoder import Decoder
from posenc.study.differences import difference_tables
from posenc.study.estimate import _forward, _sliding
from posenc.study.float_positions import Step, units
from posenc.study.outcomes import outcomes, tasks
from posenc.study.plots import finetuning_svg
from posenc.study.progress import Progress
from posenc.study.recipe import Recipe
from posenc.study.results import write_tables
from posenc.study.runner import compute, plan
from posenc.study.schedule import learning_rate
from posenc.study.specs import Plans
from posenc.study.tables import loss_tables
from posenc.study.task_tables import sentences, task_table, tasks_csv
from posenc.study.tasks.text import Text
from posenc.study.terminal import describe

BACKENDS = [name for name in ("jax", "torch") if require(name)]
several_backends = pytest.mark.parametrize("backend", some(BACKENDS, BACKENDS[-1:], long))
SMALL = {
    "train_len": 8, "steps": 3, "batch_size": 4, "layers": 2, "dim": 16, "heads": 2,
    "eval_windows": 2, "eval_lens": (8, 16), "warmup": 1,
}  # fmt: skip
TUNED = {"finetune_steps": 2, "finetune_len": 16}


@pytest.fixture
def corpus(monkeypatch):
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, size=n).tolist()) for n in (2, 3, 4, 5, 7)]
    text = b" ".join(words[i] for i in rng.integers(0, len(words), size=800))
    made = Corpus("words", text[:-800], text[-800:], 1, 1, "0" * 64)
    monkeypatch.setattr("posenc.study.runner.read_corpus", lambda text: made)
    return made


def study(tmp_path, **changes):
    given = {**SMALL, "schemes": ("rope",), "seeds": 1, "backend": BACKENDS[-1], "windowed": ()}
    return Study(**{**given, "out": str(tmp_path / "out"), **changes})


def carried_out(one, corpus):
    with ThreadPoolExecutor(1) as pool:
        return list(run_study(one, corpus, executor=pool))


def recipe(**changes):
    return Recipe(**{**SMALL, **changes})


# Fine-tuning.


@several_backends
def test_labels_that_share_a_training_are_fine_tuned_from_it(
    tmp_path, corpus, monkeypatch, backend
):
    """Without fine-tuning nothing changes, and before it a model is the one without."""
    labels, begun, make = ("rope", "rope~rope", "rope~nope"), [], runs.make_trainer
    plain = carried_out(study(tmp_path / "plain", schemes=labels, backend=backend), corpus)
    monkeypatch.setattr(runs, "make_trainer", lambda *of: begun.append(of[1]) or make(*of))
    one = study(tmp_path, schemes=labels, backend=backend, **TUNED)
    tuned = carried_out(one, corpus)
    assert [record["error"] for record in tuned] == [None] * 3
    for before, after in zip(plain, tuned, strict=True):
        assert "finetune" not in before
        assert "before" not in before
        assert after["curve"] == before["curve"]
        for key in ("loss", "loss_same_targets"):
            assert after["before"][key] == before[key]
            assert after[key] != before[key]
    rope, same, nope = tuned
    assert rope["loss"] == same["loss"]  # rope is fine-tuned as rope~rope is
    assert rope["finetune"]["curve"] == same["finetune"]["curve"]
    assert rope["loss"] != nope["loss"]
    # One training, and three that go on from its weights.
    assert len({record["training"] for record in tuned}) == 1
    _, first, *others = begun  # after the trial of the backend
    assert len(others) == 3
    starts = {decoder.digest() for decoder in others}
    assert len(starts) == 1
    assert first.digest() not in starts
    assert {record["finetune"]["weights_sha256"] for record in tuned} == starts
    assert plan(one, corpus)[1] == []


@several_backends
@pytest.mark.parametrize("label", ["rope~t5", "t5~t5@5"])
def test_the_tested_scheme_is_the_one_that_is_trained(backend, label, corpus):
    """New arrays start from their initial values, others from trained ones; both are learned."""
    made = recipe(**TUNED)
    plans = Plans.of(label, made)
    (run,) = Study(**{**SMALL, **TUNED}, schemes=(label,), seeds=1, windowed=()).runs(
        corpus, backend
    )
    task = Text().with_text(corpus)
    trained = Decoder.of(made, plans.trained, 0)
    model = runs.make_trainer(run, trained)
    batch = task.training(made, 0, 0, 2)
    model.train(batch.tokens, batch.labels, np.full(2, 0.05))
    state = model.state()
    start = extension.starting_point(made, plans, label, 0, state)
    table = start.position[0]["table"]
    if label == "rope~t5":
        assert np.array_equal(table, Decoder.of(made, plans.tested, 0).position[0]["table"])
    else:
        assert np.array_equal(table, state["position.0.table"])
        assert not np.array_equal(table, trained.position[0]["table"])
    model = runs.make_trainer(run, start)
    tuning = made.finetuning()
    stream = int(np.random.SeedSequence([0, 7]).generate_state(1, np.uint64)[0])
    batch = task.training(tuning, stream, 0, 1)
    losses, _ = model.answers(batch.tokens[0], batch.labels[0], None)
    facts = extension.fine_tune(model, start, task, 0, lambda step, loss: None)
    assert facts["curve"][0] == (1, pytest.approx(losses.mean() / math.log(2), abs=1e-5))
    learned = model.state()["position.0.table"]
    assert (np.abs(learned - table).max(axis=-1) > 1e-6).all()


def test_the_recipe_of_fine_tuning():
    made = recipe(learning_rate=0.02, steps=300, warmup=50, finetune_steps=200, finetune_len=16)
    tuning = made.finetuning()
    assert (tuning.steps, tuning.train_len, tuning.batch_size) == (200, 16, 2)  # the same tokens
    assert tuning.learning_rate == made.finetune_learning_rate == 0.002
    assert (tuning.warmup, tuning.finetune_steps) == (20, 0)
    assert learning_rate(tuning, 19) == 0.002
    assert 0 < learning_rate(tuning, 199) < 2e-5
    assert recipe(finetune_steps=1).finetune_len == 16  # the longest
    assert recipe(finetune_steps=1, finetune_len=64).finetuning().batch_size == 1
    assert recipe().finetune_len is None


def test_fine_tuning_reads_a_stream_of_its_own(corpus):
    """The same for every scheme of a seed, and none that training has read."""
    drawn = []

    class Counting:
        def train(self, tokens, labels, rates, **more):
            drawn.append((tokens, more))
            return np.zeros(len(rates))

    task, made = Text().with_text(corpus), recipe(**TUNED)
    for label, seed in (("rope", 0), ("nope", 0), ("nope", 1)):
        start = Decoder.of(made, Plans.of(label, made).tested, seed)
        extension.fine_tune(Counting(), start, task, seed, lambda step, loss: None)
    rope, nope, other = (np.stack([tokens for tokens, _ in drawn[n : n + 2]]) for n in (0, 2, 4))
    assert np.array_equal(rope, nope)
    assert not np.array_equal(nope, other)
    assert not np.array_equal(rope[:, 0], task.training(made.finetuning(), 0, 0, 2).tokens)
    assert all(more == {} for _, more in drawn)


def test_fine_tuning_knows_its_length_as_an_evaluation_does(corpus):
    seen = []

    class Counting:
        def train(self, tokens, labels, rates, plan=None):
            seen.append(plan)
            return np.zeros(len(rates))

    made = recipe(**TUNED)
    dynamic = Plans.of("rope~rope_dynamic:factor=2", made).tested
    start = Decoder.of(made, dynamic, 0)
    extension.fine_tune(Counting(), start, Text().with_text(corpus), 0, lambda step, loss: None)
    assert seen[0] == LayerPlan(tuple(scheme.at_length(16) for scheme in dynamic.schemes))


def test_tables_figure_and_csv_have_both_rows(tmp_path, corpus):
    one = study(tmp_path, schemes=("rope", "rope~nope"), seeds=2, windowed=("rope",), **TUNED)
    records = carried_out(one, corpus)
    summary = describe(one, corpus, one.backend, 1.0)
    table = loss_tables(summary, records)[0]
    assert [row[0] for row in table.rows] == [
        "rope", "rope, window 8", "rope, before", "rope~nope", "rope~nope, before"
    ]  # fmt: skip
    assert table.minor == {1, 2, 4}
    means = [np.mean([r[0]["loss"]["16"] if r[1] else r[0]["before"]["loss"]["16"]
             for r in ((one, after) for one in records if one["scheme"] == "rope~nope")])
             for after in (True, False)]  # fmt: skip
    assert [row[2][:5] for row in table.rows[3:]] == [f"{mean:.3f}" for mean in means]
    assert "after fine-tuning of 2 steps at length 16" in caption(records)
    assert "rope too, tested as trained: 2 steps of 2 x 16" in settings(summary, records)[-1]
    compared = [row[0] for table in difference_tables(summary, records) for row in table.rows]
    assert not [name for name in compared if "before" in name]
    assert finetuning_svg(summary, records).count("rope~nope") == 1
    write_tables(tmp_path, records)
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["finetune_steps"] for row in rows[:4]] == ["0", "0", "2", "2"]
    assert float(rows[0]["loss"]) == records[0]["before"]["loss"]["8"]
    assert float(rows[2]["loss"]) == records[0]["loss"]["8"]
    assert "loss_sliding" not in rows[0]


def test_tasks_are_fine_tuned_too(tmp_path):
    small = {"steps": 4, "batch_size": 3, "dim": 16, "heads": 2, "eval_windows": 8, "warmup": 1}
    one = Study(
        task=("copy",), schemes=("rope", "rope~nope"), seeds=1, backend=BACKENDS[-1],
        out=str(tmp_path), finetune_steps=2, train_len=4, learning_rate=0.05,
        finetune_learning_rate=0.05, **small,
    )  # fmt: skip
    records = carried_out(one, None)
    assert [record["error"] for record in records] == [None] * 2
    assert records[1]["finetune"]["len"] == 16
    assert records[1]["before"]["scores"] != records[1]["scores"]
    summary = describe(one, None, one.backend, 1.0)
    ((label, about),) = tasks(summary).items()
    found = outcomes(about, records)
    assert [each.before_finetuning for each in found] == [False, True, False, True]
    table = task_table(label, about, records)
    names = [row[0] for row in table.rows]
    assert [name for name in names if ", before" in name] == [f"{n}, before" for n in names[::2]]
    assert "before" not in " ".join(sentences(summary, records))
    rows = list(csv.DictReader(tasks_csv(summary, records).splitlines()))
    assert {row["finetune_steps"] for row in rows} == {"0", "2"}


def test_progress_names_the_run_that_is_fine_tuned(tmp_path, monkeypatch):
    one, printed = study(tmp_path, schemes=("rope", "rope~nope"), **TUNED), []
    monkeypatch.setattr("posenc.study.progress._EVERY", 0.0)
    monkeypatch.setattr("posenc.study.progress._SHARE", 0.0)
    progress = Progress(one, 0, printed.append, trainings=1)
    rope, nope = one.runs(Corpus("", b"", b"", 0, 0, ""), BACKENDS[-1])
    for run, step in ((rope, 1), (rope, 3), (rope, 4), (nope, 4), (nope, 5)):
        progress.step(run, step, 2.0)
    assert [line.split(",")[0].strip() for line in printed] == [
        "rope seed 0: step 1 of 3", "rope seed 0: trained", "rope seed 0: fine-tuning",
        "rope~nope seed 0: fine-tuning", "rope~nope seed 0: trained",
    ]  # fmt: skip
    assert not [line for line in printed if "left" in line]  # no training is left


class Stateless:
    """A trainer of another package, from before there was fine-tuning."""

    def __init__(self, decoder, device, scratch=None):
        pass


def test_a_trainer_without_a_state_is_refused_before_any_training(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(runs, "load_trainer", lambda backend: Stateless)
    one = study(tmp_path, **TUNED)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match="finetune_steps needs a trainer with 'state'"),
    ):
        list(compute(one, plan(one, corpus)[1], executor=pool))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schemes": ("rope~t5",)}, "needs the learned .* has none; finetune_steps would train"),
        (
            {"schemes": ("t5/t5:scaled=False~t5",), **TUNED},
            r"cannot be fine-tuned: layers \[0, 1\] share one learned array 'table', and have 2 of",
        ),
        ({"finetune_len": 16}, "finetune_len=16 needs finetune_steps, which is 0"),
        ({"finetune_learning_rate": 0.1}, "finetune_learning_rate=0.1 needs finetune_steps"),
        ({"finetune_steps": -1}, "finetune_steps must be at least 0, got -1"),
        ({"finetune_steps": 1, "finetune_len": 1}, "finetune_len must be at least 2, got 1"),
        (
            {"finetune_steps": 1, "finetune_learning_rate": -1.0},
            "finetune_learning_rate must be .*-1.0",
        ),
        (
            {"random_positions": 12, **TUNED},
            "random_positions must be at least 16, the tokens of finetune_len=16, got 12",
        ),
        ({"stride": -1}, "stride must be at least 0, got -1"),
        ({"stride": 9}, "stride must be at most 8, the shortest of eval_lens, got 9"),
        (
            {"stride": 2, "task": ("copy",), "eval_lens": None},
            "stride is for the task text, which is none of: copy",
        ),
        (
            {"random_positions": 16, "random_float_positions": 16},
            "give random_positions or random_float_positions, not both, got 16 and 16",
        ),
        ({"random_float_positions": 7}, "random_float_positions must be at least 8, got 7"),
        (
            {"random_float_positions": 16, "schemes": ("rope+t5",)},
            r"'rope\+t5': random_float_positions cannot be positions of T5Bias, accepted: RoPE",
        ),
        (
            {"random_float_positions": 16, "schemes": ("learned",)},
            "cannot be positions of Learned,",
        ),
        ({"random_float_positions": 16, "schemes": ("rope@3",)}, "has no windows of layers"),
    ],
)
def test_bad_options(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        study(tmp_path, **changes)


def test_a_text_that_is_shorter_than_fine_tuning(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("posenc.study.study.read_corpus", lambda text: corpus)
    size = len(corpus.train)
    assert study(tmp_path, finetune_steps=1, finetune_len=size - 1).corpus() is corpus
    with pytest.raises(ValueError, match=f"it needs .* .a sequence of {size}."):
        study(tmp_path, finetune_steps=1, finetune_len=size).corpus()


# Sliding windows.


@pytest.fixture
def stretches(corpus):
    return windows.held_out_stretches(corpus.validation, count=3, longest=12)


def losses_of(tokens):
    """What a model might lose: it depends on the target and on its context in the window."""
    context = np.cumsum(tokens[..., :-1], axis=-1, dtype=np.int64)
    return np.sin(context + 3.0 * tokens[..., 1:])


def test_a_stride_of_the_length_is_that_of_separate_windows(stretches):
    for length in (3, 4, 5, 12):
        losses = losses_of(windows.sliding(stretches, length, length))
        separate = losses_of(windows.non_overlapping(stretches, length))
        assert windows.sliding_mean(losses, length) == pytest.approx(separate.mean(), abs=1e-12)


@pytest.mark.parametrize(("length", "stride"), [(4, 1), (4, 2), (5, 3), (12, 1)])
def test_sliding_windows_are_those_of_the_definition(stretches, length, stride):
    scored = []
    for stretch in stretches:
        end = length
        while end <= 12:
            window = stretch[end - length : end + 1]
            new = length if end == length else stride
            scored += losses_of(window)[length - new :].tolist()
            end += stride
    losses = losses_of(windows.sliding(stretches, length, stride))
    assert windows.sliding_mean(losses, stride) == pytest.approx(np.mean(scored), abs=1e-12)
    if stride == 1:  # every target once
        assert len(scored) == 3 * 12


def test_sliding_windows_are_a_column_where_they_are_asked(tmp_path, corpus):
    one = study(tmp_path, stride=4)
    (record,) = carried_out(one, corpus)
    assert set(record["loss_sliding"]) == {"8", "16"}
    assert record["loss_sliding"]["16"] == pytest.approx(record["loss"]["16"], abs=1e-6)
    assert record["loss_sliding"]["8"] != record["loss"]["8"]
    summary = describe(one, corpus, one.backend, 1.0)
    captions = [table.caption for table in loss_tables(summary, [record])]
    assert PROTOCOLS["loss_sliding"] in captions
    assert "Sliding windows advance by 4 bytes." in settings(summary, [record])
    write_tables(tmp_path, [record])
    with (tmp_path / "results.csv").open() as file:
        assert [float(row["loss_sliding"]) for row in csv.DictReader(file)] == [
            record["loss_sliding"]["8"], record["loss_sliding"]["16"]
        ]  # fmt: skip
    # 8 bytes: windows at 0, 4 and 8, of 2 stretches; before and after fine-tuning.
    expected = _forward(one.recipes["text"], 8, 6) + _forward(one.recipes["text"], 16, 2)
    assert _sliding(recipe(stride=4)) == expected
    assert _sliding(recipe(stride=4, **TUNED)) == 2 * expected


# Random float positions.


def test_float_positions_are_sorted_in_range_and_of_the_seed():
    made = recipe(random_float_positions=20)
    assert units(20) * 32 == 2**24
    assert units(1024) == 2**14
    drawn = windows.training_positions(made.drawn_from, seed=0, steps=50, length=8)
    real = drawn / units(20)
    assert (np.diff(real) > 0).all()
    assert real.min() >= 0
    assert 19 < real.max() < 20
    assert np.abs(real % 1).max() > 0.9  # between the integers too
    again = windows.training_positions(made.drawn_from, seed=0, steps=50, length=8)
    assert np.array_equal(drawn, again)


REAL = np.array([0.25, 3.5, 7.0, 19.875])


def by_definition(label, real):
    """The embedding of real positions, and scores of one query and key at every pair of them."""
    scheme = Plans.of(label, recipe()).trained.schemes[0]
    rates = 10_000.0 ** (-np.arange(4) / 4)
    if label == "sinusoidal":
        angles = real[:, None] * 10_000.0 ** (-np.arange(8) / 8)
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(real), 16)
    distance = real[:, None] - real[None, :]
    if label == "alibi":
        return -np.array(scheme.head_slopes())[:, None, None] * np.abs(distance)
    return np.cos(distance[..., None] * rates).sum(-1)[None]


@pytest.mark.parametrize("label", ["rope", "alibi", "sinusoidal"])
def test_schemes_at_float_positions_are_those_of_the_formula(label):
    made = recipe(random_float_positions=20)
    scheme = Plans.of(label, made).trained.schemes[0]

    def found(scheme, pos):
        if label == "sinusoidal":
            return posenc.embedding(scheme, pos, {}, xp=np)
        q = np.ones((1, 2, len(pos), 8)) if label == "rope" else np.zeros((1, 2, len(pos), 8))
        q[..., 4:] = 0  # (1, 0) in each pair
        value = np.eye(len(pos))[None, None].repeat(2, axis=1)
        at = posenc.Tokens(pos=pos)
        out = posenc.attention(q, q, value, scheme, {}, tokens=at, scale=1.0)
        scores = np.log(out[0])
        return scores - scores[..., :1]

    def expected(real):
        wanted = by_definition(label, real)
        return wanted if label == "sinusoidal" else wanted - wanted[..., :1]

    if label == "alibi":  # by its terms, attention leaves out keys that are far away
        assert scheme.bias_terms() == (("", scheme),)
    trained = found(scheme, (REAL * units(20)).astype(np.int64))
    np.testing.assert_allclose(trained, expected(REAL) + np.zeros_like(trained), atol=2e-6)
    for length in (4, 8, 16):  # tokens are spread evenly over 0 to 20
        spread = 20 * (2 * np.arange(1, 5) - 1) / (2 * max(8, length))
        tested = found(scheme.at_length(length), np.arange(4))
        np.testing.assert_allclose(tested, expected(spread) + np.zeros_like(tested), atol=2e-6)
    assert Step(20, 8).at_length(16).size == Fraction(20, 16)


@several_backends
def test_float_positions_are_an_option(tmp_path, corpus, backend):
    labels = ("rope~rope_yarn:factor=2", "alibi+rope", "nope", "sinusoidal")
    given = {"schemes": labels, "backend": backend}
    drawn = carried_out(study(tmp_path, random_float_positions=16, **given), corpus)
    assert [record["error"] for record in drawn] == [None] * len(labels)
    plain = carried_out(study(tmp_path, **given), corpus)
    for one, other in zip(drawn, plain, strict=True):
        assert (one["curve"] == other["curve"]) == (one["scheme"] == "nope")
    summary = describe(study(tmp_path, random_float_positions=16), corpus, BACKENDS[-1], 1.0)
    assert any("real positions drawn from 0 to 16" in line for line in settings(summary, drawn))
