import csv
import io
import math
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from posenc.study.captions import schemes_as_built, settings
from posenc.study.comparisons import COLUMNS, comparisons_csv
from posenc.study.differences import baseline, difference_tables, growth_table
from posenc.study.panels import spread
from posenc.study.plots import curve_svg, loss_against_length, loss_svgs, note, position_svg
from posenc.study.report import headline, write_report
from posenc.study.statistics import judge, seeds_needed
from posenc.study.table import Table
from posenc.study.tables import cost_table, holds_table, loss_tables, table_markdown, table_text

LENGTHS = (64, 128, 256)
# Losses at the three lengths: one flat, one equal to it, one that breaks, one that is better.
LEVELS = {
    "flat": (2.4, 2.4, 2.4),
    "twin": (2.4, 2.4, 2.4),
    "breaks": (2.2, 3.5, 5.0),
    "better": (2.1, 2.1, 2.1),
}
NOISE = (0.01, -0.01, 0.0)
WOBBLE = {"twin": (0.003, -0.004, 0.002), "breaks": (0.002, 0.003, 0.004)}


def record(scheme, seed, windowed=False):
    levels = LEVELS.get(scheme, LEVELS["flat"])
    shift = NOISE[seed] + WOBBLE.get(scheme, (0, 0.001, 0))[seed]
    loss = {str(n): v + shift for n, v in zip(LENGTHS, levels, strict=True)}
    same = {n: v + (0.002 * seed if n == "256" else 0) for n, v in loss.items()}
    return {
        "scheme": scheme,
        "seed": seed,
        "backend": "numpy",
        "status": "ok",
        "error": None,
        "train_len": 64,
        "loss": loss,
        "loss_same_targets": same,
        "loss_windowed": dict.fromkeys(loss, loss["64"]) if windowed else None,
        "loss_by_position": {"length": 256, "bucket": 16, "loss": [loss["64"]] * 16},
        "curve": [[step, 2 + 6 / step + shift] for step in (1, 50, 100)],
        "params": {"total": 1000, "position": 250 if scheme == "breaks" else 0},
        "tokens_per_second": 50_000.0,
        "train_seconds": 18.0,
        "eval_seconds": 2.0,
    }


def failure(scheme, seed, error="ValueError: no luck"):
    return {"scheme": scheme, "seed": seed, "backend": "numpy", "status": "failed", "error": error}


def study(schemes=tuple(LEVELS), **config):
    config = {"train_len": 64, "eval_lens": LENGTHS, "schemes": list(schemes), **config}
    return {
        "config": {**config, "learning_rate": 0.0625},
        "corpus": {"name": "a text", "sha256": "5ha256" * 8, "train_bytes": 123457},
        "versions": {"posenc": "0.1.0", "numpy": "2.9.9"},
        "wall_seconds": 170.2,
    }


@pytest.fixture
def records():
    return [record(s, seed, windowed=s == "breaks") for s in LEVELS for seed in range(3)]


class Page(HTMLParser):
    """Fails on unbalanced tags; collects text, tags and what would be loaded."""

    VOID = frozenset({"meta", "br", "hr", "img", "link"})

    def __init__(self, source):
        super().__init__()
        self.open, self.text, self.tags, self.loads, self.ids = [], [], set(), [], []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.open += [] if tag in self.VOID else [tag]
        self.note(attrs)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.note(attrs)

    def note(self, attrs):
        links = {"src", "href", "xlink:href", "srcset", "data", "action"}
        self.loads += [v for k, v in attrs if k in links and not v.startswith("#")]
        self.ids += [v for k, v in attrs if k == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def write_page(tmp_path, study, records):
    path = tmp_path / "report.html"
    write_report(study, records, path)
    return path.read_text(encoding="utf-8")


def cells(table, name):
    (row,) = [row for row in table.rows if row[0] == name]
    return row


def test_text_holds_means_and_intervals(records):
    text = table_text(study(), records)
    # Shifts of twin: .013, -.014, .002; mean 1/3000, sd .013577, times 4.302653 / sqrt(3).
    assert re.search(r"^twin +2\.400 ± \.034 ", text, re.MULTILINE)
    lines = [line.split("  ")[0] for line in text.splitlines()]
    rows = ["flat", "twin", "breaks", "breaks, window 64", "better"]
    assert [line for line in lines if line in rows] == [*rows, "flat", "twin", "breaks", "better"]
    assert re.search(r"scheme +64 \(1x\) +128 \(2x\) +256 \(4x\)$", text, re.MULTILINE)
    assert "tokens" not in text  # speed is among the costs
    assert "over 3 seeds" in text


def test_text_columns_are_aligned(records):
    first = table_text(study(), records).split("\n\n")[2].splitlines()
    assert {line.index("±") for line in first[2:]} == {first[2].index("±")}


def test_order_is_that_of_the_study(records):
    given = ["better", "breaks", "twin", "flat"]
    first = table_text(study(given), records).split("\n\n")[2].splitlines()
    rows = [line.split("  ")[0] for line in first[2:]]
    assert rows == ["better", "breaks", "breaks, window 64", "twin", "flat"]


def test_markdown_has_the_same_cells(records):
    markdown = table_markdown(study(), records)
    assert "| twin | 2.400 ± .034 |" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5}


