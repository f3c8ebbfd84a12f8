"""Tasks in a study: fairness, stopping, what records say, tables, the CSV and the report."""

from __future__ import annotations

import csv
import io
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
from frameworks_installed import require
from sample import long, some

import posenc
from posenc.study import NO_ANSWER, Examples, Study, Task, run_study
from posenc.study import run as runs
from posenc.study.captions import protocol_title
from posenc.study.effective import effective_length
from posenc.study.outcomes import outcomes, tasks, wilson
from posenc.study.recipe import Recipe
from posenc.study.report import study_markdown, study_text, write_report
from posenc.study.runner import plan
from posenc.study.task_plots import group_svg, task_picture, task_svg
from posenc.study.task_tables import sentences, task_table, tasks_csv
from posenc.study.tasks.catalogue import make_task
from posenc.study.terminal import compare, describe

BACKENDS = [name for name in ("jax", "torch") if require(name)]
BACKEND = BACKENDS[-1]
TINY = {"steps": 4, "batch_size": 3, "dim": 16, "heads": 2, "eval_windows": 8, "warmup": 1}


@dataclass(frozen=True)
class Same(Task, kind="sanity", settings={"train_len": 4}):
    """The token itself: solved by any model at once."""

    @property
    def vocabulary(self):
        return 2

    def draw(self, rng, size, count):
        tokens = rng.integers(0, 2, (count, size))
        return Examples(tokens, tokens)


def study(tmp_path, **changes):
    given = {**TINY, "task": ("copy",), "schemes": ("alibi", "nope"), "seeds": 2}
    return Study(**{**given, "backend": BACKEND, "out": str(tmp_path / "out"), **changes})


def carried_out(one):
    with ThreadPoolExecutor(1) as pool:
        return list(run_study(one, one.corpus(), executor=pool))


# What a study draws.


def test_all_schemes_of_a_seed_see_the_same(tmp_path, monkeypatch):
    seen = {}
    load = runs.make_trainer

    def spied(run, decoder, *rest):
        model = load(run, decoder, *rest)
        drawn = seen.setdefault((run.seed, run.scheme), [decoder.digest()])
        train, answers = model.train, model.answers

        def spy_train(tokens, labels, rates, *at, **named):
            drawn.append((tokens.tobytes(), labels.tobytes(), rates.tobytes()))
            return train(tokens, labels, rates, *at, **named)

        def spy_answers(tokens, labels, *rest, **named):
            drawn.append((tokens.tobytes(), labels.tobytes()))
            return answers(tokens, labels, *rest, **named)

        model.train, model.answers = spy_train, spy_answers
        return model

    monkeypatch.setattr(runs, "make_trainer", spied)
    one = study(tmp_path)
    for run in one.runs(None, BACKEND):
        (record,) = runs.carry_out([run], None)
        assert record["status"] == "ok"
    assert seen[0, "alibi"] == seen[0, "nope"] != seen[1, "nope"] == seen[1, "alibi"]


