"""Which groups teach something."""

from __future__ import annotations

import math

import pytest
import torch

from qarl.advantages.keep import drop_zero_std, has_spread, zero_std_groups
from qarl.records import Group, Prompt

NAN = math.nan
REWARDS = [
    torch.tensor([0.2] * 8),
    torch.tensor([0.2] * 7 + [0.3]),
    torch.tensor([NAN, 0.5, NAN]),
    torch.tensor([NAN, NAN]),
    torch.tensor([NAN, 1.0, 0.0]),
]


def test_spread_is_found_exactly_and_among_valid_rewards_only():
    assert [has_spread(rewards_G) for rewards_G in REWARDS] == [False, True, False, False, True]
    one_ulp_apart = torch.tensor([0.2, math.nextafter(0.2, 1.0)], dtype=torch.float64)
    assert has_spread(one_ulp_apart)


def test_groups_without_any_valid_reward_are_not_counted_as_zero_std():
    assert zero_std_groups(REWARDS) == 2


def test_dropping_keeps_the_groups_that_differ_with_their_advantages_in_order():
    groups = [Group(Prompt(str(index), (), "", {}), ()) for index in range(len(REWARDS))]
    advantages = [torch.full_like(rewards_G, index) for index, rewards_G in enumerate(REWARDS)]
    kept, kept_advantages = drop_zero_std(groups, advantages, REWARDS)
    assert [group.prompt.id for group in kept] == ["1", "4"]
    assert [int(part[0]) for part in kept_advantages] == [1, 4]


def test_dropping_may_leave_nothing():
    group = Group(Prompt("0", (), "", {}), ())
    assert drop_zero_std([group], [torch.zeros(8)], REWARDS[:1]) == ([], [])


def test_dropping_refuses_sequences_of_different_length():
    with pytest.raises(ValueError, match="zip"):
        drop_zero_std([], [], REWARDS)