def test_one_seed_is_said_once(records):
    one = [r for r in records if r["seed"] == 0]
    text = table_text(study(), one)
    assert "one seed, no interval" in text
    assert "±" not in text
    assert "nan" not in text
    assert re.search(r"^flat +2\.410 ", text, re.MULTILINE)


def test_lost_runs_are_counted_in_their_cells(records):
    records[0]["loss"]["256"] = math.nan
    records[1] = failure("flat", 1)
    text = table_text(study(), records)
    assert re.search(r"^flat +\S+ ± \S+ \[2 of 3\] .* \(one seed\) \[1 of 3\]", text, re.MULTILINE)
    assert "failed: flat, seed 1: ValueError: no luck" in text
    assert "[2 of 3]: of 3 runs, 2 have a finite loss" in text
    assert headline(study(), records).endswith("failed or diverged are not in these means.")


def test_a_scheme_that_never_ran_well_keeps_its_row(records):
    records = [*records, *(failure("hopeless", seed) for seed in range(3))]
    text = table_text(study([*LEVELS, "hopeless", "absent"]), records)
    assert re.search(r"^hopeless +failed +failed +failed$", text, re.MULTILINE)
    assert re.search(r"^absent +no run ", text, re.MULTILINE)


def test_a_length_without_score_is_neither_lost_nor_failure(records):
    for r in records[:3]:
        del r["loss"]["256"], r["loss_same_targets"]["256"]
    (_, *row) = cells_of(table_text(study(), records), "flat")
    assert row[2] == "–"
    first, *_ = difference_tables(study(baseline="twin"), records)
    assert cells(first, "flat")[4:] == ("–", "–", "–")


def cells_of(text, name):
    line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
    return re.split(r"  +", line)


def test_verdicts_against_the_baseline(records):
    apart, same = difference_tables(study(), records)
    assert cells(apart, "twin")[3::3] == ("tie", "tie")
    assert cells(apart, "breaks")[3::3] == ("better", "worse")
    assert cells(apart, "better")[3::3] == ("better", "better")
    # At the training length the window is the plain model; beyond it is compared.
    assert cells(apart, "breaks, window 64")[1:4] == ("–", "–", "–")
    assert cells(apart, "breaks, window 64")[6] == "better"
    assert [row[0] for row in same.rows] == ["twin", "breaks", "better"]
    assert cells(same, "breaks")[4].startswith("+2.60")


def test_baseline_is_the_configured_one_else_the_first(records):
    assert "flat" not in {row[0] for row in difference_tables(study(), records)[0].rows}
    table = difference_tables(study(baseline="breaks"), records)[0]
    assert cells(table, "flat")[3::3] == ("worse", "better")


def test_growth_says_tie_and_rises(records):
    table = growth_table(study(), records, "loss_same_targets")
    assert cells(table, "breaks")[3] == "rises"
    assert cells(table, "flat")[3] == "tie"
    assert cells(table, "flat")[1] == "+0.002 ± .005"


def test_headline_follows_the_verdicts(records):
    text = headline(study(), records)
    assert "4 times the training length" in text
    assert "compared with flat" in text
    assert re.search(r"lower for better \(-0\.30\d\)", text)
    assert re.search(r"higher for breaks \(\+2\.60\d\)", text)
    assert re.search(r"no significant difference for twin \(", text)
    assert re.search(r"it rose for breaks \(\+2\.80\d\)", text)
    assert "failed" not in text


def test_headline_claims_nothing_without_intervals(records):
    one = headline(study(), [r for r in records if r["seed"] == 0])
    none = headline(study(), [failure("flat", 0)])
    for text in (one, none):
        assert not re.search(r"lower for|higher for|rose|fell", text)
    assert "One seed" in one
    assert "No run" in none


