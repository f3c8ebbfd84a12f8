"""``docs/atlas.py``: its stored records, and the page that is made from them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from posenc.study.recipe import Recipe

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "atlas.md").read_text(encoding="utf-8")


@pytest.fixture
def atlas(tmp_path, monkeypatch):
    """The script, whose folder of records is a new one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("atlas", DOCS / "atlas.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "FOLDER", tmp_path / "atlas")
    return made


def record(scheme="alibi", seed=0, status="ok", recipe=(), **changed):
    usual = json.loads(json.dumps(asdict(Recipe(task="majority"))))
    versions = {"jax": "0.10.2", "device": "cpu"}
    return {
        "task": "majority", "scheme": scheme, "seed": seed, "status": status, "backend": "jax",
        "recipe": {**usual, **dict(recipe)}, "versions": versions, "data": "examples",
        "curve": [1.0], **changed,
    }  # fmt: skip


def test_a_finished_record_stays_and_a_failed_one_is_replaced(atlas):
    atlas.add([record(mark=1), record("rope", status="failed", mark=1)], "one")
    atlas.add([record(mark=2), record("rope", mark=2), record(seed=3, mark=2)], "another")
    found = {(each["scheme"], each["seed"]): each for each in atlas.load("majority")}
    marks = {name: each["mark"] for name, each in found.items()}
    assert marks == {("alibi", 0): 1, ("rope", 0): 2, ("alibi", 3): 2}
    assert "curve" not in found["alibi", 0]
    machines = [found[name]["versions"]["processor"] for name in (("alibi", 0), ("rope", 0))]
    assert machines == ["one", "another"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"recipe": {"steps": 30}}, "steps 400, got 30"), ({"backend": "torch"}, "jax, got torch")],
)
def test_other_settings_are_refused(atlas, changed, named):
    with pytest.raises(ValueError, match=named):
        atlas.add([record(**changed)], "one")
    assert atlas.load("majority") == []


def test_another_text_is_refused(atlas):
    atlas.add([record()], "one")
    with pytest.raises(ValueError, match="the atlas has data examples, got others"):
        atlas.add([record(seed=1, data="others")], "one")


def test_a_folder_says_which_machine_it_is_of_and_tuned_runs_are_refused(atlas, monkeypatch):
    summary = {"config": {"sweep": []}, "versions": {"processor": "far away"}}
    part = SimpleNamespace(summary=summary, records=[record()])
    monkeypatch.setattr(atlas, "read", lambda folder: part)
    atlas.add_folder(Path("there"))
    assert atlas.load("majority")[0]["versions"]["processor"] == "far away"
    summary["config"]["sweep"] = ["learning_rate"]
    with pytest.raises(ValueError, match="no tuned runs, and 'there'"):
        atlas.add_folder(Path("there"))


def test_the_same_records_give_the_same_file(atlas):
    atlas.add([record("rope"), record("alibi")], "one")
    path = atlas.FOLDER / "majority.jsonl.xz"
    before = path.read_bytes()
    atlas.save("majority", reversed(atlas.load("majority")))
    assert path.read_bytes() == before


def test_a_scheme_that_some_seeds_solve_gets_more_seeds(atlas, monkeypatch):
    solved = {"alibi": [40, None, 40], "rope": [40, 60, 80], "t5": [None, None, None]}
    records = [
        record(name, n, solved=at) for name, each in solved.items() for n, at in enumerate(each)
    ]
    atlas.add([*records, record("nope", 0, solved=9), record("nope", 1, "failed")], "one")
    ran = []
    monkeypatch.setattr(atlas, "run", lambda task, schemes, seeds, _: ran.append((schemes, seeds)))
    monkeypatch.setattr(atlas.atlas_page, "write", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["atlas.py", "--task", "majority"])
    atlas.main()
    assert ran == [(["all"], 3), (["alibi"], 5)]


