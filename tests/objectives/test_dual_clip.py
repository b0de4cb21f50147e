"""The second clip: for negative advantages only, and only above 1."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from qarl.objectives.dual_clip import DualClip
from qarl.objectives.grpo import Grpo


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (0.1, 1.0, 0.1, 0.1), (1.0, 1.0, 1.0, 1.0), (10.0, 1.0, 1.2, 0.0),
        (0.1, -1.0, -0.8, 0.0), (1.0, -1.0, -1.0, -1.0), (2.9, -1.0, -2.9, -2.9), (10.0, -1.0, -3.0, 0.0),
    ],
)  # fmt: skip
def test_truth_table_of_values_and_gradients(one_token, ratio, advantage, objective, slope):
    batch = one_token(ratio, advantage)
    loss = DualClip()(batch).loss
    loss.backward()
    assert -loss.item() == pytest.approx(objective)
    assert -batch.new_BT.grad.item() == pytest.approx(slope)


def test_positive_advantages_are_never_touched(one_token):
    for ratio in (0.1, 1.0, 3.5, 10.0, 1000.0):
        batch = one_token(ratio, 1.0)
        assert DualClip(clip_ratio_c=3.0)(batch).loss.item() == Grpo()(batch).loss.item()


def test_the_fraction_bounded_is_reported(one_token):
    assert DualClip()(one_token(10.0, -1.0)).metrics["objective/clipped_dual"].value() == 1.0
    assert DualClip()(one_token(2.9, -1.0)).metrics["objective/clipped_dual"].value() == 0.0
    assert DualClip()(one_token(10.0, 1.0)).metrics["objective/clipped_dual"].value() == 0.0


@pytest.mark.parametrize("c", [1.0, 0.5, 0.0])
def test_c_must_be_above_one(c):
    with pytest.raises(ValidationError, match="greater than 1"):
        DualClip(clip_ratio_c=c)