def test_costs_are_those_of_runs_that_ended_well(records):
    records[0]["train_seconds"] = 27.0
    records[1] = failure("flat", 1)
    table = cost_table(study(), records)
    assert cells(table, "flat")[1:] == ("1,000", "0", "50,000", "50,000", "22.5", "2.0")
    assert cells(table, "breaks")[2] == "250 (25.0%)"


def test_one_run_that_was_disturbed_is_seen_and_moves_no_median(records):
    records[1] |= {"tokens_per_second": 9_000.0, "train_seconds": 100.0}
    table = cost_table(study(), records)
    assert table.columns[3:5] == ["tokens/s, min", "tokens/s, median"]
    assert cells(table, "flat")[3:] == ("9,000", "50,000", "18.0", "2.0")


LONG = "rope:base=500000.0,rotary_dim=4,layout=interleaved+alibi"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_every_line_fits_and_no_cell_is_lost(records, width):
    for r in records:
        r["scheme"] = LONG if r["scheme"] == "twin" else r["scheme"]
        for key in ("loss", "loss_same_targets"):
            r[key] = {**r[key], **{str(2**n): 2.0 + r["seed"] for n in range(9, 14)}}
    own = study(["flat", LONG, "breaks", "better"])
    own["corpus"]["name"] = "a text " * 20
    text = table_text(own, records, width)
    assert max(map(len, text.splitlines())) <= width
    joined = "".join(text.split())  # a name may go on below
    for table in loss_tables(own, records):
        cells = {cell for line in (table.columns, *table.rows) for cell in line[1:]}
        assert all("".join(cell.split()) in joined for cell in cells)
    assert "rope:base=500000.0" in text
    heads = [line for line in text.splitlines() if line.startswith("scheme ")]
    assert sum(line.count("x)") for line in heads) == 2 * 8
    assert table_text(own, records, 500) == table_text(own, records)


def test_the_default_study_is_one_block_at_80_columns(records):
    for r in records:
        for key in ("loss", "loss_same_targets"):
            r[key] = {str(2**n): 2 + NOISE[r["seed"]] for n in range(6, 11)}
    text = table_text(study(["flat", "breaks", "sinusoidal"]), records, 80)
    assert len([line for line in text.splitlines() if line.startswith("scheme ")]) == 2


def set_schemes(records, **schemes):
    for r in records:
        r["schemes"] = schemes.get(r["scheme"], ["NoPE()"] * 2)
    return records


def test_settings_of_the_study_are_shown(tmp_path, records):
    for r in records:
        r["scheme"] = {"flat": "t5", "twin": "t5:max_distance=9/nope"}.get(r["scheme"], r["scheme"])
    set_schemes(
        records, t5=["T5Bias(2)"] * 2, **{"t5:max_distance=9/nope": ["T5Bias(1)", "NoPE()"]}
    )
    own = study(["t5", "t5:max_distance=9/nope", "breaks", "better"], position_lr_scale=10.0)
    own["fitted"] = {
        "t5": "causal=True, num_buckets=32, max_distance=64",
        "t5:max_distance=9": "causal=True, num_buckets=32",
    }
    fitted, learned = settings(own, records)
    assert "t5 is built with causal=True, num_buckets=32, max_distance=64;" in fitted
    assert "t5:max_distance=9 is built with causal=True, num_buckets=32." in fitted
    assert learned == (
        "Learned position params (breaks) have 10 times the learning rate of the other weights."
    )
    own["config"]["position_lr_scale"] = 1
    assert "have the learning rate of the other weights" in settings(own, records)[1]
    said = settings(own, records)
    for text in (table_text(own, records), table_markdown(own, records)):
        assert all(line in text for line in said)
    page = "".join(Page(write_page(tmp_path, own, records)).text)
    for fact in (*said, "T5Bias(2)", "T5Bias(1), NoPE()", "NoPE()"):
        assert fact in page
    assert "T5Bias(2), T5Bias(2)" not in page
    assert settings(study(), [failure("flat", 0)]) == []


@pytest.mark.parametrize(
    ("windows", "shown"),
    [
        (None, "NoPE(), RoPE(8), RoPE(8)"),  # of a release that had none
        ([None, None, None], "NoPE(), RoPE(8), RoPE(8)"),
        ([None, 512, None], "NoPE(), RoPE(8)@512, RoPE(8)"),
    ],
)
def test_windows_are_shown_with_the_schemes_as_built(records, windows, shown):
    set_schemes(records, flat=["NoPE()", "RoPE(8)", "RoPE(8)"], twin=["NoPE()"] * 2)
    for r in records:
        r |= {"flat": {"windows": windows}, "twin": {"windows": [4, 4]}}.get(r["scheme"], {})
    results = schemes_as_built(study(), records)
    assert (results["flat"], results["twin"]) == (shown, "NoPE()@4")


