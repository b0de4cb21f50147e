import math

import pytest
import torch

from qarl.learner.mismatch import mismatch_metrics
from qarl.metrics import merge, values

ENGINE = torch.tensor([-1.0, -1.0, -2.0, -3.0])
LEARNER = ENGINE + torch.tensor([math.log(2.0), -math.log(4.0), 0.0, 0.0])


def test_two_tokens_apart_worked_by_hand():
    # d = ln 2, -ln 4, 0, 0, so the weights exp(d) are 2, 1/4, 1, 1.
    found = values(mismatch_metrics(LEARNER, ENGINE))
    assert found["mismatch/max_abs"] == pytest.approx(math.log(4.0), rel=1e-6)
    assert found["mismatch/mean_abs"] == pytest.approx(3 * math.log(2.0) / 4, rel=1e-6)
    assert found["mismatch/k3"] == pytest.approx((2 - math.log(2) - 1 + 0.25 + math.log(4) - 1) / 4, rel=1e-6)
    assert found["mismatch/mult_prob_error"] == pytest.approx((2 + 4 + 1 + 1) / 4, rel=1e-6)
    assert found["mismatch/bit_equal"] == 0.5
    assert found["mismatch/ess"] == pytest.approx(4.25**2 / (4 * (4 + 1 / 16 + 1 + 1)), rel=1e-6)


def test_equal_bits_are_no_mismatch():
    assert values(mismatch_metrics(ENGINE, ENGINE)) == {
        "mismatch/max_abs": 0.0,
        "mismatch/mean_abs": 0.0,
        "mismatch/k3": 0.0,
        "mismatch/mult_prob_error": 1.0,
        "mismatch/bit_equal": 1.0,
        "mismatch/ess": 1.0,
    }


def test_the_smallest_difference_counts():
    nudged = torch.nextafter(ENGINE, torch.zeros(4))
    found = values(mismatch_metrics(nudged, ENGINE))
    assert found["mismatch/bit_equal"] == 0.0
    assert 0.0 < found["mismatch/max_abs"] < 1e-6


def test_parts_merge_to_the_whole():
    parts = merge([mismatch_metrics(LEARNER[:1], ENGINE[:1]), mismatch_metrics(LEARNER[1:], ENGINE[1:])])
    assert values(parts) == pytest.approx(values(mismatch_metrics(LEARNER, ENGINE)), rel=1e-12)


def test_a_token_that_one_side_thinks_impossible_leaves_every_figure_but_the_largest_finite():
    found = values(mismatch_metrics(torch.tensor([-400.0, -1.0]), torch.tensor([-1.0, -1.0])))
    assert found["mismatch/max_abs"] == pytest.approx(399.0)
    assert all(math.isfinite(value) for value in found.values())
    assert found["mismatch/mult_prob_error"] == pytest.approx((math.exp(20) + 1) / 2)
