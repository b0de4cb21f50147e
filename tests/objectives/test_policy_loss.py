"""What every objective shares: correction last, KL and entropy terms, aggregation, what it asks for."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from qarl.metrics import Mean, Sum
from qarl.objectives.corrections import TokenTis
from qarl.objectives.grpo import Grpo
from qarl.objectives.policy_loss import KlPenalty


def test_loss_is_the_negative_surrogate_times_the_weight(one_token):
    report = Grpo(correction=TokenTis(cap=2.0))(one_token(1.1, 1.0, mismatch=1.5))
    assert report.loss.item() == pytest.approx(-1.65)
    assert report.metrics["objective/loss"] == Sum(pytest.approx(-1.65))
    assert report.metrics["correction/weight_mean"].value() == pytest.approx(1.5)


def test_kl_is_added_with_its_coefficient_and_not_weighted_by_the_correction(inputs):
    # policy 0.8, reference 0.4, k2; ratio 1 and advantage 0 leave the KL alone. The mismatch weight is 2.
    new = math.log(0.8)
    batch = inputs([[new]], [0.0], old=[[new]], engine=[[new - math.log(2.0)]], reference=[[math.log(0.4)]])
    objective = Grpo(kl=KlPenalty(type="k2", coef=0.1), correction=TokenTis())
    kl = 0.5 * math.log(2.0) ** 2
    report = objective(batch)
    assert report.loss.item() == pytest.approx(0.1 * kl)
    assert report.metrics["objective/kl"].value() == pytest.approx(kl)


def test_entropy_is_subtracted_with_its_coefficient_and_reported(inputs):
    batch = inputs([[0.0, 0.0]], [0.0], entropy=[[0.5, 1.5]])
    report = Grpo(entropy_coef=0.01)(batch)
    assert report.loss.item() == pytest.approx(-0.01)
    assert report.metrics["objective/entropy"] == Mean(2.0, 2.0)


def test_entropy_is_reported_when_it_is_there_though_nobody_asked(inputs):
    report = Grpo()(inputs([[0.0]], [0.0], entropy=[[0.5]]))
    assert report.loss.item() == 0.0
    assert report.metrics["objective/entropy"].value() == 0.5
    assert "objective/entropy" not in Grpo()(inputs([[0.0]], [0.0])).metrics


def test_what_is_needed_follows_from_the_configuration():
    assert not Grpo().needs_entropy
    assert not Grpo().needs_reference
    assert Grpo(entropy_coef=0.1).needs_entropy
    assert Grpo(kl=KlPenalty(coef=0.0)).needs_reference


def test_a_missing_reference_or_entropy_is_our_bug(inputs):
    with pytest.raises(AssertionError, match="reference"):
        Grpo(kl=KlPenalty(coef=0.1))(inputs([[0.0]], [1.0]))
    with pytest.raises(AssertionError, match="entropy"):
        Grpo(entropy_coef=0.1)(inputs([[0.0]], [1.0]))


def test_a_recipe_table_becomes_a_nested_choice():
    objective = Grpo.model_validate({"correction": {"type": "token_tis", "cap": 8.0}, "kl": {"type": "k1", "coef": 1}})
    assert objective.correction == TokenTis(cap=8.0)
    assert objective.kl == KlPenalty(type="k1", coef=1.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"kl": {"type": "k4", "coef": 0.1}},
        {"kl": {"type": "k3"}},
        {"kl": {"coef": -0.1}},
        {"entropy_coef": -1.0},
        {"aggregation": "mean"},
        {"correction": {"type": "tis"}},
        {"beta": 0.1},
    ],
)
def test_what_does_not_exist_is_refused(bad):
    with pytest.raises(ValidationError):
        Grpo.model_validate(bad)