@pytest.mark.parametrize(
    ("protocol", "words"),
    [("loss_same_targets", "On the same targets"), ("loss", "In non-overlapping windows")],
)
def test_the_first_sentence_names_its_protocol(records, protocol, words):
    for r in records:
        r["loss_same_targets"] = r["loss_same_targets"] if protocol != "loss" else {}
    best, rest = headline(study(), records).split(". ", 1)
    assert best.startswith("better has the lowest loss at 4 times the training length, 2.10")
    assert rest.startswith(f"{words}")


def comparison_rows(records, **config):
    return list(csv.DictReader(io.StringIO(comparisons_csv(study(**config), records))))


def test_differences_are_in_the_csv_as_in_the_report(records):
    rows = comparison_rows(records)
    assert tuple(rows[0]) == COLUMNS
    results = {tuple(r[k] for k in COLUMNS[:5]): r for r in rows}
    assert len(results) == len(rows) == 3 * 6 + 2 + 2 * 4  # against flat, its windows, growth
    apart, same = difference_tables(study(), records)
    for protocol, table in (("loss", apart), ("loss_same_targets", same)):
        for name, *shown in table.rows:
            for length, (change, _, verdict) in (("64", shown[:3]), ("256", shown[3:])):
                if change == "–":
                    continue
                row = results[protocol, name, length, "flat", length]
                assert f"{float(row['difference']):+.3f} ± " in change
                assert row["verdict"] == verdict
    assert all(float(row["p"]) <= float(row["p_holm"]) for row in rows)
    assert any(float(row["p"]) < float(row["p_holm"]) for row in rows)
    assert results["loss_same_targets", "breaks", "256", "breaks", "64"]["verdict"] == "rises"
    assert {row["seeds"] for row in rows} == {"3"}


def test_one_seed_has_differences_and_no_p_values(records):
    rows = comparison_rows([r for r in records if r["seed"] == 0])
    assert {row["verdict"] for row in rows} == {"one seed"}
    assert {row[key] for row in rows for key in ("p", "p_holm", "half_width")} == {""}
    assert all(row["difference"] for row in rows)
    assert comparison_rows([failure("flat", 0)]) == []


def test_page_is_whole_and_loads_nothing(tmp_path, records):
    source = write_page(tmp_path, study(), records)
    page = Page(source)
    assert page.loads == []
    assert "http://" not in source
    assert "https://" not in source
    assert not {"script", "link", "img", "iframe"} & page.tags
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)
    assert len(page.ids) == len(set(page.ids))
    assert source.count("<svg") == 4
    assert "prefers-color-scheme:dark" in source
    assert "width=device-width" in source


def test_page_names_the_study(tmp_path, records):
    own = study()
    own["command"] = "posenc compare --schemes 'a+b'"
    own["versions"] |= {"posenc commit": "c0mm1t", "processor": "A Core", "cores": "7"}
    records[0]["versions"] = {"device": "that card"}
    text = " ".join(Page(write_page(tmp_path, own, records)).text)
    for fact in (own["command"], "c0mm1t", "A Core", "cores", "that card", "differences.csv"):
        assert fact in text
    for fact in ("0.0625", "5ha256" * 8, "123457", "2.9.9", "a text", "early-token curse"):
        assert fact in text
    for fact in ("breaks, window 64", "2.400 ± .034", "tie", "learning_rate", "3 seeds", "170 s"):
        assert fact in text


def test_names_and_errors_are_escaped(tmp_path, records):
    bad = '<b>x & "$\\y_z$'  # TeX would fail at it
    runs = [record(bad, seed, windowed=True) for seed in range(3)]
    runs += [failure("<i>y", 0, "ValueError: <script>alert(1)</script>")]
    own = study(["flat", bad, "<i>y"])
    own["corpus"]["name"] = r"<u>z $\y$"
    source = write_page(tmp_path, own, records[:3] + runs)
    page = Page(source)
    assert not {"i", "u", "script"} & page.tags
    text = "".join(page.text)
    for name in (bad, r"<u>z $\y$", "<i>y", "<script>alert(1)</script>"):
        assert name in text
    markdown = table_markdown(own, records[:3] + runs)
    assert "<b>" not in markdown
    assert "&lt;b&gt;x" in markdown
    loss_against_length(runs, tmp_path / "plot.png", own)


