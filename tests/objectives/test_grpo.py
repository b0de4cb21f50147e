"""Token clipping and the three sets of defaults that use it."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from qarl.objectives.corrections import TokenTis
from qarl.objectives.grpo import Dapo, DrGrpo, Grpo


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (0.1, 1.0, 0.1, 0.1), (1.0, 1.0, 1.0, 1.0), (10.0, 1.0, 1.2, 0.0),
        (0.1, -1.0, -0.8, 0.0), (1.0, -1.0, -1.0, -1.0), (10.0, -1.0, -10.0, -10.0),
    ],
)  # fmt: skip
def test_truth_table_of_values_and_gradients(one_token, ratio, advantage, objective, slope):
    batch = one_token(ratio, advantage)
    loss = Grpo()(batch).loss
    loss.backward()
    assert -loss.item() == pytest.approx(objective)
    assert -batch.new_BT.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("ratio", "mismatch", "advantage", "expected"),
    [
        (1.1, 1.5, 1.0, 1.65), (1.1, 8.0, 1.0, 2.2), (3.0, 8.0, 1.0, 2.4), (5.0, 8.0, 1.0, 2.4),
        (3.0, 8.0, -1.0, -6.0), (0.5, 8.0, -1.0, -1.6), (1.5, 0.5, 1.0, 0.6),
    ],
)  # fmt: skip
def test_token_tis_on_the_clipped_surrogate_by_hand(one_token, ratio, mismatch, advantage, expected):
    report = Grpo(correction=TokenTis(cap=2.0))(one_token(ratio, advantage, mismatch))
    assert -report.loss.item() == pytest.approx(expected)


def test_clipped_fractions_count_tokens_whose_gradient_was_removed(inputs):
    # A > 0: 2.0 is clipped, 0.5 is not. A < 0: 0.5 is clipped, 2.0 is not. A = 0: nothing is.
    row = [math.log(0.5), math.log(2.0), 0.0]
    metrics = Grpo()(inputs([row, row, row], [1.0, -1.0, 0.0])).metrics
    assert metrics["objective/clipped_low"].value() == pytest.approx(1 / 9)
    assert metrics["objective/clipped_high"].value() == pytest.approx(1 / 9)
    assert metrics["objective/ratio_max"].value() == pytest.approx(2.0)
    assert metrics["objective/ratio_mean"].value() == pytest.approx(3.5 / 3)


def test_nothing_is_clipped_before_the_first_update(inputs):
    metrics = Grpo()(inputs([[-1.0, -2.0]], [1.0], old=[[-1.0, -2.0]])).metrics
    assert metrics["objective/clipped_low"].value() == 0.0
    assert metrics["objective/clipped_high"].value() == 0.0
    assert metrics["objective/ratio_max"].value() == 1.0


@pytest.mark.parametrize(("objective", "expected"), [(Grpo(), 0.0), (Dapo(), -0.5), (DrGrpo(), -2 / 20)])
def test_defaults_aggregate_as_their_papers_do(inputs, objective, expected):
    # Three tokens with A = 1, one with A = -1: loss -3 + 1 in sum.
    mask = [[True, True, True], [True, False, False]]
    batch = inputs([[0.0] * 3] * 2, [1.0, -1.0], mask=mask, max_new_tokens=10)
    assert objective(batch).loss.item() == pytest.approx(expected)


def test_dapo_clips_higher(one_token):
    assert -Dapo()(one_token(10.0, 1.0)).loss.item() == pytest.approx(1.28)


def test_aggregation_can_be_overridden():
    assert Grpo(aggregation="constant").aggregation == "constant"


@pytest.mark.parametrize("bad", [{"clip_ratio_low": 0.0}, {"clip_ratio_low": 1.0}, {"clip_ratio_high": 0.0}])
def test_clip_ranges_are_checked(bad):
    with pytest.raises(ValidationError):
        Grpo(**bad)
