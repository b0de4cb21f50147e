"""One ratio and one clip per sequence."""

from __future__ import annotations

import math

import pytest
import torch

from qarl.objectives.corrections import TokenTis
from qarl.objectives.gspo import Gspo


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (0.1, 1.0, 0.1, 0.1), (1.0, 1.0, 1.0, 1.0), (10.0, 1.0, 1.0004, 0.0),
        (0.1, -1.0, -0.9997, 0.0), (1.0, -1.0, -1.0, -1.0), (10.0, -1.0, -10.0, -10.0),
    ],
)  # fmt: skip
def test_truth_table_of_values_and_gradients(one_token, ratio, advantage, objective, slope):
    batch = one_token(ratio, advantage)
    loss = Gspo()(batch).loss
    loss.backward()
    assert -loss.item() == pytest.approx(objective)
    assert -batch.new_BT.grad.item() == pytest.approx(slope)


def test_agrees_with_the_two_line_reference(inputs):
    new = (torch.randn(3, 4) * 0.01).tolist()
    mask = [[True] * 4, [True, True, False, False], [False, True, True, False]]
    batch = inputs(new, [1.0, -2.0, 0.5], mask=mask)
    loss = Gspo(clip_ratio_low=0.005, clip_ratio_high=0.005)(batch).loss
    s = torch.stack([row[keep].mean().exp() for row, keep in zip(batch.new_BT, batch.mask_BT, strict=True)])
    reference = -torch.minimum(s * batch.advantages_B, s.clamp(0.995, 1.005) * batch.advantages_B).mean()
    torch.testing.assert_close(loss, reference)
    expected, actual = (torch.autograd.grad(value, batch.new_BT)[0] for value in (reference, loss))
    torch.testing.assert_close(actual, expected)


def test_fractions_count_sequences_and_not_tokens(inputs):
    up, down = [math.log(2.0)] * 3, [math.log(0.5)] * 3
    mask = [[True] * 3, [True, False, False], [True] * 3, [False] * 3]
    metrics = Gspo()(inputs([up, down, up, up], [1.0, -1.0, -1.0, 1.0], mask=mask)).metrics
    assert metrics["objective/clipped_high"].value() == pytest.approx(1 / 3)
    assert metrics["objective/clipped_low"].value() == pytest.approx(1 / 3)
    assert metrics["objective/ratio_mean"].value() == pytest.approx(4.5 / 3)


def test_a_token_weight_acts_on_the_gradient_of_its_token(inputs):
    batch = inputs([[0.0, 0.0]], [1.0], engine=[[0.0, -math.log(2.0)]])
    Gspo(correction=TokenTis(cap=4.0))(batch).loss.backward()
    assert (-batch.new_BT.grad).tolist() == [pytest.approx([0.5, 1.0])]