def test_pipes_do_not_break_markdown():
    table = Table("c", ["scheme", "a"], [("x|y\nz", "1")])
    assert table.markdown().splitlines()[-1] == r"| x\|y z | 1 |"


def test_colours_are_variables_and_ids_do_not_change(records):
    (apart, same), again = loss_svgs(study(), records), loss_svgs(study(), records)
    assert [apart, same] == again
    for svg in (apart, same, position_svg(study(), records, "flat"), curve_svg(study(), records)):
        assert "var(--line-" in svg
        assert not re.search(r"#[0-9a-f]{6}\b", svg)
        assert "xmlns" not in svg
        assert "xlink" not in svg
    assert "breaks, window 64" in apart
    assert "window" not in same


def test_positions_are_differences_to_the_reference(records):
    svg = position_svg(study(), records, "flat")
    assert ">twin<" in svg
    assert ">flat<" not in svg
    assert position_svg(study(), records, "unknown") == ""
    # What a stretch of text is like, common to all, cancels.
    for r in records:
        r["loss_by_position"]["loss"] = [x + i % 3 for i, x in enumerate([r["loss"]["64"]] * 16)]
    assert position_svg(study(), records, "flat") == svg


@pytest.mark.parametrize(
    "keep",
    [
        lambda r: r["seed"] == 0,
        lambda r: r["scheme"] == "flat",
        lambda r: r["seed"] == 0 and r["scheme"] == "flat",
        lambda r: r["scheme"] != "flat",
        lambda r: False,
    ],
)
def test_incomplete_studies_are_reported(tmp_path, records, keep):
    kept = [r for r in records if keep(r)] + [failure("hopeless", 0)]
    page = Page(write_page(tmp_path, study([*LEVELS, "hopeless"]), kept))
    assert "ValueError: no luck" in "".join(page.text)
    assert not re.search(r"\bnan\b", "".join(page.text))
    loss_against_length(kept, tmp_path / "plot.png")


def test_a_single_length_has_no_growth(tmp_path, records):
    for r in records:
        for key in ("loss", "loss_same_targets"):
            r[key] = {"64": r[key]["64"]}
        r["loss_windowed"] = None
    assert growth_table(study(), records, "loss") is None
    assert "at the training length" in headline(study(), records)
    Page(write_page(tmp_path, study(), records))


def test_losses_that_are_nan_everywhere_are_drawn_and_said(tmp_path, records):
    for r in records[:3]:
        r["loss"] = dict.fromkeys(r["loss"], math.nan)
        r["curve"] = [[1, None], [50, math.nan]]
    page = Page(write_page(tmp_path, study(), records))
    assert "diverged" in page.text
    loss_against_length(records, tmp_path / "plot.png", study())


def test_png_has_its_size(tmp_path, records):
    path = tmp_path / "plot.png"
    loss_against_length(records, path, study())
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (1600, 1000)


