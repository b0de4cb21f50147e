"""The table: what it says of intervals, differences, targets, and of runs that did not finish."""

import pytest

from qarl.compare.experiment import Comparison
from qarl.compare.results import Arrival
from qarl.compare.statistics import Arrivals, Estimate
from qarl.compare.table import (
    early_ends,
    main_rows,
    markdown,
    notes,
    shown_arrivals,
    shown_estimate,
    target_rows,
    write_table,
)
from tests.compare.conftest import result, results_of

ACCURACY = "eval/held_out/pass@1"
REACHED = [Arrival(steps=3, tokens=300, seconds=6.0)]
WHY = "answers are empty: completion/empty = 1"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "–"),
        (Estimate(0.8123, 0.0312, 3), "0.812 ± 0.031"),
        (Estimate(12345.6, 431.0, 3), "12,346 ± 431"),
        (Estimate(2e-8, 3e-8, 3), "2e-08 ± 3e-08"),
        (Estimate(0.5, 0.0, 3), "0.5 ± 0"),
        (Estimate(0.25, None, 1), "0.25"),
    ],
)
def test_a_mean_is_shown_as_exactly_as_it_is_known(found: Estimate | None, text: str):
    assert shown_estimate(found) == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Arrivals(3, 3, 38.0), "38"),
        (Arrivals(2, 3, 1234.5), "1,234 (2 of 3)"),
        (Arrivals(0, 3, None), "never"),
        (Arrivals(0, 0, None), "–"),
    ],
)
def test_a_median_says_how_many_it_is_of(found: Arrivals, text: str):
    assert shown_arrivals(found) == text


def test_arms_are_ranked_and_compared_seed_by_seed(comparison: Comparison):
    results = results_of(
        comparison,
        *(result("plain", seed, accuracy) for seed, accuracy in enumerate((0.4, 0.5))),
        *(result("tbpo", seed, accuracy) for seed, accuracy in enumerate((0.6, 0.9))),
    )
    best, baseline = main_rows(results)
    assert (best["arm"], baseline["arm"]) == ("tbpo", "full precision, GRPO")
    # Differences 0.2 and 0.4: mean 0.3, error 0.1, times 12.7.
    assert (best["difference"], baseline["difference"]) == ("+0.3 ± 1.3", "baseline")
    assert (best["runs"], best["s/step"], best["tokens"]) == ("2", "2", "400")


def test_where_less_is_better_the_least_is_first(comparison: Comparison):
    results = results_of(comparison, result("plain", 0, 0.9), result("tbpo", 0, 0.2))
    results.settings["better"] = "lower"
    assert [row["arm"] for row in main_rows(results)] == ["tbpo", "full precision, GRPO"]


def test_an_arm_that_has_not_begun_has_no_row(comparison: Comparison):
    results = results_of(comparison, result("plain", 0, 0.5), result("tbpo", 0, None, state="unfinished", steps=0))
    assert [row["arm"] for row in main_rows(results)] == ["full precision, GRPO"]
    assert early_ends(results) == ["not begun: tbpo/seed-0"]


def test_an_arm_without_a_reading_comes_last_and_a_single_run_has_no_interval(comparison: Comparison):
    results = results_of(comparison, result("plain", 0, 0.5), result("tbpo", 0, None, state="failed", steps=0))
    rows = main_rows(results)
    assert [row[ACCURACY] for row in rows] == ["0.5", "–"]
    assert [row["runs"] for row in rows] == ["1", "1, 1 failed"]
    assert "An arm with one run has no interval." in notes(results)
    assert "No run has measured `mismatch/mean_abs`." in notes(results)


def test_targets_are_medians_of_those_that_got_there(comparison: Comparison):
    results = results_of(
        comparison,
        result("plain", 0, 0.5, arrivals=REACHED),
        result("plain", 1, 0.5),
        result("tbpo", 0, 0.4),
    )
    first, second = target_rows(results)
    assert first == {
        "arm": "full precision, GRPO",
        "0.5: steps": "3 (1 of 2)",
        "0.5: tokens": "300 (1 of 2)",
        "0.5: seconds": "6 (1 of 2)",
    }
    assert second["0.5: steps"] == "never"


def test_a_run_that_ended_early_counts_and_is_told(comparison: Comparison):
    stopped = result("tbpo", 0, 0.1, state="stopped", steps=3, reason=WHY, evaluations=[{"step": 0, ACCURACY: 0.1}])
    results = results_of(
        comparison, result("plain", 0, 0.5), stopped, result("tbpo", 1, None, state="unfinished", steps=2)
    )
    text = write_table(results)
    assert "| 1, 1 stopped |" in text
    assert f"- tbpo/seed-0: stopped at step 3: {WHY} (its {ACCURACY} is that after 0 steps)" in text
    assert "- tbpo/seed-1: not finished, 2 of 4 steps; left out of the tables" in text
    assert main_rows(results)[1][ACCURACY] == "0.1"


def test_runs_that_have_not_begun_are_one_line(comparison: Comparison):
    waiting = [result(arm, 1, None, state="unfinished", steps=0) for arm in ("plain", "tbpo")]
    assert early_ends(results_of(comparison, *waiting)) == ["not begun: plain/seed-1, tbpo/seed-1"]
    many = [result("plain", seed, None, state="unfinished", steps=0) for seed in range(8)]
    assert early_ends(results_of(comparison, *many))[0].endswith("plain/seed-4 and 3 more")


def test_a_table_is_aligned_and_its_cells_cannot_break_it():
    assert markdown([{"arm": "a|b", "x": "1"}, {"arm": "c", "x": "–"}]).splitlines() == [
        "| arm  |  x |",
        "| ---- | -: |",
        "| a\\|b |  1 |",
        "| c    |  – |",
    ]
