"""The vocabulary of losses, by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from qarl.metrics import Max, Mean
from qarl.objectives import terms


def test_log_ratios_are_masked_before_anything_else_and_clamped():
    upper = torch.tensor([[0.5, 100.0, -100.0, math.inf]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    log_ratio = terms.masked_log_ratio(upper, torch.zeros(1, 4), mask)
    assert log_ratio.tolist() == [[0.5, 20.0, -20.0, 0.0]]
    log_ratio.exp().sum().backward()
    assert upper.grad is not None
    torch.testing.assert_close(upper.grad, torch.tensor([[math.exp(0.5), 0.0, 0.0, 0.0]]))


def test_sequence_ratio_is_the_geometric_mean_over_trained_tokens():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    log_ratio = torch.tensor([[0.2, 0.6, 0.0], [0.0, 0.0, 0.0]])
    ratio = terms.sequence_ratio(log_ratio, mask)
    torch.testing.assert_close(ratio[0, 0], torch.tensor(math.exp(0.4)))
    assert ratio[1].tolist() == [1.0, 1.0, 1.0]


def test_sequence_ratio_has_the_gradient_of_the_exponential_of_the_mean():
    new = torch.tensor([[0.2, 0.6, -0.3]], dtype=torch.float64, requires_grad=True)
    (direct,) = torch.autograd.grad(new.mean().exp(), new)
    by_token = terms.sequence_ratio(new, torch.ones(1, 3, dtype=torch.bool)).mean()
    (on_tokens,) = torch.autograd.grad(by_token, new)
    torch.testing.assert_close(on_tokens, direct)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (0.1, 1.0, 0.1), (1.0, 1.0, 1.0), (10.0, 1.0, 1.3),
        (0.1, -1.0, -0.8), (1.0, -1.0, -1.0), (10.0, -1.0, -10.0),
    ],
)  # fmt: skip
def test_clipped_surrogate_truth_table(ratio, advantage, expected):
    value = terms.clipped_surrogate(torch.tensor([[ratio]]), torch.tensor([[advantage]]), 0.2, 0.3)
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize(("how", "expected"), [("token_mean", 7 / 3), ("sequence_mean", 2.75), ("constant", 7 / 20)])
def test_aggregations_by_hand(inputs, how, expected):
    # First sequence: tokens 1 and 2; second: token 4 and one that is masked.
    batch = inputs([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0], mask=[[True, True], [True, False]], max_new_tokens=10)
    per_token = torch.tensor([[1.0, 2.0], [4.0, math.nan]])
    assert terms.aggregate(per_token, batch, how).item() == pytest.approx(expected)


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "constant"])
def test_a_batch_in_which_nothing_is_trained_has_loss_zero(inputs, how):
    batch = inputs([[3.0, 4.0]], [1.0], mask=[[False, False]])
    loss = terms.aggregate(batch.new_BT, dataclasses.replace(batch, num_sequences=0), how)
    loss.backward()
    assert loss.item() == 0.0
    assert batch.new_BT.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2.0)), ("k2", 0.5 * math.log(2.0) ** 2), ("k3", 0.5 + math.log(2.0) - 1.0)],
)
def test_kl_estimators_by_hand(inputs, estimator, expected):
    # policy 0.8, reference 0.4: x = log(0.4 / 0.8) = -log 2
    batch = inputs([[math.log(0.8), 5.0]], [0.0], reference=[[math.log(0.4), 9.0]], mask=[[True, False]])
    kl = terms.kl_to_reference(batch, estimator)
    assert kl[0, 0].item() == pytest.approx(expected)
    assert kl[0, 1].item() == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_average_to_the_divergence(inputs, estimator):
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    batch = inputs([policy.log().tolist()], [0.0], reference=[reference.log().tolist()])
    expected = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * terms.kl_to_reference(batch, estimator)[0]).sum(), expected)


def test_mean_over_counts_only_the_chosen_places():
    flags = torch.tensor([True, True, False, True])
    assert terms.mean_over(flags, torch.tensor([True, False, True, False])) == Mean(1.0, 2.0)


def test_ratio_metrics_leave_out_what_is_not_trained():
    ratio, where = torch.tensor([2.0, 99.0, 4.0]), torch.tensor([True, False, True])
    metrics = terms.ratio_metrics(ratio, where)
    assert metrics == {"objective/ratio_max": Max(4.0), "objective/ratio_mean": Mean(6.0, 2.0)}
    assert terms.ratio_metrics(ratio, torch.zeros(3, dtype=torch.bool)) == {}
