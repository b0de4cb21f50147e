"""The trust band, case by case."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError

from qarl.metrics import Mean
from qarl.objectives.gspo import Gspo
from qarl.objectives.tbpo import Tbpo


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        # Positive: clipped from above only.
        (0.1, 1.0, 0.1, 0.1), (1.0, 1.0, 1.0, 1.0), (1.00039, 1.0, 1.00039, 1.00039), (1.00041, 1.0, 1.0004, 0.0),
        (10.0, 1.0, 1.0004, 0.0),
        # Negative: no gradient outside [1 - 3e-4, 1 + 7e-4].
        (0.1, -1.0, 0.0, 0.0), (0.99969, -1.0, 0.0, 0.0), (0.99971, -1.0, -0.99971, -0.99971), (1.0, -1.0, -1.0, -1.0),
        (1.00069, -1.0, -1.00069, -1.00069), (1.00071, -1.0, 0.0, 0.0), (10.0, -1.0, 0.0, 0.0),
        (10.0, 0.0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_truth_table_of_values_and_gradients(one_token, ratio, advantage, objective, slope):
    batch = one_token(ratio, advantage)
    loss = Tbpo()(batch).loss
    loss.backward()
    assert -loss.item() == pytest.approx(objective)
    assert -batch.new_BT.grad.item() == pytest.approx(slope)


def test_without_mismatch_a_positive_sequence_is_that_of_gspo(inputs):
    batch = inputs([[0.0003, -0.0001], [0.1, 0.2]], [1.0, 0.5])
    assert Tbpo()(batch).loss.item() == pytest.approx(Gspo()(batch).loss.item())


def test_an_error_token_does_not_dominate_a_wrong_answer(inputs):
    batch = inputs([[0.0] * 9 + [18.0]], [-1.0])
    report = Tbpo()(batch)
    report.loss.backward()
    assert batch.new_BT.grad.abs().max() == 0.0
    assert report.metrics["tbpo/neg_above"].value() == 1.0


@pytest.mark.parametrize(("mismatch", "weight"), [(0.5, 0.5), (1.0, 1.0), (1.9, 1.9), (8.0, 2.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_mismatch_weight_is_capped(one_token, mismatch, weight, advantage):
    batch = one_token(1.0, advantage, mismatch)
    report = Tbpo()(batch)
    report.loss.backward()
    assert -report.loss.item() == pytest.approx(weight * advantage)
    assert -batch.new_BT.grad.item() == pytest.approx(weight * advantage)
    assert report.metrics["correction/weight_mean"].value() == pytest.approx(weight)


def test_the_mismatch_weight_is_normalized_by_length(inputs):
    batch = inputs([[0.0, 0.0]], [1.0], engine=[[-math.log(2.0), math.log(0.5) + math.log(2.0)]])
    assert -Tbpo()(batch).loss.item() == pytest.approx(math.sqrt(2.0))


@pytest.mark.parametrize(
    ("band", "kept"),
    [
        ({}, [1, 1, 1]),
        ({"mismatch_high": 1.1}, [1, 1, 0]),
        ({"mismatch_low": 0.9}, [0, 1, 1]),
        ({"mismatch_low": 0.9, "mismatch_high": 1.1}, [0, 1, 0]),
    ],
)
def test_sequences_outside_the_mismatch_band_are_dropped(inputs, band, kept):
    batch = inputs([[0.0]] * 3, [1.0] * 3, engine=[[-math.log(q)] for q in (0.8, 1.0, 1.2)])
    report = Tbpo(**band)(batch)
    report.loss.backward()
    assert [int(bool(row)) for row in batch.new_BT.grad[:, 0]] == kept
    assert report.metrics["tbpo/mismatch_dropped"].value() == pytest.approx(1 - sum(kept) / 3)


def test_bands_are_reported_as_fractions_of_sequences(inputs):
    ratios = [1.1, 1.1, 0.9, 0.9, 1.0, 1.1]
    advantages = [1.0, -1.0, -1.0, 1.0, -1.0, 0.0]
    mask = [[True, True]] * 6 + [[False, False]]
    batch = inputs([[math.log(ratio)] * 2 for ratio in [*ratios, 1.1]], [*advantages, -1.0], mask=mask)
    metrics = Tbpo()(batch).metrics
    for name in ("tbpo/pos_clipped", "tbpo/neg_above", "tbpo/neg_below", "objective/clipped_low"):
        assert metrics[name] == Mean(1.0, 6.0), name
    assert metrics["objective/clipped_high"] == Mean(2.0, 6.0)


@pytest.mark.parametrize("to_whom", ["engine", "old"])
def test_salvage_trains_the_prefix_before_the_error_token(inputs, to_whom):
    # Token 2 is improbable to engine or learner and opens a loop; without it the prefix's ratio is in the band.
    tokens = [[1, 2, 8, 8, 8, 8, 8, 8]]
    new = [[0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    logprobs = {"old": [[0.0] * 8], "engine": [[0.0] * 8]}
    logprobs[to_whom][0][2] = -9.0
    whole, prefix = (inputs(new, [-1.0], tokens=tokens, **logprobs) for _ in range(2))
    Tbpo()(whole).loss.backward()
    report = Tbpo(salvage_probability=0.01)(prefix)
    report.loss.backward()
    assert whole.new_BT.grad.abs().max() == 0.0
    assert (-prefix.new_BT.grad).tolist() == [[-0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert report.metrics["tbpo/salvaged"] == Mean(1.0, 1.0)


def test_salvage_changes_nothing_where_there_is_no_error(inputs):
    batch = inputs([[0.0001, 0.0]], [-1.0], tokens=[[1, 2]])
    report = Tbpo(salvage_probability=0.01)(batch)
    assert report.loss.item() == Tbpo()(batch).loss.item()
    assert report.metrics["tbpo/salvaged"].value() == 0.0


def test_salvage_needs_the_tokens(inputs):
    with pytest.raises(AssertionError, match="tokens"):
        Tbpo(salvage_probability=0.01)(inputs([[0.0]], [1.0]))


@pytest.mark.parametrize(
    "bad",
    [
        {"mismatch_low": 1.2, "mismatch_high": 1.1},
        {"neg_seq_clip_ratio_low": 0.0},
        {"neg_seq_clip_ratio_high": -1.0},
        {"cap": 0.0},
        {"salvage_probability": 1.0},
        {"correction": {"type": "none"}},
    ],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValidationError):
        Tbpo.model_validate(bad)


@pytest.mark.parametrize(("log_ratio", "slope"), [(6.9e-4, -1.0), (7.1e-4, 0.0), (-2.9e-4, -1.0), (-3.1e-4, 0.0)])
def test_the_band_is_wide_enough_for_float32(inputs, log_ratio, slope):
    batch = inputs([[log_ratio] * 5], [-1.0])
    new_BT = batch.new_BT.detach().float().requires_grad_(True)
    parts = {name: batch_part.float() for name, batch_part in (("old_BT", batch.old_BT), ("engine_BT", batch.old_BT))}
    single = dataclasses.replace(batch, new_BT=new_BT, advantages_B=batch.advantages_B.float(), **parts)
    Tbpo()(single).loss.backward()
    assert new_BT.grad is not None
    torch.testing.assert_close(-new_BT.grad.sum(), torch.tensor(slope), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("switched_off", "ratio", "slope"),
    [
        ({"neg_seq_clip_ratio_low": 1.0}, math.exp(-20.0), -math.exp(-20.0)),
        ({"neg_seq_clip_ratio_low": 1.0}, 10.0, 0.0),
        ({"neg_seq_clip_ratio_high": 1e9}, 1e8, -1e8),
        ({"neg_seq_clip_ratio_high": 1e9}, 0.1, 0.0),
    ],
)
def test_either_side_of_the_band_can_be_switched_off(one_token, switched_off, ratio, slope):
    batch = one_token(ratio, -1.0)
    Tbpo(**switched_off)(batch).loss.backward()
    assert -batch.new_BT.grad.item() == pytest.approx(slope)


def test_tokens_have_bands_and_caps_of_their_own_at_their_level(inputs):
    # Ratios 1.1, 0.5, 3; mismatch weights 1, 4 (capped at 2), 0.5.
    logs, weights = [[math.log(1.1), math.log(0.5), math.log(3.0)]] * 2, [[0.0, -math.log(4.0), math.log(2.0)]] * 2
    bands = {"seq_clip_ratio_high": 0.2, "neg_seq_clip_ratio_low": 0.2, "neg_seq_clip_ratio_high": 0.3}
    batch = inputs(logs, [1.0, -1.0], engine=weights)
    report = Tbpo(level="token", **bands)(batch)
    report.loss.backward()
    # A = 1: min(r, 1.2); A = -1: only 1.1 is inside [0.8, 1.3]. The loss is a mean of 3 tokens, then of 2 sequences.
    assert -report.loss.item() == pytest.approx(((1.1 + 2 * 0.5 + 0.5 * 1.2) - 1.1) / 6)
    expected = [1.1, 2 * 0.5, 0.0, -1.1, 0.0, 0.0]
    assert [-6 * slope for slope in batch.new_BT.grad.flatten().tolist()] == pytest.approx(expected)
    found = {name: metric.value() for name, metric in report.metrics.items()}
    assert found["tbpo/pos_clipped"] == found["tbpo/neg_below"] == found["tbpo/neg_above"] == pytest.approx(1 / 6)
    assert found["objective/ratio_max"] == pytest.approx(3.0)
    assert found["correction/weight_mean"] == pytest.approx(3.5 / 3)


def test_one_token_is_its_own_sequence(one_token):
    for ratio, advantage, mismatch in ((1.0003, 1.0, 1.5), (0.9998, -1.0, 3.0), (1.1, -1.0, 0.5)):
        batch = one_token(ratio, advantage, mismatch)
        assert Tbpo(level="token")(batch).loss.item() == Tbpo()(batch).loss.item()