@pytest.mark.long
@pytest.mark.parametrize(("form", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF-")])
def test_the_figure_is_a_vector_too(tmp_path, records, form, start):
    path = tmp_path / "whatever.partial"
    loss_against_length(records, path, study(), form)
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("seed", range(20))
def test_labels_keep_apart_in_order_and_inside(seed):
    rng = np.random.default_rng(seed)
    wanted = rng.choice([0.1, 0.12, 0.5, 0.97, 1.0], size=8) + 0.01 * rng.random(8)
    places = spread(list(wanted), 0.06)
    order = np.argsort(wanted)
    gaps = np.diff(np.array(places)[order])
    assert gaps.min() > 0.06 - 1e-9
    assert min(places) >= 0
    assert max(places) <= 1 + 1e-9


def test_labels_with_room_stay_where_they_are():
    assert spread([0.9, 0.1, 0.5], 0.1) == pytest.approx([0.9, 0.1, 0.5])
    assert spread([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
    assert spread([], 0.1) == []


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, posenc.study.report; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


MANY = ["flat", *(f"row{n}" for n in range(30)), "hopeless"]


@pytest.fixture
def many():
    """Thirty-two schemes, two of which are tests of one training; the later the lower."""
    runs = [record(name, seed) for name in MANY[:-1] for seed in range(3)]
    for index, run in enumerate(runs):
        run["loss"] = {n: value - index / 100 for n, value in run["loss"].items()}
        run |= {"training": f"{index}", "trained_as": run["scheme"], "tested_schemes": None}
    tested = [{**run, "scheme": "row4~row5", "tested_schemes": ["Row5()"]} for run in runs[15:18]]
    return [*runs, *tested, *(failure("hopeless", seed) for seed in range(3))]


def test_rows_of_many_schemes_are_sorted_and_those_of_few_are_not(records, many):
    rows = [row[0] for row in loss_tables(study([*MANY, "row4~row5"]), many)[1].rows]
    by_loss = [*(f"row{n}" for n in reversed(range(30))), "flat", "hopeless"]
    by_loss.insert(by_loss.index("row4") + 1, "row4~row5")
    assert rows == by_loss
    text = table_text(study(MANY), many)
    assert "sorted by the loss at the longest length" in " ".join(text.split())
    assert "failed: hopeless, seeds 0, 1, 2: ValueError: no luck" in text
    assert "sorted" not in table_text(study(), records)


def test_labels_that_share_a_training_are_told_and_have_one_curve(many):
    chosen = study(["row4", "row4~row5", "row6"])
    few = [run for run in many if run["scheme"] in chosen["config"]["schemes"]]
    assert "Trained once as row4, then tested as each: row4, row4~row5." in settings(chosen, few)
    for run in few:
        run["schemes"] = ["Row4()"]
    assert schemes_as_built(chosen, few)["row4~row5"] == "Row4(); tested as Row5()"
    assert "row4~row5" not in curve_svg(chosen, few)
    for run in few[-3:]:  # trained again, on another day
        run["training"] += "again"
    assert "Trained once" not in " ".join(settings(chosen, few))
    assert settings(study(random_positions=512), few)[-1].startswith("Trained at positions drawn")


def test_a_headline_of_many_schemes_is_short(many):
    for run in many:
        run["loss_same_targets"] = run.get("loss")
    line = headline(study(MANY), many)
    assert "lower for row29 (-0.900), row28 (-0.870), " in line
    assert "row25 (-0.780) and 26 others. " in line


@pytest.mark.long
def test_a_figure_of_many_lines_is_higher(tmp_path, many):
    loss_against_length(many, tmp_path / "loss.png", study(MANY))
    width, height = struct.unpack(">II", (tmp_path / "loss.png").read_bytes()[16:24])
    assert width == 1600
    assert 1000 < height < 1400
    assert note(many) == "Means over 3 seeds, by length; the tables have the intervals."


def test_few_seeds_say_how_many_a_verdict_needs(records):
    """A shift of 1 with a spread of 0.2 over two seeds is no verdict, and over a few more is."""
    assert "decide little" not in headline(study(), [r for r in records if r["scheme"] != "twin"])
    few = [dict(record) for record in records if record["seed"] < 2]
    for record in (r for r in few if r["scheme"] == "twin" and r["status"] == "ok"):
        shift = 0.8 if record["seed"] else 1.2
        for protocol in ("loss", "loss_same_targets"):
            record[protocol] = {n: loss + shift for n, loss in record[protocol].items()}
    text = headline(study(), few)
    assert re.search(r"no significant difference for .*twin \(\+(1\.0|0\.9)", text)
    needed = re.search(
        r"2 seeds decide little\. .* so many: .*twin about (\d); set by --seeds", text
    )
    assert needed
    assert 3 <= int(needed[1]) <= 5


@pytest.mark.parametrize("tests", [1, 3])
@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
def test_seeds_needed_are_the_fewest_for_a_verdict(spread, tests):
    """The same mean and spread over so many seeds are significant, over one fewer they are not."""

    def at(n):
        # Halves above and below the mean, scaled to the standard deviation of the sample.
        signs = np.where(np.arange(n) % 2, 1.0, -1.0)
        signs -= signs.mean()
        values = 1 + spread * signs / signs.std(ddof=1)
        return judge({"one": list(values)})["one"]

    needed = seeds_needed(at(2), tests)
    assert at(needed).uncorrected * tests < 0.05
    assert needed == 3 or at(needed - 1).uncorrected * tests >= 0.05


def test_the_baseline_holds_at_its_own_training_length(records):
    """Though losses of stretches are rounded, upwards here."""
    summary = study()
    for each in records:
        each["loss_by_stretch"] = {n: [round(v + 6e-6, 5)] * 3 for n, v in each["loss"].items()}
    holds = {row[0]: row[1] for row in holds_table(summary, records).rows}
    assert not holds[baseline(summary)].startswith("<")
