"""Advantages worked out by hand, and what must come out as exactly 0 or stay NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qarl.advantages import ADVANTAGES
from qarl.advantages.group import BatchNormalized, GroupMean, GroupStd, LeaveOneOut, RewardItself, has_spread
from qarl.errors import RunError

NAN = math.nan
WITH_BASELINE = [GroupMean(), GroupStd(), LeaveOneOut(), BatchNormalized()]


def rewards(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def assert_close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, rewards(*expected), rtol=1e-6, atol=1e-7, equal_nan=True)


def test_spread_is_found_exactly_and_among_valid_rewards_only():
    groups = [[0.2] * 8, [0.2] * 7 + [0.3], [NAN, 0.5, NAN], [NAN, NAN], [NAN, 1.0, 0.0]]
    assert [has_spread(rewards(*group)) for group in groups] == [False, True, False, False, True]
    one_ulp_apart = torch.tensor([0.2, math.nextafter(0.2, 1.0)], dtype=torch.float64)
    assert has_spread(one_ulp_apart)


def test_without_baseline_the_advantage_is_the_reward():
    (advantages,) = RewardItself()([rewards(0.25, NAN, -3.0)])
    assert_close(advantages, 0.25, NAN, -3.0)


def test_group_mean_subtracts_the_mean():
    first, second = GroupMean()([rewards(1.0, 0.0, 0.0, 0.0), rewards(2.0, 4.0)])
    assert_close(first, 0.75, -0.25, -0.25, -0.25)
    assert_close(second, -1.0, 1.0)


def test_group_std_divides_by_the_unbiased_std():
    # mean 0.25, squared deviations 0.5625 + 3 * 0.0625 = 0.75, divided by n - 1 = 3: std 0.5
    (advantages,) = GroupStd()([rewards(1.0, 0.0, 0.0, 0.0)])
    assert_close(advantages, 0.75 / 0.500001, *[-0.25 / 0.500001] * 3)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    (advantages,) = LeaveOneOut()([rewards(1.0, 2.0, 6.0)])
    assert_close(advantages, 1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5)


def test_batch_normalized_centres_by_group_and_scales_by_the_batch():
    # centred: +-1 and +-3; unbiased variance (1 + 1 + 9 + 9) / 3
    std = math.sqrt(20 / 3) + 1e-6
    first, second = BatchNormalized()([rewards(0.0, 2.0), rewards(10.0, 4.0)])
    assert_close(first, -1 / std, 1 / std)
    assert_close(second, 3 / std, -3 / std)


@pytest.mark.parametrize("advantage", WITH_BASELINE, ids=lambda advantage: advantage.type)
@pytest.mark.parametrize("value", [0.2, 0.35, 0.1, 1 / 3, 1e6 / 7])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(advantage, value, size, dtype):
    # In float64 the mean of three 0.1 is not 0.1.
    equal, other = advantage([torch.full((size,), value, dtype=dtype), rewards(*[0.35] * 7, 0.7)])
    assert torch.equal(equal, torch.zeros(size))
    assert other[-1] > 0.0
    assert (other[:-1] < 0.0).all()


@pytest.mark.parametrize("advantage", WITH_BASELINE, ids=lambda advantage: advantage.type)
def test_a_batch_of_equal_rewards_only_is_all_zero(advantage):
    assert all(torch.equal(part, torch.zeros(3)) for part in advantage([rewards(0.2, 0.2, 0.2)] * 4))


@pytest.mark.parametrize("advantage", WITH_BASELINE, ids=lambda advantage: advantage.type)
def test_nan_rewards_stay_nan_and_enter_no_statistic(advantage):
    with_nan, twin = advantage([rewards(1.0, NAN, 0.0, NAN, 0.5), rewards(1.0, 0.0, 0.5)])
    without, _ = advantage([rewards(1.0, 0.0, 0.5), rewards(1.0, 0.0, 0.5)])
    assert with_nan.isnan().tolist() == [False, True, False, True, False]
    assert torch.equal(with_nan[[0, 2, 4]], without)
    assert torch.equal(twin, without)


@pytest.mark.parametrize("advantage", WITH_BASELINE, ids=lambda advantage: advantage.type)
def test_a_single_valid_reward_gives_zero_and_none_gives_nan(advantage):
    single, none = advantage([rewards(NAN, 0.7, NAN), rewards(NAN, NAN)])
    assert_close(single, NAN, 0.0, NAN)
    assert_close(none, NAN, NAN)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_float32_one_per_completion_and_groups_may_differ_in_size(name):
    sizes = [4, 1, 3]
    advantages = ADVANTAGES[name]()([torch.rand(size) for size in sizes])
    assert [len(part) for part in advantages] == sizes
    assert {part.dtype for part in advantages} == {torch.float32}
    assert ADVANTAGES[name]()([]) == []


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_infinite_reward_is_refused(name):
    with pytest.raises(RunError, match="infinity"):
        ADVANTAGES[name]()([rewards(0.0, math.inf)])


def test_only_the_reward_itself_does_without_a_group():
    assert {name for name, choice in ADVANTAGES.items() if not choice.needs_group} == {"none"}


def test_the_table_names_every_type():
    assert {name: choice().type for name, choice in ADVANTAGES.items()} == {name: name for name in ADVANTAGES}


@pytest.mark.parametrize("advantage", WITH_BASELINE, ids=lambda advantage: advantage.type)
def test_rewards_that_differ_by_the_last_bit_are_no_signal_of_full_size(advantage):
    nearly = torch.full((8,), 0.35)
    nearly[-1] = torch.nextafter(nearly[-1], torch.tensor(1.0))
    (found,) = advantage([nearly])
    assert found.abs().max() < 0.1
