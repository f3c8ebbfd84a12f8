"""Sweeps: equal grids, choices on data that no result scores, tuned runs equal to plain ones."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from frameworks_installed import require

from posenc.cli.main import main
from posenc.study import Study, run_study, runner, terminal, windows
from posenc.study import run as runs
from posenc.study import study as study_module
from posenc.study.corpus import Corpus
from posenc.study.recipe import Recipe
from posenc.study.runner import compute, plan, plan_tuning
from posenc.study.sweep_plots import tuning_picture, tuning_svgs
from posenc.study.sweep_tables import (
    along,
    rise,
    tuning_csv,
    tuning_sentences,
    tuning_summary,
    tuning_table,
)
from posenc.study.sweeps import FACTORS, SEED, Axis, choose, edges, with_values
from posenc.study.tables import table_text
from posenc.study.task_tables import task_tables
from posenc.study.tasks.catalogue import make_task

BACKEND = [name for name in ("jax", "torch") if require(name)][-1]
TINY = {
    "train_len": 8, "eval_lens": (8, 16), "steps": 3, "batch_size": 2, "layers": 1, "dim": 8,
    "heads": 2, "eval_windows": 3, "warmup": 1, "seeds": 2, "backend": BACKEND, "workers": 1,
}  # fmt: skip
TEXT = bytes(np.random.default_rng(0).integers(97, 105, 2000).tolist())
CORPUS = Corpus("letters", TEXT[:-500], TEXT[-500:], 1, 1, "0" * 64)


@pytest.fixture
def made(tmp_path):
    def make(**changes):
        given = {**TINY, "schemes": ("t5", "nope"), "out": str(tmp_path / "out"), **changes}
        return Study(**given)

    return make


@pytest.fixture(autouse=True)
def text(monkeypatch):
    for module in (runner, study_module):
        monkeypatch.setattr(module, "read_corpus", lambda text: CORPUS)


def carried_out(study, corpus=CORPUS):
    with ThreadPoolExecutor(1) as pool:
        return list(run_study(study, corpus, executor=pool))


def tried(study, corpus=CORPUS):
    kept, missing = plan_tuning(study, corpus)
    with ThreadPoolExecutor(1) as pool:
        return [*kept, *compute(study, missing, executor=pool)]


def losses(records):
    return {(r["train_len"], r["scheme"], r["seed"]): r["loss"] for r in records}


# What is tried.


def test_every_scheme_has_the_same_grid(made):
    study = made(schemes=("t5", "rope", "alibi"), sweep=("learning-rate", "position-lr-scale=1,3"))
    of = {one.trained: one for one in study.tunings}
    rates = tuple(0.012 * factor for factor in FACTORS)
    assert [one.grid["learning_rate"] for one in of.values()] == [pytest.approx(rates)] * 3
    assert of["t5"].grid["position_lr_scale"] == (1.0, 3.0)
    # Without learned params, the factor would change nothing.
    assert [len(list(of[n].combinations())) for n in ("t5", "rope", "alibi")] == [10, 5, 5]
    every = [run for _, each in study.trials(CORPUS, BACKEND) for run in each]
    assert {run.seed for run in every} == {SEED}
    assert len({run.training_digest() for run in every}) == 20


def test_labels_that_are_trained_as_one_are_tuned_once(made):
    study = made(schemes=("rope", "rope~rope_yarn", "nope"), sweep=("learning-rate",))
    assert [one.labels for one in study.tunings] == [("rope", "rope~rope_yarn"), ("nope",)]


def test_an_option_of_a_scheme_is_that_of_its_own_labels(made):
    study = made(schemes=("rope:base=400", "rope+alibi", "nope"), sweep=("rope:base",))
    (one,) = study.tunings
    assert (one.labels, one.grid) == (("rope:base=400",), {"rope:base": (100, 200, 400, 800, 1600)})
    label, _ = with_values("rope:layout='half'@4", Recipe(), {"rope:base": 7.0})
    assert label == "rope:layout='half',base=7.0@4"


def test_whole_numbers_stay_whole(made):
    study = made(warmup=2, sweep=("warmup", "position-lr-scale=1,10"))
    assert study.tunings[0].grid == {"warmup": (1, 2, 4, 8), "position_lr_scale": (1.0, 10.0)}
    assert [type(v) for v in study.tunings[0].grid["position_lr_scale"]] == [float, float]


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("learnin-rate", "names 'learnin-rate' .did you mean 'learning-rate'"),
        ("steps", "cannot vary 'steps', which sets the model, the budget or the scoring"),
        ("learning-rate=a,2", "a value must be a number, got 'a'"),
        ("learning-rate=True,2", "a value must be a number, got 'True'"),
        ("learning-rate=1", "at least two values, each once"),
        ("learning-rate=1,1,2", "at least two values, each once"),
        ("learning-rate=-1,2", "learning_rate=-1 .*greater than 0, got -1"),
        ("warmup=1.5,2", "warmup=1.5 .*must be an integer"),
        ("random-positions", "the setting is 0.*name values"),
        ("t5:num_bucket", "no numeric option 'num_bucket' .did you mean 'num_buckets'"),
        ("rope:base", "no scheme of the study is 'rope' .*accepted: t5, nope"),
        ("t5:", "has no option"),
    ],
)
def test_a_sweep_that_cannot_be(made, sweep, words):
    with pytest.raises(ValueError, match=words):
        made(sweep=(sweep,))


def test_further_sweeps_that_cannot_be(made):
    with pytest.raises(ValueError, match="no scheme of the study has learned position params"):
        made(schemes=("nope",), sweep=("position-lr-scale",))
    with pytest.raises(ValueError, match="must name each option once"):
        made(sweep=("clip", "clip=1,2"))
    with pytest.raises(ValueError, match="seeds must be at most 1000"):
        made(sweep=("clip",), seeds=1001)


# On what it is scored.


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("longest", [4, 16, 40])
@pytest.mark.parametrize("room", [9, 10, 20, 100])  # between two stretches; 8 bytes need 9
def test_choices_read_no_byte_that_is_scored(count, longest, room):
    size = count * (longest + 1) + max(1, count - 1) * room
    data = bytes(size)
    scored, read = set(), set()
    original = windows.cut

    def spy(store):
        def cut(data, starts, length):
            for start in np.ravel(starts):
                store.update(range(int(start), int(start) + length + 1))
            return original(data, starts, length)

        return cut

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "cut", spy(scored))
        windows.held_out_stretches(data, count=count, longest=longest)
        patch.setattr(windows, "cut", spy(read))
        found = windows.between_stretches(data, count=count, longest=longest, length=8)
    assert len(scored) == count * (longest + 1)
    assert len(read) == found.size
    assert not scored & read
    assert max(read) < size
    assert (found.shape[1] - 1) % 8 == 0 < found.shape[1] - 1


def test_a_text_without_room_between_is_refused(made):
    short = replace(CORPUS, validation=CORPUS.validation[: 3 * 17 + 16])
    task = make_task("text").with_text(short)
    recipe = next(iter(made().recipes.values()))
    task.scores(recipe, 0, lambda t, n, w: (np.zeros(t.shape), t == t), False)
    with pytest.raises(ValueError, match=r"8 bytes lie between .* needs 9"):
        task.check_validation(recipe)


def test_the_training_text_is_that_of_an_untuned_study(made):
    drawn = []
    study = made(sweep=("clip=1,2",))
    for run in (study.trials(CORPUS, BACKEND)[0][1][0], made().runs(CORPUS, BACKEND)[0]):
        task = run.of_task.with_text(CORPUS)
        drawn.append(task.training(run, 0, 0, 3).tokens.tobytes())
    assert drawn[0] == drawn[1]


def test_a_task_is_chosen_on_other_examples_of_training_sizes():
    recipe, task, seen = Recipe(task="majority", eval_windows=20), make_task("majority"), []

    def answer(tokens, labels, window):
        seen.append(tokens)
        return np.full(labels.shape, math.log(2)), labels >= 0

    found = task.validation(recipe, 0, answer)
    assert found == {"loss": 1.0, "token_accuracy": 1.0, "exact_match": 1.0}
    assert seen[0].shape == (20, recipe.train_tokens)
    assert not np.array_equal(seen[0], task.in_domain(recipe, 0).tokens)


# What is chosen.


def outcome(loss, status="ok"):
    return {"status": status, **({"validation": {"loss": loss}} if status == "ok" else {})}


def test_the_lowest_loss_is_chosen_and_an_edge_is_named(made):
    (one,) = made(schemes=("nope",), sweep=("learning-rate=1,2,4",)).tunings
    last = [outcome(3.0), outcome(2.5), outcome(2.0)]
    assert choose(one, last) == {"learning_rate": 4.0}
    assert edges(one, choose(one, last)) == ["learning_rate"]
    inside = [outcome(3.0), outcome(2.5), outcome(0, "diverged")]
    assert choose(one, inside) == {"learning_rate": 2.0}
    assert edges(one, choose(one, inside)) == []
    assert choose(one, [outcome(0, "diverged")] * 3) == {}
    # An option that changes nothing keeps its setting.
    (flat,) = made(schemes=("nope",), sweep=("clip",)).tunings
    assert choose(flat, [outcome(2.0)] * 5) == {"clip": 1.0}


def test_a_tuned_study_is_the_untuned_study_with_the_chosen_values(made, tmp_path, monkeypatch):
    study = made(schemes=("t5",), sweep=("learning-rate=1e-3,1e-2", "t5:num_buckets=4,8"))
    tuned, records = carried_out(study), tried(study)
    assert len(records) == 4
    best = min(records, key=lambda r: r["validation"]["loss"])["tuning"]
    plain = made(
        schemes=(f"t5:num_buckets={best['t5:num_buckets']}",),
        learning_rate=best["learning_rate"],
        out=str(tmp_path / "other"),
    )
    assert [r["loss"] for r in tuned] == [r["loss"] for r in carried_out(plain)]
    assert {r["scheme"] for r in tuned} == {"t5"}
    # Without an option of a scheme they are one run, kept under one name.
    one = made(schemes=("nope",), sweep=("learning-rate=1e-3,1e-2",), out=str(tmp_path / "rate"))
    carried_out(one)
    chosen = min(tried(one), key=lambda r: r["validation"]["loss"])["tuning"]
    kept, missing = plan(made(schemes=("nope",), out=one.out, **chosen), CORPUS)
    assert (len(kept), missing) == (2, [])
    # Nothing is trained again.
    monkeypatch.setattr(runs, "make_trainer", None)
    assert losses(carried_out(study)) == losses(tuned)


def test_a_value_that_diverges_is_a_result(made):
    study = made(schemes=("nope",), sweep=("learning-rate=1e-2,1e30",), steps=6)
    found = tried(study)
    assert [r["status"] for r in found] == ["ok", "diverged"]
    assert len(plan_tuning(study, CORPUS)[0]) == 2  # kept: not tried again
    assert [r["status"] for r in carried_out(study)] == ["ok", "ok"]
    summary = {"tuning": tuning_summary(study.trials(CORPUS, BACKEND), found)}
    (row,) = tuning_table(summary).rows
    assert row[2] == "0.01"
    assert row[-1] == "at the edge; no loss at 1e+30"


def test_several_seeds_choose_by_their_mean(made):
    study = made(schemes=("nope",), sweep=("learning-rate=1,2",), sweep_seeds=3)
    ((one, each),) = study.trials(CORPUS, BACKEND)
    assert [run.seed for run in each] == [SEED, SEED + 1, SEED + 2] * 2
    ((_, single),) = made(schemes=("nope",), sweep=("learning-rate=1,2",)).trials(CORPUS, BACKEND)
    assert [run.digest() for run in single] == [run.digest() for run in each[::3]]
    first = [outcome(2.0), outcome(5.0), outcome(5.0)]
    second = [outcome(3.0), outcome(3.0), outcome(4.0)]
    assert choose(one, [*first, *second]) == {"learning_rate": 2.0}
    assert choose(one, [*first, *second[:2], outcome(0, "diverged")]) == {"learning_rate": 1.0}
    found = [{"run": run.digest(), **r} for run, r in zip(each, [*first, *second], strict=True)]
    about = terminal.describe(study, CORPUS, BACKEND, 1.0)
    summary = {**about, "tuning": tuning_summary([(one, each)], found)}
    table = tuning_table(summary)
    assert "bits per byte, at the training length after 3 runs, the mean of" in table.caption
    assert table.rows[0][2:6] == ("2", "2, 1 to 2", "3.333", "0.667")
    rows = list(csv.DictReader(io.StringIO(tuning_csv(summary))))
    assert [(row["seed"], row["loss"]) for row in rows[:3]] == [
        ("1000", "2.0"), ("1001", "5.0"), ("1002", "5.0")
    ]  # fmt: skip
    assert {row["loss_unit"] for row in rows} == {"bits per byte"}
    with pytest.raises(ValueError, match="sweep_seeds=3 needs sweep, which is empty"):
        made(sweep_seeds=3)


# What is shown.


def test_what_a_sweep_shows(made):
    study = made(schemes=("t5", "nope"), sweep=("learning-rate=1,2,4,8", "position-lr-scale=1,10"))
    trials, found = study.trials(CORPUS, BACKEND), []
    for tuning, each in trials:
        for place, run in enumerate(each):
            loss = abs(place // 2 - 1) + 2 + place % 2 if tuning.trained == "t5" else 9.0 - place
            found.append({"run": run.digest(), **outcome(loss)})
    found[7] = {"run": found[7]["run"], "status": "diverged", "error": "too fast"}
    about = terminal.describe(study, CORPUS, BACKEND, 1.0)
    summary = {**about, "tuning": json.loads(json.dumps(tuning_summary(trials, found)))}
    of_t5, of_nope = summary["tuning"]["schemes"]
    assert of_t5["chosen"] == {"learning_rate": 2.0, "position_lr_scale": 1.0}
    assert along(of_t5, "learning_rate") == {1.0: 3.0, 2.0: 2.0, 4.0: 3.0, 8.0: 4.0}
    assert rise(of_t5, "learning_rate") == "1.000, 1.000"  # 8 is further than twice the choice
    assert rise(of_t5, "position_lr_scale") == "–"
    assert of_nope["edges"] == ["learning_rate"]
    said = " ".join(tuning_sentences(summary))
    assert "nope (learning_rate 8)" in said
    assert "t5 (position_lr_scale 1)" in said
    assert "position_lr_scale changes nothing for nope, so" in said
    rows = list(csv.DictReader(io.StringIO(tuning_csv(summary))))
    assert len(rows) == 12
    assert sum(row["chosen"] == "True" for row in rows) == 2
    assert [row["status"] for row in rows].count("diverged") == 1
    assert len(tuning_svgs(summary)) == 2
    assert tuning_picture(summary, "pdf").startswith(b"%PDF")
    text = table_text(summary, [])
    assert "Tuned runs: each scheme has the learning_rate and position_lr_scale" in text


def test_a_stop_while_tuning_shows_no_untuned_result(made, monkeypatch, capsys, tmp_path):
    plain = made(schemes=("nope",), seeds=1)
    carried_out(plain)
    study = made(schemes=("nope",), seeds=1, sweep=("learning-rate=1e-3,1e-2",))

    def stopped(study, missing, **named):
        with ThreadPoolExecutor(1) as pool:
            yield from compute(study, missing[:1], executor=pool)
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "compute", stopped)
    assert terminal.compare(study) == 130
    shown = capsys.readouterr().out
    assert "the same command continues from here" in shown
    assert "no run has finished yet" in shown
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert len(plan_tuning(study, CORPUS)[1]) == 1


# Several training lengths.


def test_two_lengths_are_the_two_single_studies(made, tmp_path):
    both = made(train_len=(8, 12), eval_lens=None, schemes=("nope",), seeds=1)
    assert [r.eval_lens[-1] for r in both.recipes.values()] == [128, 192]
    assert list(both.recipes) == ["text, 8", "text, 12"]
    found = losses(carried_out(both))
    for length in (8, 12):
        one = made(
            train_len=length, eval_lens=None, schemes=("nope",), seeds=1, out=str(tmp_path / "one")
        )
        assert list(one.recipes) == ["text"]
        for name, loss in losses(carried_out(one)).items():
            assert found[name] == loss
    kept, missing = plan(made(schemes=("nope",), seeds=1, eval_lens=None), CORPUS)
    assert (len(kept), missing) == (1, [])  # the same runs, under the same names


@pytest.mark.long
def test_the_command_tunes_first_and_shows_two_lengths(made, tmp_path, monkeypatch, capsys):
    study = made(
        task=("text", "majority"), train_len=[8, 12], schemes=("t5", "nope"), steps=2,
        sweep=("learning-rate=1e-3,1e-2",),
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(
            terminal, "compute", lambda *given, **named: compute(*given, executor=pool, **named)
        )
        monkeypatch.setattr(terminal, "FORMATS", ("svg",))
        counted = []
        monkeypatch.setattr(terminal, "estimate", lambda each, _: counted.extend(each) or 60.0)
        assert terminal.compare(study) == 0
    shown, out = capsys.readouterr().out, tmp_path / "out"
    assert sum(trainings for _, trainings, _ in counted) == 16 + 16  # tried, and the study's own
    assert "2 tasks x 2 training lengths x 2 schemes x 2 seeds" in shown
    assert "tuning: 16 runs of seed 1000" in shown
    assert "majority, 8 nope learning_rate=0.001  " in shown
    assert "text, 12 nope seed 1" in shown
    assert len(list((out / "tuning").iterdir())) == 16
    assert not plan_tuning(study, CORPUS)[1]
    about = json.loads((out / "study.json").read_text())
    assert len(about["tuning"]["schemes"]) == 8
    assert {"tuning.csv", "tuning.svg"} <= set(about["files"])
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {r["seed"] for r in records} == {0, 1}
    assert not any("tuning" in r for r in records)
    assert all("Tuned runs" in table.caption for table in task_tables(about, records))
    table = (out / "table.md").read_text()
    named = [line for line in table.splitlines() if line.startswith("| t5, trained at 8 |")]
    assert len(named) == 2  # both protocols; no byte of such a text repeats from afar
    page = (out / "report.html").read_text()
    assert "<h2>Tuning</h2>" in page
    assert "Trained at 12 bytes" in page
    with (out / "differences.csv").open() as file:
        assert {row["train_len"] for row in csv.DictReader(file)} == {"8", "12"}


def test_lengths_are_named_once_each(made):
    assert made(train_len=(8,)).train_len == 8
    for lengths in ((8, 8), ()):
        with pytest.raises(ValueError, match="train_len must name each length once"):
            made(train_len=lengths)
    with pytest.raises(ValueError, match="has 2 training lengths"):
        _ = made(train_len=(8, 12)).of_task


def test_an_axis_is_read_from_words():
    assert Axis.parse("learning-rate=2,1e-3") == Axis("learning_rate", "", (1e-3, 2))
    assert Axis.parse("rope:base").name == "rope:base"


def test_the_commands_of_the_page_are_commands(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    lines = page.partition("```sh\n")[2].partition("```")[0].splitlines()
    ran = []
    monkeypatch.setattr(terminal, "compare", lambda study: ran.append(study) or 0)
    assert [main(shlex.split(line, comments=True)[1:]) for line in lines] == [0] * 6
    assert [len(study.tunings) for study in ran] == [6, 6, 6, 1, 12, 6]
