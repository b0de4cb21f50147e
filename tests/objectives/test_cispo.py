"""The weight is clipped, the gradient never."""

from __future__ import annotations

import math

import pytest

from qarl.objectives.cispo import Cispo


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [(0.1, 1.0, 0.1), (1.0, 1.0, 1.0), (10.0, 1.0, 1.2), (0.1, -1.0, -0.1), (1.0, -1.0, -1.0), (10.0, -1.0, -1.2)],
)
def test_truth_table_of_values_and_gradients(one_token, ratio, advantage, slope):
    batch = one_token(ratio, advantage)
    loss = Cispo()(batch).loss
    loss.backward()
    assert -loss.item() == pytest.approx(slope * math.log(ratio))
    assert -batch.new_BT.grad.item() == pytest.approx(slope)


def test_the_lower_bound_works_when_it_is_set(one_token):
    batch = one_token(0.1, 1.0)
    report = Cispo(clip_ratio_low=0.3)(batch)
    report.loss.backward()
    assert -batch.new_BT.grad.item() == pytest.approx(0.7)
    assert report.metrics["objective/clipped_low"].value() == 1.0


def test_clipped_weights_are_counted_whatever_the_advantage(inputs):
    row = [math.log(10.0), 0.0]
    metrics = Cispo()(inputs([row, row], [1.0, -1.0])).metrics
    assert metrics["objective/clipped_high"].value() == 0.5
    assert metrics["objective/clipped_low"].value() == 0.0
