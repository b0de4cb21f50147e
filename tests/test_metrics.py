"""Reductions: however a batch was split, merged parts read as the whole."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qarl.metrics import Ess, Last, Max, Mean, Metric, Sum, merge, values

NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)


def test_a_mean_is_weighted_by_what_it_counts() -> None:
    # Four tokens of mean 1 and one token of mean 6: not (1 + 6) / 2.
    assert Mean(4.0, 4.0).merge(Mean(6.0, 1.0)).value() == 2.0


def test_a_mean_of_nothing_is_no_number_and_adds_nothing() -> None:
    assert math.isnan(Mean(0.0, 0.0).value())
    assert Mean(0.0, 0.0).merge(Mean(3.0, 2.0)).value() == 1.5


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        (Sum(2.0), Sum(-5.0), -3.0),
        (Max(2.0), Max(-5.0), 2.0),
        (Max(-5.0), Max(2.0), 2.0),
        (Last(2.0), Last(-5.0), -5.0),
    ],
)
def test_sums_add_peaks_stay_and_the_last_reading_stands(first: Metric, second: Metric, value: float) -> None:
    assert merge([{"x": first}, {"x": second}])["x"].value() == value


def test_a_peak_that_is_not_a_number_stays_one_in_any_order() -> None:
    for first, second in ((math.nan, 2.0), (2.0, math.nan)):
        assert math.isnan(Max(first).merge(Max(second)).value())


def test_effective_sample_size_of_equal_weights_is_all_of_them() -> None:
    assert Ess(6.0, 12.0, 3.0).value() == 1.0


def test_effective_sample_size_counts_a_dominating_weight_as_one() -> None:
    # Weights 1, 0, 0, 0: one of four.
    assert Ess(1.0, 1.0, 1.0).merge(Ess(0.0, 0.0, 3.0)).value() == 0.25
    assert math.isnan(Ess(0.0, 0.0, 0.0).value())


@given(NUMBERS, st.integers(0, 12))
def test_splitting_a_batch_changes_no_reading(numbers: list[float], cut: int) -> None:
    def parts_of(batch: list[float]) -> dict[str, Metric]:
        return {
            "mean": Mean(math.fsum(batch), len(batch)),
            "sum": Sum(math.fsum(batch)),
            "max": Max(max(batch, default=-math.inf)),
            "ess": Ess(math.fsum(batch), math.fsum(x * x for x in batch), len(batch)),
        }

    whole, split = values(parts_of(numbers)), values(merge([parts_of(numbers[:cut]), parts_of(numbers[cut:])]))
    for name, value in whole.items():
        assert split[name] == pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True)


def test_a_name_need_not_occur_in_every_part() -> None:
    merged = merge([{"a": Sum(1.0)}, {"b": Sum(2.0)}, {"a": Sum(4.0)}])
    assert values(merged) == {"a": 5.0, "b": 2.0}


def test_merging_leaves_its_parts_as_they_were() -> None:
    parts = [{"a": Sum(1.0)}, {"a": Sum(2.0)}]
    merge(parts)
    assert parts == [{"a": Sum(1.0)}, {"a": Sum(2.0)}]


def test_one_name_has_one_reduction() -> None:
    with pytest.raises(AssertionError, match="a has two reductions"):
        merge([{"a": Sum(1.0)}, {"a": Max(1.0)}])


def test_values_are_sorted_by_name() -> None:
    assert list(values({"b": Sum(1.0), "a": Sum(2.0)})) == ["a", "b"]
