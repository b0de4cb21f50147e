"""What a rollout looked like: its rewards and completions as metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from qarl.errors import RunError
from qarl.metrics import Max, Mean, Metrics, Sum
from qarl.records import ErrorKind, Group, GroupRewards, Prompt, RewardError

ERROR_TOKEN_LOGPROB = math.log(1e-4)
"""A sampled token less likely than this is counted as an error token (TBPO's name for what starts a collapse)."""

REPETITION_NGRAM = 4

MOST_ERROR_LINES = 10
"""A step's errors are told in no more lines than this."""


def reward_metrics(rewards: Sequence[GroupRewards]) -> Metrics:
    """`reward/mean`, `reward/<term>` (raw, unweighted), `reward/std` (population, within a group, averaged over
    groups), `reward/zero_std_groups` (share of groups that teach nothing), `reward/errors` (how many completions have
    no reward for another reason than that they were aborted), `reward/errors/<kind>` (how many values terms could not
    give, those of weight 0 included).

    NaN rewards count as errors and in nothing else.
    """
    totals = [_finite(group.total) for group in rewards]
    scored = [total for total in totals if len(total)]
    metrics: Metrics = {
        "reward/mean": Mean(sum(float(total.sum()) for total in totals), sum(len(total) for total in totals)),
        "reward/std": Mean(sum(float(total.std(correction=0)) for total in scored), len(scored)),
        "reward/zero_std_groups": Mean(
            sum(not is_unequal(group) for group in rewards if len(_finite(group.total))), len(scored)
        ),
        "reward/errors": Sum(sum(_num_failed(group) for group in rewards)),
    }
    kinds = [error.kind for group in rewards for error in group.errors]
    metrics |= {f"reward/errors/{kind}": Sum(kinds.count(kind)) for kind in get_args(ErrorKind)}
    for name in dict.fromkeys(name for group in rewards for name in group.terms):
        raw = torch.cat([_finite(group.terms[name]) for group in rewards if name in group.terms])
        metrics[f"reward/{name}"] = Mean(float(raw.sum()), len(raw))
    return metrics


def refuse_errors(rewards: Sequence[GroupRewards], max_share: float) -> None:
    """RunError where more than a share `max_share` (0 to 1) of the completions has no reward.

    What is left would no longer be a fair sample. Aborted completions do not count.
    """
    failed = sum(map(_num_failed, rewards))
    finished = sum(len(group.total) - group.num_aborted for group in rewards)
    if failed > max_share * finished:
        first = next(error for group in rewards for error in group.errors if group.total[error.completion].isnan())
        raise RunError(
            f"{failed} of {finished} completions have no reward, the limit is a share of {max_share:g}; the first: "
            f"{first}. Correct the reward or its rows, or raise max_reward_error_share"
        )


def error_lines(rewards: Sequence[GroupRewards]) -> list[str]:
    """Errors for people: one line for every reason, with its count and first place, the frequent ones first; at most
    `MOST_ERROR_LINES`."""
    reasons: dict[tuple[str, str], list[RewardError]] = {}
    for error in (error for group in rewards for error in group.errors):
        reasons.setdefault((error.term, error.reason), []).append(error)
    ordered = sorted(reasons.values(), key=len, reverse=True)
    told = ordered if len(ordered) <= MOST_ERROR_LINES else ordered[: MOST_ERROR_LINES - 1]
    lines = [f"{errors[0]}" + (f" ({len(errors)} times)" if len(errors) > 1 else "") for errors in told]
    left = ordered[len(told) :]
    if left:
        lines.append(f"and {sum(map(len, left))} more errors of {len(left)} other reasons")
    return lines


def is_unequal(rewards: GroupRewards) -> bool:
    """Whether a group's completions differ in their rewards, so that it can teach."""
    total = _finite(rewards.total)
    return len(total) > 0 and bool((total != total[0]).any())


def completion_metrics(groups: Sequence[Group]) -> Metrics:
    """Lengths in tokens, the shares cut at the limit and stopped at once, and two early signs of collapse.

    `completion/repetition` is the share of 4-grams that occurred before in the same completion,
    `completion/error_tokens` the share of tokens the engine gave a probability below 1e-4.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion) for completion in completions]
    counts = [repeated_ngrams(one.token_ids.tolist(), REPETITION_NGRAM) for one in completions]
    repeated, ngrams = (sum(column) for column in zip(*counts, strict=True))
    improbable = sum(int(is_error_token(one.engine_logprobs).sum()) for one in completions)
    truncated = sum(completion.finish_reason == "length" for completion in completions)
    empty = sum(one.finish_reason == "stop" and len(one) <= 1 for one in completions)
    return {
        "completion/length_mean": Mean(sum(lengths), len(lengths)),
        "completion/length_max": Max(max(lengths)),
        "completion/truncated": Mean(truncated, len(completions)),
        "completion/empty": Mean(empty, len(completions)),
        "completion/repetition": Mean(repeated, ngrams) if ngrams else Mean(0.0, 1.0),
        "completion/error_tokens": Mean(improbable, sum(lengths)),
    }


def is_error_token(engine_logprobs: Tensor) -> Tensor:
    """Which sampled tokens, given their log-probabilities (float32, any shape), are error tokens."""
    return engine_logprobs < ERROR_TOKEN_LOGPROB


def prompt_metrics(prompts: Sequence[Prompt], skipped: int) -> Metrics:
    """Lengths in tokens of the prompts of a step, and how many rows were left out of it as too long."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return {
        "prompts/length_mean": Mean(sum(lengths), len(lengths)),
        "prompts/length_max": Max(max(lengths)),
        "prompts/skipped": Sum(skipped),
    }


def num_tokens(groups: Sequence[Group]) -> int:
    """Completion tokens of all groups."""
    return sum(len(completion) for group in groups for completion in group.completions)


def repeated_ngrams(token_ids: Sequence[int], length: int) -> tuple[int, int]:
    """How many runs of `length` tokens repeat an earlier one, and how many there are; none in a shorter text."""
    ngrams = _ngrams(token_ids, length)
    return len(ngrams) - len(set(ngrams)), len(ngrams)


def repetition_onset(token_ids: Sequence[int], length: int) -> int | None:
    """Where the first run of `length` tokens begins that repeats an earlier one; None where none does."""
    seen = set()
    for start, ngram in enumerate(_ngrams(token_ids, length)):
        if ngram in seen:
            return start
        seen.add(ngram)
    return None


def _ngrams(token_ids: Sequence[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(token_ids[start : start + length]) for start in range(len(token_ids) - length + 1)]


def _num_failed(rewards: GroupRewards) -> int:
    return int(rewards.total.isnan().sum()) - rewards.num_aborted


def _finite(values: Tensor) -> Tensor:
    return values[~values.isnan()]