def test_the_study_sets_what_a_task_leaves_open(tmp_path):
    one = study(tmp_path, task=("copy", "majority"), steps=None)
    assert [r.steps for r in one.recipes.values()] == [
        make_task(label).defaults()["steps"] for label in ("copy", "majority")
    ]
    assert {r.batch_size for r in one.recipes.values()} == {3}
    assert study(tmp_path).steps == 4  # of a single task, they are the study's
    assert study(tmp_path).longest_tokens == 2 * 64 + 2
    with pytest.raises(ValueError, match="has 2 tasks"):
        _ = one.longest_tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": ("copie",)}, "unknown task 'copie'.*copy"),
        ({"task": ("copy:symbol=3",)}, "no option 'symbol'.*symbols"),
        ({"task": ("copy:symbols=20",)}, "'copy:symbols=20', length 32: symbols must be at least"),
        ({"task": ("copy", "copy")}, "task must name each task once"),
        ({"task": ()}, "task is empty"),
        ({"task": ("copy+sort",)}, r"task 'copy\+sort': accepted: name"),
        ({"task": ("flip_flop",), "train_len": 7}, "length 7: sizes must be even.* got 7"),
        ({"text": ("a.txt",)}, "text is for the task text, which is none of: copy"),
        ({"windowed": ("alibi",)}, "windowed is for the task text"),
        ({"baseline": "t5"}, "baseline names 't5'.*scheme of the study"),
    ],
)
def test_wrong_options_are_errors_before_any_training(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        study(tmp_path, **changes)


# How long a run trains.


@pytest.mark.parametrize("backend", some(BACKENDS, [BACKEND], long))
def test_a_run_ends_when_its_task_is_solved(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(runs, "_CHUNK", 10)
    monkeypatch.setattr(runs, "_COOL", 20)
    monkeypatch.setattr("posenc.study.tasks.catalogue.task_class", lambda name: Same)
    make_task.cache_clear()
    changes = {"steps": 400, "learning_rate": 1e-2, "schemes": ("nope",), "batch_size": 16}
    one = study(tmp_path, task=("tasks.Same",), backend=backend, **changes)
    (record,) = runs.carry_out(one.runs(None, backend)[:1], None)
    make_task.cache_clear()
    assert record["solved"] is not None
    assert record["steps"] == record["solved"] + 20 == record["curve"][-1][0] < 400
    assert record["scores"][""]["4"]["exact_match"] == 1.0
    never = replace(one, steps=10)
    assert never.steps == 10


@long
def test_two_frameworks_say_the_same(tmp_path):
    if len(BACKENDS) < 2:
        pytest.fail("compares two frameworks")
    found = []
    for backend in BACKENDS:
        one = study(tmp_path, backend=backend, schemes=("rope",), task=("passkey",), seeds=1)
        (record,) = runs.carry_out(one.runs(None, backend), None)
        found.append(record)
    # A few steps of float32 in another order of sums.
    first, second = (record["curve"][-1][1] for record in found)
    assert first == pytest.approx(second, rel=1e-4)
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


# What is kept.


@long
def test_a_study_of_tasks_and_text_is_kept_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words and more words " * 400)
    one = study(
        tmp_path, task=("text", "passkey", "repeat_copy"), text=("a.txt",), train_len=16,
        eval_lens=(16, 32), schemes=("alibi", "rope"), seeds=1, workers=1,
    )  # fmt: skip
    assert compare(one) == 0
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir() if path.is_file()}
    assert {"report.html", "table.md", "loss.png", "results.csv", "tasks.csv"} <= names
    assert {"task-passkey.pdf", "task-passkey.svg", "task-repeat-copy.png"} <= names
    assert len(json.loads((out / "study.json").read_text())["files"]) == len(names) - 1
    rows = list(csv.DictReader(io.StringIO((out / "tasks.csv").read_text())))
    assert {row["task"] for row in rows} == {"passkey", "repeat_copy"}
    assert {row["kind"] for row in rows} == {"separating", "must fail"}
    assert any(row["depth"] for row in rows)
    assert "passkey" in capsys.readouterr().out
    kept, missing = plan(one, one.corpus())
    assert (len(kept), missing) == (6, [])
    # Fewer tasks are another study; the figures of the tasks that it lacks are moved away.
    assert compare(replace(one, task=("passkey",), text=())) == 0
    assert not (out / "task-repeat-copy.png").exists()
    assert next((out / "earlier").rglob("task-repeat-copy.png")).is_file()


# What tables say: three seeds, of which two solved the task.


def record(scheme, seed, accuracy, solved=100, task="copy", **changes):
    scores = {}
    for length, share in zip((16, 32, 64), accuracy, strict=True):
        right = [round(10 * share)] * 40
        scores[str(length)] = {
            "examples": 40, "token_accuracy": share, "exact_match": float(share == 1),
            "right": right, "asked": [10] * 40, "loss": 4 - share, "bits": [10 * (4 - share)] * 40,
        }  # fmt: skip
    return {
        "task": task, "scheme": scheme, "seed": seed, "status": "ok", "error": None,
        "train_len": 16, "steps": 200, "solved": solved, "scores": {"": scores}, **changes,
    }  # fmt: skip


@pytest.fixture
def made(tmp_path):
    one = Study(task=("copy",), schemes=("alibi", "nope"), seeds=3, backend=BACKEND)
    summary = describe(one, None, BACKEND, 1.0)
    found = [record("alibi", seed, (1, 0.9, 0.8 + seed / 100)) for seed in range(3)]
    found += [record("nope", seed, (1, 0.5, 0.2)) for seed in range(2)]
    return summary, [*found, record("nope", 2, (0.4, 0.1, 0.0), solved=None)]


def cells(table, name):
    return next(tuple(row) for row in table.rows if row[0] == name)


def test_seeds_that_did_not_solve_it_are_not_averaged(made):
    summary, records = made
    table = task_table("copy", tasks(summary)["copy"], records)
    assert table.columns == ["scheme", "solved", "16 (1x)", "32 (2x)", "64 (4x)", "RULER", "NoLiMa"]
    assert [row[0] for row in table.rows] == ["alibi", "nope"]  # the best first
    nope = cells(table, "nope")
    assert nope[1] == "2 of 3 [0.21, 0.94]"
    assert nope[4].startswith("0.200 ± .000")
    assert nope[5:] == ("16", "16")
    assert cells(table, "alibi")[5:] == ("32", "32")
    (text,) = sentences(summary, records)
    assert "alibi is best, 0.810 at 64 (4x), above every seed of the others" in text
    assert "holds to 32" in text


def test_a_loss_is_better_where_it_is_lower_and_has_a_unit(made):
    summary, records = made
    summary["tasks"]["copy"] |= {"score": "loss", "unit": "bits per token"}
    table = task_table("copy", tasks(summary)["copy"], records)
    assert "copy (separating): bits per token, lower is better" in table.caption
    assert table.columns == ["scheme", "solved", "16 (1x)", "32 (2x)", "64 (4x)", "NoLiMa"]
    assert [row[0] for row in table.rows] == ["alibi", "nope"]
    assert cells(table, "alibi")[3:5] == ("3.100 ± .000", "3.190 ± .025")
    assert cells(table, "nope")[5] == "32"  # 3.5 is at most 3 / .85, and 3.8 is not
    assert table.best == {(0, 2), (1, 2), (0, 3), (0, 4)}
    (text,) = sentences(summary, records)
    assert "alibi is best, 3.190 bits per token at 64 (4x), below every seed" in text
    rows = list(csv.DictReader(io.StringIO(tasks_csv(summary, records))))
    assert {row["loss_unit"] for row in rows} == {"bits per token"}
    assert rows[0]["loss"] == "3"
    found = outcomes(tasks(summary)["copy"], records)
    assert "bits per token, lower is better" in task_svg(
        "copy", tasks(summary)["copy"], found, ["alibi", "nope"]
    )


def test_the_loss_of_a_task_is_the_mean_over_its_answers():
    recipe, task = Recipe(task="majority", eval_windows=20), make_task("majority")
    drawn = []

    def answer(tokens, labels, window):
        drawn.append(labels >= 0)
        return np.arange(labels.size).reshape(labels.shape) * math.log(2), labels >= 0

    found = task.scores(recipe, 0, answer, False)["scores"][""]
    for asked, cell in zip(drawn, found.values(), strict=True):
        assert cell["loss"] == pytest.approx(
            np.arange(asked.size).reshape(asked.shape)[asked].mean()
        )
    with pytest.raises(TypeError, match=r"score must be 'token_accuracy', .*, got 'bits'"):
        type("Bits", (Task,), {}, score="bits")


def test_a_score_of_chance_holds_to_no_length(made):
    summary, _ = made
    guessing = [record("alibi", seed, (0.1, 0.1, 0.1), solved=None) for seed in range(3)]
    table = task_table("copy", tasks(summary)["copy"], guessing)
    assert cells(table, "alibi")[5:] == ("< 16", "–")


def test_schemes_whose_seeds_overlap_are_told_together(made):
    summary, records = made
    close = [record("nope", seed, (1, 0.9, 0.81)) for seed in range(3)]
    (text,) = sentences(summary, [*records[:3], *close])
    assert "scores most" in text
    assert "overlap" in text
    (text,) = sentences(summary, records[:1])
    assert "one seed is no verdict" in text


def test_a_task_that_must_fail_and_passes_is_red(tmp_path):
    one = Study(task=("parity",), schemes=("alibi", "fox"), seeds=1, backend=BACKEND)
    summary = describe(one, None, BACKEND, 1.0)
    assert tasks(summary)["parity"]["must_fail"] == {"alibi": True, "fox": False}
    passing = [record(s, 0, (1, 1, 1), task="parity") for s in ("alibi", "fox")]
    table = task_table("parity", tasks(summary)["parity"], passing)
    row = [r[0] for r in table.rows].index("alibi")
    assert table.wrong == {(row, 3), (row, 4)}
    assert 'class="wrong"' in table.html()
    assert "harness leaks the answer" in sentences(summary, passing)[0]
    honest = [record(s, 0, (1, 0.5, 0.5), task="parity") for s in ("alibi", "fox")]
    assert not task_table("parity", tasks(summary)["parity"], honest).wrong
    assert "as theory says" in sentences(summary, honest)[0]


@long
def test_csv_and_page_have_every_seed(made, tmp_path):
    summary, records = made
    rows = list(csv.DictReader(io.StringIO(tasks_csv(summary, records))))
    assert len(rows) == 6 * 3
    assert [r["solved"] for r in rows if r["scheme"] == "nope" and r["seed"] == "2"] == [""] * 3
    norms = {"gradient_norms": [[50, 1.5, 2.0]], "clipped": 50, "spikes": 1}
    records = [{**each, **norms} for each in records]
    records.append({**records[0], "status": "failed", "error": "ValueError: <b>", "seed": 9})
    path = tmp_path / "report.html"
    write_report(summary, records, path)
    page = path.read_text()
    assert "ValueError: &lt;b&gt;" in page
    assert page.count("<svg") == 1
    assert "<td>1.5</td><td>2</td><td>25%</td><td>3 in 3 of 3 runs</td>" in page
    for text in (study_text(summary, records, 80), study_markdown(summary, records)):
        assert "2 of 3 [0.21, 0.94]" in text
        assert "seed 9" in text


@pytest.mark.parametrize("schemes", [2, 9])
def test_pictures_of_few_and_of_many_schemes(made, schemes):
    summary, records = made
    about = tasks(summary)["copy"]
    names = [
        f"scheme {n} with a long name, which would take half of a figure" for n in range(schemes)
    ]
    many = [{**r, "scheme": name} for name in names for r in records[:3]]
    found = outcomes(about, many)
    assert "scheme 1 with" in task_svg("copy", about, found, names)
    assert task_picture("copy", about, found, names, "pdf").startswith(b"%PDF")


def test_a_heat_map_has_each_group(tmp_path):
    one = study(tmp_path, task=("passkey",), seeds=1, schemes=("nope",), eval_lens=(16, 64))
    (found,) = carried_out(one)
    cell = found["scores"][""]["64"]
    about = tasks(describe(one, None, BACKEND, 1.0))["passkey"]
    assert len(cell["groups"]) == len(about["group_names"])
    assert sum(asked for _, asked in cell["groups"]) == 2 * cell["examples"]
    assert sum(right for right, _ in cell["groups"]) == sum(cell["right"])
    svg = group_svg("passkey", about, outcomes(about, [found]))
    assert all(name in svg for name in about["group_names"])


def test_answers_within_the_training_length_do_not_count_beyond_it(tmp_path):
    one = study(tmp_path, task=("majority",), seeds=1, schemes=("nope",), eval_lens=(8, 16, 32))
    one = replace(one, train_len=16)
    (found,) = carried_out(one)
    asked = {n: set(cell["asked"]) for n, cell in found["scores"][""].items()}
    assert asked == {"8": {8}, "16": {16}, "32": {16}}


# Statistics.


def test_wilson_by_hand():
    # (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), z = 1.96
    assert wilson(3, 3) == pytest.approx((0.43850, 1.0), abs=1e-4)
    assert wilson(1, 4) == pytest.approx((0.04559, 0.69936), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_effective_length_by_hand():
    def scores(*means):
        return {16 * 2**n: [np.full(50, mean)] * 3 for n, mean in enumerate(means)}

    assert effective_length(scores(1.0, 0.9, 0.5), least=0.856).length == 32
    assert effective_length(scores(0.9, 0.77, 0.76)).length == 32  # 85 % of .9 is .765
    assert effective_length(scores(0.8, 0.9), least=0.856).text() == "< 16"
    assert effective_length(scores(1.0, 0.9), least=0.856).text() == "≥ 32"
    assert effective_length(scores(1.0, 0.1, 0.9), least=0.856).length == 16  # no gaps
    assert effective_length(scores(2.0, 2.3, 2.4), lower=True).length == 32  # 2 / .85 = 2.353
    assert effective_length({}) is None
    mixed = {16: [np.ones(50)] * 3, 32: [np.ones(50), np.ones(50), np.zeros(50)]}
    found = effective_length(mixed, least=0.856)
    assert (found.length, found.low, found.high) == (16, 16, 32)


def test_hard_texts_count_at_all_lengths_or_at_none():
    """A loss that is the same at each length holds at all of them, in every draw."""
    losses = [np.random.default_rng(n).normal(2.5, 0.8, 32) for n in range(3)]
    by_length = {64 * 2**n: losses for n in range(5)}
    for least in (None, losses):
        found = effective_length(by_length, least=least, lower=True, same_texts=True)
        assert found.text() == "≥ 1024"
    few = [losses[0][:8]]
    apart = effective_length(dict.fromkeys(by_length, few), lower=True)
    assert apart.low < 1024  # of other texts at each length it is not known
    others = effective_length(by_length, least=losses[:2], lower=True, same_texts=True)
    assert others.low < others.high  # a baseline with other seeds


def test_no_answer_is_no_score():
    labels = np.array([[NO_ANSWER, 3], [NO_ANSWER, NO_ANSWER]])
    found = runs.summarise(labels, np.array([[True, True], [True, True]]))
    assert (found["examples"], found["token_accuracy"], found["right"]) == (1, 1.0, [1])
    nothing = runs.summarise(np.full((2, 2), NO_ANSWER), np.ones((2, 2), bool))
    assert nothing["token_accuracy"] is None
    assert math.isnan(outcomes_of(nothing).score(16))


def outcomes_of(cell):
    about = {"score": "token_accuracy", "eval_lens": (16,), "train_len": 16, "must_fail": {}}
    about["recipe"] = {"task": "t", "train_len": 16}
    one = {"task": "t", "train_len": 16, "scheme": "s", "seed": 0, "status": "ok", "solved": None}
    (found,) = outcomes(about, [{**one, "scores": {"": {"16": cell}}}])
    return found


def test_schemes_get_the_tokens_of_a_task(tmp_path):
    """Sizes of a scheme are those of sequences, not of a task's examples."""
    one = study(tmp_path, task=("copy",), schemes=("t5", "learned"), eval_lens=(16, 32))
    recipe = one.recipes["copy"]
    plans = one.plans("t5", recipe), one.plans("learned", recipe)
    assert plans[0].trained.schemes[0].max_distance == recipe.train_tokens == 34
    assert plans[1].trained.schemes[0].max_len == recipe.longest_tokens == 66
    assert isinstance(plans[0].trained.schemes[0], posenc.T5Bias)


def test_titles_say_how_many_key_bytes_there_are_and_what_windows_leave_out():
    records = [{"loss": {"64": 2.0, "96": 2.0, "128": 2.0}, "key_bytes": {"128": 1234, "96": 7}}]
    assert protocol_title("loss_key_bytes", records).endswith("predicts: 7 at 96, 1,234 at 128")
    assert protocol_title("loss", records).endswith("of each stretch: 32 at 96")
    even = [{"loss": {"64": 2.0, "128": 2.0}}]  # of a study from before the counts
    assert protocol_title("loss", even).endswith("cut again for each length")
    assert protocol_title("loss_key_bytes", even).endswith("predicts")
