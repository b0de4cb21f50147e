"""Completions that are worse than expected are left out."""

from __future__ import annotations

import pytest

from qarl.objectives.positive_only import PositiveOnly


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (0.1, 1.0, 0.1, 0.1), (1.0, 1.0, 1.0, 1.0), (10.0, 1.0, 1.2, 0.0),
        (0.1, -1.0, 0.0, 0.0), (1.0, -1.0, 0.0, 0.0), (10.0, -1.0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_truth_table_of_values_and_gradients(one_token, ratio, advantage, objective, slope):
    batch = one_token(ratio, advantage)
    loss = PositiveOnly()(batch).loss
    loss.backward()
    assert -loss.item() == pytest.approx(objective)
    assert -batch.new_BT.grad.item() == pytest.approx(slope)


def test_left_out_sequences_stay_in_the_denominator_and_are_reported(inputs):
    report = PositiveOnly()(inputs([[0.0]] * 4, [1.0, -1.0, -1.0, 0.0]))
    assert -report.loss.item() == pytest.approx(1 / 4)
    assert report.metrics["objective/negative_dropped"].value() == 0.5
