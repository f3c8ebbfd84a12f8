import math

import numpy as np
import pytest

from posenc.study.statistics import (
    Interval,
    holm,
    judge,
    losses_by_seed,
    mean_interval,
    paired_differences,
    series,
    t_quantile,
    t_within,
)

# Two-sided 95 % and 99 % of Student's t, from printed tables.
TABLE = [
    (0.95, 1, 12.706205),
    (0.95, 2, 4.302653),
    (0.95, 3, 3.182446),
    (0.95, 4, 2.776445),
    (0.95, 9, 2.262157),
    (0.95, 30, 2.042272),
    (0.99, 2, 9.924843),
    (0.99, 5, 4.032143),
]


@pytest.mark.parametrize(("level", "df", "t"), TABLE)
def test_t_quantile_is_that_of_the_tables(level, df, t):
    assert t_quantile(level, df) == pytest.approx(t, abs=5e-7)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 8, 25])
def test_t_within_is_the_integral_of_the_density(df):
    x, step = np.linspace(0, 1.7, 20_001, retstep=True)
    log_norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
    density = np.exp(log_norm - (df + 1) / 2 * np.log1p(x**2 / df))
    integral = 2 * step * (density.sum() - (density[0] + density[-1]) / 2)
    assert t_within(1.7, df) == pytest.approx(integral, abs=1e-8)


@pytest.mark.parametrize("df", [1, 2, 5, 40])
def test_t_quantile_inverts_t_within(df):
    for level in (0.5, 0.9, 0.999):
        assert t_within(t_quantile(level, df), df) == pytest.approx(level, abs=1e-12)


@pytest.mark.parametrize("level", [0, 1, 95])
def test_level_is_a_probability(level):
    with pytest.raises(ValueError, match=f"level must be between 0 and 1, got {level}"):
        t_quantile(level, 3)


def test_interval_of_three():
    # sd 1, so 4.302653 / sqrt(3).
    interval = mean_interval([1, 2, 3])
    assert (interval.mean, interval.n, interval.lost) == (2, 3, 0)
    assert interval.half_width == pytest.approx(2.484138, abs=1e-6)
    assert interval.text() == "2.000 ± 2.484"


def test_interval_shrinks_with_the_root_of_n():
    few, many = mean_interval([0, 2] * 500), mean_interval([0, 2] * 2000)
    assert few.half_width / many.half_width == pytest.approx(2, rel=2e-3)


def test_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    results = [mean_interval(rng.normal(size=3), 0.8) for _ in range(2000)]
    hits = sum(abs(i.mean) <= i.half_width for i in results)
    assert 0.77 < hits / 2000 < 0.83


def test_one_seed_has_no_interval():
    interval = mean_interval([2.5])
    assert interval.n == 1
    assert math.isnan(interval.half_width)
    assert interval.text() == "2.500 (one seed)"


def test_values_that_are_not_finite_are_counted_and_not_averaged():
    interval = mean_interval([1.0, math.nan, 3.0, math.inf])
    assert (interval.mean, interval.n, interval.lost) == (2, 2, 2)
    assert interval.text().endswith("[2 of 4]")
    assert mean_interval([math.nan]).text() == "diverged"
    assert mean_interval([]).text() == "–"


def test_text_drops_the_zero_of_a_half_width_alone():
    assert Interval(0.25, 0.0125, 3).text("+") == "+0.250 ± .013"
    assert Interval(-10.5, 10.25, 3).text() == "-10.500 ± 10.250"


def seeds(*values):
    return dict(enumerate(values))


def test_identical_schemes_tie():
    table = {"a": seeds(2.0, 2.5, 3.0), "b": seeds(2.0, 2.5, 3.0)}
    results = paired_differences(table, "a")
    assert list(results) == ["b"]
    assert (results["b"].verdict, results["b"].p, results["b"].interval.mean) == ("tie", 1, 0)


