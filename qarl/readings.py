"""What a rollout looked like: its rewards and completions as metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qarl.metrics import Max, Mean, Metrics, Sum
from qarl.records import Group, GroupRewards

ERROR_TOKEN_LOGPROB = math.log(1e-4)
"""A sampled token less likely than this is counted as an error token (TBPO's name for what starts a collapse)."""

REPETITION_NGRAM = 4


def reward_metrics(rewards: Sequence[GroupRewards]) -> Metrics:
    """`reward/mean`, `reward/<term>` (raw, unweighted), `reward/std` (population, within a group, averaged over
    groups), `reward/zero_std_groups` (share of groups that teach nothing), `reward/errors` (a count).

    NaN rewards count as errors and in nothing else.
    """
    totals = [_finite(group.total) for group in rewards]
    scored = [total for total in totals if len(total)]
    metrics: Metrics = {
        "reward/mean": Mean(sum(float(total.sum()) for total in totals), sum(len(total) for total in totals)),
        "reward/std": Mean(sum(float(total.std(correction=0)) for total in scored), len(scored)),
        "reward/zero_std_groups": Mean(sum(bool((total == total[0]).all()) for total in scored), len(scored)),
        "reward/errors": Sum(sum(int(group.total.isnan().sum()) for group in rewards)),
    }
    for name in dict.fromkeys(name for group in rewards for name in group.terms):
        raw = torch.cat([_finite(group.terms[name]) for group in rewards if name in group.terms])
        metrics[f"reward/{name}"] = Mean(float(raw.sum()), len(raw))
    return metrics


def completion_metrics(groups: Sequence[Group]) -> Metrics:
    """Lengths in tokens, the share cut at the limit, and two early signs of collapse.

    `completion/repetition` is the share of 4-grams that occurred before in the same completion,
    `completion/error_tokens` the share of tokens the engine gave a probability below 1e-4.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion) for completion in completions]
    counts = [repeated_ngrams(one.token_ids.tolist(), REPETITION_NGRAM) for one in completions]
    repeated, ngrams = (sum(column) for column in zip(*counts, strict=True))
    improbable = sum(int((one.engine_logprobs < ERROR_TOKEN_LOGPROB).sum()) for one in completions)
    truncated = sum(completion.finish_reason == "length" for completion in completions)
    return {
        "completion/length_mean": Mean(sum(lengths), len(lengths)),
        "completion/length_max": Max(max(lengths)),
        "completion/truncated": Mean(truncated, len(completions)),
        "completion/repetition": Mean(repeated, ngrams) if ngrams else Mean(0.0, 1.0),
        "completion/error_tokens": Mean(improbable, sum(lengths)),
    }


def num_tokens(groups: Sequence[Group]) -> int:
    """Completion tokens of all groups."""
    return sum(len(completion) for group in groups for completion in group.completions)


def repeated_ngrams(token_ids: Sequence[int], length: int) -> tuple[int, int]:
    """How many runs of `length` tokens repeat an earlier one, and how many there are; none in a shorter text."""
    ngrams = [tuple(token_ids[start : start + length]) for start in range(len(token_ids) - length + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


def _finite(values: Tensor) -> Tensor:
    return values[~values.isnan()]