def test_a_task_is_begun_until_most_schemes_have_three_seeds(atlas):
    page, names = atlas.atlas_page, atlas.Study(schemes=("all",)).labels
    most = names[: len(names) // 2 + 1]
    records = [record(name, seed) for name in most for seed in range(3)]
    shown, begun = page.columns_of({"majority": records})
    assert ([each.task for each in shown], begun) == (["majority"], [])
    rows = page.missing(shown, begun).splitlines()
    assert f"| majority | {', '.join(names[len(most) :])} |" in rows
    assert f"| parity | all {len(names)} |" in rows
    failed = [*records[:-1], {**records[-1], "status": "failed"}]
    shown, begun = page.columns_of({"majority": failed})
    assert (shown, [each.task for each in begun]) == ([], ["majority"])
    row = f"| majority | begun: {len(failed)} of {3 * len(names)} records |"
    assert row in page.missing(shown, begun).splitlines()


def test_every_stored_record_is_on_the_page(atlas, monkeypatch):
    monkeypatch.setattr(atlas, "FOLDER", DOCS / "atlas")
    found, (shown, begun) = atlas.stored(), atlas.atlas_page.columns_of(atlas.stored())
    assert "text" in found
    for column in begun:
        assert f"| {column.task} | begun: {len(column.records)} of " in PAGE
    for task, records in ((column.task, column.records) for column in shown):
        for each in records:
            atlas.check(each)
        name = "losses" if task == "text" else "scores"
        block = re.search(f"<!-- {name} -->(.*?)<!-- end of {name} -->", PAGE, re.DOTALL)[1]
        if task != "text":
            block = re.search(rf"### {re.escape(task)}\n(.*?)(?=### |\Z)", block, re.DOTALL)[1]
        rows = set(re.findall(r"^\| (\S+) \|", block, re.MULTILINE))
        failed = set(re.findall(r"failed: (\S+),", block))
        assert {each["scheme"] for each in records} <= rows | failed, task
        holds = PAGE.partition("<!-- holds -->")[2].partition("\n\n")[0]
        assert f"{task} (" in holds


def test_the_table_of_facts_is_that_of_the_records(atlas, monkeypatch):
    monkeypatch.setattr(atlas, "FOLDER", DOCS / "atlas")
    columns, _ = atlas.atlas_page.columns_of(atlas.stored())
    assert atlas.atlas_page.facts(columns) in PAGE


@pytest.mark.parametrize(
    ("task", "begins"),
    [
        ("text", {"T5's bias holds": "t5", "FIRE": "fire", "ALiBi holds": "alibi",
                  "RoPE breaks": "rope", "PoPE breaks": "pope"}),
        ("mqar", {"recall needs no positions": "nope", "RoPE loses recall": "rope",
                  "ALiBi loses recall": "alibi", "Inkling": "inkling"}),
        ("association", {"associations need no positions": "nope",
                         "RoPE loses associations": "rope",
                         "Inkling learns associations": "inkling"}),
        ("copy", {"few schemes copy": "kerple_power", "RoPE copies": "rope",
                  "ALiBi copies half": "alibi", "without positions copying": "nope",
                  "copies are lost": "path"}),
        ("flip_flop", {"FoX, CABLE and Wall": "fox", "RoPE loses flip-flops": "rope",
                       "ALiBi makes hardly any errors": "alibi", "without positions": "nope"}),
        ("frequent_words", {"frequent words need no positions": "nope",
                            "RoPE loses some counts": "rope", "ALiBi loses counts": "alibi",
                            "sinusoids lose counts": "sinusoidal"}),
        ("passkey", {"a passkey needs no positions": "nope", "RoPE loses the passkey": "rope",
                     "AxialRoPE": "axial_rope"}),
        (
            "last_value",
            {
                "last_value is solved": "path",
                "RoPE loses last values with length": "rope",
                "ReRoPE, which keeps recall": "rope~rerope",
                "without positions, last values": "nope",
            },
        ),
        ("majority", {"majority needs no positions": "nope", "majority is not learned": "tra"}),
        ("indirect_indexing", {"what stands one or two": "deberta", "RoPE loses the place": "rope",
                               "PoPE does not find": "pope", "ALiBi does not find it": "alibi",
                               "without positions the place": "nope"}),
        ("reverse", {"copies backwards are kept": "path", "Sandwich and wavelets alone": "sandwich",
                     "Selective RoPE copies backwards": "selective_rope",
                     "KERPLE, which copies": "kerple_power",
                     "learned embeddings copy backwards": "learned"}),
        ("sort", {"sorting needs no positions": "nope", "RoPE loses the order": "rope",
                  "ALiBi loses it too": "alibi"}),
        ("parity", {"parity shows the same": "path", "Selective RoPE finds": "selective_rope"}),
        ("variable_tracking", {"chains of variables need no positions": "nope",
                               "RoPE loses chains": "rope", "ALiBi loses some of the": "alibi",
                               "RePo does not learn chains": "repo"}),
        ("repeat_copy", {"copies of two symbols .repeat_copy. end": "rope",
                         "without positions copies of two": "nope",
                         "the ways to make RoPE longer": "rope~rope_pi"}),
        ("state_tracking", {"PaTH": "path", "Selective RoPE tracks": "selective_rope",
                            "TRA": "tra"}),
    ],
)  # fmt: skip
def test_numbers_in_the_text_are_those_of_the_records(task, begins, atlas, monkeypatch):
    monkeypatch.setattr(atlas, "FOLDER", DOCS / "atlas")
    column = atlas.atlas_page.Column(task, atlas.load(task))
    section = PAGE.partition("## What surprised")[2].partition("\n## ")[0]
    for begin, scheme in begins.items():
        pair = re.search(rf"^\| {begin}\b[^|]*?(\d?\.\d\d → \d?\.\d\d)", section, re.MULTILINE)[1]
        assert pair == " → ".join(column.shown(scheme, n) for n in column.lengths), scheme


def test_who_finds_a_parity_is_that_of_the_records(atlas, monkeypatch):
    monkeypatch.setattr(atlas, "FOLDER", DOCS / "atlas")
    column = atlas.atlas_page.Column("parity", atlas.load("parity"))
    trained = [one for one in column.outcomes.values() if "~" not in one.scheme]
    found = {one.scheme: one.solved for one in trained if one.solved}
    assert found.keys() == {"path", "selective_rope", "cope", "carope"}
    assert found["selective_rope"] == 3  # of five
    none = len(trained) - len(found)
    said = f"The other {none} of the {len(trained)} that are trained find it with no seed"
    assert said in PAGE


def test_the_seeds_that_learn_a_state_are_those_of_the_records(atlas, monkeypatch):
    monkeypatch.setattr(atlas, "FOLDER", DOCS / "atlas")
    column = atlas.atlas_page.Column("state_tracking", atlas.load("state_tracking"))
    trained = [one for one in column.outcomes.values() if "~" not in one.scheme]
    every = sum(one.solved == len(one.records) == 3 for one in trained)
    none = sum(one.solved == 0 for one in trained)
    some = [one for one in trained if 2 <= one.solved <= 4 and len(one.records) == 5]
    said = (
        f"of the {len(trained)} schemes that are trained, {every} learn it with each of three "
        f"seeds, {none} with none, and {len(some)} with two to four of five"
    )
    assert said in PAGE