def test_pairing_removes_the_variance_between_seeds():
    # Seeds differ by 1, schemes by .1: unpaired, nothing could be said.
    table = {"a": seeds(1, 2, 3), "low": seeds(0.9, 1.91, 2.89), "high": seeds(1.1, 2.11, 3.09)}
    results = paired_differences(table, "a")
    assert {name: one.verdict for name, one in results.items()} == {
        "low": "better",
        "high": "worse",
    }
    # t = .1 / (.01 / sqrt(3)) with two degrees: p = 1 - t / sqrt(t**2 + 2); Holm doubles it.
    t = 0.1 / (0.01 / math.sqrt(3))
    assert results["low"].p == pytest.approx(2 * (1 - t / math.sqrt(t * t + 2)), rel=1e-6)


def test_swapping_reference_and_scheme_swaps_the_verdict():
    table = {"a": seeds(1, 2, 3), "b": seeds(0.9, 1.91, 2.89)}
    assert paired_differences(table, "a")["b"].verdict == "better"
    assert paired_differences(table, "b")["a"].verdict == "worse"


def test_pairs_are_made_by_seed_not_by_order():
    table = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {2: 3.0, 0: 1.0, 1: 2.0}}
    assert paired_differences(table, "a")["b"].interval.half_width == 0


def test_a_pair_with_a_lost_run_is_lost():
    table = {"a": seeds(1, 2, 3), "b": seeds(1.5, math.nan, 3.5), "c": {0: 1.5}}
    results = paired_differences(table, "a")
    assert (results["b"].interval.mean, results["b"].interval.n, results["b"].interval.lost) == (
        0.5,
        2,
        1,
    )
    assert (results["c"].verdict, results["c"].interval.lost) == ("one seed", 2)
    assert math.isnan(results["c"].p)


def test_without_a_pair_there_is_no_verdict():
    table = {"a": seeds(math.nan, math.nan), "b": seeds(1, 2)}
    assert paired_differences(table, "a")["b"].verdict == "no pair"


def test_reference_must_be_there():
    with pytest.raises(ValueError, match=r"got 'x'; has \['a'\]"):
        paired_differences({"a": seeds(1)}, "x")


def test_holm_is_that_of_the_paper():
    # 4 tests: .01 * 4, .02 * 3, then never below an earlier one; NaN is no test.
    results = holm({"d": 0.04, "a": 0.01, "b": 0.02, "c": 0.025, "none": math.nan})
    assert math.isnan(results.pop("none"))
    assert results == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.06})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1, "b": 1}


def test_correction_can_turn_a_verdict_into_a_tie():
    clear = [0.1, 0.12, 0.16]
    assert judge({"a": clear})["a"].verdict == "worse"
    many = judge({"a": clear, **{f"noise {i}": [-1.0, 1.0, 0.0] for i in range(4)}})
    assert many["a"].verdict == "tie"


def record(scheme, seed, status="ok", **losses):
    return {"scheme": scheme, "seed": seed, "status": status, "train_len": 4, **losses}


def test_records_become_series_in_order():
    runs = [
        record("b", 0, loss={"8": 2.0, "4": 1.0}, loss_windowed={"8": 1.5}),
        record("b", 1, loss={"4": 3.0, "8": None}, loss_windowed=None),
        record("a", 0, status="failed"),
        record("c", 0, loss={"4": 1.0}),
    ]
    lines = series(runs, "loss", ["a", "b"])
    assert [line.label for line in lines] == ["a", "b", "b, window 4", "c"]
    assert lines[0].points == {}
    assert list(lines[1].points) == [4, 8]
    assert lines[1].points[4].mean == 2
    assert (lines[1].points[8].n, lines[1].points[8].lost) == (1, 1)
    assert (lines[2].points[8].mean, lines[2].points[8].lost) == (1.5, 1)
    assert list(lines[3].points) == [4]


def test_failed_runs_stay_in_the_table_of_seeds():
    runs = [record("a", 0, loss={"4": 1.0}), record("a", 1, status="failed")]
    table = losses_by_seed(runs, "loss", 4)
    assert table["a"][0] == 1
    assert math.isnan(table["a"][1])
    assert losses_by_seed(runs[:1], "loss", 8) == {"a": {}}


def test_a_scheme_and_seed_come_once():
    with pytest.raises(ValueError, match="'a', seed 0 twice"):
        losses_by_seed([record("a", 0), record("a", 0)], "loss", 4)
