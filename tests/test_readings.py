"""Rewards and completions as metrics, on numbers worked out by hand."""

import math

import pytest
import torch

from qarl.errors import RunError
from qarl.metrics import values
from qarl.readings import (
    MOST_ERROR_LINES,
    completion_metrics,
    error_lines,
    is_error_token,
    num_tokens,
    prompt_metrics,
    refuse_errors,
    repeated_ngrams,
    repetition_onset,
    reward_metrics,
)
from qarl.records import Completion, ErrorKind, FinishReason, Group, GroupRewards, Prompt, RewardError


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


def failed(
    prompt_id: str, count: int, kind: ErrorKind = "timeout", reason: str = "took longer than 1 s"
) -> GroupRewards:
    """Four completions, of which the first `count` failed."""
    errors = tuple(RewardError(prompt_id, index, "math", kind, reason) for index in range(count))
    return GroupRewards(torch.tensor([math.nan] * count + [1.0] * (4 - count)), errors=errors)


def test_failures_are_counted_by_their_kind_and_aborted_completions_are_none() -> None:
    watched = GroupRewards(torch.ones(2), errors=(RewardError("p/2", 0, "watch", "crash", "was killed by SIGKILL"),))
    aborted = GroupRewards(torch.tensor([math.nan, 1.0]), num_aborted=1)
    found = values(reward_metrics([failed("p/0", 2), failed("p/1", 1, "invalid"), watched, aborted]))
    assert found["reward/errors"] == 3.0
    kinds = {kind: found[f"reward/errors/{kind}"] for kind in ("exception", "timeout", "crash", "invalid")}
    assert kinds == {"exception": 0.0, "timeout": 2.0, "crash": 1.0, "invalid": 1.0}


def test_too_many_failures_end_the_run() -> None:
    rewards = [failed("p/0", 0), failed("p/1", 2)]
    refuse_errors(rewards, 0.25)
    with pytest.raises(
        RunError,
        match=r"2 of 8 completions have no reward, the limit is a share of 0.2; the first: prompt p/1, completion 0, "
        r"reward math: took longer than 1 s\. .* raise max_reward_error_share",
    ):
        refuse_errors(rewards, 0.2)


def test_aborted_completions_are_in_no_share() -> None:
    aborted = GroupRewards(torch.tensor([math.nan] * 4), num_aborted=4)
    refuse_errors([aborted], 0.0)
    refuse_errors([aborted, failed("p/0", 2)], 0.5)
    with pytest.raises(RunError, match="2 of 4 completions"):
        refuse_errors([aborted, failed("p/0", 2)], 0.49)


def test_errors_are_told_once_for_every_reason_the_frequent_ones_first() -> None:
    rare = failed("p/0", 1, "exception", "KeyError: 'gold'")
    assert error_lines([rare, failed("p/1", 2), failed("p/2", 3)]) == [
        "prompt p/1, completion 0, reward math: took longer than 1 s (5 times)",
        "prompt p/0, completion 0, reward math: KeyError: 'gold'",
    ]
    assert error_lines([failed("p/0", 0)]) == []


def test_many_reasons_take_a_bounded_number_of_lines() -> None:
    groups = [failed(f"p/{index}", 1, "exception", f"ValueError: {index}") for index in range(30)]
    lines = error_lines([*groups, failed("p/30", 4)])
    assert len(lines) == MOST_ERROR_LINES
    assert lines[0].endswith("took longer than 1 s (4 times)")
    assert lines[-1] == "and 22 more errors of 22 other reasons"
    assert len(error_lines(groups[:MOST_ERROR_LINES])) == MOST_ERROR_LINES


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


def test_prompt_lengths_and_rows_left_out() -> None:
    prompts = [Prompt("p/0", (1, 2, 3), "", {}), Prompt("p/1", (1,), "", {})]
    found = values(prompt_metrics(prompts, skipped=4))
    assert found == {"prompts/length_max": 3.0, "prompts/length_mean": 2.0, "prompts/skipped": 4.0}


def test_tokens_are_counted_over_all_groups() -> None:
    assert num_tokens([group(completion([1, 2])), group(completion([3]), completion([4]))]) == 4


def test_an_error_token_has_a_probability_below_a_ten_thousandth() -> None:
    logprobs = torch.tensor([1.01e-4, 0.99e-4, 1.0]).log()
    assert is_error_token(logprobs).tolist() == [False, True, False]


def test_repetition_begins_with_the_first_ngram_that_occurred_before() -> None:
    assert repetition_onset([1, 2, 3, 1, 2, 1, 2], 2) == 3
    assert repetition_onset([7, 7, 7], 2) == 1
    assert repetition_onset([1, 2, 3], 2) is None
    assert repetition_onset([1], 2) is None
