"""Against tables and numbers worked out by hand."""

import math

import pytest

from qarl.compare.statistics import (
    Arrivals,
    Estimate,
    arrivals,
    estimate,
    first_at_least,
    paired,
    running_means,
    t_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227), (100, 1.98397)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float):
    assert t_quantile(freedom) == pytest.approx(quantile, rel=3e-6)


def test_one_degree_of_freedom_is_cauchys_distribution():
    assert t_quantile(1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)
    assert t_quantile(1, confidence=0.5) == pytest.approx(1.0, rel=1e-12)


def test_the_interval_of_three_seeds():
    # Mean 0.5, deviations -0.1, 0, 0.1: variance 0.02 / 2 = 0.01, error of the mean 0.1 / sqrt(3).
    found = estimate([0.4, 0.5, 0.6])
    assert found is not None
    assert found.mean == pytest.approx(0.5)
    assert found.count == 3
    assert found.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)


def test_one_seed_has_no_interval_and_none_has_no_mean():
    assert estimate([0.25]) == Estimate(0.25, None, 1)
    assert estimate([]) is None


def test_differences_are_taken_between_runs_of_the_same_seed():
    # Seeds 1 and 2 are common; differences 0.1 and 0.3: mean 0.2, deviation sqrt(0.02), error sqrt(0.02 / 2) = 0.1.
    found = paired({0: 0.9, 1: 0.5, 2: 0.8}, {1: 0.4, 2: 0.5, 3: 0.0})
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert found.count == 2
    assert found.half_width == pytest.approx(12.706205 * 0.1, rel=1e-6)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_a_median_is_of_those_that_arrived_and_says_how_many():
    assert arrivals([30.0, None, 10.0]) == Arrivals(2, 3, 20.0)
    assert arrivals([30.0, 50.0, 10.0]) == Arrivals(3, 3, 30.0)
    assert arrivals([None, None]) == Arrivals(0, 2, None)


def test_a_running_mean_begins_with_its_first_whole_window():
    assert running_means([1.0, 3.0, 5.0, None, 9.0], 2) == [None, 2.0, 4.0, 5.0, 9.0]
    assert running_means([None, None, 4.0], 2) == [None, None, 4.0]
    assert running_means([1.0], 2) == [None]


def test_the_first_value_at_the_target():
    assert first_at_least([None, 0.4, 0.5, 0.9], 0.5) == 2
    assert first_at_least([None, 0.4], 0.5) is None
