"""Rewards and completions as metrics, on numbers worked out by hand."""

import math

import pytest
import torch

from qarl.metrics import values
from qarl.readings import completion_metrics, num_tokens, repeated_ngrams, reward_metrics
from qarl.records import Completion, FinishReason, Group, GroupRewards, Prompt


def completion(tokens: list[int], logprobs: list[float] | None = None, reason: FinishReason = "stop") -> Completion:
    given = torch.tensor(logprobs if logprobs is not None else [-1.0] * len(tokens))
    return Completion(torch.tensor(tokens), given, torch.zeros(len(tokens), dtype=torch.int64), reason, "")


def group(*completions: Completion) -> Group:
    return Group(Prompt("p/0", (1,), "", {}), completions)


def test_reward_metrics_leave_errors_out_and_count_them() -> None:
    rewards = [
        GroupRewards(torch.tensor([0.0, 2.0, math.nan]), {"answer": torch.tensor([0.0, 1.0, math.nan])}),
        GroupRewards(torch.tensor([0.2, 0.2, 0.2]), {"answer": torch.tensor([0.1, 0.1, 0.1])}),
        GroupRewards(torch.tensor([math.nan] * 3), {"answer": torch.tensor([math.nan] * 3)}),
    ]
    found = values(reward_metrics(rewards))
    assert math.isclose(found["reward/mean"], 2.6 / 5, rel_tol=1e-6)
    # Groups (0, 2) and (0.2, 0.2, 0.2): population deviations 1 and 0.
    assert math.isclose(found["reward/std"], 0.5, rel_tol=1e-6)
    assert found["reward/zero_std_groups"] == 0.5
    assert found["reward/errors"] == 4.0
    assert math.isclose(found["reward/answer"], 1.3 / 5, rel_tol=1e-6)


def test_no_gradable_reward_has_no_mean_rather_than_zero() -> None:
    found = values(reward_metrics([GroupRewards(torch.tensor([math.nan, math.nan]))]))
    assert math.isnan(found["reward/mean"])
    assert found["reward/errors"] == 2.0


def test_completion_lengths_and_truncation() -> None:
    found = values(completion_metrics([group(completion([1, 2, 3]), completion([4], reason="length"))]))
    assert found["completion/length_mean"] == 2.0
    assert found["completion/length_max"] == 3.0
    assert found["completion/truncated"] == 0.5


def test_repetition_is_the_share_of_four_grams_seen_before() -> None:
    # 1 1 1 1 1 1: three 4-grams, two of them repeats; 1..6: three, none repeated.
    found = values(completion_metrics([group(completion([1] * 6), completion([1, 2, 3, 4, 5, 6]))]))
    assert math.isclose(found["completion/repetition"], 2 / 6)


def test_repetition_of_completions_too_short_to_repeat_is_zero() -> None:
    assert values(completion_metrics([group(completion([1, 1]))]))["completion/repetition"] == 0.0


@pytest.mark.parametrize(
    ("tokens", "length", "counts"),
    [
        ([1, 2, 3, 4], 2, (0, 3)),
        ([1, 1, 1, 1], 2, (2, 3)),
        ([1, 2, 1, 2, 1], 1, (3, 5)),
        ([1, 2], 4, (0, 0)),
        ([], 1, (0, 0)),
    ],
)
def test_ngrams_that_repeat_an_earlier_one_are_counted(tokens: list[int], length: int, counts: tuple[int, int]) -> None:
    assert repeated_ngrams(tokens, length) == counts


def test_error_tokens_are_those_below_one_in_ten_thousand() -> None:
    found = values(completion_metrics([group(completion([1, 2, 3, 4], [-0.1, -9.0, -9.3, -20.0]))]))
    assert found["completion/error_tokens"] == 0.5  # log(1e-4) = -9.21


def test_tokens_are_counted_over_all_groups() -> None:
    assert num_tokens([group(completion([1, 2])), group(completion([3]), completion([4]))]) == 4
