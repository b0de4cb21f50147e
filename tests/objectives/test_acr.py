"""QuRL's adaptive clipping range, by hand (C = 2, clip 0.2)."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from qarl.objectives.acr import Acr
from qarl.objectives.corrections import TokenTis
from qarl.objectives.grpo import Grpo


@pytest.mark.parametrize(
    ("ratio", "mismatch", "advantage", "expected"),
    [
        (1.1, 1.5, 1.0, 1.65), (1.1, 8.0, 1.0, 2.2), (3.0, 8.0, 1.0, 6.0), (5.0, 8.0, 1.0, 9.6),
        (3.0, 8.0, -1.0, -6.0), (0.5, 8.0, -1.0, -1.6), (1.5, 0.5, 1.0, 0.6),
    ],
)  # fmt: skip
def test_worked_values(one_token, ratio, mismatch, advantage, expected):
    assert -Acr()(one_token(ratio, advantage, mismatch)).loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [(0.1, 1.0, 0.1), (1.0, 1.0, 1.0), (10.0, 1.0, 0.0), (0.1, -1.0, 0.0), (1.0, -1.0, -1.0), (10.0, -1.0, -10.0)],
)
def test_truth_table_of_gradients_without_mismatch(one_token, ratio, advantage, slope):
    batch = one_token(ratio, advantage)
    Acr()(batch).loss.backward()
    assert -batch.new_BT.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("mismatch", [0.1, 1.0, 8.0, 1e5])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_with_one_update_per_batch_it_is_token_tis(one_token, mismatch, advantage):
    batch = one_token(1.0, advantage, mismatch)
    expected = Grpo(correction=TokenTis(cap=2.0))(batch).loss
    assert Acr()(batch).loss.item() == pytest.approx(expected.item())


def test_the_wider_limit_decides_what_counts_as_clipped(one_token):
    inside, outside = Acr()(one_token(3.0, 1.0, 8.0)).metrics, Acr()(one_token(5.0, 1.0, 8.0)).metrics
    assert inside["objective/clipped_high"].value() == 0.0
    assert outside["objective/clipped_high"].value() == 1.0
    assert inside["correction/truncated"].value() == 1.0
    assert inside["correction/weight_max"].value() == pytest.approx(2.0)


def test_it_has_no_other_correction():
    with pytest.raises(ValidationError, match="Extra inputs"):
        Acr.model_validate({"correction": {"type": "token_tis"}})
