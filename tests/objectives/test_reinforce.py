"""The plain policy gradient, with and without truncated importance sampling."""

from __future__ import annotations

import math

import pytest

from qarl.objectives.corrections import TokenTis
from qarl.objectives.grpo import Grpo
from qarl.objectives.reinforce import Reinforce


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_truth_table_of_values_and_gradients(one_token, ratio, advantage):
    batch = one_token(ratio, advantage)
    loss = Reinforce()(batch).loss
    loss.backward()
    assert -loss.item() == pytest.approx(advantage * math.log(ratio))
    assert -batch.new_BT.grad.item() == pytest.approx(advantage)


def test_token_tis_gives_the_truncated_form(one_token):
    batch = one_token(1.0, -1.0, mismatch=8.0)
    Reinforce(correction=TokenTis(cap=2.0))(batch).loss.backward()
    assert -batch.new_BT.grad.item() == pytest.approx(-2.0)


def test_one_update_a_batch_is_all_it_is_right_for():
    assert not Reinforce().allows_several_updates
    assert Grpo().allows_several_updates


def test_drift_of_the_ratio_is_reported_though_not_used(one_token):
    assert Reinforce()(one_token(10.0, 1.0)).metrics["objective/ratio_max"].value() == pytest.approx(10.0)
